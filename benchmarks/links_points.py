"""What `links.py` measured, beside what the physical model predicts: medians, a table, a figure."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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


def with_utilization(rows: Sequence[dict], computed: dict[str, np.ndarray], config: TrainConfig) -> list[dict]:
    """The rows of one repeat at one bandwidth, with compute utilization as measured and as predicted.

    Args:
        rows: a row for each method.
        computed: by method, the compute time of each step on each replica, (S, M).
        config: of all runs.
    """
    if not computed:  # no training was asked for
        return list(rows)
    alone_SxM = np.vstack([computed["alone"], computed["alone again"]])
    by_method = {row["method"]: row for row in rows}
    made = []
    for row in rows:
        method = row["method"]
        if method not in computed or method.startswith("alone"):
            made.append(row)
            continue
        if method.startswith("data_parallel"):
            wire = "bf16" if method.startswith("data_parallel_bf16") else "fp32"
            compute_SxM, beside = alone_SxM, by_method[f"all_reduce:{wire}"]
            after_seconds = by_method["alone"]["after_seconds"]
            expected = predicted_data_parallel(row, alone_SxM, after_seconds, beside, config)
        else:
            compute_SxM = computed[method]
            expected = predicted(row, compute_SxM, config)
        compute_seconds = row["num_steps"] * float(compute_SxM.mean())
        measured = {"compute_seconds": compute_seconds, "utilization": compute_seconds / row["wall_seconds"]}
        made.append(row | measured | {"predicted": expected})
    return made


def predicted(row: dict, compute_SxM: np.ndarray, config: TrainConfig) -> float:
    """Compute utilization as the physical model has it, from the measured compute times and link."""
    name, _, option = row["method"].partition(":")
    settings = {"method": name, "layers_per_fragment": config.diloco.layers_per_fragment}
    if name == PEER:  # which sends a fragment after the first of H/P steps, and merges it after the last
        num_fragments = _num_fragments(config)
        stretch = config.diloco.sync_every // num_fragments
        settings |= {"method": "streaming_overlapped", "overlap_steps": stretch - 1}
        settings["offsets"] = tuple(stretch * fragment + 1 for fragment in range(num_fragments))
    elif option:
        settings["overlap_steps"] = int(option)
    model = _model(row, compute_SxM, config, settings=settings)
    taken_SxM = _as_the_slowest(compute_SxM, settings["offsets"]) if name == PEER else compute_SxM
    return float(compute_SxM.mean(1).sum() / model.run_seconds([row["link_gbit_s"]], taken_SxM)[0])


def _as_the_slowest(compute_SxM: np.ndarray, offsets: Sequence[int]) -> np.ndarray:
    """Compute times where every exchange begins with a quorum, at which all replicas wait for the slowest."""
    stretches = np.split(compute_SxM, range(offsets[0], len(compute_SxM), offsets[1] - offsets[0]))
    return np.vstack([np.repeat(s[:, [s.sum(0).argmax()]], s.shape[1], axis=1) for s in stretches])


def predicted_data_parallel(
    row: dict, alone_SxM: np.ndarray, after_seconds: float, beside: dict, config: TrainConfig
) -> float:
    """The same of Data-Parallel, from the compute times without exchange and an all-reduce beside training.

    An all-reduce wants the processor, too, to add up what arrives, and every core computes: beside the backward
    pass it takes longer than alone, and makes the pass take longer. What follows the last gradient, clipping and
    the optimizer, follows the last all-reduce.
    """
    num_layers, slowed_seconds = config.model.num_layers, beside["seconds"]
    # From the first block's gradient on, all-reduces and the backward pass go on at once.
    window_seconds = float(alone_SxM.mean()) * (1 - (num_layers + 2) / (3 * num_layers - 1))
    part = min(1.0, window_seconds / slowed_seconds)
    reduced_seconds = part * slowed_seconds + (1 - part) * beside["quiet_seconds"]
    taken_seconds = part * slowed_seconds * max(0.0, 1 - alone_SxM.mean() / beside["step_seconds"])
    wire = beside["method"].partition(":")[2]
    gbit_s = 1e-9 * bits_per_param(wire) * num_matrix_params(config.model) / reduced_seconds
    model = _model(row, alone_SxM, config, settings={"method": "data_parallel"}, wire=wire)
    seconds = model.run_seconds([gbit_s], alone_SxM + taken_seconds - after_seconds)[0]
    return float(alone_SxM.mean(1).sum() / (seconds + after_seconds * len(alone_SxM)))


def _model(
    row: dict, compute_SxM: np.ndarray, config: TrainConfig, *, settings: dict, wire: str | None = None
) -> PhysicalModel:
    replica = Replica(step_seconds=float(compute_SxM.mean()), latency_seconds=row["latency_seconds"])
    return PhysicalModel(
        settings=MethodSettings(sync_every=config.diloco.sync_every, first_sync="early", **settings),
        size=ModelSize(
            num_params=num_matrix_params(config.model),
            num_layers=config.model.num_layers,
            width=config.model.width,
            vocab_size=config.model.vocab_size,
        ),
        replicas=[replica] * NUM_REPLICAS,
        wire=wire,
    )


def _num_fragments(config: TrainConfig) -> int:
    """Those of blocks, and the one outside them."""
    return 1 - -config.model.num_layers // config.diloco.layers_per_fragment


def points(rows: Sequence[dict], config: TrainConfig) -> list[dict]:
    """For each method and bandwidth medians over the repeats, of Data-Parallel with its best bucket size."""
    repeats: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        if row.get("utilization") in ("", None):
            continue
        found = {"seconds_per_step": row["wall_seconds"] / row["num_steps"]}
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
