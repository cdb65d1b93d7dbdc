"""Bridges: regions of replicas that come and go, each of which is a replica of an outer run.

Legend: P fragments, Θ_o and Θ_r the parameters of the outer run and of a region, by fragment.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engine.cases import parts_of
from tests.processes import run_replicas
from tests.rendezvous.cases import Log
from tests.rendezvous.replay import payload_of, replayed
from tests.rendezvous.replicas import P, Replica, new_model, theta0
from tests.training.runs import lines, quick_config, summary

import diloco
from diloco.cli.main import main
from diloco.engine.elastic import ElasticMembership
from diloco.errors import DisagreementError
from diloco.outer.digest import parameters_hash
from diloco.outer.nesterov import DelayedNesterov
from diloco.rendezvous.log.entries import Leave
from diloco.rendezvous.replay import replayed as checked
from diloco.rendezvous.status import Look, RunStatus
from diloco.training import bridge as bridges
from diloco.training.bridge import Bridge, ClosedRegion, Region, asked, num_shifts, run_bridge
from diloco.training.bridge import _replica as replica_of
from diloco.training.config.config import CheckpointConfig, DilocoConfig, ElasticConfig, TrainConfig
from diloco.training.config.resolve import TOKENIZER_DIGEST
from diloco.training.loop import train
from diloco.training.records.store_runs import initial_parameters
from diloco.training.world import rendezvous_of

PLAIN = "nesterov:lr=1,momentum=0"
PACE = {"poll_seconds": 0.03, "timeout_seconds": 20.0, "snapshot_rounds": 1000}


def trainer(folder: Path, region: str, name: str = "r", **settings) -> Replica:
    """A replica of a region, towards targets of the region's own."""
    target = 10 * ("eu", "us").index(region)
    settings = {"name": name, "bridge": region, "first_target": target, "snapshot_rounds": 1000} | settings
    settings |= {"poll_seconds": 0.03}
    return Replica(str(folder / region), **settings)


def bridge_of(
    folder: Path, region: str, *, between: str | None = None, quorum: str | None = None, **settings
) -> Bridge:
    """A bridge that sends every second round of its region; `between` is the outer run's rule."""
    inside = diloco.StoreRendezvous(str(folder / region), name=region, bridge=region, **PACE)
    of_region = parts_of(new_model(), mixing=0.5, sync_every=6, overlap_steps=0, **settings)
    return joined(folder, Region(of_region, inside), region, outer=between, quorum=quorum)


def joined(
    folder: Path,
    inside: Region | ClosedRegion,
    name: str,
    *,
    outer: str | None = None,
    quorum: str | None = None,
) -> Bridge:
    between = diloco.StoreRendezvous(str(folder / "outer"), name=name, quorum=quorum, **PACE)
    pace = between._pace
    between._pace = lambda sync_every: replace(pace(sync_every), drain_seconds=0.4)
    of_outer = parts_of(new_model(), outer=outer, mixing=0.0, sync_every=2 * P, overlap_steps=1)
    return Bridge(inside, of_outer, between, folder / "notes" / name)


def vanish(*lives: Replica | Bridge) -> None:
    """End as killed processes do."""
    for life in lives:
        for rendezvous in (
            [life.exchange] if isinstance(life, Replica) else [life.region.rendezvous, life.outer.rendezvous]
        ):
            rendezvous.abort("the test has ended it")


def until(condition: Callable[[], bool], *lives: Replica | Bridge) -> None:
    deadline, pause_seconds = time.monotonic() + 40, 0.003
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        for life in lives:
            life.step()
        time.sleep(pause_seconds)
        pause_seconds *= 1.01


def until_all_move(rounds: Callable[[], Sequence[int]], *lives: Replica | Bridge) -> None:
    """Let them step until there was an outer step of each fragment."""
    before = list(rounds())
    until(lambda: all(map(int.__lt__, before, rounds())), *lives)


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
        sent = sum(
            payload_of(folder / "outer", c, "fp32", 0, p, len(theta0()[p]))
            for c in outer.contributions
            if c["replica"] in own and c["fragment"] == p and c["round"] <= now
        )
        np.testing.assert_array_equal(bridge.region.vector(p).numpy(), region.outer[p][first])
        apart = outer.outer[p][now] - region.outer[p][first]
        move = bridge.outer.moved[p].numpy() if p in bridge.outer.moved else 0
        assert np.abs(learnt).max() > 1e-3
        np.testing.assert_allclose(sent + learnt + apart - move, 0, atol=2e-5)


@pytest.mark.slow
def test_two_regions_train_one_model(tmp_path: Path) -> None:
    settings = {"combine": "reduce_scatter", "num_shares": 2}
    replicas = [
        trainer(tmp_path, region, name, **settings) for region, name in (("eu", "a"), ("eu", "b"), ("us", "a"))
    ]
    bridges = [bridge_of(tmp_path, region, combine="reduce_scatter") for region in ("eu", "us")]
    last, sums = replicas[0], [np.zeros(len(theta_p)) for theta_p in theta0()]
    number, num_shifts = bridges[0].region.replica.number, 0
    while min(map(min, (bridge.outer.rounds for bridge in bridges))) < 2 or num_shifts < 5:
        for life in (*replicas[1:], *bridges):
            life.step()
        membership, step = last.engine._membership, last.engine.num_steps + 1
        counts, sent, moved = list(membership.counted), dict(membership.in_flight), list[int]()
        for outer_step in last.step():
            p, last_round, _ = outer_step.sync
            if outer_step.cohort.members == (number,):
                moved.append(p)
            elif p in sent and p not in membership.in_flight:
                averages = last.exchange.state.fragments[p].averages
                is_late = any(sent[p].base_round < average < last_round for average in averages)
                assert membership._next_send[p] == (step if is_late else sent[p].step) + 6, (
                    "a shift makes none late"
                )
        for p, (outer_p, theta_p) in enumerate(zip(last.outer(), last.theta(), strict=True)):
            total = outer_p - theta_p + last.progress[p]
            if p in moved and counts[p] == membership.counted[p]:
                np.testing.assert_allclose(total, sums[p], atol=2e-5)
                num_shifts += 1
            sums[p] = total
    for bridge in bridges:
        check_conserved(bridge, tmp_path)
        for p in set(range(P)) - bridge.outer.in_flight.keys():
            bridge._follow()
            np.testing.assert_array_equal(bridge.outer.replica.parameters.flat(p), bridge.region.vector(p))
    vanish(*replicas, *bridges)


def test_a_region_alone_goes_its_own_way_also_where_its_bridge_has_lost_its_notes(tmp_path: Path, caplog) -> None:
    replica, bridge = trainer(tmp_path, "eu"), bridge_of(tmp_path, "eu", between=PLAIN)
    until(lambda: min(bridge.outer.rounds) >= 2, replica, bridge)
    check_conserved(bridge, tmp_path, mu=0.0, eta=1.0)
    moves = [c["norm"] for c in replayed(tmp_path / "outer", theta0(), mu=0.0, eta=1.0).contributions]
    assert max(moves) > 0.5 and all(c["norm"] < 1e-5 for c in shifts(tmp_path, "eu")), "its Θ is the outer Θ"
    vanish(bridge)
    until_all_move(lambda: replica.rounds, replica)
    time.sleep(0.1)  # the last offer is there
    until(lambda: not replica.exchange._seated.log_thread.outbox.offers)  # so that Θ moves by the shift alone
    for note in (tmp_path / "notes" / "eu").iterdir():
        note.unlink()
    again = bridge_of(tmp_path, "eu", between=PLAIN)
    assert caplog.text.count("does not tell what of fragment") == P
    for p in range(P):
        outer_N = again.outer.replica.state.use("outer", p)
        torch.testing.assert_close(again.region.vector(p), outer_N, rtol=0, atol=1e-6)
    until_all_move(lambda: again.outer.rounds, replica, again)
    vanish(replica, again)


@pytest.mark.slow
def test_a_rule_counts_averages_and_no_shifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, rounds = "delayed_nesterov:delay=2", []
    replica, bridge = trainer(tmp_path, "eu", outer=outer), bridge_of(tmp_path, "eu", outer=outer)
    until(
        lambda: all(1 < log.num_shifts < log.round - 3 for log in bridge.region.state.fragments), replica, bridge
    )
    vanish(replica, bridge)
    of_rule = DelayedNesterov.on_average

    def noting(rule, fragment, average, sync, cohort) -> None:
        rounds.append(sync)
        of_rule(rule, fragment, average, sync, cohort)

    monkeypatch.setattr(DelayedNesterov, "on_average", noting)
    replay = checked(str(tmp_path / "eu"), initial=lambda facts: dict(new_model().named_parameters()))
    assert replay.checked.steps == sum(log.round for log in replay.state.fragments), "with the replica's bits"
    for p, log in enumerate(replay.state.fragments):
        own = [sync.round for sync in rounds if sync.fragment == p]
        assert own == [*range(1, log.round - log.num_shifts + 1)] and log.num_shifts


@pytest.mark.slow
def test_a_bridge_comes_back_to_an_outer_run_that_waits_for_all(tmp_path: Path) -> None:
    replicas = [trainer(tmp_path, region) for region in ("eu", "us")]
    bridge, other = (bridge_of(tmp_path, region, quorum="all") for region in ("eu", "us"))
    until(lambda: min(bridge.outer.rounds) >= 1 and bridge.outer.in_flight, *replicas, bridge, other)
    vanish(bridge)
    until_all_move(lambda: replicas[1].rounds, *replicas, other)
    again = bridge_of(tmp_path, "eu", quorum="all")
    until_all_move(lambda: again.outer.rounds, *replicas, again, other)
    check_conserved(again, tmp_path)
    check_conserved(other, tmp_path)
    vanish(*replicas, again, other)


class CrashError(Exception):
    """The bridge has died."""


@pytest.mark.slow
def test_a_bridge_that_dies_goes_on_and_nothing_is_lost_or_counted_twice(tmp_path: Path, monkeypatch) -> None:
    """Once its outer gradient is counted, before it has taken that; around a shift; and as its region ends."""
    replicas = [trainer(tmp_path, region) for region in ("eu", "us")]
    bridge, other = (bridge_of(tmp_path, region) for region in ("eu", "us"))
    outer_log = other.outer.rendezvous
    until(lambda: min(bridge.outer.rounds) >= 1, *replicas, bridge, other)
    for moment in ("sent", "before the shift", "after the shift"):
        if moment == "sent":
            until(lambda bridge=bridge: len(bridge.outer.in_flight) > 0, *replicas, bridge)
            (p, offer), *_ = bridge.outer.in_flight.items()
            until(lambda p=p, base=offer.base_round: outer_log.state.fragments[p].round > base, *replicas, other)
            assert bridge.outer.rounds[p] == offer.base_round, "counted, and not taken"
        else:
            with monkeypatch.context() as patch, pytest.raises(CrashError):
                shift = bridge.region.shift  # not the other's
                patch.setattr(bridge.region, "shift", dies(shift, first=moment == "before the shift"))
                until(lambda: False, *replicas, bridge, other)
        vanish(bridge)
        before = len(shifts(tmp_path, "eu"))
        until_all_move(lambda: other.outer.rounds, *replicas, other)
        bridge = bridge_of(tmp_path, "eu")
        assert len(shifts(tmp_path, "eu")) > before, f"{moment}: what the other region has learnt meanwhile"
        until_all_move(lambda bridge=bridge: bridge.outer.rounds, *replicas, bridge, other)
        check_conserved(bridge, tmp_path)
        check_conserved(other, tmp_path)
    until(lambda: len(bridge.outer.in_flight) > 0, *replicas, bridge, other)
    vanish(bridge)
    until_all_move(lambda: replicas[0].rounds, *replicas, other)
    replicas[0].seen(replicas[0].engine.finish(flush=True, close=True))
    replicas[0].exchange.leave()
    back = joined(tmp_path, closed_region(tmp_path), "eu")
    back.finish()
    check_conserved(back, tmp_path)
    assert not back.outer.uncounted_fragments() and not back.outer.rendezvous.state.closed, "the other goes on"
    back.outer.rendezvous.leave()
    vanish(replicas[1], other)


def dies(shift: Callable[..., bool], *, first: bool) -> Callable[..., bool]:
    """A shift at whose beginning or end the bridge dies."""

    def dying(*arguments) -> bool:
        if not first:
            shift(*arguments)
        raise CrashError("it has died")

    return dying


@pytest.mark.slow
def test_a_region_that_ends_sends_what_is_not_counted_and_the_last_closes_the_outer_run(tmp_path: Path) -> None:
    replicas = [trainer(tmp_path, region) for region in ("eu", "us")]
    bridges = [bridge_of(tmp_path, region) for region in ("eu", "us")]
    until(lambda: min(map(min, (bridge.outer.rounds for bridge in bridges))) >= 1, *replicas, *bridges)
    for replica, bridge in zip(replicas, bridges, strict=True):
        replica.seen(replica.engine.finish(flush=True, close=True))
        until(lambda bridge=bridge: bridge.region.is_closed, bridge)
        bridge.finish()
        check_conserved(bridge, tmp_path)
        for rendezvous in (replica.exchange, bridge.region.rendezvous, bridge.outer.rendezvous):
            rendezvous.leave()
    outer = replayed(tmp_path / "outer", theta0())
    assert outer.entries[-1]["kind"] == "close" and outer.entries[-1]["author"] == 1
    assert [e["body"]["finished"] for e in outer.entries if e["kind"] == "leave"] == [False, False]


def closed_region(folder: Path) -> ClosedRegion:
    replay = checked(str(folder / "eu"), initial=lambda facts: dict(new_model().named_parameters()))
    parameters = parts_of(new_model(), mixing=0.0, sync_every=6, overlap_steps=0).parameters
    return ClosedRegion(replay, [parameters.flat_of(p, replay.parameters()) for p in range(P)])


def test_a_region_that_ended_before_its_bridge_was_started_is_sent(tmp_path: Path, caplog) -> None:
    replica = trainer(tmp_path, "eu")
    until(lambda: min(replica.rounds) >= 1, replica)
    replica.seen(replica.engine.finish(flush=True, close=True))
    replica.exchange.leave()
    bridge = joined(tmp_path, closed_region(tmp_path), "eu")
    bridge.finish()
    check_conserved(bridge, tmp_path)
    assert min(bridge.outer.rounds) == 1 and "is lost" not in caplog.text
    bridge.outer.rendezvous.leave()


def test_a_region_that_ends_while_its_bridge_starts_is_over_for_it(tmp_path, small_corpus, monkeypatch) -> None:
    region, outer = str(tmp_path / "eu"), str(tmp_path / "outer")
    elastic = ElasticConfig(bridge="eu-bridge")
    config = quick_config(tmp_path, small_corpus, num_replicas=1, name="a", rendezvous=region, elastic=elastic)

    class LookBefore(Look):
        """The region as it was just before it ended."""

        def again(self) -> RunStatus:
            status = super().again()
            if not status.finished:
                replica.finish(flush=False, close=True)
                rendezvous.leave()
            return status

    monkeypatch.setattr(bridges, "Look", LookBefore)
    with rendezvous_of(config) as rendezvous:
        replica = ElasticMembership(replica_of(config.diloco, config), rendezvous)
        run_bridge(replace(asked(region, outer), num_replicas=1, runs=tmp_path / "runs", timeout_seconds=20.0))
    (member,) = checked(outer, initial=initial_parameters).state.members
    assert member.name == "eu-bridge" and member.left


def test_the_rounds_of_a_replica_that_had_the_slot_before_are_no_shifts() -> None:
    def shifts_so_far() -> int:
        return num_shifts(ClosedRegion(SimpleNamespace(state=log.state), theta0()[:1]), 0)

    log = Log(num_fragments=1, num_slots=2, bridge="eu").join("a", "eu").rounds(1, 0)
    log.add(Leave(finished=False), 1)
    log.join("b").rounds(1, 2)
    log.add(Leave(finished=False), 0)
    log.join("eu")
    assert [member.slot for member in log.state.members] == [0, 1, 1, 0], "b has the bridge's, and that a's"
    assert shifts_so_far() == 0
    log.outer(log.contribution(3))
    assert shifts_so_far() == 1


def test_a_region_with_another_tokenizer_is_refused(tmp_path, small_corpus, monkeypatch) -> None:
    monkeypatch.setattr(Bridge, "step", dies(lambda bridge: True, first=True))
    with ExitStack() as stack:
        for region in ("eu", "us"):
            config = quick_config(
                tmp_path,
                small_corpus,
                name="a",
                num_replicas=1,
                rendezvous=str(tmp_path / region),
                num_tokens=STEPS * 8 * 32,
                elastic=ElasticConfig(bridge=region),
            )
            rendezvous = stack.enter_context(rendezvous_of(config))
            rendezvous._facts |= {TOKENIZER_DIGEST: 64 * "a"} if region == "us" else {}
            ElasticMembership(replica_of(config.diloco, config), rendezvous)
            bridge = asked(str(tmp_path / region), str(tmp_path / "outer"))
            error = CrashError if region == "eu" else DisagreementError
            with pytest.raises(error, match="tokenizer" if region == "us" else "died"):
                run_bridge(replace(bridge, runs=tmp_path / "runs", timeout_seconds=20.0))


STEPS = 36


def be_a_process(configs: list[TrainConfig], folder: Path) -> None:
    """One of four replicas of two regions, or a bridge; the second bridge is killed, and starts again."""
    number, outer = int(os.environ["DILOCO_REPLICA"]), str(folder / "outer")
    os.chdir(folder)
    if number < 4:
        train(configs[number], on_step=lambda metrics: time.sleep(0.02))
        return
    region, has_died = str(folder / ("eu" if number == 4 else "us")), folder / "has-died"
    while not Path(region, "log", "0000000000").exists() or (number == 6 and not has_died.exists()):
        time.sleep(0.01)
    if number != 5:
        main(["bridge", region, outer, "--num-replicas", "2", "--diloco.sync-every", "6"])
        return
    config = asked(region, outer)
    num_steps = 0

    def die(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    run_bridge(
        replace(config, num_replicas=2, diloco=replace(config.diloco, sync_every=6), timeout_seconds=30.0),
        on_step=die,
    )


@pytest.mark.slow
def test_processes_of_two_regions_and_their_bridges_train_one_model(tmp_path, small_corpus, capsys) -> None:
    rows = small_corpus.read_text().splitlines(keepends=True)
    configs = []
    for place, region in enumerate(("eu", "us")):
        text = tmp_path / f"{region}.jsonl"
        text.write_text("".join(rows[place::2]))
        config = quick_config(
            tmp_path,
            text,
            rendezvous=str(tmp_path / region),
            num_tokens=STEPS * 8 * 32,
            diloco=DilocoConfig(sync_every=4, layers_per_fragment=1, overlap_steps=1),
            elastic=ElasticConfig(bridge=f"{region}-bridge"),
            checkpoint=CheckpointConfig(every_steps=0),
        )
        configs += [replace(config, name=f"{region}-{name}") for name in "ab"]
    run_replicas(be_a_process, 7, configs, tmp_path, joined=False, mortal=[5], timeout_seconds=120)
    counted = {}
    for region in ("eu", "us"):
        replay = checked(str(tmp_path / region), initial=initial_parameters)
        counted[f"{region}-bridge"] = replay.state.tokens // P * P
        hashes = {summary(tmp_path / "runs" / f"{region}-{name}")["outer_hash"] for name in "ab"}
        assert hashes == {parameters_hash(replay.parameters())}
        steps = [
            step for line in lines(tmp_path / "runs" / f"{region}-a", 0) for step in line.get("outer_steps", [])
        ]
        assert {*steps[-1]["contributors"]} <= {f"{region}-a", f"{region}-b", f"{region}-bridge"}
        assert any(f"{region}-bridge" in step["contributors"] for step in steps)
    outer = checked(str(tmp_path / "outer"), initial=initial_parameters)
    assert outer.state.closed and outer.checked.steps == outer.state.num_outer > 5
    names = [member.name for member in outer.state.members]
    assert sorted(names) == ["eu-bridge", "us-bridge", "us-bridge"]
    tokens = {name: sum(m.tokens for m in outer.state.members if m.name == name) for name in names}
    assert tokens == counted, "each token once"
    capsys.readouterr()
    losses = []
    for store in ("outer", "eu", "us"):
        prepared = configs[2 * (store == "us")].data.prepared
        main(["eval", str(tmp_path / store), "--prepared", str(prepared), "--json"])
        losses.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert losses[0] < 1.1 * min(losses[1:]) < 4, losses
