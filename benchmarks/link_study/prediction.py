"""Compute utilization of a row of `links.py`: measured, and as the physical model predicts it.

Shapes: S steps, M replicas.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np

from diloco.simulator.description import MethodSettings, ModelSize, Replica
from diloco.simulator.physical import PhysicalModel, PhysicalRun
from diloco.training.config.config import TrainConfig
from diloco.wire.formats import parse

from .methods import NUM_REPLICAS, PEER, num_fragments
from .rows import Row


def with_predictions(
    row: Row,
    alone_SxM: np.ndarray,
    all_reduce: Mapping[str, Any] | None,
    config: TrainConfig,
    own_seconds: float = 0.0,
) -> Row:
    """A row with compute utilization, measured and predicted, and the time lost at an outer step.

    Utilization is, for every method, the time of as many steps without exchange over the time measured.

    Args:
        row: a method's measurements.
        alone_SxM: seconds of each step on each replica without exchange, right before and after.
        all_reduce: the row of all-reduces beside training with the method's codec; None if it reduces nothing.
        config: the config of all runs.
        own_seconds: the peer's own time at an outer step, beside reducing.
    """
    alone_seconds, steps = float(alone_SxM.mean()), row["measured_steps"]
    lost_seconds = row["wall_seconds"] - steps * alone_seconds
    row = row | {"utilization": steps * alone_seconds / row["wall_seconds"], "lost_seconds": lost_seconds}
    if row["method"].startswith("data_parallel"):
        assert all_reduce is not None, "variants() puts it before the method"
        plain = _model(row, alone_SxM, config, {"method": "data_parallel"}, all_reduce["method"].partition(":")[2])
        return row | {
            "predicted": float(alone_SxM.mean(1).sum() / plain.run_seconds([row["link_gbit_s"]], alone_SxM)[0]),
            "predicted_with_reducing": predicted_data_parallel(row, alone_SxM, all_reduce, config),
        }
    per_outer_step = row["lost_seconds"] / (
        steps / config.diloco.sync_every * num_fragments(row["method"], config)
    )
    row = row | {"lost_seconds_per_outer_step": per_outer_step, "predicted": predicted(row, alone_SxM, config)}
    if row["method"] == PEER:
        assert all_reduce is not None, "variants() puts it before the method"
        row |= {"predicted_with_reducing": predicted(row, alone_SxM, config, all_reduce, own_seconds)}
    return row


def predicted(
    row: Mapping[str, Any],
    alone_SxM: np.ndarray,
    config: TrainConfig,
    all_reduce: Mapping[str, Any] | None = None,
    own_seconds: float = 0.0,
) -> float:
    """Compute utilization of the measured steps by the physical model.

    Args:
        row: a method's measurements, with the measured link.
        alone_SxM: seconds of each step without exchange, repeated as often as needed.
        config: the config of the run.
        all_reduce: for torchft, how reducing slows the link and the steps beside it.
        own_seconds: for torchft, its other time at an outer step.
    """
    name, _, option = row["method"].partition(":")
    settings: dict[str, Any] = {"method": name, "layers_per_fragment": config.diloco.layers_per_fragment}
    warm, measured = int(row["warm_steps"]), int(row["measured_steps"])
    compute_SxM = np.array(list(islice(cycle(alone_SxM), warm + measured)))
    gbit_s = row["link_gbit_s"]
    if name == PEER:  # sends a fragment after the first of H/P steps, and merges it after the last
        fragments = range(num_fragments(name, config))
        stretch = config.diloco.sync_every // len(fragments)
        offsets = tuple(stretch * fragment + 1 for fragment in fragments)
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
    run = PhysicalRun(model, [gbit_s])
    run.advance(taken_SxM[:warm])
    begun = run.ready_BxM.mean()
    run.advance(taken_SxM[warm:])
    return float(alone_SxM.mean() * measured / (run.ready_BxM.mean() - begun))


def _as_the_slowest(compute_SxM: np.ndarray, offsets: Sequence[int]) -> np.ndarray:
    """Compute times if every exchange begins with a quorum, at which all replicas wait for the slowest."""
    stretches = np.split(compute_SxM, range(offsets[0], len(compute_SxM), offsets[1] - offsets[0]))
    return np.vstack([np.repeat(s[:, [s.sum(0).argmax()]], s.shape[1], axis=1) for s in stretches])


def _slowed(alone_SxM: np.ndarray, all_reduce: Mapping[str, Any]) -> float:
    """The part of an all-reduce's time by which the steps beside it grow longer."""
    return max(0.0, 1 - float(alone_SxM.mean()) / all_reduce["step_seconds"])


def _reduced_gbit_s(all_reduce: Mapping[str, Any], seconds: float, config: TrainConfig) -> float:
    wire = all_reduce["method"].partition(":")[2]
    return 1e-9 * parse(wire).bits_per_value * config.model.num_matrix_params / seconds


def predicted_data_parallel(
    row: Mapping[str, Any], alone_SxM: np.ndarray, all_reduce: Mapping[str, Any], config: TrainConfig
) -> float:
    """Compute utilization of Data-Parallel by the physical model, given the time of an all-reduce beside training.

    An all-reduce needs the processor to add, and every core computes: beside the backward pass it is slower than
    alone, and slows the pass. Clipping and the optimizer follow the last all-reduce.
    """
    num_layers, slowed_seconds = config.model.num_layers, all_reduce["seconds"]
    # All-reduces and the backward pass overlap from the first block's gradient on.
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
    row: Mapping[str, Any],
    compute_SxM: np.ndarray,
    config: TrainConfig,
    settings: dict[str, Any],
    wire: str | None = None,
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
