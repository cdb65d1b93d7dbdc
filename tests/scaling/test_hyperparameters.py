"""The hyperparameters of a method at a size, beside the published laws and our own sweep."""

from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.scaling.hyperparameters import OUTER_LEARNING_RATES, hyperparameters
from diloco.scaling.laws import Laws
from diloco.scaling.prediction import predict
from diloco.scaling.table import read_table

# Tables 8 to 10 of arXiv 2503.09799: factor and exponent of the learning rate and of the batch in sequences.
INDEPENDENT = {
    0: (16319.2, -0.819, 0.22592, 0.281),
    1: (74620.6, -0.945, 0.01361, 0.435),
    2: (3978.82, -0.780, 0.00769, 0.479),
    4: (4512.99, -0.789, 0.00535, 0.510),
    8: (618986, -1.102, 0.01859, 0.455),
}


@pytest.mark.parametrize("replicas", INDEPENDENT)
@pytest.mark.parametrize("num_params", [35e6, 1.3e9, 10e9])
def test_each_method_and_number_of_replicas_has_its_own_law(replicas, num_params):
    a, alpha, b, beta = INDEPENDENT[replicas]
    method = "diloco" if replicas else "data_parallel"
    tuned = hyperparameters(method, num_params, replicas or 2)  # Data-Parallel has its own law, for any M
    assert tuned.learning_rate == pytest.approx(a * num_params**alpha)
    assert (tuned.outer_learning_rate is None) == (method == "data_parallel")
    assert tuned.batch_tokens == pytest.approx(2048 * b * num_params**beta)


def test_other_numbers_of_replicas_have_the_joint_law():
    for replicas, fit in ((3, None), (16, None), (4, "joint")):
        tuned = hyperparameters("diloco", 1.3e9, replicas, fit=fit)
        assert tuned.learning_rate == pytest.approx(22256 * 1.3e9**-0.8827 * replicas**0.2929)
        assert tuned.batch_tokens == pytest.approx(2048 * 0.00709 * 1.3e9**0.4695 * replicas**0.3399)
    with pytest.raises(UserError, match="no published law is there for M = 3: there are those for M = 0, M = 1"):
        hyperparameters("diloco", 1.3e9, 3, fit="independent")
    with pytest.raises(UserError, match="not for Data-Parallel"):
        hyperparameters("data_parallel", 1.3e9, fit="joint")


def test_the_batch_is_cut_into_a_power_of_two_of_sequences_per_replica():
    tuned = hyperparameters("diloco", 35_651_584, 2)  # 32.5 sequences of 2,048 tokens
    assert [tuned.sequences(2, length) for length in (1024, 2048, 4096)] == [64, 32, 16]
    assert tuned.sequences(64, 2048) == 64, "one sequence at the least"


def test_the_outer_learning_rates_are_those_of_our_sweep():
    laws = Laws(read_table(Path(__file__).parents[2] / "docs" / "results" / "sweep.csv", sync_every=30))
    for replicas, rate in OUTER_LEARNING_RATES.items():
        assert predict(2e5, replicas, laws=laws)["outer_learning_rate"]["value"] == rate
        assert predict(1.3e9, replicas)["outer_learning_rate"]["value"] == rate
    streaming = [hyperparameters("streaming", 1e9, replicas).outer_learning_rate for replicas in (1, 2, 4, 8)]
    assert streaming == [0.4, 0.4, 0.8, 0.8]
