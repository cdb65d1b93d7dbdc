"""Counting the steps of optimizers, their subclasses and wrappers; each test counts with a real engine."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import diloco

SYNC_EVERY = 100


def engine_of(model: nn.Module) -> diloco.StreamingDiLoCo:
    return diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=SYNC_EVERY, num_fragments=1),
        exchange=diloco.LoopbackExchange(),
    )


def linear() -> nn.Linear:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


class CallsSuper(torch.optim.AdamW):
    """An optimizer as people write it."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise RuntimeError("out of memory")


def test_an_attached_engine_counts_tokens_and_refuses_another_count():
    model = linear()
    optimizer, engine = adamw(model), engine_of(model)
    attachment = engine.attach(optimizer, tokens=24)
    for _ in range(3):
        optimizer.step()
    assert (engine.num_steps, engine.tokens) == (3, 72)
    with pytest.raises(diloco.UserError, match=r"attached .* and counts its steps: leave out engine.step\(\)"):
        engine.step()
    attachment.remove()
    engine.step(tokens=np.int64(8))
    assert (engine.num_steps, engine.tokens) == (4, 80)


def test_an_optimizer_is_attached_to_one_engine_at_a_time():
    model = linear()
    optimizer, first, second = adamw(model), engine_of(model), engine_of(model)
    attachment = first.attach(optimizer)
    with pytest.raises(
        diloco.UserError, match=r"attached to another engine already, .*: call remove\(\) of what its"
    ):
        second.attach(optimizer)
    attachment.remove()
    second.attach(optimizer)
    optimizer.step()
    assert (first.num_steps, second.num_steps) == (0, 1)


def test_an_optimizer_that_takes_the_place_of_the_attached_one_is_noticed():
    model = linear()
    first, second, engine = adamw(model), torch.optim.SGD(model.parameters(), lr=0.1), engine_of(model)
    engine.attach(first)
    for optimizer in (second, first, torch.optim.SGD(linear().parameters())):
        for _ in range(SYNC_EVERY - 1):
            optimizer.step()
    for _ in range(SYNC_EVERY - 1):
        second.step()
    with pytest.warns(UserWarning, match=r"SGD has taken 100 steps .* attached AdamW, .* attach the") as caught:
        second.step()
    assert caught[0].filename == __file__
    second.step()  # without a warning
    assert engine.num_steps == SYNC_EVERY - 1


@pytest.mark.parametrize("tokens", [torch.tensor(3), -1, 0.5, "8"])
def test_tokens_are_a_whole_number(tokens):
    model = linear()
    engine = engine_of(model)
    for count in (lambda: engine.step(tokens=tokens), lambda: engine.attach(adamw(model), tokens=tokens)):
        with pytest.raises(diloco.UserError, match=r"tokens must be a whole number of 0 or more") as caught:
            count()
        assert ("call .item()" in str(caught.value)) == isinstance(tokens, torch.Tensor)
    assert engine.num_steps == 0


def test_the_engine_steps_after_the_outermost_step():
    adamw(linear())
    model = linear()

    class AddsOne(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                model.weight.fill_(7.0)

    seen = []
    engine = engine_of(model)
    engine.step = lambda *, tokens: seen.append(model.weight.detach().clone())
    optimizer = AddsOne(model.parameters())
    engine.attach(optimizer)
    optimizer.step()
    assert len(seen) == 1 and seen[0].eq(7.0).all()


def test_a_step_that_raised_leaves_the_next_ones_counted():
    adamw(linear())
    model = linear()
    optimizer, engine = CallsSuper(model.parameters()), engine_of(model)
    engine.attach(optimizer)
    for fails in (True, True, False, False, True, False, False):
        optimizer.fails = fails
        with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
            optimizer.step()
    assert engine.num_steps == 4


def test_a_closure_that_raises_in_the_first_step_leaves_the_next_ones_counted():
    model = linear()
    optimizer, engine = adamw(model), engine_of(model)
    engine.attach(optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for _ in range(3):
        optimizer.step()
    assert engine.num_steps == 3


def test_a_schedule_and_a_copy_of_the_optimizer_keep_the_count():
    model = linear()
    optimizer, engine = adamw(model), engine_of(model)
    with engine.attach(optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        schedule.step()
        copy.deepcopy(optimizer).step()
    optimizer.step()
    assert engine.num_steps == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile's own
@pytest.mark.parametrize("kind", [torch.optim.AdamW, CallsSuper])
def test_a_compiled_step_is_counted_and_does_not_trace_the_engine(kind):
    adamw(linear())
    model = linear()
    optimizer, engine = kind(model.parameters()), engine_of(model)
    traced = []

    def step(*, tokens: int | None) -> tuple:
        traced.append(torch.compiler.is_compiling())
        return type(engine).step(engine, tokens=tokens)

    engine.step = step
    engine.attach(optimizer)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        compiled()
    assert engine.num_steps == 3 and traced == [False] * 3
    torch._dynamo.reset()


class Container(torch.optim.Optimizer):
    """Several optimizers as torchtitan's OptimizersContainer holds them."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)


class Wrapper(torch.optim.Optimizer):
    """A wrapper that is never initialised as an optimizer, and steps every second time, as accelerate's."""

    def __init__(self, optimizer):
        self.optimizer, self.num_calls = optimizer, 0

    def step(self, closure=None):
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.optimizer.step(closure)


class StepsTwice:
    """A wrapper that is no optimizer and steps once per group of parameters, as DeepSpeed's may."""

    def __init__(self, optimizer):
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad

    def step(self):
        self.optimizer.step()
        self.optimizer.step()


class Skips(StepsTwice):
    """A wrapper that skips every second step, as DeepSpeed's skip one whose gradients overflow."""

    overflow = False

    def step(self):
        self.overflow = not self.overflow
        if not self.overflow:
            super().step()


@pytest.mark.parametrize(
    ("optimizer_of", "num_counted"),
    [
        (lambda model: CallsSuper(model.parameters()), 8),
        (lambda model: Container([adamw(part) for part in model]), 8),
        (lambda model: StepsTwice(adamw(model)), 8),
        (lambda model: Skips(adamw(model)), 8),
        (lambda model: Wrapper(Wrapper(adamw(model))), 2),  # every fourth step
    ],
    ids=["calls super's", "container", "steps twice", "skips", "wrappers"],
)
def test_each_step_counts_once_while_the_engine_is_attached(optimizer_of, num_counted):
    adamw(linear()).step()  # torch puts hooks around a class's step when the first of that class is built
    model = nn.Sequential(linear(), linear())
    optimizer, engine = optimizer_of(model), engine_of(model)
    for _ in range(2):
        with engine.attach(optimizer):
            for _ in range(4):
                optimizer.step()
        optimizer.step()
    assert engine.num_steps == num_counted


def test_an_optimizer_of_other_parameters_is_refused():
    """A model built twice: the engine would exchange zeros, and all hashes would be equal."""
    model, engine = linear(), engine_of(linear())
    for optimizer in (adamw(model), Wrapper(adamw(model)), Container([adamw(model), adamw(linear())])):
        with pytest.raises(
            diloco.UserError,
            match=r"trains none of the parameters that the engine exchanges .weight, bias.: build",
        ):
            engine.attach(optimizer)
    optimizer = adamw(model)
    optimizer.step()
    assert engine.num_steps == 0, "nothing was attached"


@pytest.mark.parametrize("with_names", [False, True])
def test_parameters_outside_the_model_that_the_optimizer_trains_are_named(with_names):
    model, head = linear(), nn.Linear(3, 2)
    head.bias.requires_grad_(False)
    both = nn.ModuleDict({"model": model, "head": head})
    optimizer = torch.optim.AdamW(both.named_parameters() if with_names else both.parameters())
    named = "head.weight" if with_names else r"1 of shape \(2, 3\)"
    with pytest.warns(UserWarning, match=rf"also trains {named}, outside of the engine's model") as caught:
        engine_of(model).attach(optimizer).remove()
    assert len(caught) == 1 and caught[0].filename == __file__
    engine_of(both).attach(optimizer)  # without a warning


@pytest.mark.parametrize(
    "optimizer",
    [None, 0.1, torch.optim.SGD, nn.Linear(1, 1), "adamw"],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_what_is_no_optimizer_is_refused(optimizer):
    engine = engine_of(linear())
    with pytest.raises(
        diloco.UserError, match=r"is no torch.optim.Optimizer, nor a wrapper .* pass the optimizer"
    ):
        engine.attach(optimizer)


def test_a_scheduler_and_a_wrong_scaler_are_refused():
    model = linear()
    engine, optimizer = engine_of(model), adamw(model)
    with pytest.raises(diloco.UserError, match="optimizer=StepLR is no torch"):
        engine.attach(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(diloco.UserError, match=r"must be a torch\.amp\.GradScaler, or None"):
        engine.attach(optimizer, 2.0)
    engine.attach(optimizer)


@pytest.mark.parametrize("kwargs", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapper], ids=["bare", "wrapped"])
def test_a_step_that_the_scaler_skips_is_counted(kwargs, wrap):
    model, other = linear(), linear()
    optimizer, engine = torch.optim.AdamW(model.parameters(), **kwargs), engine_of(model)
    others = adamw(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = engine.attach(wrap(optimizer), scaler)
    steps = []
    for factor in (1.0, torch.inf, 1.0, torch.inf):
        for each in (model, other):
            scaler.scale(each(torch.ones(1, 2)).sum() * factor).backward()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        assert model.weight.equal(before) == (factor == torch.inf)
        scaler.step(others)
        scaler.update()
        for each in (optimizer, others):
            each.zero_grad()
        steps.append(engine.num_steps)
    assert steps == [1, 2, 3, 4]
    handle.remove()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert engine.num_steps == 4 and "step" not in vars(scaler)


def test_a_wrapper_brings_its_scaler():
    model = linear()
    wrapper, engine = Wrapper(adamw(model)), engine_of(model)
    wrapper.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    engine.attach(wrapper)
    wrapper.scaler.scale(model(torch.ones(1, 2)).sum() * torch.inf).backward()
    wrapper.scaler.step(wrapper.optimizer)
    assert engine.num_steps == 1


@pytest.mark.parametrize("removed", [0, 1])
def test_engines_that_share_a_scaler_are_removed_in_any_order(removed):
    models = [linear(), linear()]
    optimizers, engines = [adamw(model) for model in models], [engine_of(model) for model in models]
    scaler = torch.amp.GradScaler("cpu")
    handles = [engine.attach(optimizer, scaler) for engine, optimizer in zip(engines, optimizers, strict=True)]
    handles[removed].remove()
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler.scale(model(torch.ones(1, 2)).sum() * torch.inf).backward()
        scaler.step(optimizer)
    assert [engine.num_steps for engine in engines] == [removed, 1 - removed]


def test_an_engine_is_attached_once_at_a_time():
    model = linear()
    engine = engine_of(model)
    one, other = adamw(model), adamw(model)
    handle = engine.attach(one)
    with pytest.raises(diloco.UserError, match="the engine is attached already"):
        engine.attach(other)
    handle.remove()
    one.step()
    assert engine.num_steps == 0
    engine.attach(other)
    other.step()
    assert engine.num_steps == 1


def test_an_optimizer_of_parameters_that_are_frozen_for_now_is_accepted():
    model = linear()
    engine = engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    engine.attach(optimizer)
    model.requires_grad_(True)
    optimizer.step()
    assert engine.num_steps == 1
