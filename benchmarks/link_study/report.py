"""Table and figure of `links.py`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .methods import NAMES
from .rows import Row


def report(points: Sequence[Row]) -> None:
    """Print a table in Markdown, the held-out losses, and the points furthest from their prediction."""
    print("| Mbit/s | | s a step | utilization | spread | predicted | lost ms an outer step | MB a step |")
    print("|---|---|---|---|---|---|---|---|")
    for point in points:
        spread = f"{point['lowest']:.1%} … {point['highest']:.1%}"
        lost = point.get("lost_seconds_per_outer_step")
        predicted = f"{point['predicted']:.1%}"
        if "predicted_with_reducing" in point:
            predicted = f"{point['predicted_with_reducing']:.1%} ({predicted})"
        line = (
            f"| {point['mbit_s']:g} | {NAMES.get(point['method'], point['method'])} | "
            f"{point['seconds_per_step']:.4f} | {point['utilization']:.1%} | {spread} | {predicted} | "
            f"{'' if lost is None else f'{1e3 * lost:.0f}'} | {point['megabytes_per_step']:.3f} |"
        )
        print(line.replace("%", " %"))
    for point in points:
        if "eval_loss" in point:
            print(f"held-out loss of {NAMES.get(point['method'], point['method'])}: {point['eval_loss']:.4f}")
    worst = sorted(points, key=lambda point: -abs(_best_prediction(point) - point["utilization"]))[:5]
    misses = [f"{p['method']} at {p['mbit_s']:g}: {_best_prediction(p) - p['utilization']:+.1%}" for p in worst]
    print(f"furthest from the prediction: {', '.join(misses)}")


def _best_prediction(point: Mapping[str, Any]) -> float:
    return point.get("predicted_with_reducing", point["predicted"])


def report_payloads(rows: Sequence[Row]) -> None:
    """Print how much of a link a large payload fills, both ways at once, and the bytes sent for each byte."""
    payloads = [row for row in rows if row["method"] == "payload"]
    for mbit_s in sorted({row["mbit_s"] for row in payloads}):
        here = [row for row in payloads if row["mbit_s"] == mbit_s]
        filled = statistics.median(8e-6 * row["payload_bytes"] / row["wall_seconds"] / mbit_s for row in here)
        sent = statistics.median(row["interface_bytes"] / row["payload_bytes"] for row in here)
        size = here[0]["payload_bytes"] / 1e6
        print(f"{mbit_s:g} Mbit/s: {size:g} MB each way fill {filled:.1%}; {sent:.4f} bytes sent for each of them")


def draw(points: Sequence[Row], path: Path) -> None:
    """Draw measured utilization over bandwidth, and the prediction as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for index, method in enumerate(name for name in NAMES if any(point["method"] == name for point in points)):
        here = [point for point in points if point["method"] == method]
        x = [point["mbit_s"] for point in here]
        shade = pyplot.get_cmap("viridis")(index / 8)
        errors = [[abs(p["utilization"] - p[end]) for p in here] for end in ("lowest", "highest")]
        axes.errorbar(
            x,
            [p["utilization"] for p in here],
            yerr=errors,
            fmt="osv^D<>Xp"[index % 9],
            color=shade,
            label=NAMES[method],
            capsize=3,
        )
        axes.plot(x, [_best_prediction(point) for point in here], color=shade, linewidth=1)
    axes.set(xscale="log", xlabel="bandwidth of each link (Mbit/s)", ylabel="compute utilization", ylim=(0, 1.08))
    axes.legend(fontsize=7, title="measured; lines: predicted", title_fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
