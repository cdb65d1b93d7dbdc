"""The versions that a run publishes beside its training."""

import os
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tests.processes import run_replicas
from tests.training.runs import quick_config
from torch import nn

import diloco
from diloco.errors import UserError
from diloco.outer.step import OuterStep
from diloco.publishing.differences import content_digest
from diloco.publishing.publisher import Publisher
from diloco.publishing.versions import Version
from diloco.rendezvous.log.keys import write_key
from diloco.rendezvous.store import StoreError
from diloco.schedule import Sync
from diloco.training.config.config import TrainConfig
from diloco.training.loop import train
from diloco.training.processes import STORE
from diloco.training.records.versions import RunPublisher

BRIDGE = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)


@dataclass
class _State:
    synchronizer: diloco.StreamingDiLoCo
    step: int = 0
    is_over: bool = False


def versions(place: Path, *, follower: diloco.Follower) -> dict[int, Version]:
    """The versions of a place, by number."""
    read = (follower._chain.version(int(path.name)) for path in sorted((place / "versions").iterdir()))
    listed = [follower._background.wait(each, 10, "place") for each in read]
    return {version.number: version for version in listed}


def publisher_of(
    engine: diloco.StreamingDiLoCo, place: Path, *, every: int = 1, rendezvous: object = None, step: int = 0
) -> RunPublisher:
    """The publisher of a replica, alone or in the run of a rendezvous."""
    config = SimpleNamespace(publish=str(place), publish_every=every, timeout_seconds=10, name="run")
    config.model = SimpleNamespace(published_name=lambda name: name)
    world = SimpleNamespace(rendezvous=rendezvous, replica=0, rank=0)
    return RunPublisher(config, world, _State(engine, step))


@pytest.mark.parametrize("overlap, every", [(0, 1), (4, 1), (4, 2)])
def test_a_version_has_every_fragment_after_the_same_round(tmp_path: Path, overlap: int, every: int) -> None:
    model, place = Net(), tmp_path / "place"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = diloco.LoopbackExchange()
    engine = diloco.StreamingDiLoCo(model, sync_every=6, overlap_steps=overlap, exchange=exchange)
    num_fragments, names = len(engine.settings.fragments), [f.parameters for f in engine.settings.fragments]
    publisher = publisher_of(engine, place, every=every)
    after: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in range(num_fragments)]
    for step in range(1, 40):
        model.head(model.blocks[step % 3](torch.full((1, 4), step / 40))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer_steps = engine.step()
        for p, taken in ((outer_step.sync.fragment, outer_step.sync.round) for outer_step in outer_steps):
            outer = engine.outer_parameters()
            after[p][taken] = {name: outer[name].bfloat16() for name in names[p]}
        publisher.after(step, outer_steps)
        publisher._thread.join()
    engine.finish()
    publisher.finish()()
    publisher.close()
    with diloco.Follower(str(place)) as follower:
        listed = versions(place, follower=follower)
    rounds = {version.facts["round"]: version.digest for version in listed.values() if "round" in version.facts}
    whole = min(map(len, after))
    assert whole > 4 and [*rounds] == [taken for taken in range(whole + 1) if taken % every == 0]
    for taken, digest in rounds.items():
        if taken:
            parts = (after[p][taken] for p in range(num_fragments))
            assert digest == content_digest({name: tensor for part in parts for name, tensor in part.items()})
    final = {name: tensor.bfloat16() for name, tensor in engine.outer_parameters().items()}
    last = listed[max(listed)]
    assert last.facts == {"run": "run", "final": True} and last.digest == content_digest(final)


def test_a_group_that_is_saved_in_the_midst_of_a_round_publishes_it_after_a_resume(tmp_path: Path) -> None:
    """Two fragments with H = 6 are sent at steps 6, 9, 12, 15, …: step 12 is in the midst of round 2."""
    digests = []
    for stops in ((), (12,), (7, 13)):
        model, place = Net(), tmp_path / f"place-{len(stops)}"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        new = partial(diloco.StreamingDiLoCo, sync_every=6, overlap_steps=1, exchange=diloco.LoopbackExchange())
        engine = new(model)
        publisher = publisher_of(engine, place)
        for step in range(1, 24):
            model.head(model.blocks[step % 3](torch.full((1, 4), step / 40))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.after(step, engine.step())
            publisher._thread = publisher._thread and publisher._thread.join()
            if step in stops:
                saved = engine.state_dict()
                publisher.close()
                engine = new(model)
                engine.load_state_dict(saved)
                publisher = publisher_of(engine, place, step=step)
        publisher.close()
        with diloco.Follower(str(place)) as follower:
            digests.append({v.facts["round"]: v.digest for v in versions(place, follower=follower).values()})
    assert [*digests[0]] == [0, 1, 2, 3] and digests[1] == digests[2] == digests[0]


def test_a_round_of_which_a_slow_first_member_has_no_copy_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
    publisher = publisher_of(engine, tmp_path / "place", rendezvous=rendezvous_of(0, "a"))
    # Fragment 0 takes round 2 alone, and rounds 3 and 4 at once; fragment 1 takes rounds 2 to 4, one by one.
    for step, taken in enumerate((2, 3, 4)):
        fragments = [(0, 2)] if taken == 2 else [(0, 3), (0, 4)] if taken == 3 else []
        publisher.after(step, [outer_step(*each, (0, 1)) for each in [*fragments, (1, taken)]])
        if publisher._thread is not None:
            publisher._thread.join()
    publisher.close()
    assert [r.getMessage().rpartition("; ")[2] for r in caplog.records if "skipped" in r.message] == [
        "rounds 3 were skipped"
    ]
    with diloco.Follower(str(tmp_path / "place")) as follower:
        listed = versions(tmp_path / "place", follower=follower)
    assert [version.facts["round"] for version in listed.values()] == [2, 4]


def outer_step(fragment: int, round: int, members: tuple[int, ...]) -> OuterStep:
    cohort = SimpleNamespace(members=members)
    return cast("OuterStep", SimpleNamespace(sync=Sync(fragment, round, 0), cohort=cohort))


def rendezvous_of(replica: int, run: str) -> SimpleNamespace:
    """A rendezvous in which a run of two fragments has ended."""
    logs = (SimpleNamespace(round=4), SimpleNamespace(round=3))
    state = SimpleNamespace(creator="", allowed=(), members=(), fragments=logs, run=run)
    state.is_bridge = lambda replica: replica == BRIDGE
    return SimpleNamespace(replica=replica, is_closed=True, state=state)


def test_files_that_can_not_be_read_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files_of(config: object) -> dict[str, bytes]:
        raise UserError("the tokenizer is gone")

    monkeypatch.setattr("diloco.training.records.versions.files_of", files_of)
    engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
    publisher = publisher_of(engine, tmp_path / "place")
    assert publisher._thread is not None
    publisher._thread.join()
    with pytest.raises(UserError, match="the tokenizer is gone"):
        publisher.after(1, engine.step())
    publisher.close()


def test_a_place_with_newer_versions_of_another_run_ends_the_run(tmp_path: Path) -> None:
    with diloco.Publisher(str(tmp_path / "place")) as publisher:
        publisher.publish(Net(), step=1000)
    engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
    ours = publisher_of(engine, tmp_path / "place", rendezvous=rendezvous_of(0, "a"))
    ours.after(20, [outer_step(fragment, 3, (0, 1)) for fragment in (0, 1)])
    ours._thread.join()
    with pytest.raises(UserError, match="version 0 of step 1000 is published already, by another run: publish at"):
        ours.after(21, ())
    ours.close()


def test_two_runs_do_not_take_turns_in_one_place(tmp_path: Path) -> None:
    """The second run is at a later step than the newest version of the first."""
    place = tmp_path / "place"
    for log, taken in (("a", 3), ("b", 4), ("a", 5)):
        engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
        ours = publisher_of(engine, place, rendezvous=rendezvous_of(0, log))
        ours.after(20, [outer_step(fragment, taken, (0, 1)) for fragment in (0, 1)])
        ours._thread.join()
        if log == "b":
            with pytest.raises(UserError, match="version 0 of step 18 is published already, by another run"):
                ours.after(21, ())
        ours.close()
    with diloco.Follower(str(place)) as follower:
        assert [version.facts["log"] for version in versions(place, follower=follower).values()] == ["a", "a"]


def test_a_key_that_was_shut_out_publishes_for_the_run_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    own, former = (write_key(tmp_path / name) for name in ("own.key", "former.key"))
    with diloco.Publisher(str(place), key=str(tmp_path / "former.key")) as publisher:
        publisher.publish(Net(), step=1 << 40, facts={"log": "a"})
    monkeypatch.setenv("DILOCO_KEY", str(tmp_path / "own.key"))
    rendezvous, members = rendezvous_of(0, "a"), [SimpleNamespace(key=key) for key in (own, former)]
    vars(rendezvous.state).update(creator=own, allowed=(own,), members=members)
    engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
    ours = publisher_of(engine, place, rendezvous=rendezvous)
    ours.after(20, [outer_step(fragment, 3, (0, 1)) for fragment in (0, 1)])
    ours._thread.join()
    ours.close()
    with diloco.Follower(str(place), public_key=own) as follower:
        assert (version := follower.update()) is not None and version.step == 18


def test_a_last_version_that_is_not_published_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers would take the version before it for the run's result."""
    engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
    publisher = publisher_of(engine, tmp_path / "place")
    publish = publisher.finish()

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the store is full")

    publisher._thread.join()
    monkeypatch.setattr(Publisher, "publish", refuse)
    with pytest.raises(
        StoreError, match=r"^the last parameters .* not published: the store is full; .* resume it"
    ):
        publish()
    publisher.close()


def test_replicas_of_a_store_agree_who_publishes_and_what_is_last(tmp_path: Path) -> None:
    """One takes the outer steps of a round in another order than the other, and has taken fewer inner steps."""
    steps, place = [outer_step(0, 3, (0, 1)), outer_step(1, 3, (1, 2))], tmp_path / "place"
    publishers = list[RunPublisher]()
    for replica, order in ((0, steps), (1, steps[::-1])):
        engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
        assert len(engine.settings.fragments) == 2
        publishers.append(publisher_of(engine, place, rendezvous=rendezvous_of(replica, "a")))
        publishers[-1].after(10 - 9 * replica, order)
    assert [publisher._thread is not None for publisher in publishers] == [False, True]
    publishers[1]._thread.join()
    for publisher, step in zip(publishers, (10, 1), strict=True):
        publisher.state.step = step
        publisher.finish()()
        publisher.close()
    with diloco.Follower(str(place)) as follower:
        listed = versions(place, follower=follower)
    assert [(version.step, version.facts.get("final")) for version in listed.values()] == [(18, None), (25, True)]


def test_a_round_that_ends_with_a_shift_is_published_by_the_first_of_the_round_before(tmp_path: Path) -> None:
    """The bridge is a member of the shift, and publishes nothing."""
    place, published = tmp_path / "place", list[list[int]]()
    for replica in (0, 1):
        engine = diloco.StreamingDiLoCo(Net(), sync_every=6, exchange=diloco.LoopbackExchange())
        publisher = publisher_of(engine, place, rendezvous=rendezvous_of(replica, "a"))
        published.append([])
        for taken, members in ((2, (1, 2)), (3, (BRIDGE,)), (4, (0, 1)), (5, (BRIDGE,))):
            publisher.after(taken, [outer_step(fragment, taken, members) for fragment in (0, 1)])
            if publisher._thread is not None:
                publisher._thread = publisher._thread.join()
                published[replica].append(taken)
        publisher.close()
    assert published == [[4, 5], [2, 3]]


def take_long_to_publish(config: TrainConfig) -> bool:
    place = {"RANK": os.environ["DILOCO_REPLICA"], "LOCAL_RANK": os.environ["DILOCO_REPLICA"], "WORLD_SIZE": "2"}
    os.environ |= place | {STORE: str(config.runs.parent / "meeting")}
    publish = Publisher.publish

    def slow(self: Publisher, *arguments: Any, facts: dict, **options: Any) -> Version:
        time.sleep(2 * config.timeout_seconds if facts.get("final") else 0)
        return publish(self, *arguments, facts=facts, **options)

    Publisher.publish = slow
    return train(config) is not None


@pytest.mark.slow
def test_the_last_version_is_that_of_the_run_and_may_take_longer_than_others_wait(
    tmp_path: Path, small_corpus: Path
) -> None:
    settings = {"num_replicas": 2, "num_tokens": 32 * 8 * 30, "publish": str(tmp_path / "place")}
    config = quick_config(tmp_path, small_corpus, name="x", publish_every=2, **settings)
    config = replace(config, timeout_seconds=2.0)
    assert run_replicas(take_long_to_publish, 2, config, joined=False) == [True, True]
    outer = load_file(config.directory / "outer.safetensors")
    with diloco.Follower(str(tmp_path / "place")) as follower:
        version = follower.update()
        assert version.facts == {"run": "x", "final": True} and version.step == 30 and version.number > 1
        expected = content_digest({name: tensor.bfloat16() for name, tensor in outer.items()})
        assert content_digest(dict(follower.state)) == expected


def test_data_parallel_publishes_its_parameters(tmp_path: Path, small_corpus: Path) -> None:
    place = tmp_path / "place"
    settings = {"method": "data_parallel", "num_replicas": 1, "num_tokens": 32 * 8 * 12}
    config = quick_config(tmp_path, small_corpus, publish=str(place), publish_every=3, **settings)

    def wait_until_published(_: object) -> None:
        for thread in threading.enumerate():
            if thread.name == "diloco publish":
                thread.join(20)

    assert train(config, on_step=wait_until_published) is not None
    with diloco.Follower(str(place)) as follower:
        version = follower.update()
        assert version is not None and version.facts["final"] and version.step == config.num_steps == 12
        assert [each.step for each in versions(place, follower=follower).values()] == [0, 3, 6, 9, 12]


def test_a_place_of_another_model_ends_the_run(tmp_path: Path) -> None:
    with diloco.Publisher(str(tmp_path / "place")) as publisher:
        publisher.publish({"another": torch.ones(2)}, step=1)
    engine = diloco.StreamingDiLoCo(Net(), sync_every=6, overlap_steps=0, exchange=diloco.LoopbackExchange())
    publisher = publisher_of(engine, tmp_path / "place")
    publisher._thread.join()
    with pytest.raises(UserError, match=r"has version 0 of another model: another is missing: publish this one"):
        publisher.after(1, ())
    publisher.close()


def test_what_cannot_be_published_is_refused(tmp_path: Path, small_corpus: Path) -> None:
    with pytest.raises(UserError, match="publish_every must be at least 1, not 0"):
        quick_config(tmp_path, small_corpus, publish_every=0)
    with pytest.raises(UserError, match="publish_every=2 means nothing without publish: set that"):
        quick_config(tmp_path, small_corpus, publish_every=2)
    with pytest.raises(UserError, match="ftp://a: give a directory, or s3://bucket/prefix"):
        quick_config(tmp_path, small_corpus, publish="ftp://a")
    assert TrainConfig.publish is None
