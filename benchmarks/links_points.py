"""What `links.py` measured, beside what the physical model predicts: medians, a table, a figure.

Shapes: S steps, M replicas.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from diloco.simulator.methods import MethodSettings
from diloco.simulator.model_size import ModelSize
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.replicas import Replica
from diloco.training.config import TrainConfig
from diloco.wire.formats import parse

NUM_REPLICAS = 2
ENGINE = ("diloco", "streaming", "streaming_overlapped", "streaming_overlapped_fp4")
PEER = "torchft_diloco"
UNLIMITED_MBIT_S = 10_000.0
"""Where the link takes nothing, and what the peer loses is what it takes itself."""
Key = tuple[float, float, str]
"""Repeat, Mbit/s, method."""


def key(row: Mapping) -> Key:
    """What tells a row from the others."""
    return row["repeat"], row["mbit_s"], row["method"]


def is_training(method: str) -> bool:
    """Whether a row's steps are measured."""
    return method.startswith(("data_parallel", *ENGINE, PEER))


def num_steps(method: str, config: TrainConfig, link_gbit_s: float, seconds: float) -> tuple[int, int]:
    """How many steps are taken before those that are measured, and how many are: two periods of H after one.

    All steps of Data-Parallel are alike: where they take long, a few will do.
    """
    period = config.diloco.sync_every
    if not method.startswith("data_parallel"):
        return period, 2 * period
    reduced_seconds = 32e-9 * config.model.num_matrix_params / link_gbit_s  # an all-reduce, about
    most = round(seconds / reduced_seconds)
    return (period, 2 * period) if most >= 3 * period else (2, max(4, min(2 * period, most)))


def with_predictions(
    row: dict, alone_SxM: np.ndarray, all_reduce: Mapping | None, config: TrainConfig, own_seconds: float = 0.0
) -> dict:
    """A row with compute utilization, as measured and as predicted, and the time lost at an outer step.

    Utilization is what as many steps take without exchange, over what they took: for every method the same.

    Args:
        row: of a method.
        alone_SxM: what each step took on each replica without exchange, right before and after.
        all_reduce: the row of all-reduces beside training, of the method's codec; where the method reduces.
        config: of all runs.
        own_seconds: what the peer takes at an outer step, beside reducing.
    """
    alone_seconds, steps = float(alone_SxM.mean()), row["measured_steps"]
    lost_seconds = row["wall_seconds"] - steps * alone_seconds
    row = row | {"utilization": steps * alone_seconds / row["wall_seconds"], "lost_seconds": lost_seconds}
    if row["method"].startswith("data_parallel"):
        assert all_reduce is not None, "it is measured before"
        plain = _model(row, alone_SxM, config, {"method": "data_parallel"}, all_reduce["method"].partition(":")[2])
        return row | {
            "predicted": float(alone_SxM.mean(1).sum() / plain.run_seconds([row["link_gbit_s"]], alone_SxM)[0]),
            "predicted_with_reducing": predicted_data_parallel(row, alone_SxM, all_reduce, config),
        }
    per_outer_step = row["lost_seconds"] / (
        steps / config.diloco.sync_every * _num_fragments(row["method"], config)
    )
    row = row | {"lost_seconds_per_outer_step": per_outer_step, "predicted": predicted(row, alone_SxM, config)}
    if row["method"] == PEER:
        assert all_reduce is not None, "it is measured before"
        row |= {"predicted_with_reducing": predicted(row, alone_SxM, config, all_reduce, own_seconds)}
    return row


def predicted(
    row: Mapping,
    alone_SxM: np.ndarray,
    config: TrainConfig,
    all_reduce: Mapping | None = None,
    own_seconds: float = 0.0,
) -> float:
    """Compute utilization of the steps that were measured, as the physical model has it.

    Args:
        row: with the link that was measured.
        alone_SxM: compute times, repeated as often as the steps need.
        config: of the run.
        all_reduce: of torchft, what reducing makes of the link and of the steps meanwhile.
        own_seconds: and what else it takes at an outer step.
    """
    name, _, option = row["method"].partition(":")
    settings: dict = {"method": name, "layers_per_fragment": config.diloco.layers_per_fragment}
    warm, measured = int(row["warm_steps"]), int(row["measured_steps"])
    compute_SxM = np.array(list(islice(cycle(alone_SxM), warm + measured)))
    gbit_s = row["link_gbit_s"]
    if name == PEER:  # sends a fragment after the first of H/P steps, and merges it after the last
        num_fragments = _num_fragments(name, config)
        stretch = config.diloco.sync_every // num_fragments
        offsets = tuple(stretch * fragment + 1 for fragment in range(num_fragments))
        settings |= {"method": "streaming_overlapped", "overlap_steps": stretch - 1, "offsets": offsets}
        compute_SxM = _as_the_slowest(compute_SxM, offsets)
    elif option:
        settings["overlap_steps"] = int(option)
    model = _model(row, compute_SxM, config, settings)
    taken_SxM = compute_SxM.copy()
    if all_reduce is not None:
        gbit_s = _reduced_gbit_s(all_reduce, all_reduce["seconds"], config)
        for step in range(1, len(taken_SxM)):
            for sync in model.schedule.sent(step):
                seconds = 32e-9 * model.fragment_params[sync.fragment] / gbit_s
                taken_SxM[step] += seconds * _slowed(alone_SxM, all_reduce) + own_seconds
    run = model.start([gbit_s])
    run.advance(taken_SxM[:warm])
    begun = run.ready_BxM.mean()
    run.advance(taken_SxM[warm:])
    return float(alone_SxM.mean() * measured / (run.ready_BxM.mean() - begun))


def _as_the_slowest(compute_SxM: np.ndarray, offsets: Sequence[int]) -> np.ndarray:
    """Compute times where every exchange begins with a quorum, at which all replicas wait for the slowest."""
    stretches = np.split(compute_SxM, range(offsets[0], len(compute_SxM), offsets[1] - offsets[0]))
    return np.vstack([np.repeat(s[:, [s.sum(0).argmax()]], s.shape[1], axis=1) for s in stretches])


def _slowed(alone_SxM: np.ndarray, all_reduce: Mapping) -> float:
    """The part of an all-reduce's time by which it makes the steps beside it longer."""
    return max(0.0, 1 - float(alone_SxM.mean()) / all_reduce["step_seconds"])


def _reduced_gbit_s(all_reduce: Mapping, seconds: float, config: TrainConfig) -> float:
    wire = all_reduce["method"].partition(":")[2]
    return 1e-9 * parse(wire).bits_per_value * config.model.num_matrix_params / seconds


def predicted_data_parallel(
    row: Mapping, alone_SxM: np.ndarray, all_reduce: Mapping, config: TrainConfig
) -> float:
    """The same of Data-Parallel, told what an all-reduce takes beside training.

    It wants the processor, too, to add up what arrives, and every core computes: beside the backward pass it takes
    longer than alone, and makes the pass take longer. What follows the last gradient, clipping and the optimizer,
    follows the last all-reduce.
    """
    num_layers, slowed_seconds = config.model.num_layers, all_reduce["seconds"]
    # From the first block's gradient on, all-reduces and the backward pass go on at once.
    window_seconds = float(alone_SxM.mean()) * (1 - (num_layers + 2) / (3 * num_layers - 1))
    part = min(1.0, window_seconds / slowed_seconds)
    reduced_seconds = part * slowed_seconds + (1 - part) * all_reduce["quiet_seconds"]
    taken_seconds = part * slowed_seconds * _slowed(alone_SxM, all_reduce)
    gbit_s = _reduced_gbit_s(all_reduce, reduced_seconds, config)
    wire, after_seconds = all_reduce["method"].partition(":")[2], row["alone_after_seconds"]
    model = _model(row, alone_SxM, config, {"method": "data_parallel"}, wire)
    seconds = model.run_seconds([gbit_s], alone_SxM + taken_seconds - after_seconds)[0]
    return float(alone_SxM.mean(1).sum() / (seconds + after_seconds * len(alone_SxM)))


def _model(
    row: Mapping, compute_SxM: np.ndarray, config: TrainConfig, settings: dict, wire: str | None = None
) -> PhysicalModel:
    replica = Replica(step_seconds=float(compute_SxM.mean()), latency_seconds=row["latency_seconds"])
    return PhysicalModel(
        settings=MethodSettings(sync_every=config.diloco.sync_every, first_sync="early", **settings),
        size=ModelSize(
            num_params=config.model.num_matrix_params,
            num_layers=config.model.num_layers,
            width=config.model.width,
            vocab_size=config.model.vocab_size,
        ),
        replicas=[replica] * NUM_REPLICAS,
        wire=wire,
    )


def _num_fragments(method: str, config: TrainConfig) -> int:
    """Those of blocks, and the one outside them; of DiLoCo one."""
    return 1 if method == "diloco" else 1 - -config.model.num_layers // config.diloco.layers_per_fragment


def points(rows: Sequence[dict], alone: Mapping[Key, np.ndarray], config: TrainConfig) -> list[dict]:
    """For each method and bandwidth medians over the repeats, of Data-Parallel with its best bucket size."""
    by_key = {key(row): row for row in rows}
    repeats: dict[tuple, list[dict]] = defaultdict(list)
    own_seconds = _own_seconds(rows, alone, config)
    for row in rows:
        if is_training(row["method"]) and row["mbit_s"] != UNLIMITED_MBIT_S:
            wire = "bf16" if row["method"].startswith("data_parallel_bf16") else "fp32"
            all_reduce = by_key.get((row["repeat"], row["mbit_s"], f"all_reduce:{wire}"))
            found = with_predictions(row, alone[key(row)], all_reduce, config, own_seconds)
            found["seconds_per_step"] = row["wall_seconds"] / row["measured_steps"]
            steps = row["warm_steps"] + row["measured_steps"]
            found["megabytes_per_step"] = 1e-6 * row["interface_bytes"] / steps
            repeats[row["mbit_s"], row["method"]].append(found)
    made = [_median(several) for several in repeats.values()]
    best: dict[tuple, dict] = {}
    for point in made:
        name = point["method"]
        name = name.partition(":")[0] if name.startswith("data_parallel") else name
        at = point["mbit_s"], name
        if at not in best or point["seconds_per_step"] < best[at]["seconds_per_step"]:
            best[at] = point | {"method": name, "variant": point["method"]}
    return sorted(best.values(), key=lambda point: (point["mbit_s"], -point["seconds_per_step"]))


def _own_seconds(rows: Sequence[dict], alone: Mapping[Key, np.ndarray], config: TrainConfig) -> float:
    """What the peer takes at an outer step: its quorum, copies, votes and threads."""
    unlimited = [row for row in rows if row["method"] == PEER and row["mbit_s"] == UNLIMITED_MBIT_S]
    lost_a_step = [
        row["wall_seconds"] / row["measured_steps"] - float(alone[key(row)].mean()) for row in unlimited
    ]
    stretch = config.diloco.sync_every / _num_fragments(PEER, config)
    return stretch * max(0.0, statistics.median(lost_a_step)) if lost_a_step else 0.0


def _median(rows: list[dict]) -> dict:
    point = {
        name: statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, float | int) and all(row.get(name) not in ("", None) for row in rows)
    }
    utilizations = [row["utilization"] for row in rows]
    spread = {"lowest": min(utilizations), "highest": max(utilizations), "repeats": len(rows)}
    losses = [row["eval_loss"] for row in rows if row.get("eval_loss") not in ("", None)]
    known = {"eval_loss": losses[0]} if losses else {}
    return point | {"method": rows[0]["method"], "mbit_s": rows[0]["mbit_s"], **spread, **known}


NAMES = {
    "data_parallel": "Data-Parallel (DDP, FP32, best of 3 buckets)",
    "data_parallel_bf16": "Data-Parallel, bf16 hook",
    "diloco": "DiLoCo, FP32",
    "streaming": "Streaming, FP32",
    "streaming_overlapped": "Streaming, τ = 1, FP32",
    "streaming_overlapped_fp4": "Streaming, τ = 1, E3M0",
    "streaming_overlapped_fp4:9": "Streaming, τ = 9, E3M0",
    PEER: "torchft DiLoCo, τ = 9, FP32",
}


def report(found: list[dict]) -> None:
    """A row of Markdown for each point."""
    print("| Mbit/s | | s a step | utilization | spread | predicted | lost ms an outer step | MB a step |")
    print("|---|---|---|---|---|---|---|---|")
    for point in found:
        spread = f"{point['lowest']:.1%} … {point['highest']:.1%}"
        lost = point.get("lost_seconds_per_outer_step")
        told = f"{point['predicted']:.1%}"
        if "predicted_with_reducing" in point:
            told = f"{point['predicted_with_reducing']:.1%} ({told})"
        line = (
            f"| {point['mbit_s']:g} | {NAMES.get(point['method'], point['method'])} | "
            f"{point['seconds_per_step']:.4f} | {point['utilization']:.1%} | {spread} | {told} | "
            f"{'' if lost is None else f'{1e3 * lost:.0f}'} | {point['megabytes_per_step']:.3f} |"
        )
        print(line.replace("%", " %"))
    for point in found:
        if "eval_loss" in point:
            print(f"held-out loss of {NAMES.get(point['method'], point['method'])}: {point['eval_loss']:.4f}")
    worst = sorted(found, key=lambda point: -abs(_best_prediction(point) - point["utilization"]))[:5]
    told = [f"{p['method']} at {p['mbit_s']:g}: {_best_prediction(p) - p['utilization']:+.1%}" for p in worst]
    print(f"furthest from what was predicted: {', '.join(told)}")


def _best_prediction(point: Mapping) -> float:
    return point.get("predicted_with_reducing", point["predicted"])


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
    for index, method in enumerate(name for name in NAMES if any(point["method"] == name for point in found)):
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
            label=NAMES[method],
            capsize=3,
        )
        axes.plot(x, [_best_prediction(point) for point in here], color=shade, linewidth=1)
    axes.set(xscale="log", xlabel="bandwidth of each link (Mbit/s)", ylabel="compute utilization", ylim=(0, 1.08))
    axes.legend(fontsize=7, title="measured; lines: predicted", title_fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
