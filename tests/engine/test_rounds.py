"""Legend: see tests/engine/cases.py."""

import re
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from tests import reference
from tests.engine.cases import SIZES, Case, inner_step, outer_of, theta_of, train
from tests.processes import run_replicas
from tests.wire.cases import sealed
from torch import nn

import diloco
from diloco.engine.fixed import exchange as bring
from diloco.engine.replica import Flight
from diloco.errors import PayloadError
from diloco.exchange.transport import Channel
from diloco.outer.averages import Reduction, reduction_of
from diloco.outer.cohort import Cohort
from diloco.schedule import Sync
from diloco.wire import Key, codec
from diloco.wire.floats import FP32


class Losing:
    """Replica 1 sends what replica 0 sends, but not fragment 0."""

    replica, num_replicas, ordered, device, failure = 0, 2, False, torch.device("cpu"), None

    def __init__(self, *, loses: bool) -> None:
        self.loses = loses

    def abort(self, reason): ...

    def finishing(self, step):
        return nullcontext()

    def start(self, payloads, tag):
        def wait() -> dict:
            if self.loses and tag.channel is Channel.PAYLOAD and tag.fragment == 0:
                raise diloco.ExchangeError("fragment 0 lost", (1,))
            return dict(payloads)

        return SimpleNamespace(wait=wait)


def test_a_payload_that_only_a_slower_replica_needs_is_waited_for_before_anything_is_merged():
    case = Case(P=2, H=4, tau=(0, 2))
    model = case.model()
    engine = case.engine(model, exchange=Losing(loses=False))
    state = [engine.state_dict() for _ in zip(range(5), train(engine, model, 9))][-1]  # noqa: B905
    assert state["in_flight"] == [[0, 1, 4]]  # merged at once, and sent again after a resume
    losing = Losing(loses=False)
    resumed = case.engine(model, exchange=losing)
    resumed.load_state_dict(state)
    losing.loses = True
    inner_step(model, 0, 6)
    theta, Theta = theta_of(model), outer_of(resumed)
    with pytest.raises(diloco.ExchangeError, match="step 6: fragment 0 lost"):
        resumed.step()
    assert theta_of(model).tobytes() == theta.tobytes() and outer_of(resumed).tobytes() == Theta.tobytes()


def count_bytes(cases: list[Case]) -> list[tuple[int, int, int]]:
    counts = []
    for case in cases:
        model = case.model()
        engine = case.engine(model)
        for _ in train(engine, model, case.T):
            pass
        counts.append((engine.bytes_sent, engine.bytes_received, engine.num_steps))
    return counts


def test_bytes_are_those_of_every_payload_to_every_destination():
    """With reduce_scatter a share to each of the others, and an average."""
    case, M = Case(P=3, H=5, T=23, tau=(0, 3, 4), wire="e3m0"), 3
    e3m0, bf16 = codec("e3m0"), codec("bf16")
    sends = [
        len(reference.send_steps(case.H, case.P, case.offsets, case.first_sync, p, case.T)) for p in range(case.P)
    ]
    shares = [-(-(SIZES[p] + 1) // M) for p in range(case.P)]
    gathered = sum(e3m0.payload_bytes(SIZES[p] + 1) * (M - 1) * n for p, n in enumerate(sends))
    reduced = sum(
        (e3m0.payload_bytes(S) + bf16.payload_bytes(S)) * (M - 1) * n for S, n in zip(shares, sends, strict=True)
    )
    cases = [case, replace(case, combine="reduce_scatter:bf16")]
    expected = [(num_bytes, num_bytes, case.T) for num_bytes in (gathered, reduced)]
    assert run_replicas(count_bytes, M, cases) == [expected] * M
    assert count_bytes([replace(case, tau=4)]) == [(0, 0, case.T)]


@dataclass(frozen=True)
class RecordingFP32(FP32):
    """FP32 that keeps the keys it is given."""

    keys: ClassVar[dict[str, list[Key]]] = {"encode": [], "decode": []}

    def pack(self, delta_N, body, key):
        self.keys["encode"].append(key)
        return super().pack(delta_N, body, key)

    def unpack(self, body, to_N, key, *, add):
        self.keys["decode"].append(key)
        return super().unpack(body, to_N, key, add=add)


def record_keys(case: Case, seed: int) -> dict[str, list[Key]]:
    model = case.model()
    for keys in RecordingFP32.keys.values():
        keys.clear()
    for _ in train(case.engine(model, wire=RecordingFP32(), seed=seed), model, case.T):
        pass
    return {way: sorted(set(keys)) for way, keys in RecordingFP32.keys.items()}


@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
def test_a_codec_is_told_whose_outer_gradient_it_is(combine):
    case, M = Case(P=2, H=3, T=7, tau=1, combine=combine), 2
    rounds = [(0, 1), (0, 2), (1, 1), (1, 2)]
    parts = [0] if combine == "gather" else [0, 1]
    for m, keys in enumerate(run_replicas(record_keys, M, case, 2**40)):
        own = [Key(2**40, p, r, m, part) for p, r in rounds for part in parts]
        everybody = [Key(2**40, p, r, other, part) for p, r in rounds for other in range(M) for part in parts]
        if combine == "gather":
            assert keys == {"encode": own, "decode": everybody}
        else:  # a replica decodes everybody's part of its own share, and of each share the average, replica M's
            own += [Key(2**40, p, r, M, m) for p, r in rounds]
            decoded = [key for key in everybody if key.part == m]
            decoded += [Key(2**40, p, r, M, part) for p, r in rounds for part in parts]
            assert keys == {"encode": sorted(own), "decode": sorted(decoded)}


def diverge(case: Case, step: int) -> tuple[str, int, bool]:
    """Fragment 1 of replica 1 is not finite after a step: the error, bytes sent, and whether θ and Θ were kept."""
    model = case.model()
    engine = case.engine(model)
    for t in range(1, step):
        inner_step(model, engine.exchange.replica, t)
        engine.step()
    dist.barrier()  # else the other replica may fail in an earlier step
    bytes_sent, Theta = engine.bytes_sent, outer_of(engine)
    if engine.exchange.replica == 1:
        nn.init.constant_(model.blocks[1].bias, float("nan"))
    theta = theta_of(model)
    with pytest.raises((diloco.NonFiniteError, diloco.ExchangeError)) as caught:
        engine.step()
    kept = theta_of(model).tobytes() == theta.tobytes() and outer_of(engine).tobytes() == Theta.tobytes()
    return f"{caught.type.__name__}: {caught.value}", engine.bytes_sent - bytes_sent, kept


def test_a_gradient_that_is_not_finite_is_named_and_not_sent():
    (waiting, *_, waiting_kept), (diverged, bytes_sent, diverged_kept) = run_replicas(diverge, 2, Case(tau=0), 6)
    assert waiting_kept and diverged_kept
    assert diverged.startswith(
        "NonFiniteError: step 6: the outer gradient of blocks.1.bias (replica 1, fragment 1)"
    )
    assert bytes_sent == 0
    assert waiting.startswith("ExchangeError: step 6: ") and f"replica 1 failed: {diverged[16:]}" in waiting


def test_nothing_is_sent_when_another_fragment_of_the_step_is_not_finite():
    _, (diverged, bytes_sent, _) = run_replicas(diverge, 2, Case(tau=0, offsets=(0, 0)), 4)
    assert "fragment 1" in diverged and bytes_sent == 0


class WithNaNInFragment1(diloco.ProcessGroupExchange):
    def start(self, payloads, tag):
        payloads = {replica: payload.clone() for replica, payload in payloads.items()}
        if tag.fragment == 1:
            for payload in payloads.values():
                payload[-4:].copy_(torch.tensor([float("nan")]).view(torch.uint8))
                sealed(payload)
        return super().start(payloads, tag)


class WithoutFragment1(diloco.ProcessGroupExchange):
    def start(self, payloads, tag):
        return super().start({} if tag.fragment == 1 else payloads, tag)


def fail_at_the_first_sync(case: Case, other: type[diloco.ProcessGroupExchange], expected: type[Exception]) -> str:
    model = case.model()
    kind = other if dist.get_rank() == 1 else diloco.ProcessGroupExchange
    engine = case.engine(model, exchange=kind(timeout_seconds=20))
    for t in range(1, case.H):
        inner_step(model, dist.get_rank(), t)
        engine.step()
    theta, Theta = theta_of(model), outer_of(engine)
    if dist.get_rank() == 1:
        with suppress(diloco.ExchangeError):  # who drops a message has none to average, either
            engine.step()
        return ""
    with pytest.raises(expected) as caught:
        engine.step()
    assert theta_of(model).tobytes() == theta.tobytes() and outer_of(engine).tobytes() == Theta.tobytes()
    for go_on in (engine.step, engine.finish, engine.state_dict):
        with pytest.raises(ValueError, match="step 4 failed: build a new engine and load the last state"):
            go_on()
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "expected", "message"),
    [
        (WithoutFragment1, diloco.ExchangeError, "replica 1 failed: "),
        (WithNaNInFragment1, PayloadError, "replica 1: a payload in fp32 holds NaN"),
    ],
)
def test_a_failed_step_leaves_all_parameters_as_they_were_and_ends_the_engine(other, expected, message):
    """Fragment 0 arrives and fragment 1, of the same step, does not, or is damaged."""
    raised, _ = run_replicas(fail_at_the_first_sync, 2, Case(tau=0, offsets=(0, 0)), other, expected)
    assert raised.startswith(f"step 4: fragment 1, round 1: {message}")


def damaged_payloads(combine: str, weights: str, replica: int, byte: int, num_steps: int) -> str:
    """Replica `replica` sends payloads with a byte changed; the first error."""
    model = torch.nn.Linear(300, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    exchange = diloco.ProcessGroupExchange(timeout_seconds=20)
    start = exchange.start

    def start_damaged(payloads, tag):
        if dist.get_rank() == replica and tag.channel is Channel.PAYLOAD:
            payloads = {m: payload.clone() for m, payload in payloads.items()}
            for payload in payloads.values():
                payload[byte] ^= 255
        return start(payloads, tag)

    exchange.start = start_damaged
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=1, num_fragments=1),
        combine=combine,
        weights=weights,
        exchange=exchange,
    )
    before = [p.clone() for p in model.parameters()]
    try:
        for _ in range(num_steps):
            engine.step(tokens=8)
    except (PayloadError, diloco.ExchangeError) as error:
        assert all(map(torch.equal, before, model.parameters()))
        return f"{type(error).__name__}: {error}"
    return "no error"


REFUSED = "PayloadError: step 1: fragment 0, round 1: replica 1:"


@pytest.mark.parametrize(
    ("combine", "weights", "byte", "refusal"),
    [
        ("gather", "equal", 0, "a payload of 301 elements in e3m0"),
        ("reduce_scatter", "equal", 5, "a payload of 151 elements in e3m0"),
        ("gather", "equal", -7, ".* does not match its checksum"),
        ("reduce_scatter", "tokens", -17, ".* does not match its checksum"),
        ("gather", "tokens", -11, "the weight behind its payload was damaged"),
    ],
)
def test_one_changed_byte_is_refused_with_fragment_and_round_and_the_others_are_told(
    combine, weights, byte, refusal
):
    """Before anything is merged, and where a share is averaged."""
    first, second = run_replicas(damaged_payloads, 2, combine, weights, 1, byte, 2)
    assert re.match(f"{REFUSED} {refusal}", first), first
    assert second.startswith("ExchangeError: step") and first.removeprefix("PayloadError: ") in second


def read_tokens_in_the_first_interval_alone() -> tuple[Cohort | None, str]:
    """The cohort of the first outer step, and the error after H inner steps without a token."""
    case = Case(P=1, H=2, tau=0, weights="tokens_squared_per_step")
    model = case.model()
    engine = case.engine(model)
    for t in range(1, 3):
        inner_step(model, dist.get_rank(), t)
        outer_steps = engine.step(tokens=10 * t * (1 + dist.get_rank()))
    engine.step()
    with pytest.raises(diloco.UserError) as caught:
        engine.step()
    return outer_steps[0].cohort, str(caught.value)


def test_an_outer_step_tells_the_weights_and_an_interval_without_tokens_is_refused():
    refusal = "step 4: the last 2 inner steps read no token, and weights=tokens_squared_per_step weighs by them: "
    refusal += "pass engine.step(tokens=…), or engine.attach(optimizer, tokens=…)"
    expected = Cohort((0, 1), (0.25, 1.0)), refusal
    assert run_replicas(read_tokens_in_the_first_interval_alone, 2) == [expected] * 2


def test_tokens_read_before_a_reset_weigh_nothing_after_it():
    engine = (case := Case(P=1, H=2, tau=0, weights="tokens")).engine(case.model())
    engine.step(tokens=5)
    engine.reset_outer()
    (outer_step,) = engine.step(tokens=7)
    assert outer_step.cohort == Cohort.equal(1) and engine.state_dict()["weighed"] == [[12, 7.0]]


def flip_a_bit_of_the_outer_parameters(case: Case, replica: int, after: int) -> tuple[int, str, bool]:
    """Θ of fragment 1 changes in one replica's memory: the step that fails, its error, and whether Θ was kept."""
    model = case.model()
    engine = case.engine(model)
    for t in range(1, case.T + 1):
        inner_step(model, engine.exchange.replica, t)
        theta, Theta = theta_of(model), outer_of(engine)
        try:
            engine.step()
        except (diloco.DisagreementError, diloco.ExchangeError) as error:
            kept = theta_of(model).tobytes() == theta.tobytes() and outer_of(engine).tobytes() == Theta.tobytes()
            return t, str(error), kept
        if t == after and engine.exchange.replica == replica:
            engine._replica.state.at_home("outer")[1].view(torch.int32)[0] ^= 1
    return 0, "no error", True


@pytest.mark.parametrize(
    "case",
    [
        Case(P=2, H=4, T=18, tau=1),
        Case(P=2, H=4, T=18, tau=(0, 3), wire="e3m0", combine="reduce_scatter", beta=0.9, offload=True),
    ],
)
def test_outer_parameters_that_differ_are_named_in_the_next_round_of_their_fragment(case):
    """Fragment 1 is sent after steps 6, 10, 14: its third round is the first that starts from the changed Θ."""
    for m, (step, error, kept) in enumerate(run_replicas(flip_a_bit_of_the_outer_parameters, 2, case, 1, 13)):
        assert 14 <= step <= 14 + case.schedule().overlap(m) and kept  # or another replica sent it before
        assert "fragment 1, round 3: the outer parameters of replica" in error, error
        assert "are no longer those of this replica" in error


def flight_of(delta_N: torch.Tensor, reduction: Reduction, key: Key, cohort: Cohort) -> Flight:
    """An outer gradient that is encoded and sealed."""
    return Flight(
        sync=Sync(key.fragment, key.round, 0),
        key=key,
        cohort=cohort,
        num_elements=delta_N.numel(),
        reduction=reduction,
        payloads=reduction.encode(delta_N, key, cohort),
    )


def reduce_while_the_first_replica_does_nothing(seconds: float) -> bool:
    exchange, reduction = (
        diloco.ProcessGroupExchange(timeout_seconds=20),
        reduction_of("reduce_scatter", codec("fp32")),
    )
    cohort = Cohort.equal(2)
    key, delta = Key(0, 0, 1, exchange.replica), torch.full((5,), float(exchange.replica))
    wait = bring(exchange, flight_of(delta, reduction, key, cohort))
    if exchange.replica == 0:
        time.sleep(seconds)  # a training loop that is busy with other things
        dist.barrier()
        wait()
        return True
    start = time.monotonic()
    received = wait()
    in_time = time.monotonic() - start < seconds / 2
    dist.barrier()
    average = reduction.average(received, torch.empty(5), key, cohort)
    return in_time and torch.equal(average.divided(), torch.full((5,), 0.5))


@pytest.mark.slow
def test_the_second_phase_starts_by_itself():
    assert run_replicas(reduce_while_the_first_replica_does_nothing, 2, 3.0) == [True, True]


def reduce_without_the_last_replica() -> str:
    exchange, reduction = (
        diloco.ProcessGroupExchange(timeout_seconds=1),
        reduction_of("reduce_scatter", codec("fp32")),
    )
    cohort = Cohort.equal(3)
    key = Key(0, 3, 2, exchange.replica)
    if exchange.replica == 2:
        return ""
    wait = bring(exchange, flight_of(torch.ones(5), reduction, key, cohort))
    with pytest.raises(diloco.ExchangeError, match="fragment 3, round 2: no payload from or to") as caught:
        wait()
    return str(caught.value.missing)


def test_a_replica_that_is_missing_in_either_phase_is_named():
    assert all("2" in missing for missing in run_replicas(reduce_without_the_last_replica, 3)[:2])
