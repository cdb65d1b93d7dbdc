"""The rounds of one replica by a script of offers and decisions; of real runs see test_elastic.py.

Legend: θ the replica's parameters, Θ the outer parameters, Δ the outer gradient, N elements.
"""

from collections.abc import Sequence

import pytest
import torch
from tests.engine.cases import parts_of
from torch import Tensor, nn

import diloco
from diloco.engine.elastic import ElasticMembership
from diloco.outer.cohort import Cohort
from diloco.rendezvous.contract import Content, Decision, Form, Joined, News, Offer, Payload, StoredSnapshot
from diloco.rendezvous.log.entries import Rules

N, SLOT, ALPHA = 4, 7, 0.25


class Script:
    """A rendezvous, and a seat in it, whose log is written by a test."""

    def __init__(self) -> None:
        self.payloads: list[Tensor] = []
        self.decisions: list[Decision] = []

    def join(self, facts: object, form: Form, *, sync_every: int) -> Joined:
        return Joined(
            seat=self,
            run="",
            rules=Rules(num_fragments=1),
            replica=0,
            slot=SLOT,
            start=0,
            step_tokens=1 << 20,
            most_steps=1 << 20,
            slot_rounds=[0],
            snapshots={},
            form=form,
            num_decisions=0,
        )

    def offer(self, offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
        self.payloads += payloads

    def step(
        self, num_steps: int, taken_rounds: Sequence[tuple[int, int]], *, room: int, **others: object
    ) -> News:
        taken, self.decisions = self.decisions, []
        return News(decisions=taken, rounds=[0])


def member_of(script: Script) -> tuple[ElasticMembership, Tensor]:
    """A replica with a model of one fragment, and its θ."""
    model = nn.Linear(N, 1, bias=False)
    parts = parts_of(
        model,
        sync_every=8,
        overlap_steps=1,
        fragments=diloco.whole(model),
        outer=diloco.Nesterov(lr=0.5, momentum=0.0),
        mixing=ALPHA,
    )
    return ElasticMembership(parts, script), model.weight.detach().view(N)


def snapshot_after(round: int, outer_N: Tensor) -> StoredSnapshot:
    return StoredSnapshot(
        round=round, name="snapshots/0/2-", vectors={"outer": outer_N, "velocity": torch.zeros(N)}
    )


def decision(
    member: ElasticMembership, round: int, content: Content | StoredSnapshot, *, own_seq: int
) -> Decision:
    return Decision(
        number=10 + round,
        fragment=0,
        round=round,
        before=member.base(0),
        cohort=Cohort.weighted({0: 1}),
        content=content,
        base_rounds={0: 0},
        own_seq=own_seq,
        with_snapshot=False,
    )


def step(member: ElasticMembership) -> None:
    member.replica.num_steps += 1
    member.replica.tokens += 8
    member.take_decided(wait=False)


@pytest.mark.parametrize("counted_in", [2, 3])
def test_a_payload_is_merged_once_with_the_round_that_counted_it(counted_in: int) -> None:
    script = Script()
    member, theta_N = member_of(script)
    step(member)
    first_N, move_N = theta_N.clone(), torch.arange(1.0, N + 1)
    theta_N += move_N
    member.send(0)
    # A snapshot of round 2 comes in the place of round 1.
    outer_N, own_seq = first_N + 10, 0 if counted_in == 2 else -1
    script.decisions = [decision(member, 1, snapshot_after(2, outer_N), own_seq=own_seq)]
    step(member)
    if counted_in == 2:
        assert member.counted[0] == (8, 1) and not member.in_flight
        torch.testing.assert_close(theta_N, ALPHA * (first_N + move_N) + (1 - ALPHA) * outer_N)
        return
    torch.testing.assert_close(theta_N - outer_N, move_N)
    assert member.counted[0] == (0, 0) and not member.uncounted_fragments()
    own = Content(payloads={0: Payload(script.payloads[0])}, bytes_received=0)
    script.decisions = [decision(member, 3, own, own_seq=0)]
    step(member)
    assert member.counted[0] == (8, 1) and not member.in_flight
    new_N = outer_N + 0.5 * move_N
    torch.testing.assert_close(member.replica.state.use("outer", 0), new_N)
    torch.testing.assert_close(theta_N, ALPHA * (outer_N + move_N) + (1 - ALPHA) * new_N)
