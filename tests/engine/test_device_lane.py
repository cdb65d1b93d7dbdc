"""The engine on a device on which its work runs beside training: bits, waits of the host, copies, and races.

Legend: see tests/engine/cases.py; the device is that of tests/fake_device.py.
"""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import LR, Case, f32
from tests.engine.test_masters import engine_of
from tests.engine.test_rounds import Losing
from tests.fake_device import FakeDevice, FakeTensor
from tests.processes import run_replicas
from tests.rendezvous.replicas import new_model
from tests.wire.cases import sealed
from torch import nn

import diloco
from diloco.exchange.transport import Channel
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.replay import replayed

CASES = [
    Case(P=3, H=6, T=14, tau=2, wire="e3m0"),
    Case(P=2, H=4, T=11, tau=(0, 3), wire="int4:stochastic=true", alpha=0.0),
    Case(P=2, H=4, T=11, tau=3, wire="topk:density=0.1", beta=0.9, parameters="bf16"),
    Case(P=3, H=5, T=12, tau=1, wire="e3m0", combine="reduce_scatter:bf16", beta=1.0, offload=True),
    Case(P=3, H=5, T=12, tau=2, wire="pulse:density=0.2", beta=1.0, offload=True),
    Case(P=4, H=3, T=8, tau=2, wire="fp32", offload=True, parameters="bf16"),
    Case(P=2, H=4, T=9, tau=0, wire="bf16", offsets=(0, 0)),
]


@torch.no_grad()
def learn(model: nn.Module, m: int, t: int) -> None:
    """A step of gradient descent on ½‖θ − target‖², on the model's own device."""
    for i, theta in enumerate(model.parameters()):
        target = np.random.default_rng((m, t, i)).standard_normal(theta.shape).astype(f32)
        theta.sub_(LR * (theta - torch.from_numpy(target).to(theta.device)))


def values(model: nn.Module) -> list[bytes]:
    tensors = (p.inner if isinstance(p, FakeTensor) else p for p in map(torch.Tensor.detach, model.parameters()))
    return [tensor.float().numpy().tobytes() for tensor in tensors]


def trained(case: Case, device: FakeDevice | None) -> tuple[list[list[bytes]], dict, str]:
    """θ after each step, all payloads, and the hash of Θ; on the device each step's counters are checked."""
    model = case.model()
    if device is not None:
        model = device.on_device(model)
    engine = case.engine(model)
    m, num_merged, history, sent = dist.get_rank(), 0, [], {}
    start = engine.exchange.start

    def recorded(payloads, tag):
        if tag.channel is Channel.PAYLOAD:
            sent[tag] = {replica: payload.cpu().numpy().tobytes() for replica, payload in payloads.items()}
        return start(payloads, tag)

    if dist.get_world_size() > 1:
        engine.exchange.start = recorded
    for t in range(1, case.T + 1):
        learn(model, m, t)
        due = engine.settings.schedule.due(t, m)
        if device is not None:
            device.clear()
        num_merged += len(engine.step())
        if device is not None and device.has_streams:
            check_counts(device, case, num_sent=len(due.send), num_merged=len(due.merge))
        history.append(values(model))
    num_merged += len(engine.finish())
    assert num_merged > 3
    return [*history, values(model)], sent, engine.outer_hash()


def check_counts(device: FakeDevice, case: Case, *, num_sent: int, num_merged: int) -> None:
    """No step makes the host wait; a send copies payloads off the device once, and what was judged."""
    assert not device.races, device.races
    assert not device.host_reads, device.host_reads
    of_state = 2 * (num_sent + num_merged) * (2 if case.beta else 1) if case.offload else 0
    assert 2 * num_sent <= len(device.to_host) <= 2 * num_sent + of_state
    if not num_sent and not case.offload:
        assert not device.to_host


def bits_of_both(cases: list[Case], like_apples: bool = False) -> list[bool]:
    equal = []
    for case in cases:
        expected = trained(case, None)
        with FakeDevice(like_apples=like_apples) as device:
            equal.append(trained(case, device) == expected)
    return equal


@pytest.mark.slow
def test_the_bits_are_those_of_a_cpu_and_the_host_never_waits():
    assert run_replicas(bits_of_both, 2, CASES) == [[True] * len(CASES)] * 2


@pytest.mark.slow
def test_the_bits_are_those_of_a_cpu_on_a_device_without_streams_and_fp64():
    cases = CASES[:1] + CASES[2:4]
    assert run_replicas(bits_of_both, 2, cases, True) == [[True] * len(cases)] * 2


def alone_in(folder: str, like_apples: bool) -> str:
    """Train alone in a store, on the device: the hash of Θ."""
    with FakeDevice(like_apples=like_apples) as device:
        model = device.on_device(new_model())
        run = diloco.StoreRendezvous(folder, name="a", poll_seconds=0.004, timeout_seconds=20.0)
        engine = diloco.StreamingDiLoCo(
            model,
            fragments=diloco.sequential(model, layers_per_fragment=1),
            schedule=diloco.Schedule(sync_every=6, num_fragments=3, overlap_steps=1),
            wire="e3m0",
            rendezvous=run,
        )
        for t in range(1, 20):
            learn(model, 0, t)
            engine.step(tokens=8)
            time.sleep(0.005)
        engine.finish(close=True)
        run.leave()
        assert not device.races and run.state.num_outer >= 3
        return engine.outer_hash()


@pytest.mark.slow
@pytest.mark.parametrize("like_apples", [False, True])
def test_the_log_of_a_replica_on_a_device_gives_its_bits(like_apples: bool, tmp_path):
    [digest] = run_replicas(alone_in, 1, str(tmp_path), like_apples)
    replay = replayed(str(tmp_path), initial=lambda facts: dict(new_model().named_parameters()))
    assert parameters_hash(replay.parameters()) == digest


def saved_and_loaded() -> list[tuple[int, list[str]]]:
    """The races of a state that is read after each step, and of one that is loaded after a send."""
    races = []
    with FakeDevice() as device:
        case = Case(P=2, H=4, T=8, tau=3, wire="topk:density=0.1", beta=0.9)
        model = device.on_device(case.model())
        engine = case.engine(model)
        begun = {
            name: {key: values.clone() for key, values in value.items()} if isinstance(value, dict) else value
            for name, value in engine.state_dict().items()
        }
        for t in range(1, case.T + 1):
            learn(model, 0, t)
            engine.step()
            if t < case.T:
                for tensor in engine.state_dict()["error"].values():
                    tensor.cpu()
            races.append((t, [*device.races]))
            device.races.clear()
        engine.load_state_dict(begun)
        races.append((0, [*device.races]))
    return races


def test_a_state_is_saved_and_loaded_after_what_a_send_still_writes():
    [races] = run_replicas(saved_and_loaded, 1)
    assert not [each for each in races if each[1]]


def unfrozen() -> list[list[float]]:
    """Θ and v of a parameter that was unfrozen after a save, with the state on the host, and on the device."""
    values = []
    with FakeDevice() as device:
        case = Case(P=1, H=2, tau=0, layers_per_fragment=2)
        for is_on_host in (True, False):
            model = device.on_device(case.model())
            bias = model.blocks[0].bias.requires_grad_(False)
            engine = case.engine(model)
            for t in (1, 2):
                learn(model, 0, t)
                engine.step()
            engine.finish()
            state = {
                name: {key: tensor.cpu() if is_on_host else tensor.clone() for key, tensor in value.items()}
                if isinstance(value, dict)
                else value
                for name, value in engine.state_dict().items()
            }
            bias.requires_grad_(True)
            resumed = case.engine(model)
            resumed.load_state_dict(state)
            again = resumed.state_dict()
            values.append([again[kind]["blocks.0.bias"].cpu().item() for kind in ("outer", "velocity")])
            assert values[-1][0] == bias.cpu().item()
    return values


def test_a_parameter_that_was_unfrozen_since_a_save_begins_with_its_value():
    [[on_host, on_device]] = run_replicas(unfrozen, 1)
    assert on_host == on_device and on_host[1] == 0


def wait_for_sends(engine: diloco.StreamingDiLoCo) -> None:
    deadline = time.monotonic() + 20
    while not all(flight.sent.done() for flight in engine._membership.in_flight):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def diverged(step: int) -> tuple[int, str, list[tuple[int, int]]]:
    """Fragment 1 of replica 1 is not finite after a step: where training ends, its error, and what was sent."""
    with FakeDevice() as device:
        case = Case(P=2, H=4, T=12, tau=2, wire="e3m0")
        model = device.on_device(case.model())
        engine = case.engine(model, exchange=diloco.ProcessGroupExchange(timeout_seconds=20))
        sent: list[tuple[int, int]] = []
        start = engine.exchange.start
        engine.exchange.start = lambda payloads, tag: (sent.append(tag[1:3]), start(payloads, tag))[1]
        try:
            for t in range(1, case.T + 1):
                learn(model, dist.get_rank(), t)
                if t == step and dist.get_rank() == 1:
                    model.blocks[1].bias.inner.fill_(float("nan"))
                engine.step()
                wait_for_sends(engine)  # the host is far ahead of a GPU, but not here
        except (diloco.NonFiniteError, diloco.ExchangeError) as error:
            return engine.num_steps, f"{type(error).__name__}: {error}", [tag for tag in sent if tag[1]]
        return case.T, "no error", sent


def test_an_outer_gradient_that_is_not_finite_is_not_sent_and_named_a_step_later():
    (_, waiting, _), (ended, message, sent) = run_replicas(diverged, 2, 6)
    assert ended == 7 and sent == [(0, 1)], "fragment 1 is due after step 6"
    expected = (
        "step 6: the outer gradient of blocks.1.bias (replica 1, fragment 1) is not finite; nothing was sent"
    )
    assert message.startswith(f"NonFiniteError: {expected}")
    assert waiting.startswith("ExchangeError: step ") and expected in waiting


def undone() -> tuple[int, str]:
    """An optimizer with weights of its own, on the device: the step at which the engine refuses to go on."""
    with FakeDevice() as device:
        layers = [nn.Linear(300, 1, bias=False) for _ in range(3)]
        model = device.on_device(nn.Sequential(*layers))
        engine = engine_of(model, exchange=diloco.LoopbackExchange(), mixing=0.0)
        kept = [torch.randn(1, 300) for _ in layers]
        device.clear()
        try:
            for _ in range(50):
                for layer, weight in zip(layers, kept, strict=True):
                    weight += 0.05 + 0.01 * torch.randn(1, 300)
                    layer.weight.detach().copy_(device.wrapped(weight.clone()))
                engine.step()
                time.sleep(0.02)
        except diloco.UserError as error:
            assert not device.host_reads
            return engine.num_steps, str(error)
    return 0, "no error"


def test_a_merge_that_was_undone_is_noticed_with_the_next_payload():
    [(step, message)] = run_replicas(undone, 1)
    assert "the merge of fragment 0 after step 20 was undone by the next inner step" in message
    assert message.startswith("step 40: ") and step == 40


def damaged() -> tuple[str, bool]:
    """A payload with a code that is never written, under a right checksum: the error, and whether θ was kept."""
    with FakeDevice() as device:
        case = Case(P=1, H=4, T=8, tau=1, wire="int8", layers_per_fragment=3)
        model = device.on_device(case.model())
        engine = case.engine(model, exchange=Damaging())
        for t in range(1, 5):
            learn(model, 0, t)
            engine.step()
        learn(model, 0, 5)
        before = values(model)
        device.clear()
        with pytest.raises(diloco.PayloadError) as caught:
            engine.step()
        assert not device.host_reads
        return str(caught.value), before == values(model)


class Damaging(Losing):
    """Replica 1 sends what replica 0 sends, with a code that is never written."""

    def __init__(self) -> None:
        super().__init__(loses=False)

    def start(self, payloads, tag):
        if tag.channel is Channel.PAYLOAD:
            payloads = {replica: payload.clone() for replica, payload in payloads.items()}
            for payload in payloads.values():
                payload[-1] = 0x80
                sealed(payload)
        return super().start(payloads, tag)


def test_a_payload_that_is_not_sound_is_refused_before_anything_is_merged():
    [(message, is_kept)] = run_replicas(damaged, 1)
    assert "replica 1: a payload in int8:block=256 holds a scale or a code that is never written" in message
    assert is_kept
