"""Guards against results that would be wrong without an error."""

import pytest
import torch
import torch.distributed as dist
from tests.engine.test_masters import MastersSGD, Plain, engine_of, network, take_inner_step
from tests.processes import run_replicas
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.outer.merge import Mixing


def train(dtype: torch.dtype, optimizer_of: type[MastersSGD], **arguments) -> tuple[int, str | None]:
    """The step at which training ends, and the error that ended it."""
    model = network(dtype)
    engine = engine_of(model, **arguments)
    optimizer = optimizer_of(model)
    data = torch.Generator().manual_seed(engine.exchange.replica)
    try:
        for _ in range(61):
            take_inner_step(model, optimizer, data)
            engine.step()
    except (diloco.UserError, diloco.ExchangeError) as error:  # the other replica's, or its own
        return engine.num_steps, str(error)
    return engine.num_steps, None


def train_with_masters_of_its_own(arguments: dict) -> tuple[int, str | None]:
    """The optimizer's masters are unknown to the engine."""
    return train(torch.bfloat16, MastersSGD, **arguments)


@pytest.mark.parametrize("arguments", [{"mixing": 0.0}, {"mixing": 0.5, "overlap_steps": 3}])
def test_a_merge_that_an_optimizer_undoes_is_noticed_at_the_next_send(arguments):
    results = run_replicas(train_with_masters_of_its_own, 2, arguments)
    assert 40 in [num_steps for num_steps, _ in results]
    for num_steps, message in results:
        assert num_steps <= 40 + arguments.get("overlap_steps", 0), "one replica tells the other"
        assert "step 40: the merge of fragment 0 after step 2" in message
        assert "was undone by the next inner step" in message and "masters=" in message


def test_a_merge_that_is_undone_after_the_last_send_is_noticed_at_the_end():
    model = network(torch.bfloat16)
    slow = diloco.Nesterov(lr=0.1, momentum=0.0)
    engine = engine_of(model, exchange=diloco.LoopbackExchange(), mixing=0.0, outer=slow)
    optimizer, data = MastersSGD(model), torch.Generator().manual_seed(0)
    for _ in range(30):
        take_inner_step(model, optimizer, data)
        engine.step()
    with pytest.raises(diloco.UserError, match="step 30: the merge of fragment 0 after step 20 was undone"):
        engine.finish()


def train_honestly() -> list[tuple[int, str | None]]:
    """Parameters that keep what was merged: in BF16, with hardly any merge, with one at each step."""
    fast = diloco.Nesterov(lr=0.9, momentum=0.5)
    return [
        train(torch.bfloat16, Plain),
        train(torch.bfloat16, Plain, mixing=0.99),
        train(torch.float32, Plain, mixing=0.0, outer=fast),
        train(torch.float32, Plain, mixing=Mixing(1.0)),
        train(torch.float32, Plain, mixing=0.0, sync_every=1, wire="e3m0"),
        train(torch.bfloat16, Plain, mixing=0.5, sync_every=2, overlap_steps=1),
    ]


@pytest.mark.slow
def test_merges_that_are_kept_raise_no_alarm():
    for results in run_replicas(train_honestly, 2):
        assert results == [(61, None)] * 6


def train_alike(combine: str, wire: str, cause: str) -> str | None:
    """The error of replicas whose gradients are averaged, or whose data are the same."""
    model = network(torch.float32)
    engine = engine_of(model, sync_every=5, combine=combine, wire=wire)
    replica = engine.exchange.replica
    optimizer = Plain(model)
    called = DistributedDataParallel(model) if cause == "spanning" else model
    data = torch.Generator().manual_seed(0 if cause == "data" else replica)
    try:
        for _ in range(11):
            if cause == "no gradients":
                engine.step()
                continue
            take_inner_step(called, optimizer, data)
            engine.step()
    except diloco.UserError as error:
        assert engine.num_steps == 5
        return str(error)
    return None


ALIKE = [
    (combine, wire, cause)
    for combine, wire in (("gather", "e3m0"), ("reduce_scatter:bf16", "int8"))
    for cause in ("spanning", "data", "no gradients", "none")
]


def train_all_alike() -> list[str | None]:
    return [train_alike(*arguments) for arguments in ALIKE]


def test_equal_outer_gradients_are_refused():
    for messages in run_replicas(train_all_alike, 2):
        for (_, _, cause), message in zip(ALIKE, messages, strict=True):
            if cause in ("spanning", "data"):
                assert "replicas 0 and 1 made the same outer gradients of all fragments" in message
                assert "diloco.connect" in message and "the same data" in message
            else:
                assert message is None


def train_two_alike(combine: str, same_data: bool) -> tuple[int, str | None]:
    """Replicas 0 and 2 get no gradient for fragment 0, whose weights decay; `same_data` is theirs."""
    replica = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.1)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.sequential(model, layers_per_fragment=1),
        sync_every=4,
        overlap_steps=1,
        combine=combine,
        exchange=diloco.ProcessGroupExchange(timeout_seconds=20),
    )
    data = torch.Generator().manual_seed(replica % 2 if same_data else replica)
    try:
        for _ in range(10):
            optimizer.zero_grad(set_to_none=False)
            hidden = model[0](torch.randn(16, 32, generator=data))
            hidden = hidden.detach() if replica != 1 else hidden
            model[0].requires_grad_(replica == 1)
            model[1](hidden).square().mean().backward()
            model[0].requires_grad_(True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
            engine.step()
    except (diloco.UserError, diloco.ExchangeError) as error:
        return engine.num_steps, str(error)
    return engine.num_steps, None


@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
def test_two_replicas_of_three_that_read_the_same_are_named(combine):
    """Once the last fragment has been sent: in one they may be equal for want of gradients."""
    for num_steps, message in run_replicas(train_two_alike, 3, combine, True):
        assert num_steps in (6, 7) and "replicas 0 and 2 made the same outer gradients of all fragments" in message
    assert run_replicas(train_two_alike, 3, combine, False) == [(10, None)] * 3


@pytest.mark.parametrize(("width", "is_noticed"), [(7, False), (8, True)])
def test_few_elements_prove_nothing(width, is_noticed):
    """Inner steps that undo merges: of 28 elements, as a tiny model's may by themselves, and of 32."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, 1, bias=False) for _ in range(4)))
    slow = diloco.Nesterov(lr=0.1, momentum=0.0)
    engine = engine_of(model, sync_every=2, exchange=diloco.LoopbackExchange(), mixing=0.0, outer=slow)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        for step in range(12):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(value + step)
            engine.step()
    except diloco.UserError as error:
        assert is_noticed and "was undone by the next inner step" in str(error)
    else:
        assert not is_noticed
