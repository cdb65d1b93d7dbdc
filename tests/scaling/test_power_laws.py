import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from diloco.cli.main import main
from diloco.errors import UserError
from diloco.files import require
from diloco.scaling import judgement, parametric, power_laws
from diloco.scaling.judgement import EXTRAPOLATED, EXTRAPOLATED_PARAMS
from diloco.scaling.laws import Laws
from diloco.scaling.parametric import FORMS, NUM_STARTS, fit_parametric
from diloco.scaling.power_laws import JOINT, LAWS, PowerLaw, PowerLawFit
from diloco.scaling.table import PUBLISHED_PARAMS, published_table

SIZES = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)


def named(size: str) -> float:
    """The rounded number of parameters in a size's name, such as 1.3B."""
    return float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]


def test_the_parameters_that_we_count_have_the_papers_names():
    for size, num_params in PUBLISHED_PARAMS.items():
        assert num_params == pytest.approx(named(size), rel=0.05)


@pytest.mark.parametrize("replicas", LAWS["loss"])
def test_the_published_losses_give_the_published_independent_laws(replicas):
    """Losses are rounded to 0.001: a standard deviation of A of 0.06 %."""
    law = Laws().fit("loss", replicas, "independent").law
    assert law.factor == pytest.approx(LAWS["loss"][replicas].factor, rel=0.0012)
    assert law.exponent == pytest.approx(LAWS["loss"][replicas].exponent, abs=0.0001)


def test_the_published_losses_give_the_published_joint_law():
    law = Laws().fit("loss", 1, "joint").law
    assert law.factor == pytest.approx(JOINT["loss"].factor, rel=0.0006)
    assert law.exponent == pytest.approx(JOINT["loss"].exponent, abs=0.00005)
    assert law.replicas_exponent == pytest.approx(JOINT["loss"].replicas_exponent, abs=0.00005)


RESIDUALS = {
    "independent": {1: 0.011, 2: 0.0099, 4: 0.012, 8: 0.014},
    "joint": {1: 0.019, 2: 0.013, 4: 0.0082, 8: 0.0076},
}
"""Table 11 of arXiv 2503.09799: residuals of the loss at 2.4B, left out of the fit."""


def test_the_published_losses_give_the_published_residuals_at_the_size_left_out():
    """Only with the parameters counted: the rounded sizes of the names move residuals by up to 0.003."""

    def farthest(laws: Laws) -> float:
        ours = {error.law: error.by_replicas for error in judgement.held_out_errors(laws)}
        return max(abs(ours[law][m] - theirs) for law, by_m in RESIDUALS.items() for m, theirs in by_m.items())

    names = {num_params: name for name, num_params in PUBLISHED_PARAMS.items()}
    rounded = [replace(point, params=named(names[point.params])) for point in published_table()]
    assert farthest(Laws()) < 0.0005  # half of the last printed digit
    assert farthest(Laws(rounded)) > 0.002


def test_the_published_laws_predict_larger_models_and_always_low():
    for (fit, replicas), (at_4b, at_10b) in EXTRAPOLATED.items():
        law = JOINT["loss"] if fit == "joint" else LAWS["loss"][replicas]
        for num_params, measured, bound in zip(EXTRAPOLATED_PARAMS, (at_4b, at_10b), (0.025, 0.045), strict=True):
            assert 1 - bound < law(num_params, max(1, replicas)) / measured < 0.99


@pytest.fixture
def few_starts(monkeypatch) -> None:
    """A fourth of the starts: the fits must find the lowest valley from fewer."""
    monkeypatch.setattr(parametric, "NUM_STARTS", NUM_STARTS // 4)


@pytest.mark.slow
def test_the_published_table_is_judged(capsys, monkeypatch, few_starts):
    """The forms of docs/results/scaling.md; N counts parameters."""
    fits = {}

    def fit(form, *columns):
        fits[form.name] = fit_parametric(form, *columns)
        return fits[form.name]

    monkeypatch.setattr(judgement, "fit_parametric", fit)
    main(["scaling", "fit"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("independent", "joint", *(form.formula for form in FORMS.values())))
    assert "loss = A·N^α" in printed and printed.count(" has less loss than Data-Parallel ") == 4
    assert "9.79e+09 parameters 2.086   law 1.994 (-4.4 %)   form 2.066 (-1.0 %)" in printed
    assert "among all starts, as the paper selects: 0.0120; published: 0.0044" in printed
    ranked = sorted(fits, key=lambda name: fits[name].residual)
    assert ranked == sorted(parametric.PUBLISHED_RESIDUALS, key=parametric.PUBLISHED_RESIDUALS.__getitem__)
    for name in ranked[:3]:
        assert fits[name].residual == pytest.approx(parametric.PUBLISHED_RESIDUALS[name], abs=0.0006)
    # A·N^α·M^β is the joint law, whose residual is 0.012 in Table 11; the 0.0044 of Table 13 is not reproduced.
    assert fits["product"].residual_of_all == pytest.approx(0.0120, abs=0.0002)
    c = fits["exponent"].coefficients
    assert c == pytest.approx({"log A": 3.593, "α": -0.1548, "β": 0.00028, "C": 1.028}, rel=0.02)
    by_hand = math.exp(c["log A"]) * 1e9 ** (c["α"] + 4 * c["β"]) + c["C"]
    assert fits["exponent"](1e9, 4) == pytest.approx(by_hand)
    for (_, replicas), (_, at_10b) in EXTRAPOLATED.items():
        if replicas:
            assert fits[ranked[0]](EXTRAPOLATED_PARAMS[1], replicas) == pytest.approx(at_10b, rel=0.025)


def test_without_scipy_the_command_that_brings_it_is_named(capsys, monkeypatch):
    monkeypatch.setattr(parametric, "require", lambda module, *, extra: require("no_scipy", extra=extra))
    with pytest.raises(SystemExit, match="2"):
        main(["scaling", "fit"])
    assert "run pip install 'diloco[scaling]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(FORMS))
def test_a_form_is_recovered_from_its_own_values(name, few_starts):
    form = FORMS[name]
    truth = {"log A": 1.2, "α": -0.35, "log B": -4.0, "β": 0.05 if name != "exponent" else 0.001, "C": 1.5}
    values = np.array([truth[symbol] for symbol in form.ranges])
    n = np.array([size for _ in (1, 2, 4, 8) for size in SIZES])
    m = np.array([m for m in (1, 2, 4, 8) for _ in SIZES])
    fit = fit_parametric(form, n, m, form.predict(values, n, m.astype(float)))
    assert fit.residual < 1e-3
    for replicas in (1, 4):
        expected = form.predict(values, np.array(10e9), np.array(float(replicas)))
        assert fit(10e9, replicas) == pytest.approx(float(expected), rel=5e-3)


def made_up(seed: int = 0) -> tuple[list[float], list[int], list[float]]:
    law, noise = PowerLaw(18.0, -0.095, 0.012), np.random.default_rng(seed).normal(0, 0.002, (4, len(SIZES)))
    points = [
        (n, m, law(n, m) * math.exp(noise[i, j])) for i, m in enumerate((1, 2, 4, 8)) for j, n in enumerate(SIZES)
    ]
    n, m, y = zip(*points, strict=True)
    return list(n), list(m), list(y)


@pytest.mark.parametrize("name", list(FORMS))
def test_derivatives_are_those_of_the_form(name):
    form = FORMS[name]
    c = np.array(
        [{"log A": 1.2, "α": -0.35, "log B": -4.0, "β": 0.05, "C": 1.5}[symbol] for symbol in form.ranges]
    )
    n, m = np.array([35e6, 300e6]), np.array([2.0, 4.0])
    for index, derivative in enumerate(form.evaluate(c, n, m)[1]):
        step = 1e-6 * np.eye(len(c))[index]
        slope = (form.predict(c + step, n, m) - form.predict(c - step, n, m)) / 2e-6
        assert derivative == pytest.approx(slope, rel=1e-5)


def test_an_outlier_hardly_moves_a_huber_fit_and_the_largest_size_is_not_fitted(few_starts):
    n, m, loss = made_up()
    form, expected = FORMS["product"], fit_parametric(FORMS["product"], n, m, loss)
    wild = [2 * y if (a, b) == (SIZES[1], 1) else y for a, b, y in zip(n, m, loss, strict=True)]
    assert fit_parametric(form, n, m, wild)(1e9, 2) == pytest.approx(expected(1e9, 2), rel=0.005)
    squares = [PowerLawFit(n, values, m).law(1e9, 2) for values in (loss, wild)]
    assert abs(squares[1] / squares[0] - 1) > 0.005
    # The form has one valley: whatever the largest size says, the fit is that of the others.
    beyond = [1.5 * y if a == SIZES[-1] else y for a, y in zip(n, loss, strict=True)]
    assert fit_parametric(form, n, m, beyond)(1e9, 2) == pytest.approx(expected(1e9, 2), rel=1e-3)


def test_among_equally_low_fits_the_best_at_the_largest_size_is_kept(monkeypatch):
    """The ends: the lowest, one as low that suits the largest size better, and higher ones that suit it best."""
    n, m, loss = made_up()
    exact = np.array([math.log(18.0) - 0.095 * math.log(1e6), -0.095, 0.012])
    far, near, bait = (exact + np.array([shift, 0.0, 0.0]) for shift in (0.05, 0.01, 0.0))
    ends = iter([(100.0, far), (100.9, near), (102.0, bait)] + [(500.0, bait)] * (NUM_STARTS - 3))

    def minimize(*_, **__):
        fun, x = next(ends)
        return SimpleNamespace(fun=fun, x=x)

    monkeypatch.setattr("scipy.optimize.minimize", minimize)
    fit = fit_parametric(FORMS["product"], n, m, loss)
    assert fit.coefficients["log A"] == pytest.approx(math.log(18.0) + 0.01)
    assert fit.residual == pytest.approx(0.01, abs=0.004) and fit.residual_of_all < 0.004
    assert next(ends, None) is None and NUM_STARTS == 256


def test_the_huber_loss_is_quadratic_up_to_delta_and_linear_beyond():
    form, y = FORMS["product"], np.array([2.0])
    for residual, expected in ((5e-4, 0.5**2 / 2), (-1e-2, 10 - 0.5)):  # δ is 1e-3
        c = np.array([math.log(2.0) + residual, 0.0, 0.0])
        value, gradient = parametric._huber(c, form, np.array([1e6]), np.array([1.0]), y)
        assert value == pytest.approx(expected)
        assert gradient[0] == pytest.approx(np.clip(residual / 1e-3, -1, 1) / 1e-3)


@pytest.mark.slow
def test_a_constant_is_not_negative_and_more_points_than_coefficients_are_needed(few_starts):
    """A line in log-log that bends down beyond a power law would take a negative constant."""
    n = [size for _ in (1, 2) for size in SIZES]
    m = [m for m in (1, 2) for _ in SIZES]
    loss = [3.0 * (a / 1e8) ** -0.05 - 0.8 + 0.01 * b for a, b in zip(n, m, strict=True)]
    assert fit_parametric(FORMS["product_constant"], n, m, loss).coefficients["C"] == pytest.approx(0.0, abs=1e-9)
    few = [i for i in range(len(n)) if m[i] == 1 or n[i] == SIZES[0]]
    with pytest.raises(ValueError, match=r"A·N\^α·M\^β \+ C has 4 coefficients, and there are 4 points below"):
        few_sizes = [i for i in few if n[i] in (*SIZES[:3], SIZES[-1])]
        fit_parametric(FORMS["product_constant"], *([column[i] for i in few_sizes] for column in (n, m, loss)))


@pytest.mark.parametrize(
    ("columns", "form", "message"),
    [
        (
            ([1e6, 2e6, 3e6] * 2, [1, 1, 1, 2, 2, 2]),
            "sum",
            "3 sizes below the largest and 3 numbers of replicas",
        ),
        (([1e6, 2e6, 3e6], [1, 1, 1]), "product", "and 2 numbers of replicas, and there are 2 and 1"),
        (([1e6, 2e6, 4e6], [1, 2, 4]), "", "M = 4 don't tell α from β"),
        (([1e6, 1e6], None), "", "two sizes or more"),
        (([1e6, 2e6], [4, 4]), "", "two numbers of replicas"),
    ],
)
def test_too_few_points_are_refused(columns, form, message):
    n, m = columns
    loss = [3.0 - 0.1 * i for i in range(len(n))]
    with pytest.raises(ValueError, match=message):
        fit_parametric(FORMS[form], n, m, loss) if form else PowerLawFit(n, loss, m)


TRUTH, NUM_FITS = PowerLaw(18.0, -0.095, 0.012), 100


def coverage(sizes: Sequence[float], replicas: Sequence[int], shared: float, *asked: str) -> dict[str, float]:
    """The part of fits whose intervals hold the truth; `shared` is what a size errs alike for every M."""
    n, m = zip(*((size, m) for size in sizes for m in replicas), strict=True)
    truths = {"factor": TRUTH.factor, "exponent": TRUTH.exponent, "replicas_exponent": TRUTH.replicas_exponent}
    covered = dict.fromkeys(asked, 0)
    for seed in range(NUM_FITS):
        generator = np.random.default_rng(seed)
        by_size = dict(zip(sizes, generator.normal(0, 0.005 * math.sqrt(shared), len(sizes)), strict=True))
        alone = generator.normal(0, 0.005 * math.sqrt(1 - shared), len(n))
        values = [TRUTH(a, b) * math.exp(by_size[a] + e) for a, b, e in zip(n, m, alone, strict=True)]
        fit = PowerLawFit(n, values, m if len(replicas) > 1 else None)
        for name in asked:
            estimate = fit.predict(10e9, 2) if name == "predict" else getattr(fit, name)()
            covered[name] += estimate.low <= truths.get(name, TRUTH(10e9, 2)) <= estimate.high
    return {name: count / NUM_FITS for name, count in covered.items()}


THREE_SIZES = (1e5, 1.7e5, 3e5)


@pytest.mark.parametrize(
    ("sizes", "replicas", "shared", "asked"),
    [
        (SIZES, (1,), 0.0, ("factor", "exponent")),
        *(
            (SIZES, replicas, shared, ("exponent", "replicas_exponent", "predict"))
            for replicas in ((1, 2, 4, 8), (1, 2))
            for shared in (0.0, 0.9)
        ),
        (THREE_SIZES, (1, 2, 4), 0.5, ("replicas_exponent",)),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(sizes, replicas, shared, asked, monkeypatch):
    monkeypatch.setattr(power_laws, "_REPEATS", 1000)
    covered = coverage(sizes, replicas, shared, *asked)
    assert all(0.90 <= part <= 0.99 for part in covered.values()), covered


def test_three_sizes_tell_what_more_replicas_do_and_no_more():
    n, m = zip(*((size, m) for size in THREE_SIZES for m in (1, 2, 4)), strict=True)
    fit = PowerLawFit(n, [TRUTH(a, b) for a, b in zip(n, m, strict=True)], m)
    assert fit.exponent().low is None
    assert fit.factor().reason == "an interval needs 5 sizes, and there are 3"
    more_sizes = [*THREE_SIZES, 1e6, 2e6, 1e5, 2e6]
    few_points = PowerLawFit(more_sizes, [2.0, 1.9, 1.8, 1.7, 1.6, 2.1, 1.7], [1] * 5 + [2] * 2)
    assert few_points.replicas_exponent().reason == "an interval needs 9 points, and there are 7"


def test_one_point_a_size_gives_a_joint_law_without_intervals():
    fit = PowerLawFit([1e6, 2e6, 4e6, 8e6, 16e6], [3.0, 2.8, 2.65, 2.55, 2.3], [1, 2, 1, 4, 2])
    for estimate in (fit.factor(), fit.exponent(), fit.replicas_exponent(), fit.predict(1e7, 2)):
        assert estimate.low is None and "a size at which several numbers of replicas" in estimate.reason


def test_points_on_a_law_leave_no_interval_but_the_law():
    law = PowerLaw(20.0, -0.1, 0.01)
    n, m = [1e6, 3e6, 1e7, 3e7, 1e8] * 2, [1] * 5 + [4] * 5
    fit = PowerLawFit(n, [law(a, b) for a, b in zip(n, m, strict=True)], m)
    assert fit.law.factor == pytest.approx(20.0) and fit.law.replicas_exponent == pytest.approx(0.01)
    prediction = fit.predict(1e9, 2)
    assert (
        prediction.low
        == pytest.approx(prediction.value)
        == pytest.approx(prediction.high)
        == pytest.approx(law(1e9, 2))
    )
    few = PowerLawFit([1e6, 2e6, 4e6], [2.0, 1.9, 1.85])
    assert few.exponent().low is None and few.predict(1e7).high is None


def test_a_value_that_no_float_holds_is_refused():
    steep = PowerLawFit([1e6, 1.1e6, 1.3e6], [math.exp(480 - 35 * math.log(n)) for n in (1e6, 1.1e6, 1.3e6)])
    assert steep.law(1e6) == pytest.approx(math.exp(480 - 35 * math.log(1e6)))
    with pytest.raises(UserError, match=r"the law's value would be e\^-729: take a size nearer to those"):
        steep.predict(1e15)
