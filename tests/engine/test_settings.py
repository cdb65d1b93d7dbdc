"""The engine's settings: refusals, and the facts that replicas compare."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import diloco
from diloco.engine.settings import Settings
from diloco.errors import UserError
from diloco.outer.merge import Mixing


def model_of_two_blocks() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    return model


def settings(**changes) -> Settings:
    base = Settings(
        fragments=diloco.sequential(model_of_two_blocks(), layers_per_fragment=1),
        schedule=diloco.Schedule(sync_every=10, num_fragments=2),
        outer=diloco.Nesterov(),
        mixing=Mixing(0.5),
        wire=diloco.codec("e3m0"),
        combine="gather",
        error_feedback=None,
        seed=0,
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule": diloco.Schedule(sync_every=10, num_fragments=3)},
            "num_fragments=3, but there are 2 fragments",
        ),
        (
            {"schedule": diloco.Schedule(sync_every=10, num_fragments=2, overlap_steps=(1, 2))},
            r"overlap_steps=\(1, 2\) must hold one number for each of 1",
        ),
        (
            {"wire": diloco.codec("dare"), "error_feedback": 1.0},
            r"error_feedback=1.0 with wire=dare:density=0.05,values=fp32 diverges",
        ),
        ({"error_feedback": 1.5}, "error_feedback must be above 0 and at most 1, or None, not 1.5"),
        ({"seed": -1}, "seed must be a whole number, at least 0 and below 2.64, not -1"),
        ({"combine": "broadcast"}, "combine='broadcast' is neither gather nor"),
        ({"fragments": (diloco.Fragment(("blocks.0.weight",)),)}, "no fragment holds blocks.0.bias"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    settings().check(model_of_two_blocks(), num_replicas=1)
    with pytest.raises(ValueError, match=message):
        settings(**changes).check(model_of_two_blocks(), num_replicas=1)


def test_parameters_that_cant_be_exchanged_are_refused():
    model = model_of_two_blocks()
    model.blocks[1].bias = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match=r"blocks.0.weight is on cpu and blocks.1.bias on meta: one replica, one"):
        settings().check(model, num_replicas=1)
    model.blocks[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"blocks.1.bias is torch.complex64: only real floats can be exchanged"):
        settings().check(model, num_replicas=1)


def test_parameters_in_fp64_are_refused():
    model = model_of_two_blocks()
    model.blocks[1].double()
    with pytest.raises(
        UserError, match=r"blocks.1.weight is torch.float64, .* train the model in FP32, model.float"
    ):
        settings().check(model, num_replicas=1)
    model.blocks[1].requires_grad_(False)
    model.blocks[0].to(torch.float16)
    settings(fragments=diloco.whole(model), schedule=diloco.Schedule(sync_every=10, num_fragments=1)).check(
        model, num_replicas=1
    )


def test_facts_tell_every_setting_apart():
    """A replica with any other setting is noticed by the others."""
    other = {
        "schedule": diloco.Schedule(sync_every=11, num_fragments=2),
        "outer": diloco.Nesterov(lr=0.7),
        "mixing": Mixing(0.25),
        "wire": diloco.codec("int4"),
        "combine": "reduce_scatter",
        "error_feedback": 1.0,
        "seed": 1,
    }
    facts = settings().facts(2)
    assert (facts["outer rule"], facts["outer rule's learning rate"]) == ("Nesterov", 0.4)
    assert (facts["merge rule"], facts["merge rule's mixing"]) == ("Mixing", 0.5)
    for name, value in other.items():
        changed = settings(**{name: value}).facts(2)
        assert changed.keys() == facts.keys() and changed != facts, name


def test_an_ordered_transport_is_refused_where_a_reduction_has_two_phases():
    ordered = SimpleNamespace(replica=0, num_replicas=2, ordered=True, device=torch.device("cpu"))
    settings().check_transport(ordered)
    with pytest.raises(UserError, match="combine=reduce_scatter:bf16 sends its averages when they are ready"):
        settings(combine="reduce_scatter:bf16").check_transport(ordered)
    settings(combine="reduce_scatter:bf16").check_transport(diloco.LoopbackExchange())
