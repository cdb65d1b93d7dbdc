"""A rule and a merge rule of one's own, in the engine."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, outer_of, theta_of
from tests.processes import run_replicas

import diloco
from diloco.errors import UserError
from diloco.outer.merge import MergeRule, Mixing, Past
from diloco.outer.rule import OuterRule


@dataclass(frozen=True)
class HeavyBall(OuterRule):
    """v ← μ v + Δ; Θ ← Θ − η v."""

    lr: float
    momentum: float
    slots = ("ball",)

    def on_average(self, fragment, average, sync, cohort) -> None:
        ball_N = fragment.use("ball")
        ball_N.mul_(self.momentum).add_(average.divided())
        fragment.use("outer").sub_(self.lr * ball_N)


@dataclass(frozen=True)
class Eager(HeavyBall):
    """At a send, the replica's own outer gradient stands in for the average that is on its way."""

    shared = False
    slots = ("ball", "own")

    def on_send(self, fragment, own, sync, cohort) -> None:
        fragment.use("own").copy_(own())
        fragment.use("outer").sub_(self.lr * fragment.use("own"))

    def on_average(self, fragment, average, sync, cohort) -> None:
        fragment.use("outer").add_(self.lr * (fragment.use("own") - average.divided()))


@dataclass(frozen=True)
class Halfway(MergeRule):
    """θ ← (θ + Θ) / 2."""

    def merge(self, theta_N: torch.Tensor, outer_N: torch.Tensor, past: Past) -> torch.Tensor:
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


def test_a_merge_rule_decides_how_outer_parameters_enter():
    case = Case(P=2, H=4, alpha=0.5)
    assert same(trained(case, 13), trained(case, 13, mixing=Halfway()))


class Twice(diloco.Nesterov):
    """Nesterov with twice the outer gradient."""

    def step(self, outer_N, velocity_N, delta_N):
        return super().step(outer_N, velocity_N, 2 * delta_N)


class AllButNothing(Mixing):
    """α θ + (1 − α) Θ with 1 − α in the place of α."""

    def merge(self, theta_N, outer_N, past):
        return Mixing(1 - self.alpha).merge(theta_N, outer_N, past)


def test_a_subclass_is_computed_by_its_own_code_where_the_compiled_pass_would_reach():
    case = Case(P=2, H=4, alpha=0.25)
    assert not same(trained(case, 9), trained(case, 9, outer=Twice(lr=case.eta, momentum=case.mu)))
    assert same(trained(replace(case, alpha=0.75), 9), trained(case, 9, mixing=AllButNothing(0.25)))


def test_slots_that_the_state_has_already_are_refused():
    for slots in (("seed",), ("outer",), ("sent",), ("tokens",), ("ball", "ball")):
        rule = type("Rule", (HeavyBall,), {"slots": slots})(0.5, 0.0)
        with pytest.raises(UserError, match=r"Rule.slots=.* must be different names, and none of"):
            Case().engine(Case().model(), outer=rule)


def test_a_state_of_another_rule_is_refused_and_nothing_is_changed():
    case = Case(P=2, H=4, tau=2)
    engine, _ = trained(case, 9)
    other, model = trained(case, 3, outer=HeavyBall(0.4, 0.9))
    before = outer_of(other)
    with pytest.raises(UserError, match="saved with outer_rule=Nesterov, and this engine has HeavyBall"):
        other.load_state_dict(engine.state_dict())
    inner_step(model, 0, 4)
    other.step()
    assert other.num_steps == 4 and before.shape == outer_of(other).shape


@dataclass(frozen=True)
class Median(OuterRule):
    """Θ ← Θ − D_0, the outer gradient of the first replica, kept with those of the others."""

    slots = ("first", "second")
    needs_deltas = True

    def on_average(self, fragment, average, sync, cohort) -> None:
        for slot, delta_N in zip(self.slots, average.deltas(), strict=True):
            fragment.use(slot).copy_(delta_N)
        fragment.use("outer").sub_(fragment.use("first"))


def steps_with_deltas() -> list[bool]:
    """For each outer step whether a rule was given the replicas' outer gradients, and the places of parameters."""
    case = Case(P=2, H=4, tau=2, wire="e3m0")
    model = case.model()
    engine = case.engine(model, outer=Median())
    right: list[bool] = []
    for t in range(1, 14):
        inner_step(model, dist.get_rank(), t)
        for step in engine.step():
            p = step.sync.fragment
            state = engine.state_dict()
            for slot, delta_N in zip(Median.slots, step.deltas, strict=True):
                named = {name: state[slot][name] for name in engine.settings.fragments[p].parameters}
                spans = engine._membership.replica.parameters.places[p]
                right.append(
                    list(spans) == list(named)
                    and all(torch.equal(spans[n].of(delta_N).view(spans[n].shape), x) for n, x in named.items())
                    and bool(delta_N.any())
                )
    engine.finish()
    return right


def test_a_rule_may_read_the_outer_gradient_of_each_replica_and_find_each_parameter_in_it():
    for right in run_replicas(steps_with_deltas, 2):
        assert right == [True] * 8


def eager_outer_steps(combine: str, offload: bool) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """Two replicas: the own outer gradients that the rule is given, and those that the others decode."""
    owns: list[np.ndarray] = []

    class Recording(Eager):
        def on_send(self, fragment, own, sync, cohort) -> None:
            owns.append(own().numpy().copy())
            super().on_send(fragment, own, sync, cohort)

    case = Case(P=2, H=4, tau=2, wire="e3m0", combine=combine, offload=offload)
    model = case.model()
    engine = case.engine(model, outer=Recording(0.5, 0.0))
    steps = []
    for t in range(1, 14):
        inner_step(model, dist.get_rank(), t)
        steps += engine.step()
    steps += engine.finish()
    decoded = [step.deltas[dist.get_rank()].numpy().copy() for step in steps if step.deltas]
    return owns, decoded, engine.outer_hash()


@pytest.mark.parametrize(("combine", "offload"), [("gather", True), ("reduce_scatter", False)])
def test_a_rule_is_given_its_own_outer_gradient_as_the_others_decode_it(combine, offload):
    for owns, decoded, _ in run_replicas(eager_outer_steps, 2, combine, offload):
        assert len(owns) == 5 and all(own.any() for own in owns)
        if combine == "gather":
            assert [own.tobytes() for own in owns] == [delta.tobytes() for delta in decoded]
