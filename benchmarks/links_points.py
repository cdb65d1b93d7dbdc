"""What `links.py` measured, beside what the physical model predicts: medians, a table, a figure."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from diloco.models.ladder import num_matrix_params
from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica
from diloco.simulator.volume import bits_per_param
from diloco.training.config import TrainConfig

NUM_REPLICAS = 2
ENGINE = ("diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4")
PEER = "torchft_diloco"
MEASURES = ("payload", "all_reduce")
"""Not methods: a large payload each way, and torch's all-reduce of the gradients with nothing else to do."""


def predicted(row: dict, compute_seconds: float, reduced: dict | None, config: TrainConfig) -> float | None:
    """Compute utilization as the physical model has it, from a measured step and link; None where it can't.

    `reduced` is what an all-reduce took. Data-Parallel's bandwidth is what that makes of the link and of the
    machine, which has to add up what arrives; its part of the processor's time is taken from the computation, for
    which every core is needed.
    """
    name, _, option = row["method"].partition(":")
    settings = {"method": name, "layers_per_fragment": config.diloco.layers_per_fragment}
    wire, gbit_s, taken_seconds = None, row["link_gbit_s"], 0.0
    if name.startswith("data_parallel"):
        if reduced is None:
            return None
        wire = "bf16" if name.endswith("bf16") else "fp32"
        settings["method"] = "data_parallel"
        gbit_s = 1e-9 * bits_per_param(wire) * num_matrix_params(config.model) / reduced[f"{wire}_seconds"]
        taken_seconds = reduced[f"{wire}_cpu_seconds"]
    elif name == PEER:  # which has one fragment in flight at the most
        settings |= {"method": "streaming_overlapped"}
        settings |= {"overlap_steps": config.diloco.sync_every // _num_fragments(config) - 1}
    elif option:
        settings["overlap_steps"] = int(option)
    busy_seconds = compute_seconds + taken_seconds
    model = PhysicalModel(
        settings=MethodSettings(sync_every=config.diloco.sync_every, first_sync="early", **settings),
        size=ModelSize(
            num_params=num_matrix_params(config.model),
            num_layers=config.model.num_layers,
            width=config.model.width,
            vocab_size=config.model.vocab_size,
        ),
        replicas=[Replica(step_seconds=busy_seconds, latency_seconds=row["latency_seconds"])] * NUM_REPLICAS,
        wire=wire,
    )
    utilization = model.compute_utilization([gbit_s], num_steps=int(row["num_steps"]))[0]
    return float(utilization) * compute_seconds / busy_seconds


def _num_fragments(config: TrainConfig) -> int:
    """Those of blocks, and the one outside them."""
    return 1 - -config.model.num_layers // config.diloco.layers_per_fragment


def points(rows: Sequence[dict], config: TrainConfig) -> list[dict]:
    """For each method and bandwidth medians over the repeats, of Data-Parallel with its best bucket size."""
    repeats: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        if row["method"] in MEASURES:
            continue
        beside = [r for r in rows if (r["repeat"], r["mbit_s"]) == (row["repeat"], row["mbit_s"])]
        alone = [r["compute_seconds"] / r["num_steps"] for r in beside if r["method"].startswith("alone")]
        if row["method"].startswith("alone") or len(alone) < 2:
            continue
        compute_seconds = row["compute_seconds"] / row["num_steps"]
        if row["method"].startswith("data_parallel"):
            compute_seconds = statistics.mean(alone)
        seconds = row["wall_seconds"] / row["num_steps"]
        found = {"utilization": compute_seconds / seconds, "seconds_per_step": seconds}
        reduced = next((r for r in rows if (r["mbit_s"], r["method"]) == (row["mbit_s"], "all_reduce")), None)
        found["predicted"] = predicted(row, compute_seconds, reduced, config)
        if row["method"] == PEER:  # which does not tell
            found["num_outer_steps"] = row["num_steps"] // (config.diloco.sync_every // _num_fragments(config))
        repeats[row["mbit_s"], row["method"]].append(row | found)
    made = [_median(several) for several in repeats.values()]
    best: dict[tuple, dict] = {}
    for point in made:
        name = (
            point["method"].partition(":")[0] if point["method"].startswith("data_parallel") else point["method"]
        )
        key = point["mbit_s"], name
        if key not in best or point["seconds_per_step"] < best[key]["seconds_per_step"]:
            best[key] = point | {"method": name, "variant": point["method"]}
    return sorted(best.values(), key=lambda point: (point["mbit_s"], -point["seconds_per_step"]))


def _median(rows: list[dict]) -> dict:
    point = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, float | int) and all(row.get(name) not in ("", None) for row in rows)
    }
    utilizations = [row["utilization"] for row in rows]
    spread = {"lowest": min(utilizations), "highest": max(utilizations), "repeats": len(rows)}
    return point | {"method": rows[0]["method"], "mbit_s": rows[0]["mbit_s"], **spread}


def report(found: list[dict]) -> None:
    """A line for each point."""
    print(
        f"{'Mbit/s':>7} {'method':27} {'s a step':>9} {'utilization':>12} {'lowest, highest':>16} "
        f"{'predicted':>10} {'blocked ms':>11} {'sent MB':>8} {'held-out':>9}"
    )
    for point in found:
        spread = f"{point['lowest']:.1%}, {point['highest']:.1%}"
        outer_steps = point["num_outer_steps"]
        blocked = f"{1e3 * point['sync_seconds'] / outer_steps:11.1f}" if outer_steps else " " * 11
        predicted = f"{point['predicted']:10.1%}" if "predicted" in point else " " * 10
        loss = f"{point['eval_loss']:9.4f}" if "eval_loss" in point else ""
        print(
            f"{point['mbit_s']:7g} {point['method']:27} {point['seconds_per_step']:9.4f} "
            f"{point['utilization']:12.1%} {spread:>16} {predicted} {blocked} "
            f"{point['interface_bytes'] / 1e6:8.2f} {loss}"
        )


def report_payloads(rows: Sequence[dict]) -> None:
    """How much of a link a large payload fills, both ways at once, and what is sent for it."""
    payloads = [row for row in rows if row["method"] == "payload"]
    for mbit_s in sorted({row["mbit_s"] for row in payloads}):
        here = [row for row in payloads if row["mbit_s"] == mbit_s]
        filled = statistics.median(8e-6 * row["payload_bytes"] / row["wall_seconds"] / mbit_s for row in here)
        sent = statistics.median(row["interface_bytes"] / row["payload_bytes"] for row in here)
        size = here[0]["payload_bytes"] / 1e6
        print(f"{mbit_s:g} Mbit/s: {size:g} MB each way fill {filled:.1%}; {sent:.4f} bytes sent for each of them")


def draw(found: list[dict], path: Path) -> None:
    """Measured utilization over bandwidth, and the prediction as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for index, method in enumerate(dict.fromkeys(point["method"] for point in found)):
        here = [point for point in found if point["method"] == method]
        x = [point["mbit_s"] for point in here]
        shade = pyplot.get_cmap("viridis")(index / 8)
        errors = [[abs(p["utilization"] - p[end]) for p in here] for end in ("lowest", "highest")]
        axes.errorbar(
            x,
            [p["utilization"] for p in here],
            yerr=errors,
            fmt="osv^D<>Xp"[index % 9],
            color=shade,
            label=method,
            capsize=3,
        )
        if all("predicted" in point for point in here):
            axes.plot(x, [point["predicted"] for point in here], color=shade, linewidth=1)
    axes.set(xscale="log", xlabel="bandwidth of each link (Mbit/s)", ylabel="compute utilization", ylim=(0, 1.08))
    axes.legend(fontsize=7, title="measured; lines: predicted", title_fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
