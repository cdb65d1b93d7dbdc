"""The versions that a run publishes beside its training."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.training.runs import quick_config, run, summary
from torch import nn

import diloco
from diloco.errors import UserError
from diloco.publishing.differences import content_digest
from diloco.publishing.versions import Version
from diloco.training.config.config import TrainConfig
from diloco.training.loop import train
from diloco.training.versions import RunPublisher


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)


@dataclass
class _State:
    sync: diloco.StreamingDiLoCo
    step: int = 0
    is_over: bool = False


def versions(place: Path, *, follower: diloco.Follower) -> dict[int, Version]:
    """The versions of a place, by number."""
    read = (follower._chain.version(int(path.name)) for path in sorted((place / "versions").iterdir()))
    listed = [follower._background.wait(each, 10, "place") for each in read]
    return {version.number: version for version in listed}


def publisher_of(engine: diloco.StreamingDiLoCo, place: Path, *, every: int = 1) -> RunPublisher:
    """The publisher of a replica alone."""
    config = SimpleNamespace(publish=str(place), publish_every=every, timeout_seconds=10, name="run")
    config.model = SimpleNamespace(published_name=lambda name: name)
    world = SimpleNamespace(rendezvous=None, replica=0, rank=0)
    return RunPublisher(config, world, _State(engine))


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
    publisher.finish()
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


@pytest.mark.slow
def test_a_run_of_two_replicas_publishes_its_outer_parameters(folder: Path) -> None:
    flags = ["--name", "published", "--num-tokens", "40960", "--publish", "place", "--publish-every", "2"]
    done = run(folder, *flags)
    assert done.returncode == 0, done.stderr
    outer = load_file(folder / "runs" / "published" / "outer.safetensors")
    with diloco.Follower(str(folder / "place")) as follower:
        version = follower.update()
        assert version is not None and version.facts == {"run": "published", "final": True}
        assert version.step == summary(folder / "runs" / "published")["num_steps"] and version.number > 1
        assert content_digest(dict(follower.state)) == content_digest(
            {name: tensor.bfloat16() for name, tensor in outer.items()}
        )


def test_data_parallel_publishes_its_parameters(tmp_path: Path, small_corpus: Path) -> None:
    place = tmp_path / "place"
    settings = {"method": "data_parallel", "num_replicas": 1, "num_tokens": 32 * 8 * 12}
    config = quick_config(tmp_path, small_corpus, publish=str(place), publish_every=3, **settings)
    assert train(config) is not None
    with diloco.Follower(str(place)) as follower:
        version = follower.update()
        assert version is not None and version.facts["final"] and version.step == config.num_steps
        steps = {each.step for each in versions(place, follower=follower).values()}
    assert steps > {0, version.step} and all(step % 3 == 0 for step in steps - {version.step})


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
