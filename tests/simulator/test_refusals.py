"""Settings that the simulator refuses, each with the field that it names and a part of its sentence."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.simulator.cases import task, with_replicas
from tests.simulator.test_timeline import PHYSICAL
from tests.simulator.test_wall_clock import MACHINE, RUN

from diloco.errors import UserError
from diloco.simulator.description import (
    MethodSettings,
    ModelSize,
    Replica,
    Stragglers,
    checked_gbit_s,
    replicas_of,
)
from diloco.simulator.paper import PaperModel
from diloco.simulator.physical import PhysicalModel
from diloco.simulator.timeline import physical_timeline
from diloco.simulator.wall_clock import step_seconds


def settings(**changes: object) -> MethodSettings:
    return MethodSettings(**{"method": "streaming_overlapped", **changes})


def size(**changes: object) -> ModelSize:
    return ModelSize(**{"num_params": 1e8, "num_layers": 6, **changes})


def paper(**changes: object) -> PaperModel:
    return PaperModel(
        **{"settings": settings(), "num_params": 1e9, "num_layers": 6, "step_seconds": 0.1, **changes}
    )


def physical(**changes: object) -> PhysicalModel:
    return replace(PHYSICAL, settings=settings(), **changes)


def by_data_parallel(**changes: object) -> PhysicalModel:
    return replace(PHYSICAL, settings=MethodSettings(method="data_parallel"), **changes)


REFUSALS: list[tuple[Callable[[], object], str, str]] = [
    *((lambda g=g: checked_gbit_s(g), "link", "above 0 and finite") for g in (0, -1.0, np.nan, np.inf)),
    *((lambda g=g: checked_gbit_s(g), "link", "above 0 and finite") for g in ([], [1.0, 0.0], [[1.0]])),
    (lambda: settings(method="fsdp"), "method", "'fsdp' is not a method: choose one of data_parallel, diloco"),
    (lambda: settings(method="data_parallel", overlap_steps=1), "overlap_steps", "data_parallel does not overlap"),
    (lambda: settings(sync_every=0), "sync_every", "at least 1, not 0"),
    (lambda: settings(fragments="whole"), "fragments", "strided or sequential, not 'whole'"),
    (lambda: settings().layers(2), "layers_per_fragment", "=3, but the model has num_layers=2"),
    (lambda: size(num_params=float("inf")), "num_params", "above 0 and finite, not inf"),
    (lambda: size(width=0), "width", "above 0 and finite, not 0"),
    (lambda: size(width=10_000), "num_params", "leaves nothing for blocks beside vocab_size=32000"),
    (lambda: Replica(step_seconds=0), "step_seconds", "above 0"),
    (lambda: Replica(step_seconds=1, gbit_s=0), "link", "above 0"),
    (lambda: Replica(step_seconds=1, latency_seconds=-1), "latency_seconds", "at least 0"),
    (lambda: replicas_of(3, (1.0,), (0.0, 1.0), (None,)), "latency_seconds", "one for each of 3 replicas"),
    (lambda: replicas_of(0, (1.0,), (0.0,), (None,)), "num_replicas", "at least 1, not 0"),
    (lambda: Stragglers(step_variation=-1), "step_variation", "at least 0"),
    (
        lambda: Stragglers(stall_probability=2.0, stall_seconds=1.0),
        "stall_probability",
        "between 0 and 1, not 2.0",
    ),
    (lambda: Stragglers(stall_probability=0.5), "stall_probability", "stalls nothing: set both"),
    (lambda: paper(settings=settings(layers_per_fragment=1, sync_every=2)), "sync_every", "too short for 6"),
    (lambda: paper(num_params=0), "num_params", "above 0 and finite, not 0"),
    (lambda: paper(step_seconds=float("nan")), "step_seconds", "above 0 and finite, not nan"),
    (
        lambda: paper(settings=settings(overlap_steps=(1, 2))),
        "overlap_steps",
        "one number for each of 1 replicas",
    ),
    (lambda: physical(replicas=[]), "num_replicas", "from 1 to 256, not 0"),
    (lambda: physical(wire="e9m9"), "wire", "'e9m9' is not a codec"),
    (lambda: physical(combine="broadcast"), "combine", "neither gather nor reduce_scatter"),
    (lambda: by_data_parallel(combine="reduce_scatter"), "combine", "leave it out"),
    (lambda: by_data_parallel(wire="e3m0"), "wire", "take fp32, bf16 or fp16"),
    (
        lambda: replace(PHYSICAL, settings=settings(overlap_steps=(1, 2, 3))),
        "overlap_steps",
        "(1, 2, 3) must hold one number for each of 2 replicas",
    ),
    (lambda: physical_timeline(by_data_parallel(), gbit_s=1, num_steps=2), "method", "with preset=paper only"),
    (lambda: replace(task(1.0), target=1.0), "target", "above 0 and below 1, not 1.0"),
    (lambda: replace(task(1.0), num_steps=19), "num_steps", "=19 must be at least 20"),
    (lambda: with_replicas(task(1.0), gbit_s=None), "link", "each replica's link needs a bandwidth"),
    (lambda: replace(RUN, num_tokens=-1), "num_tokens", "above 0 and finite, not -1"),
    (lambda: replace(RUN, inner_bits_per_param=0), "inner_bits_per_param", "above 0"),
    (lambda: replace(RUN, num_replicas=101), "num_replicas", "and at most num_chips=100"),
    (lambda: replace(RUN, overlap_steps=30, num_replicas=2), "overlap_steps", "below sync_every=30"),
    (lambda: replace(RUN, overlap_steps=1), "overlap_steps", "num_replicas=0 is Data-Parallel"),
    (lambda: step_seconds(**MACHINE | {"num_chips": 0}), "num_chips", "above 0 and finite, not 0"),
    (lambda: step_seconds(**MACHINE | {"mfu": 60}), "mfu", "above 0 and at most 1, not 60"),
]


@pytest.mark.parametrize(("make", "field", "sentence"), REFUSALS)
def test_a_setting_is_refused_by_its_name(make, field, sentence):
    with pytest.raises(UserError) as refusal:
        make()
    assert refusal.value.field == field and sentence in str(refusal.value)
