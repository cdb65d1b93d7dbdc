"""States that are not an engine's, or not this model's: refused in words, and nothing is changed."""

import copy

import pytest
import torch
from tests.engine.cases import Case, inner_step, outer_of, theta_of
from torch import nn

import diloco

CASE = Case(P=2, H=4, tau=2)


def advanced(steps: int, **changes) -> tuple[diloco.StreamingDiLoCo, nn.Module]:
    model = CASE.model()
    engine = CASE.engine(model, **changes)
    for t in range(1, steps + 1):
        inner_step(model, 0, t)
        engine.step()
    return engine, model


def without(state: dict, *names: str) -> dict:
    return {name: value for name, value in state.items() if name not in names}


WEIGHT = "blocks.0.weight"
BROKEN = {
    "list": (lambda s: [s], "the state is a list, and not a dict: pass what state_dict"),
    "empty": (lambda s: {}, r"names no format, and this diloco reads format 1: .* pass what state_dict"),
    "format": (lambda s: s | {"format": 2}, r"is of format 2, and this diloco reads format 1"),
    "no steps": (lambda s: without(s, "num_steps"), "missing required field num_steps"),
    "text": (lambda s: s | {"bytes_sent": "7"}, "bytes_sent: expected int, got str"),
    "tokens": (lambda s: s | {"tokens": -1}, "tokens: expected int >= 0"),
    "in flight": (lambda s: s | {"in_flight": [[0, 1]]}, r"in_flight.*: expected array of length 3"),
    "beyond": (lambda s: s | {"in_flight": [[7, 1, 4]]}, r"fragments \[7\] in flight"),
    "cut": (lambda s: s | {"last_sent": [1]}, "has 1 values as last_sent, and there are 2 fragments"),
    "no slot": (lambda s: without(s, "velocity"), "no tensors by parameter name as velocity"),
    "numbers": (lambda s: s | {"outer": dict.fromkeys(s["outer"], 1.0)}, "no tensors by parameter name as outer"),
    "missing": (lambda s: s | {"outer": without(s["outer"], WEIGHT)}, f"lacks {WEIGHT} in outer"),
    "half": (lambda s: s | {"velocity": without(s["velocity"], WEIGHT)}, f"lacks {WEIGHT} in velocity"),
    "sent": (lambda s: s | {"sent": without(s["sent"], WEIGHT)}, f"lacks {WEIGHT} in sent"),
    "unexpected": (
        lambda s: s | {"outer": {f"other.{name}": value for name, value in s["outer"].items()}},
        r"has other.blocks.0.weight, other.blocks.0.bias, other.blocks.1.weight and 1 more in outer, which",
    ),
    "shape": (lambda s: s | {"outer": s["outer"] | {WEIGHT: torch.zeros(7, 1)}}, r"is \(7, 1\) in torch.float32"),
    "dtype": (
        lambda s: s | {"velocity": {name: value.bfloat16() for name, value in s["velocity"].items()}},
        "velocity of blocks.0.weight is .* in torch.bfloat16, and here it is .* in torch.float32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_the_engine_goes_on(name):
    break_it, message = BROKEN[name]
    saved = copy.deepcopy(advanced(5)[0].state_dict())
    assert [fragment for fragment, *_ in saved["in_flight"]] == [0]
    (engine, model), (undisturbed, its_model) = advanced(5), advanced(5)
    with pytest.raises(diloco.UserError, match=message):
        engine.load_state_dict(break_it(saved))
    for t in range(6, 10):
        for one, own in ((engine, model), (undisturbed, its_model)):
            inner_step(own, 0, t)
            one.step()
    assert outer_of(engine).tobytes() == outer_of(undisturbed).tobytes()
    assert theta_of(model).tobytes() == theta_of(its_model).tobytes()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_the_prefixes_of_wrappers_are_no_other_names(prefix):
    engine, _ = advanced(5)
    saved = copy.deepcopy(engine.state_dict())
    for kind in ("outer", "velocity", "sent"):
        saved[kind] = {prefix + name: tensor for name, tensor in saved[kind].items()}
    saved["fragments"] = [[prefix + name for name in names] for names in saved["fragments"]]
    resumed = CASE.engine(CASE.model())
    resumed.load_state_dict(saved)
    assert outer_of(resumed).tobytes() == outer_of(engine).tobytes()
    assert resumed.state_dict()["in_flight"] == saved["in_flight"]


def test_the_engine_of_a_compiled_model_takes_up_the_state_of_a_plain_one():
    engine, _ = advanced(5)
    wrapped = nn.Module()
    wrapped._orig_mod = CASE.model()
    resumed = CASE.engine(wrapped)
    assert set(resumed.outer_parameters()) == {f"_orig_mod.{name}" for name in engine.outer_parameters()}
    resumed.load_state_dict(engine.state_dict())
    assert outer_of(resumed).tobytes() == outer_of(engine).tobytes()
