"""A job: what renames its run and what does not, and which failures are final."""

import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from tests.experiments.runner.machines import tiny_config

from diloco.data.config import DataConfig
from diloco.data.prepare import prepare, resolve
from diloco.data.tokenizers import train_bpe
from diloco.errors import (
    CheckpointError,
    NonFiniteError,
    ReplicaFailedError,
    TrainingError,
    UserError,
    exit_code_of,
)
from diloco.experiments.runner import job
from diloco.experiments.runner.grid import base_name, run_name, with_absolute_paths
from diloco.training.config.config import DilocoConfig, TrainConfig
from diloco.training.config.recipes import recipe


def test_stored_runs_keep_their_names(tmp_path):
    """The tables in docs/results name their runs so: they must not be renamed."""
    (tmp_path / "text.txt").write_text("some text")
    data = DataConfig(train=(str(tmp_path / "text.txt"),))
    assert run_name(replace(recipe("laptop"), data=data)) == "run-eb4db948b636"
    assert base_name(replace(recipe("laptop"), data=data, method="diloco")) == "base-618f0c6287ca"


def test_a_new_field_renames_no_run(small_corpus, tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class LaterDilocoConfig(DilocoConfig):
        new: int = 0

    @dataclass(frozen=True, kw_only=True)
    class LaterConfig(TrainConfig):
        new: int | None = None

    config = tiny_config(small_corpus, tmp_path)
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    diloco = LaterDilocoConfig(**{f.name: getattr(config.diloco, f.name) for f in fields(config.diloco)})
    later = LaterConfig(**(values | {"diloco": diloco}))
    assert run_name(later) == run_name(config)
    others = (replace(later, new=0), replace(later, diloco=replace(diloco, new=1)))
    assert len({run_name(each) for each in (later, *others)}) == 3


def test_settings_that_change_no_number_and_defaults_spelled_out_rename_no_run(small_corpus, tmp_path):
    config = tiny_config(small_corpus, tmp_path)
    elsewhere = replace(config, name="x", runs=tmp_path, recipe="", timeout_seconds=1.0)
    elsewhere = replace(elsewhere, data=replace(config.data, cache=tmp_path / "elsewhere"))
    assert run_name(elsewhere) == run_name(config)
    spelled_out = replace(config, diloco=replace(config.diloco, overlap_steps=1, fragments="strided", wire="e3m0"))
    assert run_name(spelled_out) == run_name(config)
    others = (
        replace(config, seed=1),
        replace(config, precision="fp32"),
        replace(config, method="diloco"),
        replace(config, optimizer=replace(config.optimizer, learning_rate=1.0)),
        replace(config, diloco=replace(config.diloco, overlap_steps=2)),
    )
    assert len({run_name(each) for each in (config, *others)}) == 6


def test_a_base_has_one_name_whatever_the_columns_say(small_corpus, tmp_path):
    config = tiny_config(small_corpus, tmp_path)
    with_other_columns = replace(
        config,
        seed=1,
        num_replicas=2,
        num_tokens=10 * config.tokens_per_step,
        model=replace(config.model, width=64),
        optimizer=replace(config.optimizer, learning_rate=1.0),
        diloco=replace(config.diloco, sync_every=5, outer_learning_rate=1.0),
    )
    assert base_name(with_other_columns) == base_name(config)
    assert base_name(replace(config, diloco=replace(config.diloco, wire="fp32"))) != base_name(config)


def test_a_run_is_known_by_its_text_wherever_that_lies(small_corpus, tmp_path):
    copy = tmp_path / "elsewhere" / small_corpus.name
    copy.parent.mkdir()
    copy.write_bytes(small_corpus.read_bytes())
    assert run_name(tiny_config(copy, tmp_path)) == run_name(tiny_config(small_corpus, tmp_path))
    copy.write_bytes(small_corpus.read_bytes() + b'{"text": "one more"}\n')
    assert run_name(tiny_config(copy, tmp_path)) != run_name(tiny_config(small_corpus, tmp_path))


def test_a_run_is_known_by_its_prepared_data_and_its_tokenizers_file(small_corpus, tmp_path):
    def name(**data) -> str:
        return run_name(replace(recipe("tiny"), data=DataConfig(**data)))

    first, same, other = (tmp_path / place for place in ("first", "same", "other"))
    text = {"train": (str(small_corpus),), "held_out_fraction": 0.1}
    prepare(DataConfig(**text), first)
    shutil.copytree(first, same)
    prepare(DataConfig(**(text | {"held_out_fraction": 0.2})), other)
    assert name(prepared=first) == name(prepared=same) != name(prepared=other)

    for place in "ab":
        (tmp_path / place).mkdir()
    tokenizer, copy = (tmp_path / place / "tokenizer.json" for place in "ab")
    train_bpe(["some text, and some more"], 260, tokenizer)
    shutil.copy(tokenizer, copy)
    one = name(**text, tokenizer=str(tokenizer))
    assert one == name(**text, tokenizer=str(copy)) != name(**text)
    train_bpe(["some text, and some more"], 262, copy)
    assert one != name(**text, tokenizer=str(copy))


def test_a_process_with_another_working_directory_finds_the_data(small_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(small_corpus.parent)
    data = with_absolute_paths(DataConfig(train=(small_corpus.name, "stdlib", "hf:name"), cache=Path("cache")))
    assert data.train == (str(small_corpus), "stdlib", "hf:name") and data.cache == small_corpus.parent / "cache"
    # Prepared data may name its sources as they were when it was made.
    prepared = tmp_path / "prepared"
    sources = DataConfig(train=(str(small_corpus),), held_out_fraction=0.1)
    prepare(sources, prepared)
    assert resolve(with_absolute_paths(DataConfig(train=sources.train, prepared=prepared))) == prepared


def test_a_damaged_checkpoint_is_no_final_failure(monkeypatch):
    """The error names a file to delete; the checkpoint before it is good."""

    def damaged(*_, **__):
        raise CheckpointError("delete it")

    monkeypatch.setattr("diloco.training.loop.train", damaged)
    with pytest.raises(OSError, match="delete it") as caught:
        job._train(recipe("tiny"), resume=True)
    assert exit_code_of(caught.value) != UserError.exit_code


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (TrainingError("lower it", "optimizer.learning_rate"), True),
        (TrainingError("no memory", "micro_batch", "evaluation.batch"), False),
        (UserError("wandb can't start", "trackers"), False),
        (UserError("there is no GPU", "device"), False),
        (NonFiniteError("the outer gradient is not finite: lower the learning rate"), True),
        (ReplicaFailedError("lower it", exit_code=2, fields=("optimizer.learning_rate",)), True),
        (ReplicaFailedError("was killed", exit_code=1), False),
    ],
)
def test_a_failure_that_this_machine_caused_is_not_final(error, is_final):
    assert job._is_final(error) is is_final
