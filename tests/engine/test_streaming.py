"""Legend: m of M replicas, P fragments, t of T steps, H sync period, τ overlap, α mixing, η and μ of the outer
step, θ a replica's parameters, Θ the outer parameters. Vectors hold all parameters, fragment after fragment.
"""

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests import reference
from tests.processes import run_replicas
from tests.wire import reference as wire_reference
from torch import nn

import diloco
from diloco.errors import PayloadError
from diloco.wire import Key, codec
from diloco.wire.floats import FP32

f32 = np.float32
LR = 0.3
SIZES = (3, 1, 299, 6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of the engine and of the reference."""

    P: int = 2
    H: int = 4
    T: int = 13
    tau: int | tuple[int, ...] = 1
    alpha: float = 0.5
    eta: float = 0.4
    mu: float = 0.9
    wire: str = "fp32"
    combine: str = "gather"
    beta: float | None = None
    offload: bool = False
    offsets: tuple[int, ...] | None = None
    first_sync: reference.FirstSync = "full_period"
    parameters: str = "fp32"
    """The dtype of the model's parameters, by the name of its codec."""
    layers_per_fragment: int = 1
    seed: int = 0

    def schedule(self) -> diloco.Schedule:
        return diloco.Schedule(
            sync_every=self.H,
            num_fragments=self.P,
            overlap_steps=self.tau,
            offsets=self.offsets,
            first_sync=self.first_sync,
        )

    def model(self) -> nn.Module:
        """Blocks of unequal sizes, of two parameters each; the same on every replica."""
        torch.manual_seed(self.seed)
        model = nn.Module()
        sizes = SIZES[: self.P * self.layers_per_fragment]
        model.blocks = nn.ModuleList(nn.Linear(size, 1) for size in sizes)
        return model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[self.parameters])

    def engine(self, model: nn.Module, **changes) -> diloco.StreamingDiLoCo:
        """Over the process group, or alone where there is none."""
        arguments = {
            "fragments": diloco.sequential(model, layers_per_fragment=self.layers_per_fragment),
            "schedule": self.schedule(),
            "outer": diloco.Nesterov(lr=self.eta, momentum=self.mu),
            "mixing": self.alpha,
            "wire": self.wire,
            "combine": self.combine,
            "error_feedback": self.beta,
            "offload": self.offload,
            "exchange": exchange(),
        }
        return diloco.StreamingDiLoCo(model, **(arguments | changes))

    def reference(self, M: int) -> reference.History:
        """The same run in NumPy."""
        cuts = np.cumsum([size + 1 for size in SIZES[: self.P]])[:-1]
        store = through(self.parameters)

        def inner_step(thetas, m, t):
            # The reference merges in FP32: a model in BF16 rounds what it writes.
            return np.split(store(inner(store(np.concatenate(thetas)), m, t)), cuts)

        return reference.run(
            theta0=np.split(theta_of(self.model()), cuts),
            inner_step=inner_step,
            T=self.T,
            H=self.H,
            P=self.P,
            taus=[self.schedule().overlap(m) for m in range(M)],
            alpha=self.alpha,
            M=M,
            eta=self.eta,
            mu=self.mu,
            codec=through(self.wire),
            offsets=self.offsets,
            first_sync=self.first_sync,
            beta=self.beta,
            second=self.second(),
        )

    def second(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The codec of averages; None in gather."""
        way, _, second = self.combine.partition(":")
        return None if way == "gather" else through(second or self.wire)


def through(wire: str) -> Callable[[np.ndarray], np.ndarray]:
    """decode(encode(Δ))."""
    return lambda delta: wire_reference.decode(wire, wire_reference.encode(wire, delta), len(delta))


def exchange(timeout_seconds: float = 20.0) -> diloco.ProcessGroupExchange | diloco.LoopbackExchange:
    if dist.is_initialized():
        return diloco.ProcessGroupExchange(timeout_seconds=timeout_seconds)
    return diloco.LoopbackExchange()


def inner(theta: np.ndarray, m: int, t: int) -> np.ndarray:
    """A step of gradient descent on ½‖θ − target‖², with a target for each replica and step."""
    target = np.random.default_rng((m, t)).standard_normal(len(theta)).astype(f32)
    return theta - f32(LR) * (theta - target)


def theta_of(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).numpy()


def outer_of(engine: diloco.StreamingDiLoCo) -> np.ndarray:
    return torch.cat([p.reshape(-1) for p in engine.outer_parameters().values()]).numpy()


def inner_step(model: nn.Module, m: int, t: int) -> None:
    theta_N = torch.from_numpy(inner(theta_of(model), m, t))
    parts = theta_N.split([p.numel() for p in model.parameters()])
    with torch.no_grad():
        for p, part_N in zip(model.parameters(), parts, strict=True):
            p.copy_(part_N.view_as(p))


class Snapshot(NamedTuple):
    theta: np.ndarray
    Theta: np.ndarray


def train(
    engine: diloco.StreamingDiLoCo, model: nn.Module, T: int, after_step: Callable[[int], None] = lambda t: None
) -> Iterator[Snapshot]:
    """θ and Θ after each step that is still to be taken, then after the drain."""
    for t in range(engine.num_steps + 1, T + 1):
        inner_step(model, engine.exchange.replica, t)
        engine.step()
        after_step(t)
        yield Snapshot(theta_of(model), outer_of(engine))
    engine.finish()
    yield Snapshot(theta_of(model), outer_of(engine))


def run_cases(cases: list[Case]) -> list[tuple[list[Snapshot], str]]:
    results = []
    for case in cases:
        model = case.model()
        engine = case.engine(model)
        results.append((list(train(engine, model, case.T)), engine.outer_hash()))
    return results


def some_cases(M: int, num: int) -> list[Case]:
    """Every setting drawn by itself, so that all pairs of values meet."""
    rng = np.random.default_rng(M)

    def one_of(*values):
        return values[rng.integers(len(values))]

    def steps_below_period(num: int) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(0, H, num)))

    cases = []
    for _ in range(num):
        P, H = one_of(1, 2, 3, 4), one_of(1, 2, 3, 5, 8)
        cases.append(
            Case(
                P=P,
                H=H,
                T=H * 3 + one_of(0, 1, 2),
                tau=one_of(0, min(1, H - 1), H - 1, steps_below_period(M), steps_below_period(M)),
                alpha=one_of(0.0, 0.5, 0.7, 1.0),
                eta=one_of(0.4, 1.0),
                mu=one_of(0.0, 0.9),
                wire=one_of("fp32", "bf16", "e3m0"),
                combine=one_of("gather", "gather", "reduce_scatter", "reduce_scatter:bf16"),
                beta=one_of(None, None, 1.0, 0.7),
                offload=one_of(False, True),
                offsets=one_of(None, None, steps_below_period(P)),
                first_sync=one_of("full_period", "early"),
                parameters=one_of("fp32", "fp32", "bf16"),
            )
        )
    return cases


@pytest.mark.parametrize(("M", "num_cases"), [(1, 150), (2, 100), (3, 60)])
def test_every_step_is_the_references_bit_for_bit(M, num_cases):
    cases = some_cases(M, num_cases)
    results = [run_cases(cases)] if M == 1 else run_replicas(run_cases, M, cases)
    for i, case in enumerate(cases):
        history = case.reference(M)
        assert len({outer_hash for _, outer_hash in (replica[i] for replica in results)}) == 1, case
        for m, replica in enumerate(results):
            snapshots, _ = replica[i]
            expected = [*(step[m] for step in history.steps[1:]), history.final[m]]
            for t, (actual, state) in enumerate(zip(snapshots, expected, strict=True), start=1):
                where = f"replica {m}, step {t} of {case.T}, {case}"
                theta = through(case.parameters)(np.concatenate(state.theta))
                assert actual.theta.tobytes() == theta.tobytes(), f"θ of {where}"
                assert actual.Theta.tobytes() == np.concatenate(state.Theta).tobytes(), f"Θ of {where}"


def test_the_cases_hold_several_fragments_in_flight_at_once_and_at_the_end():
    cases = [case for M, num in ((2, 100), (3, 60)) for case in some_cases(M, num)]
    assert sum(case.schedule().max_overlap > case.H / case.P for case in cases) > 30
    assert sum(bool(case.schedule().sent(case.T)) and case.tau not in (0, (0, 0)) for case in cases) > 20


def network(tied: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Module()
    model.embedding = nn.Embedding(11, 6)
    model.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    model.head = nn.Linear(6, 11, bias=False)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, m: int, t: int) -> None:
    """A step of next-token prediction on tokens of this replica and step."""
    token_B, target_B = torch.from_numpy(np.random.default_rng((m, t)).integers(0, 11, (2, 16)))
    x_BxD = model.embedding(token_B)
    for block in model.blocks:
        x_BxD = x_BxD + block(x_BxD).tanh()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model.head(x_BxD), target_B).backward()
    optimizer.step()


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_one_replica_without_outer_momentum_is_plain_training(tied):
    plain, model = network(tied), network(tied)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.strided(model, layers_per_fragment=2),
        schedule=diloco.Schedule(sync_every=4, num_fragments=3),
        outer=diloco.Nesterov(lr=1.0, momentum=0.0),
        mixing=0.0,
        wire="fp32",
        exchange=diloco.LoopbackExchange(),
    )
    optimizers = adamw(plain), adamw(model)
    for t in range(1, 21):
        learn(plain, optimizers[0], 0, t)
        learn(model, optimizers[1], 0, t)
        engine.step()
        assert_close(model, plain)
    assert (model.head.weight is model.embedding.weight) == tied
    assert ("head.weight" in engine.outer_parameters()) != tied


def test_full_mixing_leaves_inner_training_untouched():
    case = Case(alpha=1.0, tau=3, P=3)
    model, plain = case.model(), case.model()
    for t, snapshot in enumerate(train(case.engine(model), model, case.T), start=1):
        if t <= case.T:
            inner_step(plain, 0, t)
        assert np.array_equal(snapshot.theta, theta_of(plain))
    assert not np.allclose(snapshot.Theta, theta_of(case.model()))


def run_diloco(H: int, T: int) -> np.ndarray:
    model = network()
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=H, num_fragments=1),
        outer=diloco.Nesterov(lr=0.7, momentum=0.9),
        mixing=0.0,
        wire="fp32",
        exchange=exchange(),
    )
    optimizer = adamw(model)
    for t in range(1, T + 1):
        learn(model, optimizer, engine.exchange.replica, t)
        engine.step()
    return theta_of(model)


def diloco_by_hand(M: int, H: int, T: int) -> list[np.ndarray]:
    """DiLoCo as in arXiv 2311.08105, Algorithm 1, with torch's own outer optimizer."""
    outer, models = network(), [network() for _ in range(M)]
    outer_optimizer = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizers = [adamw(model) for model in models]
    for t in range(1, T + 1):
        for m in range(M):
            learn(models[m], optimizers[m], m, t)
        if t % H == 0:
            for Theta, *thetas in zip(outer.parameters(), *(model.parameters() for model in models), strict=True):
                Theta.grad = torch.stack([Theta.detach() - theta.detach() for theta in thetas]).mean(dim=0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    return [theta_of(model) for model in models]


def test_one_fragment_without_overlap_is_diloco():
    H, T = 5, 18
    for theta, by_hand in zip(run_replicas(run_diloco, 2, H, T), diloco_by_hand(2, H, T), strict=True):
        np.testing.assert_allclose(theta, by_hand, rtol=1e-4, atol=1e-5)


def run_averaging(T: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """θ before and after each sync."""
    case = Case(P=3, H=1, tau=0, alpha=0.0, eta=1.0, mu=0.0)
    model = case.model()
    engine = case.engine(model)
    history = []
    for t in range(1, T + 1):
        inner_step(model, engine.exchange.replica, t)
        before = theta_of(model)
        engine.step()
        history.append((before, theta_of(model)))
    return history


def test_syncing_at_every_step_without_momentum_averages_the_parameters():
    for steps in zip(*run_replicas(run_averaging, 3, 6), strict=True):
        average = np.mean([before for before, _ in steps], axis=0)
        for _, after in steps:
            np.testing.assert_allclose(after, average, rtol=1e-5, atol=1e-6)


def test_attaching_to_the_optimizer_is_calling_step():
    def final_theta(attached: bool) -> np.ndarray:
        model, case = network(), Case(P=5, tau=2)
        optimizer = adamw(model)
        engine = case.engine(model, fragments=diloco.strided(model, layers_per_fragment=1))
        handle = engine.attach(optimizer) if attached else None
        for t in range(1, case.T + 1):
            learn(model, optimizer, 0, t)
            if not attached:
                engine.step()
        if handle:
            handle.remove()
            optimizer.step()
        assert engine.num_steps == case.T
        return outer_of(engine)

    assert np.array_equal(final_theta(attached=True), final_theta(attached=False))


def test_an_engine_is_attached_once_at_a_time():
    model = network()
    engine = Case(P=5).engine(model, fragments=diloco.strided(model, layers_per_fragment=1))
    one, other = adamw(model), adamw(model)
    handle = engine.attach(one)
    with pytest.raises(ValueError, match="the engine is attached already"):
        engine.attach(other)
    handle.remove()
    engine.attach(other)


RESUMED = [
    Case(P=1, tau=3, wire="e3m0"),
    Case(P=4, H=5, tau=4, wire="bf16", parameters="bf16"),
    Case(P=3, tau=0, first_sync="early"),
    Case(P=4, H=6, tau=(0, 5), wire="e3m0"),
    Case(P=3, H=5, tau=(4, 1), alpha=0.0),
    Case(P=3, H=5, tau=(1, 4), wire="e3m0", combine="reduce_scatter:bf16", beta=0.9, offload=True),
]


def resume_after_every_step(case: Case) -> None:
    model = case.model()
    engine = case.engine(model)
    checkpoints = {}

    def save(t: int) -> None:
        checkpoints[t] = io.BytesIO()
        torch.save({"engine": engine.state_dict(), "model": model.state_dict()}, checkpoints[t])

    save(0)
    history = list(train(engine, model, case.T, after_step=save))
    for t, checkpoint in checkpoints.items():
        checkpoint.seek(0)
        state = torch.load(checkpoint, weights_only=True)
        resumed_model = case.model()
        nn.init.zeros_(resumed_model.blocks[0].weight)
        resumed = case.engine(resumed_model)
        resumed_model.load_state_dict(state["model"])
        resumed.load_state_dict(state["engine"])
        for actual, expected in zip(train(resumed, resumed_model, case.T), history[t:], strict=True):
            assert actual.theta.tobytes() == expected.theta.tobytes(), (t, case)
            assert actual.Theta.tobytes() == expected.Theta.tobytes(), (t, case)
        for counter in ("num_steps", "bytes_sent", "bytes_received"):
            assert getattr(resumed, counter) == getattr(engine, counter), (counter, t, case)
        assert resumed.outer_hash() == engine.outer_hash()


def resume_all(cases: list[Case]) -> None:
    for case in cases:
        resume_after_every_step(case)


def test_a_run_resumes_bit_for_bit_with_exchanges_in_flight():
    run_replicas(resume_all, 2, RESUMED)


def load_different_steps() -> str:
    case = Case()
    model = case.model()
    engine = case.engine(model)
    state = engine.state_dict() | {"num_steps": 7 + dist.get_rank()}
    with pytest.raises(diloco.DisagreementError) as caught:
        engine.load_state_dict(state)
    return str(caught.value)


def test_states_of_different_steps_are_refused():
    for message in run_replicas(load_different_steps, 2):
        assert "step of the loaded state: replica 0 has 7, replica 1 has 8" in message


def test_a_state_of_other_settings_is_refused_with_both_values():
    case = Case(beta=0.5, wire="int4")
    with_error = case.engine(case.model(), error_feedback=0.5)
    for changes, message in (
        ({"error_feedback": None}, "error_feedback=0.5, and this engine has None"),
        ({"wire": "int2"}, "wire=int4:block=256,stochastic=false, and this engine has int2"),
        ({"combine": "reduce_scatter"}, "combine=gather, and this engine has reduce_scatter"),
        ({"seed": 3}, "seed=0, and this engine has 3"),
    ):
        other = case.engine(case.model(), **changes)
        with pytest.raises(ValueError, match=f"the state was saved with {message}"):
            other.load_state_dict(with_error.state_dict())


def test_a_state_with_something_in_flight_wants_its_schedule():
    short, long = Case(H=10, P=1, tau=1), Case(H=10, P=1, tau=5)

    def state_at(case: Case, step: int) -> dict:
        model = case.model()
        engine = case.engine(model)
        states = [engine.state_dict() for _, _ in zip(range(step), train(engine, model, 40), strict=False)]
        return states[-1]

    with pytest.raises(ValueError, match=r"saved with schedule=.*overlap_steps=\[5\].* has .*overlap_steps=\[1\]"):
        short.engine(short.model()).load_state_dict(state_at(long, 14))
    landed = state_at(short, 14)
    assert not landed["in_flight"]
    for other in (long, Case(H=7, P=1, tau=3)):
        model = other.model()
        engine = other.engine(model)
        engine.load_state_dict(landed)
        for _ in train(engine, model, 40):
            pass
        assert engine.num_steps == 40


def load_the_others_state() -> str:
    case = Case(H=10, P=1, tau=(0, 5))
    model = case.model()
    engine = case.engine(model)
    states: list = [None, None]
    dist.all_gather_object(states, [engine.state_dict() for _ in zip(range(12), train(engine, model, 20))][-1])  # noqa: B905
    own, others = states[dist.get_rank()], states[1 - dist.get_rank()]
    again = case.engine(case.model())
    again.load_state_dict(own)
    with pytest.raises(ValueError, match="own_overlap_steps") as caught:
        case.engine(case.model()).load_state_dict(others)
    return str(caught.value)


def test_a_replica_does_not_take_up_the_state_of_one_with_another_overlap():
    told, _ = run_replicas(load_the_others_state, 2)
    assert "own_overlap_steps=5, and this engine has 0" in told


def load_another_replicas_state(beta: float | None, num_steps: int) -> list[str]:
    """What each is told that takes up replica 0's, as DDP's users do: replica 0 itself, too."""
    case = Case(H=10, P=1, tau=5, beta=beta)
    model = case.model()
    engine = case.engine(model)
    states: list = [None, None]
    own = [engine.state_dict() for _ in zip(range(num_steps), train(engine, model, 20))][-1]  # noqa: B905
    dist.all_gather_object(states, own)
    again, start = case.engine(case.model()), time.monotonic()
    try:
        again.load_state_dict(states[0])
    except ValueError as error:
        assert time.monotonic() - start < 10, "no replica waits for one that has refused"
        return [type(error).__name__, str(error)]
    return []


@pytest.mark.parametrize(("beta", "num_steps"), [(None, 12), (1.0, 17)])
def test_a_replica_does_not_take_up_the_state_of_another(beta, num_steps):
    """In flight at step 12; at step 17 nothing is, but the error is the replica's own."""
    first, second = run_replicas(load_another_replicas_state, 2, beta, num_steps)
    assert first[0] == "DisagreementError" and "why the state can't be loaded: replica 0 has null" in first[1]
    assert second[0] == "ValueError" and "saved with replica=0, and this engine has 1" in second[1]


def test_a_state_of_nothing_but_what_is_shared_is_any_replicas():
    assert run_replicas(load_another_replicas_state, 2, None, 17) == [[], []]


def load_what_one_has_drained() -> str:
    case = Case(H=10, P=1, tau=5)
    model = case.model()
    engine = case.engine(model)
    snapshots = train(engine, model, 12)
    states = [engine.state_dict() for _ in snapshots]
    with pytest.raises(diloco.DisagreementError) as caught:
        case.engine(case.model()).load_state_dict(states[-1 - dist.get_rank()])
    return str(caught.value)


def test_what_one_replica_has_drained_and_another_has_not_is_refused():
    for message in run_replicas(load_what_one_has_drained, 2):
        assert (
            "in flight in the loaded state" in message
            and "replica 0 has [], replica 1 has [[0, 1, 10]]" in message
        )


def test_room_for_what_was_in_flight_is_fp32_whatever_the_default():
    engine = Case().engine(Case().model())
    torch.set_default_dtype(torch.bfloat16)
    try:
        room = engine.state_like({"in_flight": [(0, 1, 4)]})["sent"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in room.values()} == {torch.float32}


class Losing:
    """Replica 1 sends what replica 0 sends, but not fragment 0."""

    replica, num_replicas = 0, 2

    def __init__(self, *, loses: bool) -> None:
        self.loses = loses

    def start(self, payloads, fragment, round, phase=0):
        def wait() -> dict:
            if self.loses and fragment == 0:
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


def test_a_parameter_that_was_replaced_is_refused_by_name():
    case = Case(P=2, H=4)
    model = case.model()
    engine = case.engine(model)
    for t in range(1, 4):
        inner_step(model, 0, t)
        engine.step()
    model.load_state_dict(case.model().state_dict(), assign=True)
    with pytest.raises(
        ValueError, match=r"step 4: parameter blocks.0.weight was replaced .*: build the engine last"
    ):
        engine.step()


def test_a_parameter_that_was_unfrozen_is_refused_by_name():
    case = Case(P=1, H=4)
    model = case.model()
    model.blocks[0].bias.requires_grad_(False)
    engine = case.engine(model)
    model.blocks[0].bias.requires_grad_(True)
    for _ in range(3):
        engine.step()
    with pytest.raises(ValueError, match=r"step 4: parameter blocks.0.bias was unfrozen or added after"):
        engine.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_outer_parameters_take_the_place_of_the_models_own_for_a_while(dtype):
    case = Case(P=2, H=4)
    model = case.model().to(dtype)
    engine = case.engine(model)
    for t in range(1, 7):
        inner_step(model, 0, t)
        engine.step()
    own = {name: parameter.clone() for name, parameter in model.named_parameters()}
    Theta = {name: outer.clone() for name, outer in engine.outer_parameters().items()}
    with pytest.raises(ZeroDivisionError), engine.outer_in_place():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, Theta[name].to(dtype)) and not torch.equal(parameter, own[name])
        raise ZeroDivisionError
    assert all(torch.equal(parameter, own[name]) for name, parameter in model.named_parameters())
    assert all(torch.equal(outer, Theta[name]) for name, outer in engine.outer_parameters().items())


def test_frozen_parameters_may_be_of_any_type_and_on_any_device():
    case = Case(P=2)
    model = case.model()
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    model.elsewhere = nn.Parameter(torch.zeros(3, device="meta"), requires_grad=False)
    model = nn.ModuleDict({"frozen": nn.ParameterDict({"first": model.elsewhere}), "rest": model})
    fragments = diloco.sequential(model, layers_per_fragment=1)
    engine = case.engine(model, fragments=fragments)
    for _ in range(6):
        engine.step()
    assert "rest.table" not in engine.outer_parameters()
    model.rest.blocks[1].bias = nn.Parameter(torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match=r"rest.blocks.0.weight is on cpu and rest.blocks.1.bias on meta"):
        case.engine(model, fragments=fragments)


def count_bytes(case: Case) -> tuple[int, int, int]:
    model = case.model()
    engine = case.engine(model)
    for _ in train(engine, model, case.T):
        pass
    return engine.bytes_sent, engine.bytes_received, engine.num_steps


def test_bytes_are_those_of_every_payload_to_every_destination():
    case, M = Case(P=3, H=5, T=23, tau=(0, 3, 4), wire="e3m0"), 3
    num_bytes = sum(
        codec("e3m0").payload_bytes(SIZES[p] + 1)
        * (M - 1)
        * len(reference.send_steps(case.H, case.P, case.offsets, case.first_sync, p, case.T))
        for p in range(case.P)
    )
    assert run_replicas(count_bytes, M, case) == [(num_bytes, num_bytes, case.T)] * M
    assert count_bytes(replace(case, tau=4)) == (0, 0, case.T)


def test_bytes_of_reduce_scatter_are_those_of_shares_and_averages():
    case, M = Case(P=3, H=5, T=23, tau=(0, 3, 4), wire="e3m0", combine="reduce_scatter:bf16"), 3
    shares = [-(-(SIZES[p] + 1) // M) for p in range(case.P)]
    num_bytes = sum(
        (codec("e3m0").payload_bytes(shares[p]) + codec("bf16").payload_bytes(shares[p]))
        * (M - 1)
        * len(reference.send_steps(case.H, case.P, case.offsets, case.first_sync, p, case.T))
        for p in range(case.P)
    )
    assert run_replicas(count_bytes, M, case) == [(num_bytes, num_bytes, case.T)] * M


@dataclass(frozen=True)
class RecordingFP32(FP32):
    """FP32 that keeps the keys it is given."""

    keys: ClassVar[dict[str, list[Key]]] = {"encode": [], "decode": []}

    def encode(self, delta_N, key=None):
        self.keys["encode"].append(key)
        return super().encode(delta_N, key)

    def decode_into(self, to_N, payload, key=None, *, add=False):
        self.keys["decode"].append(key)
        return super().decode_into(to_N, payload, key, add=add)


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


def train_with_mask(case: Case) -> np.ndarray:
    model = case.model()
    *_, last = train(case.engine(model), model, case.T)
    return last.Theta


@pytest.mark.parametrize(("combine", "num_kept"), [("gather", 31), ("reduce_scatter", 2 * 16)])
def test_a_mask_keeps_the_same_places_on_all_replicas_and_others_in_the_next_round(combine, num_kept):
    case = Case(P=1, layers_per_fragment=3, H=2, T=2, tau=0, wire="feddropout:density=0.1", combine=combine)
    start = theta_of(case.model())
    once = run_replicas(train_with_mask, 2, case)
    twice = run_replicas(train_with_mask, 2, replace(case, T=4))
    assert np.array_equal(*once) and np.array_equal(*twice)
    assert (once[0] != start).sum() == num_kept
    assert 1.5 * num_kept < (twice[0] != start).sum() <= 2 * num_kept


def record_outer_steps(case: Case) -> list[tuple]:
    """Of each outer step: sync, Δ, ‖Δ‖, the replicas' Δ_m, the cosines of the fragment and of its blocks."""
    model = case.model()
    engine = case.engine(model)
    records, blocked_seconds = [], 0.0
    for t in range(1, case.T + 1):
        inner_step(model, engine.exchange.replica, t)
        for step in engine.step():
            blocks = engine.settings.fragments[step.sync.fragment].blocks
            cosines = {block: step.mean_cosine(block) for block in (None, *blocks)}
            deltas = [delta_N.numpy() for delta_N in step.deltas]
            records.append((step.sync, step.average.numpy(), step.norm(), deltas, cosines))
            blocked_seconds += step.blocked_seconds
    assert engine.blocked_seconds == pytest.approx(blocked_seconds)
    return records


def mean_cosine(vectors: list[np.ndarray]) -> float:
    pairs = list(combinations([vector.astype(np.float64) for vector in vectors], 2))
    return sum(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs) / len(pairs)


def test_an_outer_step_tells_its_norm_and_how_far_the_replicas_agree():
    case = Case(P=2, T=9, wire="bf16", layers_per_fragment=2)
    results = run_replicas(record_outer_steps, 3, case)
    assert [sync for sync, *_ in results[0]] == [(0, 1, 4), (1, 1, 6), (0, 2, 8)]
    for (sync, average, norm, deltas, cosines), *others in zip(*results, strict=True):
        for _, other_average, _, other_deltas, _ in others:
            assert np.array_equal(other_average, average) and np.array_equal(other_deltas, deltas)
        np.testing.assert_allclose(average, np.mean(deltas, axis=0), rtol=1e-5, atol=1e-6)
        assert norm == pytest.approx(np.linalg.norm(average), rel=1e-5)
        first = 2 * sync.fragment
        border = SIZES[first] + 1
        assert cosines == {
            None: pytest.approx(mean_cosine(deltas), abs=1e-5),
            f"blocks.{first}": pytest.approx(mean_cosine([delta[:border] for delta in deltas]), abs=1e-5),
            f"blocks.{first + 1}": pytest.approx(mean_cosine([delta[border:] for delta in deltas]), abs=1e-5),
        }
    assert record_outer_steps(case)[0][-1] == {None: None, "blocks.0": None, "blocks.1": None}


def diverge(case: Case, step: int) -> tuple[str, int, bool]:
    """Fragment 1 of replica 1 is not finite after a step: the error, bytes sent, and whether θ and Θ were kept."""
    model = case.model()
    engine = case.engine(model, exchange=exchange(timeout_seconds=1.0))
    for t in range(1, step):
        inner_step(model, engine.exchange.replica, t)
        engine.step()
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
    assert waiting.startswith("ExchangeError: step 6: fragment 1, round 1: no payload") and "replica 1" in waiting


def test_nothing_is_sent_when_another_fragment_of_the_step_is_not_finite():
    _, (diverged, bytes_sent, _) = run_replicas(diverge, 2, Case(tau=0, offsets=(0, 0)), 4)
    assert "fragment 1" in diverged and bytes_sent == 0


class WithNaNInFragment1(diloco.ProcessGroupExchange):
    def start(self, payloads, fragment, round, phase=0):
        payloads = {replica: payload.clone() for replica, payload in payloads.items()}
        if fragment == 1:
            for payload in payloads.values():
                payload[-4:].copy_(torch.tensor([float("nan")]).view(torch.uint8))
        return super().start(payloads, fragment, round, phase)


class WithoutFragment1(diloco.ProcessGroupExchange):
    def start(self, payloads, fragment, round, phase=0):
        return super().start({} if fragment == 1 else payloads, fragment, round, phase)


def fail_at_the_first_sync(case: Case, other: type[diloco.ProcessGroupExchange], expected: type[Exception]) -> str:
    model = case.model()
    kind = other if dist.get_rank() == 1 else diloco.ProcessGroupExchange
    engine = case.engine(model, exchange=kind(timeout_seconds=2.0))
    for t in range(1, case.H):
        inner_step(model, dist.get_rank(), t)
        engine.step()
    theta, Theta = theta_of(model), outer_of(engine)
    if dist.get_rank() == 1:
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
        (WithoutFragment1, diloco.ExchangeError, "no payload from or to replica 1"),
        (WithNaNInFragment1, PayloadError, "replica 1: a payload in fp32 holds NaN"),
    ],
)
def test_a_failed_step_leaves_all_parameters_as_they_were_and_ends_the_engine(other, expected, message):
    """Fragment 0 arrives and fragment 1, of the same step, does not, or is damaged."""
    told, _ = run_replicas(fail_at_the_first_sync, 2, Case(tau=0, offsets=(0, 0)), other, expected)
    assert told.startswith(f"step 4: fragment 1, round 1: {message}")


DIFFERENCES = {
    "sync_every: replica 0 has 4, replica 1 has 5": Case(H=5),
    "overlap_steps: replica 0 has [1, 1], replica 1 has [2, 2]": Case(tau=2),
    "offsets: replica 0 has [0, 2], replica 1 has [0, 1]": Case(offsets=(0, 1)),
    'first_sync: replica 0 has "full_period", replica 1 has "early"': Case(first_sync="early"),
    'wire: replica 0 has "fp32", replica 1 has "e3m0:block=256,stochastic=false"': Case(wire="e3m0"),
    "mixing: replica 0 has 0.5, replica 1 has 0.25": Case(alpha=0.25),
    "outer learning rate: replica 0 has 0.4, replica 1 has 0.7": Case(eta=0.7),
    "initial parameters (SHA-256): replica 0 has ": Case(seed=1),
}


def start_differently(cases: list[Case]) -> list[str]:
    messages = []
    for different in cases:
        case = different if dist.get_rank() == 1 else Case()
        with pytest.raises(diloco.DisagreementError) as caught:
            case.engine(case.model())
        messages.append(str(caught.value))
    return messages


def test_replicas_that_differ_are_refused_at_the_start_with_both_values():
    for messages in run_replicas(start_differently, 2, list(DIFFERENCES.values())):
        for message, difference in zip(messages, DIFFERENCES, strict=True):
            assert f"the replicas disagree on {difference}" in message


def start_in_another_order() -> None:
    case = Case(P=1)
    model = case.model()
    names = diloco.whole(model)[0].parameters
    with pytest.raises(diloco.DisagreementError):
        case.engine(model, fragments=[diloco.Fragment(names[:: 1 if dist.get_rank() == 0 else -1])])


def test_replicas_that_order_their_parameters_differently_are_refused():
    run_replicas(start_in_another_order, 2)


def test_settings_that_contradict_the_model_or_each_other_are_refused():
    case = Case()
    for changes, message in (
        ({"mixing": 1.5}, "mixing must lie between 0 and 1, not 1.5"),
        ({"wire": "fp8"}, "'fp8' is not a wire format: choose one of fp32, bf16"),
        ({"fragments": [diloco.Fragment(("blocks.0.weight",))]}, "no fragment holds blocks.0.bias"),
    ):
        with pytest.raises(ValueError, match=message):
            case.engine(case.model(), **changes)


def drain_and_go_on(case: Case, drained: int) -> tuple[list, list]:
    """Steps with a drain in the middle, in one engine and through a state that was saved after the drain."""
    model = case.model()
    engine = case.engine(model)
    snapshots = list(train(engine, model, drained))
    state, theta = engine.state_dict(), theta_of(model)
    resumed_model = case.model()
    resumed = case.engine(resumed_model)
    resumed.load_state_dict(state)
    parts = torch.from_numpy(theta).split([p.numel() for p in resumed_model.parameters()])
    with torch.no_grad():
        for p, part_N in zip(resumed_model.parameters(), parts, strict=True):
            p.copy_(part_N.view_as(p))
    assert snapshots[-1].theta.tobytes() == theta_of(resumed_model).tobytes()
    return list(train(engine, model, case.T)), list(train(resumed, resumed_model, case.T))


@pytest.mark.parametrize("tau", [0, 3, (1, 3)])
def test_a_run_may_go_on_after_a_drain(tau):
    for one, other in run_replicas(drain_and_go_on, 2, Case(tau=tau), 9):
        assert len(one) == len(other) > 0
        for mine, theirs in zip(one, other, strict=True):
            assert (
                mine.theta.tobytes() == theirs.theta.tobytes() and mine.Theta.tobytes() == theirs.Theta.tobytes()
            )
