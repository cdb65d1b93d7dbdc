"""Legend: see tests/engine/cases.py."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, exchange, inner_step, run_cases, theta_of, through, train
from tests.processes import run_replicas
from torch import nn

import diloco


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
                weights=one_of("equal", "equal", "tokens", "tokens_squared_per_step"),
            )
        )
    return cases


PAPERS = [
    Case(P=3, H=5, T=23, tau=2, wire="sparseloco:block=64,k=8", beta=0.95, eta=1.0, mu=0.0),
    Case(P=3, H=5, T=23, tau=2, wire="pulse:density=0.5", beta=1.0, eta=0.7, lr=3e-5),
    Case(
        P=3, H=4, T=18, tau=3, wire="pulse:density=1,values=bf16", combine="reduce_scatter:fp32", beta=1.0, lr=3e-5
    ),
]


@pytest.mark.parametrize(("M", "num_cases"), [(1, 8), (2, 20), pytest.param(3, 20, marks=pytest.mark.slow)])
def test_every_step_is_the_references_bit_for_bit(M, num_cases):
    cases = [*some_cases(M, num_cases), *PAPERS]
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


def test_pulse_with_room_for_every_change_in_fp32_is_dense():
    form = {"P": 3, "H": 5, "T": 23, "tau": 2, "lr": 3e-5}
    cases = [Case(wire="pulse:density=1,mask=fp32", beta=1.0, **form), Case(wire="fp32", **form)]
    for (pulse, _), (dense, _) in run_replicas(run_cases, 2, cases):
        for one, other in zip(pulse, dense, strict=True):
            assert np.array_equal(one.theta, other.theta) and np.array_equal(one.Theta, other.Theta)


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
    for block in model.blocks.children():
        x_BxD = x_BxD + block(x_BxD).tanh()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model.head(x_BxD), target_B).backward()
    optimizer.step()


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_one_replica_without_outer_momentum_is_plain_training():
    plain, model = network(tied=True), network(tied=True)
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
    assert model.head.weight is model.embedding.weight and "head.weight" not in engine.outer_parameters()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_through_parameters_from_before_a_merge_raises(dtype):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=2, num_fragments=1),
        exchange=diloco.LoopbackExchange(),
    )
    loss = model(torch.ones(1, 2, dtype=dtype)).sum()
    engine.step()
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_that_was_replaced_is_refused_by_name():
    case = Case(P=2, H=4)
    model = case.model()
    engine = case.engine(model)
    for t in range(1, 4):
        inner_step(model, 0, t)
        engine.step()
    model.load_state_dict(case.model().state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"parameter blocks.0.weight was replaced .*: build the engine last"):
        engine.step()


def leave_outer_parameters_applied(engine, replace):
    with engine.outer_parameters_applied():
        replace()


OUTER_PARAMETERS_REACH_NO_MODEL = {
    "finish": lambda engine, replace: (replace(), engine.finish()),
    "copy": lambda engine, replace: (replace(), engine.copy_outer_to_model()),
    "apply": lambda engine, replace: (replace(), engine.outer_parameters_applied().__enter__()),
    "applied": leave_outer_parameters_applied,
}


@pytest.mark.parametrize("way", OUTER_PARAMETERS_REACH_NO_MODEL)
def test_outer_parameters_that_would_not_reach_the_model_are_refused(way):
    case = Case(P=2, H=4, tau=2)
    model = case.model()
    engine = case.engine(model)
    for t in range(1, 6):  # then a fragment is in flight
        inner_step(model, 0, t)
        engine.step()
    other = case.model().state_dict()
    with pytest.raises(ValueError, match=r"parameter \S+ was replaced .*: build the engine last"):
        OUTER_PARAMETERS_REACH_NO_MODEL[way](engine, lambda: model.load_state_dict(other, assign=True))


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
    with pytest.raises(ZeroDivisionError), engine.outer_parameters_applied():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, Theta[name].to(dtype)) and not torch.equal(parameter, own[name])
        raise ZeroDivisionError
    assert all(torch.equal(parameter, own[name]) for name, parameter in model.named_parameters())
    assert all(torch.equal(outer, Theta[name]) for name, outer in engine.outer_parameters().items())


INSIDE = {
    "step": lambda engine: engine.step(),
    "finish": lambda engine: engine.finish(),
    "reset_outer": lambda engine: engine.reset_outer(),
    "state_dict": lambda engine: engine.state_dict(),
    "load_state_dict": lambda engine: engine.load_state_dict({}),
    "copy_outer_to_model": lambda engine: engine.copy_outer_to_model(),
}


@pytest.mark.parametrize("name", INSIDE)
def test_nothing_is_trained_saved_or_loaded_while_the_outer_parameters_stand_in(name):
    """A step there would be thrown away, and a saved replica would resume Θ in the place of θ."""
    case = Case(P=1, H=4)
    model = case.model()
    engine = case.engine(model)
    inner_step(model, 0, 1)
    engine.step()
    theta = theta_of(model)
    with engine.outer_parameters_applied():
        with engine.outer_parameters_applied():
            pass
        with pytest.raises(diloco.UserError, match=rf"engine\.{name}\(\) inside outer_parameters_applied\(\)"):
            INSIDE[name](engine)
    assert theta_of(model).tobytes() == theta.tobytes() and engine.num_steps == 1
    engine.step()
    engine.state_dict()


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


DIFFERENCES = {
    "sync_every: replica 0 has 4, replica 1 has 5": Case(H=5),
    "overlap_steps: replica 0 has [1, 1], replica 1 has [2, 2]": Case(tau=2),
    "offsets: replica 0 has [0, 2], replica 1 has [0, 1]": Case(offsets=(0, 1)),
    'first_sync: replica 0 has "full_period", replica 1 has "early"': Case(first_sync="early"),
    'wire: replica 0 has "fp32", replica 1 has "e3m0:block=256,stochastic=false"': Case(wire="e3m0"),
    "merge rule's alpha: replica 0 has 0.5, replica 1 has 0.25": Case(alpha=0.25),
    "outer rule's lr: replica 0 has 0.4, replica 1 has 0.7": Case(eta=0.7),
    "initial parameters (SHA-256): replica 0 has ": Case(seed=1),
}
SEED = "set the same seed before the model is made, make its parts in the same order, and build the engine before"


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
            assert (SEED in message) == difference.startswith("initial")


def start_in_another_order() -> None:
    case = Case(P=1)
    model = case.model()
    names = diloco.whole(model)[0].parameters
    with pytest.raises(diloco.DisagreementError, match=r"fragment and place of parameter blocks\.0\.weight"):
        case.engine(model, fragments=[diloco.Fragment(names[:: 1 if dist.get_rank() == 0 else -1])])


def test_replicas_that_order_their_parameters_differently_are_refused():
    run_replicas(start_in_another_order, 2)
