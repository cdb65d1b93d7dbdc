import json
import math
from dataclasses import replace

import numpy as np
import pytest

from diloco.cli.main import main
from diloco.scaling.judgement import crossing, held_out_errors
from diloco.scaling.laws import Laws, best_batch
from diloco.scaling.power_laws import PowerLaw
from diloco.scaling.prediction import predict
from diloco.scaling.table import Point, best_points, read_table

SIZES = (1e5, 2e5, 4e5)


def sweep() -> list[Point]:
    """A made-up sweep in which everything follows laws.

    The best batch is 2^0.2·4096·(N/1e5)^0.5·M. An outer learning rate of 0.8 is better than the grid's 0.6, but
    was tried at one batch alone.
    """
    points = []
    for params in SIZES:
        for replicas in (0, 1, 2, 4):
            best = 4096 * (params / 1e5) ** 0.5 * max(1, replicas)
            for octave in (-1, 0, 1):
                for outer in (0.6, 0.8) if octave == 0 and replicas else (0.6,):
                    loss = 9.0 * params**-0.1 * (1.02 if replicas == 0 else replicas**0.01)
                    loss += 0.02 * (octave - 0.2) ** 2 - 0.02 * 0.2**2 + 0.05 * (0.8 - outer)
                    settings = {"batch_tokens": best * 2.0**octave, "learning_rate": 30 * params**-0.7}
                    settings |= {"outer_learning_rate": outer, "sync_every": 30.0} if replicas else {}
                    points.append(Point(params, replicas, loss, settings | {"tokens": 20 * params}))
    return points


def test_a_sweep_predicts_what_it_was_made_of():
    prediction = predict(8e5, 4, laws=Laws(sweep()))
    assert prediction["fit"] == "joint"
    assert prediction["loss"]["value"] == pytest.approx(9.0 * 8e5**-0.1 * 4**0.01, rel=1e-6)
    assert prediction["batch_tokens"]["value"] == pytest.approx(2**0.2 * 4096 * 8**0.5 * 4, rel=1e-6)
    assert prediction["batch_tokens"]["power_of_two"] == 2**16  # of 2^15.7
    assert prediction["learning_rate"]["value"] == pytest.approx(30 * 8e5**-0.7, rel=1e-6)
    outer = prediction["outer_learning_rate"]
    assert outer["value"] == 0.8
    assert outer["reason"].startswith("the best of 0.6, 0.8, tried with M = 4; 0.6 has 0.3")
    assert outer["reason"].endswith("more loss, and a better one may lie beyond")
    assert prediction["sync_every"] == 30 and predict(8e5, 0, laws=Laws(sweep()))["sync_every"] is None
    assert prediction["loss"]["reason"] == "an interval needs 5 sizes, and there are 3"
    default = predict(8e5, 8, laws=Laws(sweep()))["outer_learning_rate"]
    assert default["value"] == 0.8 and "a default, not a fit" in default["reason"]
    assert prediction["steps"]["value"] == math.ceil(20 * 8e5 / prediction["batch_tokens"]["value"])
    assert "800000 lies outside the sizes that were fitted, 100000 to 400000" in prediction["warning"]
    assert "M = 8 lies outside the numbers of replicas" in predict(3e5, 8, laws=Laws(sweep()))["warning"]
    assert predict(3e5, 0, laws=Laws(sweep()))["warning"] is None
    inside = predict(3e5, 0, laws=Laws(sweep()), overtraining=2)
    assert inside["warning"] == "the loss is that of 20 tokens a parameter, 0.5 of these"
    assert inside["fit"] == "independent" and inside["tokens"]["value"] == 12e6
    assert inside["outer_learning_rate"]["value"] is None


def test_an_interval_of_the_batch_is_one_of_the_steps():
    points = [
        Point(n, m, 3.0 * n**-0.1, {"batch_tokens": 10.0 * n**0.5 * math.exp(noise)})
        for m, noises in {1: (0.1, -0.1, 0.05, -0.05, 0.1), 2: (0.0, 0.1, -0.1, 0.1, 0.0)}.items()
        for n, noise in zip((1e5, 2e5, 4e5, 8e5, 16e5), noises, strict=True)
    ]
    prediction = predict(4e5, 2, laws=Laws(points))
    batch, steps = prediction["batch_tokens"], prediction["steps"]
    assert steps["low"] == math.ceil(8e6 / batch["high"]) < steps["value"] < math.ceil(8e6 / batch["low"])
    message = "the table has no learning_rate, and the published law of 35M to 2.4B parameters is far"
    assert message in prediction["warning"]


def rates(tried: dict[float, dict[float, float]]) -> Laws:
    runs = [(n, loss, rate) for n, losses in tried.items() for rate, loss in losses.items()]
    return Laws([Point(n, 1, loss, {"outer_learning_rate": rate}) for n, loss, rate in runs])


def outer_rate(laws: Laws) -> dict:
    return predict(2e5, 1, laws=laws, fit="independent")["outer_learning_rate"]


def test_outer_rates_are_compared_at_the_sizes_that_they_share():
    rate = outer_rate(rates({1e5: {0.4: 3.0, 0.6: 2.9}, 2e5: {0.4: 2.8, 0.6: 2.85}, 4e5: {1.0: 2.5}}))
    assert rate["value"] == 0.6 and "1 (" not in rate["reason"]
    # An interrupted sweep: only the grid's own rate was tried at the largest size.
    tried = {1e5: {0.4: 3.0, 0.6: 2.9, 0.8: 2.8}, 2e5: {0.4: 2.9, 0.6: 2.8, 0.8: 2.7}, 4e5: {0.6: 2.6}}
    rate = outer_rate(rates(tried))
    assert rate["value"] == 0.8
    assert rate["reason"].startswith("the best of 0.4 (at 2 of 3 sizes), 0.6, 0.8 (at 2 of 3 sizes), tried with")
    assert rate["reason"].endswith("a better one may lie beyond")
    warning = predict(2e5, 1, laws=rates(tried), fit="independent")["warning"]
    assert "M = 1: the loss is the best of unequally many outer learning rates (3 at N = 100000, 3 at" in warning
    tried[1e5][0.8] = tried[2e5][0.8] = 3.1
    rate = outer_rate(rates(tried))
    assert rate["value"] == 0.6 and "beyond" not in rate["reason"]
    alone = outer_rate(rates({1e5: {0.4: 3.0}, 2e5: {0.4: 2.8}}))
    assert (alone["value"], alone["reason"]) == (0.4, "the only one tried with M = 1")


def grid(best_rate: float, best_batch: float) -> list[Point]:
    """Five sizes and two M, each with the same best of a grid of three by three."""
    return [
        Point(n, m, 9.0 * n**-0.1 + 0.02 * abs(rate / best_rate - 1) + 1e-5 * abs(batch - best_batch), settings)
        for n in (1e5, 2e5, 4e5, 8e5, 16e5)
        for m in (1, 2)
        for rate in (0.008, 0.0113, 0.016)
        for batch in (1024.0, 2048.0, 4096.0)
        for settings in [{"learning_rate": rate, "batch_tokens": batch}]
    ]


def test_values_on_the_edge_of_the_grid_are_named_and_have_no_interval():
    check_edges(Laws(grid(0.008, 1024)))
    inside = predict(4e5, 2, laws=Laws(grid(0.0113, 2048)))
    assert inside["warning"] is None
    assert inside["learning_rate"]["low"] is None and "a factor 1.41" in inside["learning_rate"]["reason"]
    assert inside["batch_tokens"]["low"] is not None, "a parabola's minimum is no value of the grid"


def check_edges(laws: Laws) -> None:
    edges = predict(4e5, 2, laws=laws)
    for name in ("learning_rate", "batch_tokens"):
        assert edges[name]["low"] is None and "less than the step between values tried" in edges[name]["reason"]
        assert f"the best {name} of 10 of the law's 10 points is the smallest or the largest" in edges["warning"]


def test_more_seeds_of_the_best_runs_alone_make_the_grid_no_finer():
    def repeated(points):
        best = best_points(points)
        return Laws([replace(point, num_seeds=3) if point in best else point for point in points])

    check_edges(repeated(grid(0.008, 1024)))
    inside = predict(4e5, 2, laws=repeated(grid(0.0113, 2048)))
    assert inside["warning"] is None
    assert inside["batch_tokens"]["value"] == pytest.approx(2048), "no neighbour has as many seeds"
    assert "a factor 2" in inside["batch_tokens"]["reason"]


def test_an_edge_is_judged_by_the_values_tried_beside_the_best():
    wide = [
        Point(1e6, 1, 3.0 + loss, {"learning_rate": rate, "batch_tokens": batch})
        for batch, tried in {1024.0: {0.005: 0.2, 0.01: 0.1, 0.02: 0.2}, 2048.0: {0.005: 0.1, 0.01: 0.0}}.items()
        for rate, loss in tried.items()
    ]
    laws = Laws(wide)
    assert laws.is_on_edge(laws.best[0], "learning_rate") and laws.is_on_edge(laws.best[0], "batch_tokens")
    beyond = at_batches({1024: 3.0, 2048: 2.9, 4096: 3.0}, outer_learning_rate=0.6)
    laws = Laws([*beyond, *at_batches({8192: 2.8}, outer_learning_rate=0.8)])
    assert laws.is_on_edge(laws.best[0], "batch_tokens")


def test_a_table_of_losses_alone_predicts_the_loss_for_any_m():
    points = [Point(n, m, 9.0 * n**-0.1) for n in (1e6, 2e6, 4e6) for m in (0, 3)]
    prediction = predict(2e6, 3, laws=Laws(points), fit="independent")
    assert prediction["loss"]["value"] == pytest.approx(9.0 * 2e6**-0.1)
    for name in ("learning_rate", "batch_tokens", "steps"):
        assert prediction[name]["value"] is None and prediction[name]["reason"]
    assert "no published law is there for M = 3" in prediction["batch_tokens"]["reason"]


def test_a_size_that_was_not_run_with_this_m_is_named():
    points = [Point(n, m, 9.0 * n**-0.1 * 1.01**m) for n, m in ((1e5, 1), (4e5, 1), (1e5, 2))]
    assert "that were run with M = 2, 100000 to 100000" in predict(3e5, 2, laws=Laws(points))["warning"]
    with pytest.raises(ValueError, match=r"M = 2 was run at 100000 parameters only: .* laws for M = 1$"):
        predict(3e5, 2, laws=Laws(points), fit="independent")


def test_steps_are_those_of_a_batch_that_can_be_run(capsys):
    prediction = predict(1.3e9, 3)
    assert prediction["batch_tokens"]["power_of_two"] == 2**19
    assert prediction["steps"]["at_power_of_two"] == math.ceil(20 * 1.3e9 / 2**19)
    main(["scaling", "predict", "--num-params", "1.3e9", "--num-replicas", "3"])
    assert "49,592 at that power of two" in capsys.readouterr().out


def test_the_recipes_have_what_is_predicted():
    from diloco.training.config.recipes import scaling_laws

    for replicas, method in ((0, "data_parallel"), (1, "diloco"), (2, "diloco"), (3, "diloco"), (4, "diloco")):
        config = scaling_laws("1.3B", max(1, replicas), method)
        prediction = predict(config.model.num_matrix_params, replicas)
        assert config.optimizer.learning_rate == pytest.approx(prediction["learning_rate"]["value"])
        assert replicas == 3 or config.tokens_per_step == prediction["batch_tokens"]["power_of_two"]
        assert not replicas or config.diloco.outer_learning_rate == prediction["outer_learning_rate"]["value"]


def test_the_published_laws_are_the_default(capsys):
    main(["scaling", "predict", "--num-params", "1.3e9", "--num-replicas", "4", "--json"])
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["loss"]["low"] < prediction["loss"]["value"] < prediction["loss"]["high"]
    assert prediction["loss"]["value"] == pytest.approx(2.472, rel=0.02)
    rate, outer = prediction["learning_rate"], prediction["outer_learning_rate"]
    assert rate["value"] == pytest.approx(4512.99 * 1.3e9**-0.789), "M = 4's own law"
    assert rate["low"] is None and "without the data behind them" in rate["reason"]
    assert outer["value"] == 0.8 and "not a fit" in outer["reason"]
    assert prediction["tokens"]["value"] == 20 * 1.3e9 and prediction["warning"] is None
    main(["scaling", "predict", "--num-params", "1e9", "--num-replicas", "0"])
    printed = capsys.readouterr().out
    assert "Data-Parallel, 1e+09 parameters, independent laws" in printed and "2^17" in printed
    main(["scaling", "predict", "--num-params", "1e11"])
    assert "lies outside the sizes that were fitted" in capsys.readouterr().err


def at_batches(losses: dict[float, float], **settings: float) -> list[Point]:
    return [Point(1e6, 1, loss, {"batch_tokens": batch, **settings}) for batch, loss in losses.items()]


def the_best_batch(points: list[Point]) -> float:
    return best_batch(points, best_points(points)[0])


def test_the_best_batch_is_the_bottom_of_the_parabola():
    valley = {2.0**x: 3 + 0.1 * (x - 12.4) ** 2 for x in (11, 12, 13, 14)}
    assert the_best_batch(at_batches(valley)) == pytest.approx(2**12.4)
    assert the_best_batch(at_batches(valley | {2.0**15: 9.0, 2.0**10: 3.4})) == pytest.approx(2**12.4)
    assert the_best_batch(at_batches({1024: 3.0, 2048: 2.9, 4096: 2.85})) == 4096  # the bottom is not among them
    assert the_best_batch(at_batches({1024: 3.0, 2048: 3.2, 4096: 3.1})) == 1024  # a hill
    assert the_best_batch(at_batches({1024: 3.0, 2048: 2.9})) == 2048


def test_a_batch_that_fewer_seeds_have_tried_does_not_move_the_best():
    tried = {16: (3.05, 1), 17: (3.00, 3), 18: (2.98, 1)}
    points = [Point(35e6, 2, loss, {"batch_tokens": 2.0**at}, num_seeds=n) for at, (loss, n) in tried.items()]
    assert best_batch(points, points[1]) == 2.0**17
    everywhere = [replace(point, num_seeds=3) for point in points]
    assert best_batch(everywhere, everywhere[1]) > 2.0**17


def test_the_best_batch_is_that_of_the_best_run():
    # A lucky run at the edge, and the settings that three seeds have tried.
    lucky = at_batches({1024: 2.8, 2048: 3.0, 4096: 2.9, 8192: 3.0})
    seeds = [replace(p, num_seeds=3) if p.settings["batch_tokens"] == 4096 else p for p in lucky]
    assert the_best_batch(lucky) == 1024 and the_best_batch(seeds) == pytest.approx(4096)
    # Other outer learning rates count where they were tried at batches on both sides, and not at one batch alone.
    grid = at_batches({1024: 3.2, 2048: 3.1, 4096: 3.05, 8192: 3.0, 16384: 3.1}, outer_learning_rate=0.2)
    better = at_batches({1024: 2.9, 2048: 2.7, 4096: 2.9}, outer_learning_rate=0.8)
    assert the_best_batch(grid + better) == pytest.approx(2048)
    alone = at_batches({8192: 2.7}, outer_learning_rate=0.8)
    assert 4096 < the_best_batch(grid + alone) < 16384
    # What lies in no valley between its neighbours stays at what was tried.
    hill = [*at_batches({1024: 2.9, 4096: 2.8}), *(replace(p, num_seeds=2) for p in at_batches({2048: 3.0}))]
    assert the_best_batch(hill) == 2048


def test_data_parallel_has_no_outer_settings_and_failed_runs_are_left_out(tmp_path):
    path = tmp_path / "sweep.csv"
    rows = ["1e6,0,2.0,1,0,False", "2e6,0,1.9,1,nan,False", "1e6,2,2.1,30,0.6,False", "2e6,2,2.0,30,0.6,False"]
    path.write_text("\n".join(("params,replicas,eval_loss,sync_every,outer_learning_rate,failed", *rows)))
    points = read_table(path)
    assert [point.settings for point in points[:2]] == [{}, {}] and len(points) == 4
    path.write_text(path.read_text() + "\n4e6,2,,30,0.6,the loss was nan\n")
    assert read_table(path) == points
    path.write_text(path.read_text() + "1e6,2,2.3,100,0.6,\n")
    with pytest.raises(ValueError, match=r"several periods \(30, 100\): set sync_every to one of them"):
        read_table(path)
    assert read_table(path, sync_every=30) == points
    with pytest.raises(ValueError, match="no run with sync_every=10, but 30, 100"):
        read_table(path, sync_every=10)


def test_seeds_are_averaged_and_a_mean_is_not_beaten_by_a_lucky_run(tmp_path):
    path = tmp_path / "sweep.csv"
    rows = ("1e6,1,2.0,0,0.1", "1e6,1,3.0,1,0.1", "1e6,1,2.4,0,0.2", "2e6,1,2.0,0,0.1")
    path.write_text("\n".join(("\ufeffparams,replicas,eval_loss,seed,learning_rate", *rows)))
    points = read_table(path)
    assert [(point.eval_loss, point.num_seeds) for point in points] == [(2.5, 2), (2.4, 1), (2.0, 1)]
    assert [point.eval_loss for point in best_points(points)] == [2.5, 2.0]


def test_data_parallel_alone_has_laws_too(tmp_path, capsys):
    path = tmp_path / "sweep.csv"
    path.write_text("params,replicas,eval_loss\n1e6,0,2.0\n2e6,0,1.9\n3e6,0,1.85\n")
    main(["scaling", "fit", "--data", str(path)])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and "Data-Parallel" in printed[1] and "needs 5 sizes, and there are 3" in printed[1]
    with pytest.raises(SystemExit, match="2"):
        main(["scaling", "predict", "--data", str(path), "--num-params", "3e6"])
    assert "M = 0 (0 is Data-Parallel): set " in capsys.readouterr().err


def test_laws_cross_where_they_are_equal():
    laws = {0: PowerLaw(10.0, -0.06), 1: PowerLaw(20.0, -0.1), 2: PowerLaw(11.0, -0.06)}
    sizes = [1e5 * 2**i for i in range(7)]
    noise = np.random.default_rng(0).normal(0, 1e-3, (3, 7))
    points = [Point(n, m, law(n) * math.exp(noise[m, i])) for m, law in laws.items() for i, n in enumerate(sizes)]
    exact = [Point(n, m, law(n)) for m, law in laws.items() for n in sizes]
    point = crossing(Laws(exact), 1)
    assert laws[0](point.num_params) == pytest.approx(laws[1](point.num_params))
    assert point.is_lower_above and not point.is_measured
    among = [Point(n, m, laws[m](100 * n)) for m in (0, 1) for n in sizes]  # they cross at 2^25 / 100
    assert crossing(Laws(among), 1).is_measured
    point = crossing(Laws(points), 1)
    assert point.low < 2**25 < point.high and point.high < 4 * point.low  # the truth, (20/10)^(1/0.04)
    fit = Laws(points).fit("loss", 1, "independent"), Laws(points).fit("loss", 0, "independent")
    assert fit[0].law(point.num_params) == pytest.approx(fit[1].law(point.num_params))
    twins = [Point(n, m, laws[0](n) * math.exp(noise[m, i])) for m in (0, 1) for i, n in enumerate(sizes)]
    uncertain = crossing(Laws(twins), 1)
    assert uncertain.num_params and uncertain.low is None and "don't differ for certain" in uncertain.reason
    for factor, is_lower in ((0.9, True), (1.1, False)):
        apart = [Point(n, m, (factor if m else 1.0) * laws[0](n)) for m in (0, 1) for n in sizes]
        never = crossing(Laws(apart), 1)
        assert (never.num_params, never.is_lower_above) == (None, is_lower)
    same = crossing(Laws([Point(n, m, laws[0](n)) for m in (0, 1) for n in sizes]), 1)
    assert (same.num_params, same.is_lower_above) == (None, None)
    assert crossing(Laws([p for p in points if p.params < 5e5]), 1).reason.startswith("an interval needs 5 sizes")


def test_a_law_that_is_judged_has_not_seen_the_largest_size():
    points = [p for p in sweep() if p.settings.get("outer_learning_rate", 0.6) == 0.6]
    errors = {error.law: error for error in held_out_errors(Laws(points))}
    assert errors["joint"].mean < 1e-3 and errors["independent"].mean < 1e-3
    moved = [replace(p, eval_loss=p.eval_loss * 1.1) if p.params == SIZES[-1] else p for p in points]
    for error in held_out_errors(Laws(moved)):
        assert error.mean == pytest.approx(math.log(1.1), abs=1e-3) and set(error.by_replicas) == {1, 2, 4}


def test_a_table_is_judged(tmp_path, capsys):
    path = tmp_path / "sweep.csv"
    lines = ["params,replicas,eval_loss,learning_rate,batch_tokens,outer_learning_rate"]
    for p in sweep():
        known = [p.settings.get(name, "") for name in lines[0].split(",")[3:]]
        lines.append(",".join(map(str, (p.params, p.replicas, p.eval_loss, *known))))
    path.write_text("\n".join(lines) + "\n")
    main(["scaling", "fit", "--data", str(path), "--json"])
    output = json.loads(capsys.readouterr().out)
    assert output["laws"]["loss"]["joint"]["alpha"]["value"] == pytest.approx(-0.1, abs=1e-6)
    assert output["laws"]["batch_tokens"]["joint"]["beta"]["value"] == pytest.approx(1.0, abs=1e-6)
    assert {error["law"] for error in output["test_errors"]["loss"]} == {"independent", "joint"}
    assert output["test_errors"]["learning_rate"][0]["mean"] < 1e-9
    (form,) = output["forms"]
    assert form["form"] == output["extrapolates_best"]["form"] == "product"
    assert form["coefficients"]["α"] == pytest.approx(-0.1, abs=1e-3)
    assert "needs 3 sizes below the largest" in output["forms_refused"]["sum"]
    assert {(edge["quantity"], edge["value"]) for edge in output["on_edge"]} == {("outer_learning_rate", 0.8)}
    assert output["extrapolation"] == []


def test_sizes_too_near_to_each_other_are_no_crash(tmp_path):
    rates = (2**-9, 2**-5, 2**-10, 2**-4, 2**-7)
    rows = [f"{1e7 + 3e5 * i},0,{3 - 0.01 * i},{rate}" for i, rate in enumerate(rates)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["params,replicas,eval_loss,learning_rate", *rows]))
    laws = Laws(read_table(table))
    near = predict(1.05e7, 0, laws=laws)["learning_rate"]
    assert 0 < near["value"] < 1
    factor = laws.fit("learning_rate", 0, "independent").factor()
    assert factor.low is None and "the interval has no end" in factor.reason
