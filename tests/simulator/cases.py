"""Random physical models, the same runs simulated event by event, and tasks to plan."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from tests.simulator.reference import Events

from diloco.presets import METHODS
from diloco.simulator.description import MethodSettings, ModelSize, Replica
from diloco.simulator.link_planner import LinkTask
from diloco.simulator.physical import PhysicalModel


@st.composite
def models(draw) -> PhysicalModel:
    """Small models of the methods with outer steps, and everything that can differ between replicas."""
    num_replicas = draw(st.integers(1, 4))
    method, num_layers = draw(st.sampled_from(METHODS[1:])), draw(st.integers(1, 6))
    sync_every = draw(st.integers(2, 9))
    overlap = st.integers(0, sync_every - 1)
    settings = MethodSettings(
        method=method,
        sync_every=sync_every,
        layers_per_fragment=draw(st.integers(1, num_layers)),
        overlap_steps=tuple(draw(overlap) for _ in range(num_replicas)),
    )
    return PhysicalModel(
        settings=settings,
        size=ModelSize(num_params=1e9, num_layers=num_layers),
        replicas=[
            Replica(
                step_seconds=draw(st.floats(0.05, 2)),
                gbit_s=draw(st.none() | st.floats(0.5, 100)),
                latency_seconds=draw(st.sampled_from([0.0, 0.1]) | st.floats(0, 3)),
            )
            for _ in range(num_replicas)
        ],
        wire=draw(st.sampled_from(["fp32", "e3m0"])),
        combine=draw(st.sampled_from(["gather", "reduce_scatter", "reduce_scatter:bf16"])),
    )


def events(model: PhysicalModel, compute_SxM: np.ndarray, gbit_s: float) -> Events:
    num_replicas, block = len(model.replicas), model.size.block_params
    sizes = [len(layers) * block for layers in model.settings.layers(model.size.num_layers)]
    sizes = [*sizes, model.size.outside_params] if model.settings.streams else [1e9]
    first = {"fp32": 32, "e3m0": 4 + 8 / 256}[model.wire]
    second = 16 if model.combine.endswith("bf16") else first

    def bits(fragment: int, phase: int) -> float:
        share = 1 if model.combine == "gather" else num_replicas
        return sizes[fragment] * (first, second)[phase] / share

    schedule = model.schedule
    return Events(
        compute_SxM.tolist(),
        lambda step: [sync.fragment for sync in schedule.sent(step)],
        bits,
        1 if model.combine == "gather" else 2,
        [replica.gbit_s or gbit_s for replica in model.replicas],
        [replica.latency_seconds for replica in model.replicas],
        [schedule.overlap(m) for m in range(num_replicas)],
    )


def task(gbit_s: float, *, num_replicas: int = 2, latency_seconds: float = 0.05) -> LinkTask:
    """A 7B model of 7 layers, for 20 tokens a parameter."""
    replica = Replica(step_seconds=2.3, gbit_s=gbit_s, latency_seconds=latency_seconds)
    size = ModelSize(num_params=7e9, num_layers=7)
    return LinkTask(size=size, replicas=(replica,) * num_replicas, num_steps=66_757)


def with_replicas(original: LinkTask, **changes: float) -> LinkTask:
    return replace(original, replicas=tuple(replace(replica, **changes) for replica in original.replicas))
