import json

import pytest

from diloco.cli import main
from diloco.scaling.batches import best_batch
from diloco.scaling.judgement import crossing
from diloco.scaling.power_laws import PowerLaw, PowerLawFit
from diloco.scaling.prediction import Laws, predict
from diloco.scaling.table import Point, read_table

SIZES = (1e5, 2e5, 4e5)


def sweep() -> list[Point]:
    """A made-up sweep in which everything follows laws: the best batch 4096·(N/1e5)^0.5·M, the best rate 0.6."""
    points = []
    for params in SIZES:
        for replicas in (0, 1, 2, 4):
            best = 4096 * (params / 1e5) ** 0.5 * max(1, replicas)
            for octave in (-1, 0, 1):
                for outer in (0.4, 0.6):
                    loss = 9.0 * params**-0.1 * (1.02 if replicas == 0 else replicas**0.01)
                    loss += 0.02 * octave**2 + 0.05 * abs(outer - 0.6)
                    settings = {"batch_tokens": best * 2.0**octave, "learning_rate": 30 * params**-0.7}
                    settings |= {"outer_learning_rate": outer} if replicas else {}
                    points.append(Point(params, replicas, loss, settings))
    return points


def test_a_sweep_predicts_what_it_was_made_of():
    found = predict(8e5, 4, laws=Laws(sweep()))
    assert found["fit"] == "joint"
    assert found["loss"]["value"] == pytest.approx(9.0 * 8e5**-0.1 * 4**0.01, rel=1e-6)
    assert found["batch_tokens"]["value"] == pytest.approx(4096 * 8**0.5 * 4, rel=1e-6)
    assert found["batch_tokens"]["power_of_two"] in (2**15, 2**16)  # of 2^15.5
    assert found["learning_rate"]["value"] == pytest.approx(30 * 8e5**-0.7, rel=1e-6)
    assert found["outer_learning_rate"]["value"] == 0.6
    assert found["steps"]["value"] == pytest.approx(20 * 8e5 / found["batch_tokens"]["value"])
    assert "800000 lies outside the sizes that were fitted, 100000 to 400000" in found["warning"]
    assert "M = 8 lies beyond the numbers of replicas" in predict(3e5, 8, laws=Laws(sweep()))["warning"]
    inside = predict(3e5, 0, laws=Laws(sweep()), overtraining=2)
    assert inside["warning"] is None and inside["fit"] == "independent" and inside["tokens"]["value"] == 12e6
    assert inside["outer_learning_rate"] == {
        "value": None,
        "low": None,
        "high": None,
        "reason": "Data-Parallel has no outer step",
    }


def test_the_published_laws_are_the_default(capsys):
    main(["scaling", "predict", "--num-params", "1.3e9", "--num-replicas", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["loss"]["low"] < found["loss"]["value"] < found["loss"]["high"]
    assert found["loss"]["value"] == pytest.approx(2.472, rel=0.02)
    assert found["learning_rate"]["value"] == pytest.approx(22256 * 1.3e9**-0.8827 * 4**0.2929)
    assert (
        found["learning_rate"]["low"] is None
        and "without the data behind them" in found["learning_rate"]["reason"]
    )
    assert found["outer_learning_rate"]["value"] == 0.4 and "not a fit" in found["outer_learning_rate"]["reason"]
    assert found["tokens"]["value"] == 20 * 1.3e9 and found["warning"] is None
    main(["scaling", "predict", "--num-params", "1e9", "--num-replicas", "0"])
    printed = capsys.readouterr().out
    assert "Data-Parallel, 1e+09 parameters, independent laws" in printed and "2^17" in printed
    main(["scaling", "predict", "--num-params", "1e11"])
    assert "lies outside the sizes that were fitted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num-replicas", "0", "--fit", "joint"], "for Data-Parallel, M = 0, pass --fit independent"),
        (["--num-replicas", "3", "--fit", "independent"], "there are those for M = 0, 1, 2, 4, 8"),
        (["--num-replicas", "-1"], "num_replicas must be at least 1, or 0 for Data-Parallel, not -1"),
        (["--overtraining", "0"], "overtraining=0 must be above 0"),
        (["--data", "nowhere.csv"], "nowhere.csv can't be read as a table"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["scaling", "predict", "--num-params", "1e9", *arguments])
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("params,loss\n1,2\n", "has no column 'replicas'"),
        (
            "params,replicas,eval_loss\n1e6,1,2\n2e6,1,nan\n",
            "line 3: eval_loss must be above 0 and finite, not nan",
        ),
        ("params,replicas,eval_loss\n1e6,1,-2\n", "line 2: eval_loss must be above 0 and finite, not -2"),
        ("params,replicas,eval_loss\n1e6,1,x\n", "line 2: eval_loss must be a number, not 'x'"),
        ("params,replicas,eval_loss\n1e6,1.5,2\n", "line 2: replicas must be a whole number, not 1.5"),
        ("params,replicas,eval_loss\n# c\n1e6,1,2\n1e6,2,2\n", r"runs of one size only \(1e\+06\)"),
    ],
)
def test_bad_data_is_refused_by_its_row(text, sentence, tmp_path):
    path = tmp_path / "sweep.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_table(path)


def test_the_best_batch_is_the_bottom_of_the_parabola():
    def points(losses: dict[float, float]) -> list[Point]:
        return [Point(1e6, 1, loss, {"batch_tokens": batch}) for batch, loss in losses.items()]

    valley = {2.0**x: 3 + 0.1 * (x - 12.4) ** 2 for x in (11, 12, 13, 14)}
    assert best_batch(points(valley)) == pytest.approx(2**12.4)
    assert best_batch(points({1024: 3.0, 2048: 2.9, 4096: 2.85})) == 4096  # the bottom is not among them
    assert best_batch(points({1024: 3.0, 2048: 3.2, 4096: 3.1})) == 1024  # a hill
    assert best_batch(points({1024: 3.0, 2048: 2.9})) == 2048


def test_laws_cross_where_they_are_equal():
    one, other = PowerLaw(20.0, -0.1), PowerLaw(10.0, -0.06)
    fits = [PowerLawFit(SIZES, [law(n) for n in SIZES]) for law in (one, other)]
    n = crossing(*fits)
    assert one(n) == pytest.approx(other(n))
    assert crossing(fits[0], fits[0]) is None


def test_a_table_is_judged(tmp_path, capsys):
    path = tmp_path / "sweep.csv"
    lines = ["params,replicas,eval_loss,learning_rate,batch_tokens,outer_learning_rate"]
    for p in sweep():
        known = [p.settings.get(name, "") for name in lines[0].split(",")[3:]]
        lines.append(",".join(map(str, (p.params, p.replicas, p.eval_loss, *known))))
    path.write_text("\n".join(lines) + "\n")
    main(["scaling", "fit", "--data", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["laws"]["loss"]["joint"]["alpha"]["value"] == pytest.approx(-0.1, abs=1e-6)
    assert found["laws"]["batch_tokens"]["joint"]["beta"]["value"] == pytest.approx(1.0, abs=1e-6)
    kinds = {residual["law"] for residual in found["residuals"]["loss"]}
    assert {"independent", "joint", "product"} <= kinds
    assert found["residuals"]["learning_rate"][0]["mean"] < 1e-9


def test_the_published_table_is_judged(capsys):
    main(["scaling", "fit"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("independent", "joint", "product_constant", "exponent", "sum"))
    assert "loss = A·N^α" in printed and printed.count(" and Data-Parallel cross ") == 4
