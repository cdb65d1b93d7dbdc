"""Measured and predicted utilization, of rows whose answers are known."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.link_study.methods import PEER, UNLIMITED_MBIT_S, num_steps
from benchmarks.link_study.points import points
from benchmarks.link_study.prediction import _as_the_slowest, with_predictions

from diloco.training.config.recipes import laptop

RECIPE = laptop()
CONFIG = replace(RECIPE, model=replace(RECIPE.model, vocab_size=257))
STEP_SECONDS = 0.1
ALONE = np.full((60, 2), STEP_SECONDS)
NUM_PARAMS = CONFIG.model.num_matrix_params
BLOCKS = 3 * 12 * CONFIG.model.width**2
"""Parameters of a fragment of three blocks; the third fragment holds the rest."""


def row(method: str, gbit_s: float, **changes: float) -> dict:
    link = {"link_gbit_s": gbit_s, "latency_seconds": 0.0, "alone_after_seconds": 0.0}
    columns = {"repeat": 0.0, "mbit_s": 1000 * gbit_s, "method": method, **link}
    columns |= {"warm_steps": 30, "measured_steps": 60, "wall_seconds": 7.5, "interface_bytes": 9e6}
    return columns | changes


def transfer_seconds(num_params: float, gbit_s: float) -> float:
    return 32e-9 * num_params / gbit_s


@pytest.mark.parametrize("method", ["diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4:9"])
def test_a_fast_link_costs_nothing_and_utilization_is_relative_to_steps_alone(method):
    result = with_predictions(row(method, 1e6), ALONE, None, CONFIG)
    assert result["predicted"] == pytest.approx(1.0, abs=1e-4)
    assert result["utilization"] == pytest.approx(0.8)
    outer_steps = 2 if method == "diloco" else 6
    assert result["lost_seconds_per_outer_step"] == pytest.approx(1.5 / outer_steps)


def test_diloco_waits_for_the_whole_model_once_a_period():
    result = with_predictions(row("diloco", 0.01), ALONE, None, CONFIG)
    assert result["predicted"] == pytest.approx(3 / (3 + transfer_seconds(NUM_PARAMS, 0.01)))


def test_torchft_overlaps_nine_of_ten_steps():
    result = with_predictions(row(PEER, 0.01), ALONE, reducing("all_reduce:fp32", 0.01), CONFIG)
    parts = (BLOCKS, BLOCKS, NUM_PARAMS - 2 * BLOCKS)
    period = sum(max(0.9, transfer_seconds(part, 0.01)) + 0.1 for part in parts)
    assert result["predicted"] == pytest.approx(3 / period, rel=1e-6)
    assert result["predicted_with_reducing"] == pytest.approx(result["predicted"], rel=1e-6)
    slower = reducing("all_reduce:fp32", 0.005) | {"step_seconds": 2 * STEP_SECONDS}
    assert (
        with_predictions(row(PEER, 0.01), ALONE, slower, CONFIG)["predicted_with_reducing"] < result["predicted"]
    )


def test_the_time_that_torchft_loses_without_a_limit_is_lost_at_every_bandwidth():
    rows = [row(PEER, 1.0), *(row(PEER, 1e-3 * UNLIMITED_MBIT_S, repeat=float(r)) for r in range(3))]
    for r, wall_seconds in enumerate((6.3, 6.6, 9.0)):
        rows[1 + r]["wall_seconds"] = wall_seconds
    reduce = [reducing("all_reduce:fp32", 1e6) | {"repeat": 0.0, "mbit_s": mbit_s} for mbit_s in (1e3, 1e4)]
    reduce += [reduce[1] | {"repeat": repeat} for repeat in (1.0, 2.0)]
    alone = {(r["repeat"], r["mbit_s"], r["method"]): ALONE for r in rows}
    (point,) = points(rows + reduce, alone, CONFIG)
    assert point["mbit_s"] == 1000.0 and point["predicted"] == pytest.approx(1.0)
    # 60 steps of 0.1 s have six outer steps, each of which loses 0.1 s.
    assert point["predicted_with_reducing"] == pytest.approx(6 / 6.6, rel=1e-4)


def reducing(method: str, gbit_s: float) -> dict:
    seconds = transfer_seconds(NUM_PARAMS, gbit_s) * (0.5 if method.endswith("bf16") else 1.0)
    return {"method": method, "seconds": seconds, "quiet_seconds": seconds, "step_seconds": STEP_SECONDS}


@pytest.mark.parametrize("hook", ["", "_bf16"])
def test_data_parallel_is_predicted_alike_where_reducing_takes_no_processor(hook):
    measured = row(f"data_parallel{hook}:4", 0.01)
    result = with_predictions(measured, ALONE, reducing(f"all_reduce:{hook[1:] or 'fp32'}", 0.01), CONFIG)
    assert result["predicted"] == pytest.approx(result["predicted_with_reducing"])
    # The bytes still to send when the backward pass begins can't be hidden.
    seconds = transfer_seconds(NUM_PARAMS, 0.01) * (0.5 if hook else 1.0)
    assert STEP_SECONDS / (STEP_SECONDS + seconds) < result["predicted"] < STEP_SECONDS / seconds


def test_a_quorum_makes_all_as_slow_as_the_slowest_of_each_stretch():
    compute_SxM = np.array([[1.0, 2.0], [5.0, 1.0], [1.0, 3.0], [4.0, 4.0]])
    assert _as_the_slowest(compute_SxM, (1, 3)).tolist() == [[2.0, 2.0], [5.0, 5.0], [1.0, 1.0], [4.0, 4.0]]


def test_data_parallel_takes_fewer_steps_where_they_take_long():
    assert num_steps("streaming", CONFIG, 0.01, 8.0) == (30, 60)
    assert num_steps("data_parallel:4", CONFIG, 1.0, 8.0) == (30, 60)
    assert num_steps("data_parallel:4", CONFIG, 0.01, 8.0) == (2, 4)


def test_points_are_medians_and_data_parallel_has_its_best_bucket():
    rows = [row("streaming", 0.1, repeat=float(r), wall_seconds=w) for r, w in enumerate((6.5, 8.0, 7.0))]
    rows += [row(f"data_parallel:{size}", 0.1, wall_seconds=w) for size, w in (("1", 40.0), ("4", 30.0))]
    rows.append(reducing("all_reduce:fp32", 0.1) | {"repeat": 0.0, "mbit_s": 100.0})
    alone = {(r["repeat"], r["mbit_s"], r["method"]): ALONE for r in rows}
    streaming, data_parallel = sorted(points(rows, alone, CONFIG), key=lambda point: point["seconds_per_step"])
    assert streaming["seconds_per_step"] == pytest.approx(7 / 60) and streaming["repeats"] == 3
    assert (streaming["lowest"], streaming["highest"]) == pytest.approx((6 / 8, 6 / 6.5))
    assert (data_parallel["method"], data_parallel["variant"]) == ("data_parallel", "data_parallel:4")
