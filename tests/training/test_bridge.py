"""Bridges: regions of replicas that come and go, each of which is a replica of an outer run.

Legend: P fragments, Θ_o and Θ_r the parameters of the outer run and of a region, by fragment.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.rendezvous.replay import payload_of, replayed
from tests.rendezvous.replicas import P, Replica, new_model, theta0

import diloco
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica import Replica as Parts
from diloco.engine.replica import outer_state
from diloco.engine.settings import settings_of
from diloco.training.bridge import Bridge, Region

PLAIN = "nesterov:lr=1,momentum=0"
PACE = {"poll_seconds": 0.004, "timeout_seconds": 20.0, "snapshot_rounds": 1000}


def parts(*, combine: str = "gather", **settings) -> Parts:
    model = new_model()
    timing = {name: settings.pop(name) for name in ("sync_every", "overlap_steps")}
    of_engine = settings_of(
        model,
        fragments=diloco.sequential(model, layers_per_fragment=1),
        schedule_for=lambda num_fragments: diloco.Schedule(num_fragments=num_fragments, **timing),
        combine=combine,
        error_feedback=None,
        seed=0,
        buffers="own",
        weights="equal",
        **settings,
    )
    parameters = FragmentParameters(model, of_engine.fragments)
    return Parts(of_engine, parameters, outer_state(of_engine, parameters, offload=False))


def trainer(folder: Path, region: str, name: str = "r", **settings) -> Replica:
    """A replica of a region, towards targets of the region's own."""
    target = 10 * ("eu", "us").index(region)
    settings = {"name": name, "bridge": region, "first_target": target, "snapshot_rounds": 1000} | settings
    return Replica(str(folder / region), **settings)


def bridge_of(folder: Path, region: str, *, outer: str | None = None, **settings) -> Bridge:
    """A bridge that sends every second round of its region."""
    inside = diloco.StoreRendezvous(str(folder / region), name=region, bridge=region, **PACE)
    of_region = parts(**({"wire": "fp32"} | settings), outer=None, mixing=0.5, sync_every=6, overlap_steps=0)
    between = diloco.StoreRendezvous(str(folder / "outer"), name=region, **PACE)
    of_outer = parts(wire="fp32", outer=outer, mixing=0.0, sync_every=2 * P, overlap_steps=1)
    return Bridge(Region(of_region, inside), of_outer, between, folder / "notes" / region)


def vanish(bridge: Bridge) -> None:
    """End as a killed process does."""
    for membership in (bridge.region, bridge.outer):
        membership.rendezvous.abort("the test has ended it")


def until(condition: Callable[[], bool], *lives: Replica | Bridge) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        for life in lives:
            life.step()
        time.sleep(0.003)


def shifts(folder: Path, region: str) -> list[dict]:
    """The contributions that were shifts."""
    run = replayed(folder / region, theta0())
    own = {e["author"] for e in run.entries if e["kind"] == "join" and e["body"]["name"] == region}
    return [c for c in run.contributions if c["replica"] in own]


def check_conserved(bridge: Bridge, folder: Path, *, mu: float = 0.9, eta: float = 0.4) -> None:
    """All that a region has learnt was told to the outer run once, or lies in Θ_o − Θ_r; with FP32 on the wires.

    Σ decoded outer gradients of the bridge + Σ moves of Θ_r by averages + Θ_o − Θ_r − s = 0.
    """
    name = bridge.outer.joined.seat.log_thread.state.members[bridge.outer.replica.number].name
    region, outer = replayed(folder / name, theta0()), replayed(folder / "outer", theta0(), eta=eta, mu=mu)
    shifted = {(c["fragment"], c["round"]) for c in shifts(folder, name)}
    own = {e["author"] for e in outer.entries if e["kind"] == "join" and e["body"]["name"] == name}
    for p, (first, now) in enumerate(zip(bridge.region.rounds, bridge.outer.rounds, strict=True)):
        learnt = sum(
            region.outer[p][k] - region.outer[p][k - 1] for k in range(1, first + 1) if (p, k) not in shifted
        )
        told = sum(
            payload_of(folder / "outer", c, "fp32", 0, p, len(theta0()[p]))
            for c in outer.contributions
            if c["replica"] in own and c["fragment"] == p and c["round"] <= now
        )
        np.testing.assert_array_equal(bridge.region.vector(p).numpy(), region.outer[p][first])
        apart = outer.outer[p][now] - region.outer[p][first]
        move = bridge.outer.moved[p].numpy() if p in bridge.outer.moved else 0
        assert np.abs(learnt).max() > 0.05
        np.testing.assert_allclose(told + learnt + apart - move, 0, atol=2e-5)


@pytest.mark.parametrize("combine", ["gather", "reduce_scatter"])
def test_two_regions_of_two_replicas_train_one_model(combine: str, tmp_path: Path) -> None:
    settings = {"combine": combine, "num_shares": 2} if combine != "gather" else {}
    replicas = [trainer(tmp_path, region, name, **settings) for region in ("eu", "us") for name in "ab"]
    bridges = [bridge_of(tmp_path, region, combine=combine) for region in ("eu", "us")]
    last, sums = replicas[0], [np.zeros(len(theta_p)) for theta_p in theta0()]
    number, num_shifts = bridges[0].region.replica.number, 0
    while min(map(min, (bridge.outer.rounds for bridge in bridges))) < 2 or num_shifts < 5:
        for life in (*replicas[1:], *bridges):
            life.step()
        counts = list(last.engine._membership.counted)
        moved = [step.sync.fragment for step in last.step() if step.cohort.members == (number,)]
        for p, (outer_p, theta_p) in enumerate(zip(last.outer(), last.theta(), strict=True)):
            total = outer_p - theta_p + last.progress[p]
            if p in moved and counts[p] == last.engine._membership.counted[p]:
                np.testing.assert_allclose(total, sums[p], atol=2e-5)
                num_shifts += 1
            sums[p] = total
    for bridge in bridges:
        check_conserved(bridge, tmp_path)
        for p in set(range(P)) - bridge.outer.in_flight.keys():
            bridge._follow()
            np.testing.assert_array_equal(bridge.outer.replica.parameters.flat(p), bridge.region.vector(p))
    for replica in replicas:
        replica.vanish()
    for bridge in bridges:
        vanish(bridge)


def test_a_region_alone_goes_its_own_way(tmp_path: Path) -> None:
    replica, bridge = trainer(tmp_path, "eu"), bridge_of(tmp_path, "eu", outer=PLAIN)
    until(lambda: min(bridge.outer.rounds) >= 4, replica, bridge)
    check_conserved(bridge, tmp_path, mu=0.0, eta=1.0)
    moves = [c["norm"] for c in replayed(tmp_path / "outer", theta0(), mu=0.0, eta=1.0).contributions]
    assert min(moves) > 0.1 and all(c["norm"] < 1e-5 for c in shifts(tmp_path, "eu")), "its Θ is the outer Θ"
    replica.vanish()
    vanish(bridge)


class Crash(Exception):
    """The bridge has died."""


@pytest.mark.parametrize("moment", ["sent", "before the shift", "after the shift", "without notes"])
def test_a_bridge_that_dies_goes_on_and_nothing_is_lost_or_counted_twice(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [trainer(tmp_path, region) for region in ("eu", "us")]
    bridge, other = (bridge_of(tmp_path, region) for region in ("eu", "us"))
    until(lambda: min(bridge.outer.rounds) >= 2, *replicas, bridge, other)
    if moment in ("sent", "without notes"):
        until(lambda: len(bridge.outer.in_flight) > 0, *replicas, bridge)
        (p, offer), *_ = bridge.outer.in_flight.items()
        log = bridge.outer.rendezvous.state.fragments[p]
        until(lambda: bridge.outer.rendezvous.state.fragments[p].round > offer.base_round, *replicas, other)
        assert bridge.outer.rounds[p] == offer.base_round and log, "counted, and not taken"
    else:
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(Region, "shift", dies(Region.shift, first=moment == "before the shift"))
            until(lambda: False, *replicas, bridge, other)
    vanish(bridge)
    before, rounds = len(shifts(tmp_path, "eu")), list(other.outer.rounds)
    until(lambda: all(map(int.__lt__, rounds, other.outer.rounds)), *replicas, other)
    if moment == "without notes":
        for note in (tmp_path / "notes" / "eu").iterdir():
            note.unlink()
    again = bridge_of(tmp_path, "eu")
    assert len(shifts(tmp_path, "eu")) > before, "what the other region has learnt meanwhile"
    rounds = list(again.outer.rounds)
    until(lambda: all(map(int.__lt__, rounds, again.outer.rounds)), *replicas, again, other)
    if moment == "without notes":
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check_conserved(again, tmp_path)
    else:
        check_conserved(again, tmp_path)
    check_conserved(other, tmp_path)
    for life in (*replicas,):
        life.vanish()
    vanish(again)
    vanish(other)


def dies(shift: Callable[..., bool], *, first: bool) -> Callable[..., bool]:
    """A shift at whose beginning or end the bridge dies."""

    def dying(region: Region, *arguments) -> bool:
        if not first:
            shift(region, *arguments)
        raise Crash

    return dying


def test_a_region_that_ends_sends_what_is_not_counted_and_the_last_closes_the_outer_run(tmp_path: Path) -> None:
    replicas = [trainer(tmp_path, region) for region in ("eu", "us")]
    bridges = [bridge_of(tmp_path, region) for region in ("eu", "us")]
    until(lambda: min(map(min, (bridge.outer.rounds for bridge in bridges))) >= 1, *replicas, *bridges)
    for replica, bridge in zip(replicas, bridges, strict=True):
        replica.seen(replica.engine.finish(flush=True, close=True))
        until(lambda bridge=bridge: bridge.region.is_closed, bridge)
        bridge.finish()
        check_conserved(bridge, tmp_path)
        apart = [bridge.outer.vector(p) - bridge.region.vector(p) for p in range(P)] if False else []
        assert not apart
        for rendezvous in (replica.exchange, bridge.region.rendezvous, bridge.outer.rendezvous):
            rendezvous.leave()
    outer = replayed(tmp_path / "outer", theta0())
    assert outer.entries[-1]["kind"] == "close" and outer.entries[-1]["author"] == 1
    assert [e["body"]["finished"] for e in outer.entries if e["kind"] == "leave"] == [False, False]
