from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco.data.config import DataConfig
from diloco.errors import ExchangeError, UserError
from diloco.publishing.publisher import Publisher
from diloco.training import prepare
from diloco.training.config.config import CheckpointConfig, DilocoConfig, ElasticConfig, TrainConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import Budget, resolved
from diloco.training.prepare import prepare_run
from diloco.training.records.runs import claim, own_run, resumable


@pytest.fixture(scope="module")
def tiny(folder) -> TrainConfig:
    """The recipe on the folder's text."""
    config = recipe("tiny")
    data = replace(config.data, train=(str(folder / "text.jsonl"),), held_out_fraction=0.1, cache=folder / "data")
    return replace(config, data=data, runs=folder / "runs")


def diloco(**values) -> dict:
    return {"diloco": replace(recipe("tiny").diloco, **values)}


def text(**values) -> dict:
    return {"data": DataConfig(**values)}


MISTAKES = {
    "period": (diloco(sync_every=0), "sync_every=0 must be at least 1"),
    "second wire": (
        diloco(combine="reduce_scatter:e9"),
        "diloco.combine=reduce_scatter:e9: 'e9' is not a codec",
    ),
    "never sent": (diloco(sync_every=58), "fragment 2 is first sent at step 96, and the run has 60"),
    "no whole gradient": (
        {"log_layer_cosine": True, **diloco(combine="reduce_scatter")},
        "log_layer_cosine means nothing to diloco.combine=reduce_scatter",
    ),
    "shares of nothing": (
        {"rendezvous": "store", "name": "a", "elastic": ElasticConfig(num_shares=4)},
        "elastic.num_shares=4 with rendezvous=store: gather cuts nothing into shares",
    ),
    "two overlaps of one replica": (
        {"rendezvous": "store", "name": "a", **diloco(overlap_steps=(1, 2))},
        r"overlap_steps=\(1, 2\) with replicas that come and go: give each replica its own number",
    ),
    "one fragment": (
        {"method": "diloco", "diloco": DilocoConfig(sync_every=10, layers_per_fragment=1)},
        "diloco.layers_per_fragment=1 means nothing to one whole fragment",
    ),
    "chosen twice": (
        diloco(outer="auto", outer_momentum=0.5),
        "diloco.outer=auto chooses lr and momentum, and auto:momentum=0.5 gives them: leave one out",
    ),
    "chosen for nobody knows how many": (
        {"rendezvous": "store", "name": "a", "num_replicas": 1, **diloco(outer="auto")},
        "diloco.outer=auto chooses by the number of replicas, which no replica knows where they come and go",
    ),
    "no outer step": (
        {"method": "data_parallel", **diloco(mixing=0.75)},
        "diloco.mixing means nothing to data_parallel",
    ),
    "nobody to connect to": ({"num_replicas": 1, "num_connections": 2}, "num_connections=2 means nothing to one"),
    **{
        repr(name): ({"name": name}, r"name=.* must be 1 to 64 letters, digits, dots, dashes and underscores")
        for name in ("../../elsewhere", "a\n", ".hidden", "x" * 65, "é")
    },
    "a run twice": ({"name": "streaming"}, "already holds a run: choose another name, or resume it"),
    "long sequences": ({"sequence_length": 1 << 20, "num_tokens": 1 << 27}, " takes 1048577: add text"),
    "no text": (text(train=("nowhere.txt",)), "'nowhere.txt' matches no file"),
    "empty text": (text(train=("empty.txt",)), "empty.txt"),
    # Refused before the text is read, of which there is none.
    "wire": (
        text(train=("nowhere.txt",)) | diloco(wire="e9m9"),
        "diloco.wire=e9m9: 'e9m9' is not a codec: choose one of fp32, bf16",
    ),
    "overlap": (
        text(train=("nowhere.txt",), tokenizer="bpe:300") | diloco(overlap_steps=10),
        "overlap_steps=10 must be at least 0 and below",
    ),
    "large vocabulary": (
        text(train=("nowhere.txt",)) | {"model": replace(recipe("tiny").model, vocab_size=2048)},
        "more than twice the tokenizer's 257",
    ),
    "no step": (
        text(train=("nowhere.txt",)) | {"budget": Budget(7, "tokens")},
        "7 tokens are less than half a step",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_before_anything_is_started(tiny, folder, streaming, changes, sentence, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "empty.txt").touch()
    before, fields = sorted(folder.glob("runs/*")), dict(changes)
    budget = fields.pop("budget", None)
    with pytest.raises(UserError, match=sentence):
        prepare_run(replace(tiny, **fields), budget=budget)
    assert sorted(folder.glob("runs/*")) == before and not (folder.parent / "elsewhere").exists()


@pytest.mark.parametrize("is_resume", [False, True])
def test_what_needs_a_gpu_is_refused_without_one(tiny, streaming, monkeypatch, is_resume):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = resumable(streaming) if is_resume else tiny
    for changes, sentence in (
        ({"diloco": replace(asked.diloco, offload=True)}, r"diloco.offload spares a GPU's memory"),
        ({"device": "cuda"}, "device=cuda, but torch finds no GPU here"),
        ({"device": "mps"}, "device=mps, but torch finds no Apple GPU here"),
    ):
        with pytest.raises(UserError, match=sentence):
            prepare_run(replace(asked, **changes), resume=streaming if is_resume else None)


def test_a_run_publishes_behind_no_other_run(tiny, streaming, tmp_path):
    place = str(tmp_path / "place")
    new, resumed = replace(tiny, publish=place), replace(resumable(streaming), publish=place)
    with Publisher(place) as publisher:
        for run in ("other", streaming.name):
            publisher.publish({"a": torch.zeros(2)}, step=10, facts={"run": run})
            expected = rf"publish=.* has version \d already, of step 10 of {run}: set a place of its own"
            with pytest.raises(UserError, match=f"{expected}, or resume that run$"):
                prepare_run(new)
            if run == "other":
                with pytest.raises(UserError, match=f"{expected}$"):
                    prepare_run(resumed, resume=streaming)
    assert prepare_run(resumed, resume=streaming).publish == place


def test_the_place_of_a_text_that_a_resume_names_is_absolute(streaming, monkeypatch):
    asked = resumable(streaming)
    prepared = asked.data.prepared
    monkeypatch.chdir(prepared.parent)
    moved = replace(asked, data=replace(asked.data, prepared=Path(prepared.name)))
    assert prepare_run(moved, resume=streaming).data.prepared == prepared


def test_a_run_without_a_name_is_named_by_its_recipe_and_the_time(tiny, monkeypatch):
    config = prepare_run(replace(tiny, checkpoint=CheckpointConfig(every_steps=5)))
    assert config.name.startswith("tiny-") and config.checkpoint.keep is None and config.data.prepared is not None
    assert resolved(config).checkpoint.keep == 5 and resolved(config).model.vocab_size == 257
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="under this launcher set name") as error:
        prepare_run(tiny)
    assert error.value.fields == ("name",)
    with pytest.raises(UserError, match=r"name='\.\./a' must be 1 to 64 letters"):
        prepare_run(replace(tiny, name="../a"))


def test_under_torchrun_the_first_process_that_comes_names_the_run(tiny, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    names = []
    for rank, own in (1, "first"), (0, "second"):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(prepare, "_name", lambda asked, own=own: own)
        names.append(prepare_run(tiny).name)
    assert names == ["first", "first"]
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ExchangeError, match="replica 0"):
        prepare_run(replace(tiny, timeout_seconds=0.3))


def test_the_command_of_a_stores_replica_continues_it(tiny, folder, tmp_path):
    for name in ("store", "other"):
        (tmp_path / name).mkdir()
    asked = replace(tiny, name="again", runs=tmp_path, num_replicas=1, rendezvous=str(tmp_path / "store"))
    config = prepare_run(asked)
    assert own_run(asked) is None
    claim(config)
    own = own_run(asked)
    assert own == config.directory and prepare_run(asked, own=own) == config
    slower = resolved(prepare_run(replace(asked, replica_batch=2), own=own))
    assert (slower.replica_batch, slower.micro_batch) == (2, 2), "its own batch may change"
    with pytest.raises(UserError, match=r"num_tokens=20480 with .*: the run's log says 30720 to all replicas"):
        prepare_run(replace(asked, num_tokens=20_480), own=own)
    with pytest.raises(
        UserError, match=r"already holds a replica of the run in .*/store, and not .*/other: choose"
    ):
        prepare_run(replace(asked, rendezvous=str(tmp_path / "other")))
