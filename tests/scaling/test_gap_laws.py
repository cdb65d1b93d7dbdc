"""The papers' gaps to Data-Parallel as laws of the size, beside a textbook's regression."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import UserError
from diloco.scaling.gap_laws import diloco_gap, larger_batch_from, streaming_gap
from diloco.scaling.table import PUBLISHED_PARAMS

PUBLISHED = Path(__file__).parents[2] / "src" / "diloco" / "paper_tables"
SIZES = [PUBLISHED_PARAMS[name] for name in ("35M", "90M", "180M", "335M", "550M", "1.3B", "4B")]


def ratios(method: str) -> tuple[list[float], list[float]]:
    """N and loss over Data-Parallel's, of a method of the paper's tables."""
    _, *lines = (PUBLISHED / "streaming_scaling.csv").read_text().splitlines()
    losses = {}
    for row in csv.DictReader(lines):
        losses.setdefault(row["method"], []).append(float(row["eval_loss"]))
    pairs = zip(SIZES, losses[method], losses["data_parallel"], strict=False)
    sizes, values = zip(*((n, ours / theirs) for n, ours, theirs in pairs), strict=True)
    return list(sizes), list(values)


@pytest.mark.parametrize(
    ("setting", "method"),
    [((2, 30), "streaming_overlapped_fp4"), ((4, 30), "Streaming, M=4"), ((4, 100), "Streaming, M=4, H=100")],
)
@pytest.mark.parametrize("num_params", [0.10e6, 1.2e6, 4.8e6])
def test_a_band_is_the_interval_of_the_least_squares(setting, method, num_params):
    from scipy import stats  # which takes a second of the test processes that do not run this

    sizes, values = ratios(method)
    x, y = np.log(sizes), np.log(values)
    line = stats.linregress(x, y)
    at = line.intercept + line.slope * math.log(num_params)
    spread = math.sqrt(((y - line.intercept - line.slope * x) ** 2).sum() / (len(x) - 2))
    spread *= math.sqrt(1 / len(x) + (math.log(num_params) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
    half = float(stats.t.ppf(0.975, len(x) - 2)) * spread
    band = streaming_gap(*setting).band(num_params)
    assert band.value == pytest.approx(math.expm1(at), rel=1e-9)
    assert (band.low, band.high) == pytest.approx((math.expm1(at - half), math.expm1(at + half)), abs=2e-3)


@pytest.mark.parametrize(
    ("replicas", "gap", "low", "high"), [(1, 0.33, 0.25, 0.41), (2, 1.55, 1.0, 2.1), (4, 4.15, 3.5, 4.8)]
)
def test_tuned_diloco_loses_more_in_small_models_and_with_more_replicas(replicas, gap, low, high):
    band = diloco_gap(replicas).band(0.10e6)
    assert [100 * value for value in (band.value, band.low, band.high)] == pytest.approx(
        [gap, low, high], abs=0.06
    )


def test_a_gap_over_other_replicas_is_the_quotient():
    eight, two, between = (law.fit.law(2e5) for law in (diloco_gap(8), diloco_gap(2), diloco_gap(8, over=2)))
    assert between == pytest.approx(eight / two, rel=1e-12)


def test_the_best_batches_cross_where_table_9_has_them():
    assert [round(larger_batch_from(m) / 1e6, 1) for m in (1, 2, 4, 8)] == [83.7, 26.0, 12.6, 1.7]


def test_a_setting_without_rows_is_refused():
    with pytest.raises(UserError, match=r"M = 8, H = 30: the paper's tables have M = 2, H = 30, M = 2, H = 100"):
        streaming_gap(8, 30)
    with pytest.raises(UserError, match=r"M = 3: the paper's table has M = 1, M = 2, M = 4, M = 8"):
        diloco_gap(3)
