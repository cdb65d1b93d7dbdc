import pytest

from diloco.outer.cohort import Cohort


def test_weights_are_relative_to_the_largest():
    assert Cohort.weighted({3: 10, 1: 40}) == Cohort((1, 3), (1.0, 0.25))
    assert Cohort.weighted({3: 10, 1: 40}).total_weight == 1.25
    assert Cohort.equal(3).total_weight == 3.0


@pytest.mark.parametrize(
    ("members", "weights"),
    [((), ()), ((0, 1), (1.0,)), ((1, 0), (1.0, 1.0)), ((0, 0), (1.0, 1.0)), ((0, 1), (1.0, 0.0)), ((0,), (2.0,))],
)
def test_what_is_no_cohort_is_a_bug(members, weights):
    with pytest.raises(AssertionError):
        Cohort(members, weights)
