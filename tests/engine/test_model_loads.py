"""Parameters that are loaded into the model beside the engine: noticed, adopted, or right."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, outer_of, theta_of, train
from tests.processes import run_replicas
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import diloco

CASE = Case(P=2, H=4, tau=1)
REFUSED = r"loaded into the model after the engine .*: build the engine after .* engine.reset_outer\(\)"


def parameters_of_another_run() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 3) for name, tensor in CASE.model().state_dict().items()}


def wrapped(model: nn.Module) -> nn.Module:
    wrapper = nn.Module()
    wrapper._orig_mod = model
    return wrapper


WAYS = {
    "plain": lambda model: model.load_state_dict(parameters_of_another_run()),
    "part": lambda model: model.blocks[1].load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1)}),
    "wrapper": lambda model: wrapped(model).load_state_dict(
        {f"_orig_mod.{name}": tensor for name, tensor in parameters_of_another_run().items()}
    ),
    "torch.distributed": lambda model: set_model_state_dict(model, parameters_of_another_run()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_load_after_the_engine_was_built_is_refused_until_it_is_adopted(way):
    model = CASE.model()
    engine = CASE.engine(model)
    WAYS[way](model)
    for _ in range(2):
        with pytest.raises(diloco.UserError, match=REFUSED):
            engine.step()
    with pytest.raises(diloco.UserError, match=REFUSED):
        engine.finish(flush=True)
    engine.reset_outer()
    assert outer_of(engine).tobytes() == theta_of(model).tobytes()
    expected = CASE.model()
    expected.load_state_dict(model.state_dict())
    for actual, other in zip(train(engine, model, 9), train(CASE.engine(expected), expected, 9), strict=True):
        assert actual.theta.tobytes() == other.theta.tobytes() and actual.Theta.tobytes() == other.Theta.tobytes()


@pytest.mark.parametrize("engine_first", [False, True])
def test_a_resume_is_silent_in_either_order(engine_first):
    model = CASE.model()
    engine = CASE.engine(model)
    for _ in zip(range(6), train(engine, model, 9), strict=False):
        pass
    saved, parameters = copy.deepcopy(engine.state_dict()), copy.deepcopy(model.state_dict())
    other = CASE.model()
    resumed = CASE.engine(other)
    loads = [lambda: other.load_state_dict(parameters), lambda: resumed.load_state_dict(saved)]
    for load in reversed(loads) if engine_first else loads:
        load()
    resumed.step()
    other.load_state_dict(parameters_of_another_run())
    with pytest.raises(diloco.UserError, match=REFUSED):
        resumed.step()


def test_loads_that_change_nothing_or_are_undone_are_silent():
    model = CASE.model()
    engine = CASE.engine(model)
    model.load_state_dict(CASE.model().state_dict())
    engine.step()
    inner_step(model, 0, 2)
    theta = theta_of(model)
    with engine.outer_parameters_applied():
        model.load_state_dict(parameters_of_another_run())
    assert theta_of(model).tobytes() == theta.tobytes()
    engine.step()
    assert engine.num_steps == 2


def test_engines_follow_one_another_on_a_model_and_its_copies_are_free():
    model = CASE.model()
    first = CASE.engine(model)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "the model keeps no engine alive"
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
    model.load_state_dict(parameters_of_another_run())
    engine = CASE.engine(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(CASE.model().state_dict())
    engine.step()


def adopt_what_differs() -> list[str]:
    model = CASE.model()
    engine, messages = CASE.engine(model), []

    def refused() -> None:
        with pytest.raises(diloco.DilocoError) as caught:
            engine.reset_outer()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")

    nn.init.constant_(model.blocks[0].weight, 1.0 + dist.get_rank())
    before = outer_of(engine)
    refused()
    assert outer_of(engine).tobytes() == before.tobytes()
    nn.init.constant_(model.blocks[0].weight, 1.0)
    for _ in range(4):
        engine.step()
    refused()  # fragment 0 was sent after step 4
    engine.finish(flush=True)
    velocity = engine.state_dict()["velocity"]
    assert any(tensor.any() for tensor in velocity.values())
    model.load_state_dict(parameters_of_another_run())
    engine.reset_outer()
    assert not any(tensor.any() for tensor in velocity.values())
    assert outer_of(engine).tobytes() == theta_of(model).tobytes()
    engine.step()
    return messages


def test_replicas_adopt_the_same_parameters_or_none():
    for different, in_flight in run_replicas(adopt_what_differs, 2):
        assert different.startswith(
            "DisagreementError: the replicas disagree on the model's parameters at reset_outer()"
        )
        assert in_flight == "UserError: fragment 0 is in flight: call finish() before reset_outer()"


def resume_a_model_that_was_loaded_first(assign: bool) -> list[str]:
    """As nanoGPT loads it, and with `assign` nanochat, before there can be an engine."""
    model, replica = CASE.model(), dist.get_rank()
    engine = CASE.engine(model)
    for _ in zip(range(6), train(engine, model, 9), strict=False):
        pass
    saved = copy.deepcopy({"model": model.state_dict(), "engine": engine.state_dict()})
    for t in range(7, 10):
        inner_step(model, replica, t)
        engine.step()
    engine.finish()

    model = CASE.model()
    model.load_state_dict(saved["model"], assign=assign)
    with pytest.raises(diloco.DisagreementError, match=r"or on its outer parameters, .*: state\['outer'\]"):
        CASE.engine(model)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved["engine"]["outer"], strict=False)
    resumed = CASE.engine(model)
    model.load_state_dict(own)
    resumed.load_state_dict(saved["engine"])
    for t in range(7, 10):
        inner_step(model, replica, t)
        resumed.step()
    resumed.finish()
    return [engine.outer_hash(), resumed.outer_hash()]


@pytest.mark.parametrize("assign", [False, True])
def test_a_script_that_loads_the_model_first_resumes_bit_for_bit(assign):
    results = run_replicas(resume_a_model_that_was_loaded_first, 2, assign)
    assert len({outer_hash for hashes in results for outer_hash in hashes}) == 1
