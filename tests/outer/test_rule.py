"""A rule and a merge rule of one's own, in the engine."""

import copy
from dataclasses import dataclass

import pytest
import torch
from tests.engine.cases import Case, inner_step, outer_of, theta_of

import diloco


@dataclass(frozen=True)
class HeavyBall:
    """v ← μ v + Δ; Θ ← Θ − η v."""

    lr: float
    momentum: float
    slots = ("ball",)
    shared = True

    def facts(self) -> dict:
        return {"heavy ball": [self.lr, self.momentum]}

    def on_send(self, fragment, own, sync) -> None:
        pass

    def on_average(self, fragment, average, sync, cohort) -> None:
        ball_N = fragment.use("ball")
        ball_N.mul_(self.momentum).add_(average.divided())
        fragment.use("outer").sub_(self.lr * ball_N)
        fragment.merge()


@dataclass(frozen=True)
class Eager(HeavyBall):
    """At a send, the replica's own outer gradient stands in for the average that is on its way."""

    shared = False
    slots = ("ball", "own")

    def on_send(self, fragment, own, sync) -> None:
        fragment.use("own").copy_(own())
        fragment.use("outer").sub_(self.lr * fragment.use("own"))

    def on_average(self, fragment, average, sync, cohort) -> None:
        fragment.use("outer").add_(self.lr * (fragment.use("own") - average.divided()))
        fragment.merge()


@dataclass(frozen=True)
class Halfway:
    """θ ← (θ + Θ) / 2."""

    def facts(self) -> dict:
        return {}

    def merge(self, theta_N: torch.Tensor, outer_N: torch.Tensor) -> torch.Tensor:
        return (theta_N + outer_N) / 2


def trained(case: Case, steps: int, **changes) -> tuple[diloco.StreamingDiLoCo, torch.nn.Module]:
    model = case.model()
    engine = case.engine(model, **changes)
    for t in range(1, steps + 1):
        inner_step(model, 0, t)
        engine.step()
    return engine, model


def same(one: tuple, other: tuple) -> bool:
    return all(
        theta_of(m).tobytes() == theta_of(n).tobytes() and outer_of(e).tobytes() == outer_of(f).tobytes()
        for (e, m), (f, n) in [(one, other)]
    )


@pytest.mark.parametrize("offload", [False, True])
def test_a_rule_without_momentum_is_plain_sgd(offload):
    """With dyadic numbers no rounding differs: η = 0.5, μ = 0."""
    case = Case(P=3, H=4, mu=0.0, eta=0.5, offload=offload)
    assert same(trained(case, 14), trained(case, 14, outer=HeavyBall(0.5, 0.0)))
    assert not same(trained(case, 14), trained(case, 14, outer=HeavyBall(0.5, 0.5)))


def test_an_eager_rule_ends_where_the_average_alone_would():
    """One replica: its own outer gradient is the average, and Θ moves at the send instead of at the merge."""
    case = Case(P=1, H=4, tau=2, mu=0.0, eta=0.5)
    engine, model = trained(case, 4, outer=Eager(0.5, 0.0))
    late, _ = trained(case, 4)
    assert outer_of(engine).tobytes() != outer_of(late).tobytes()
    for one, its_model in ((engine, model), (late, _)):
        for t in (5, 6):
            inner_step(its_model, 0, t)
            one.step()
    torch.testing.assert_close(torch.tensor(outer_of(engine)), torch.tensor(outer_of(late)))


def test_a_rules_own_vectors_are_saved_and_loaded():
    case = Case(P=2, H=4, tau=2)
    rule = HeavyBall(0.4, 0.9)
    engine, model = trained(case, 9, outer=rule)
    state, parameters = copy.deepcopy(engine.state_dict()), copy.deepcopy(model.state_dict())
    assert set(state["ball"]) == set(dict(model.named_parameters()))
    fresh = case.model()
    resumed = case.engine(fresh, outer=rule)
    fresh.load_state_dict(parameters)
    resumed.load_state_dict(state)
    for t in range(10, 16):
        for one, its_model in ((engine, model), (resumed, fresh)):
            inner_step(its_model, 0, t)
            one.step()
    assert same((engine, model), (resumed, fresh))


def test_a_merge_rule_decides_how_outer_parameters_enter():
    case = Case(P=2, H=4, alpha=0.5)
    assert same(trained(case, 13), trained(case, 13, mixing=Halfway()))
