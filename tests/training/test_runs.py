"""The directory of a run: claimed, locked, read, and taken up again, or refused in a sentence with the reason."""

import errno
import json
import os
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.data.corpora import INDEX, SHARD
from tests.processes import run_replicas
from tests.training.cases import world_on_cpu

from diloco.data.shards import INDEX_FILE, write_record
from diloco.errors import ExchangeError, FileError, UserError
from diloco.training.config.config import TrainConfig, with_value
from diloco.training.config.recipes import tiny
from diloco.training.config.resolve import resolve
from diloco.training.records import runs
from diloco.training.records.checkpoints import checksum_path, step_path
from diloco.training.records.runs import (
    check_not_running,
    check_text,
    claim,
    claim_together,
    continued,
    fcntl,
    newest_common_step,
    read_asked,
    read_config,
    resumable,
    resume_config,
    running,
    unwritten_changes,
)
from diloco.training.records.summary import OUTER_FILE, SUMMARY_FILE
from diloco.training.world import alone


def write_index(prepared: Path, digest: str = "abc", num_tokens: int = 42) -> None:
    """Write the index of a text of two shards."""
    shards = [replace(SHARD, num_tokens=number) for number in (num_tokens - 2, 2)]
    index = replace(INDEX, digest=digest, splits=INDEX.splits | {"train": tuple(shards)})
    write_record(prepared / INDEX_FILE, index)


@pytest.fixture
def run(tmp_path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_index(prepared)
    asked = with_value(replace(tiny(), name="r", runs=tmp_path), "data.prepared", prepared)
    claim(asked)
    return asked


def full(asked):
    """The resolved config of a run on this text."""
    return resolve(asked, vocab_size=257, prepared=asked.data.prepared)


def test_a_run_is_saved_as_asked_and_what_follows_is_computed_on_load(run):
    assert read_asked(run.directory) == run and run.checkpoint.keep is None and run.diloco.wire is None
    assert read_config(run.directory) == full(run)
    assert resume_config(run.directory, resumable(run.directory)) == run


def test_a_resume_may_change_what_does_not_change_the_run(run):
    saved = resumable(run.directory)
    changed = replace(saved, timeout_seconds=5.0, checkpoint=replace(saved.checkpoint, keep=9), micro_batch=2)
    changed = replace(changed, evaluation=replace(saved.evaluation, batch=1))
    assert resume_config(run.directory, changed) == changed
    often = replace(saved, checkpoint=replace(saved.checkpoint, every_steps=1))
    assert full(resume_config(run.directory, often)).checkpoint.keep == 13


def test_a_resume_writes_down_what_it_changes_for_those_that_follow(run):
    saved = resumable(run.directory)
    assert not unwritten_changes(saved)
    (run.directory / SUMMARY_FILE).touch()
    asked = with_value(saved, "checkpoint.every_steps", 7)
    assert unwritten_changes(asked) == {"checkpoint.every_steps": 7}
    continued(asked, alone(), 0)
    assert read_asked(run.directory).checkpoint.every_steps == 7 and not unwritten_changes(asked)
    assert (run.directory / SUMMARY_FILE).exists(), "of as many steps"
    longer = replace(asked, num_tokens=2 * saved.num_tokens)
    continued(longer, alone(), 0)
    assert not unwritten_changes(longer) and not (run.directory / SUMMARY_FILE).exists()


@pytest.mark.parametrize("result", [SUMMARY_FILE, OUTER_FILE])
def test_a_run_with_results_alone_is_not_begun_anew(run, result):
    (run.directory / result).touch()
    with pytest.raises(UserError, match=rf"{result}, and no checkpoint to go on from: bring .*checkpoints back"):
        resume_config(run.directory, replace(run, num_tokens=2 * run.num_tokens))
    checksums = checksum_path(step_path(run.checkpoints / "replica-0", 5))
    checksums.parent.mkdir(parents=True)
    checksums.touch()
    assert resume_config(run.directory, resumable(run.directory))


def test_a_resume_knows_whether_a_warm_up_was_asked_for(run):
    """A new phase has a warm-up of its own length, and the weight decay of the first."""
    saved, warmup = resumable(run.directory), "optimizer.warmup_steps"
    longer = replace(saved, num_tokens=2 * saved.num_tokens)
    inner = resume_config(run.directory, longer).optimizer
    assert (inner.warmup_steps, inner.weight_decay) == (None, 1 / run.num_steps)
    as_before = read_config(run.directory).optimizer.warmup_steps
    assert resume_config(run.directory, with_value(longer, warmup, as_before)).optimizer.warmup_steps == as_before
    no_phase = resume_config(run.directory, with_value(saved, warmup, as_before))
    assert full(no_phase) == read_config(run.directory)


def test_a_shorter_phase_sends_each_fragment(run):
    """As a new run does: the outer parameters of another would stay the initial ones."""
    shorter = {steps: replace(resumable(run.directory), num_tokens=steps * 512) for steps in (15, 16)}
    assert resume_config(run.directory, shorter[16])
    with pytest.raises(UserError, match="fragment 2 is first sent at step 16, and the run has 15"):
        resume_config(run.directory, shorter[15])


def test_a_longer_phase_keeps_the_outer_rule_that_auto_chose(run):
    started = with_value(replace(run, name="auto"), "diloco.outer", "auto")
    claim(started)
    saved, rule = resumable(started.directory), read_config(started.directory).diloco.outer
    longer = replace(saved, num_tokens=20 * saved.num_tokens)
    assert full(resume_config(started.directory, longer)).diloco.outer == rule != full(longer).diloco.outer


@pytest.mark.parametrize(
    ("change", "sentence", "field"),
    [
        ({"seed": 3}, "was started with seed=0, and now 3 is asked for", "seed"),
        ({"sequence_length": 128}, "sequence_length=64, and now 128", "sequence_length"),
        (
            {"data": replace(tiny().data, tokenizer="bpe:500", prepared=Path())},
            "data.tokenizer=bytes, and now bpe:500",
            "data.tokenizer",
        ),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused(run, change, sentence, field):
    with pytest.raises(UserError, match=sentence) as error:
        resume_config(run.directory, replace(resumable(run.directory), **change))
    assert error.value.field == field


@pytest.mark.parametrize(("old", "new"), [(None, "store"), ("store", None)])
def test_a_resume_neither_brings_replicas_to_a_store_nor_takes_one_from_it(run, old, new):
    started = replace(run, name="other", num_replicas=1, rendezvous=old)
    claim(started)
    with pytest.raises(UserError, match=rf"was started with rendezvous={old}, and now {new} is asked for"):
        resume_config(started.directory, replace(resumable(started.directory), rendezvous=new))


@pytest.mark.parametrize(
    ("asked", "shards", "micro_batch"),
    [(2, 2, 2), (2, 4, 1), (2, 1, 2), (None, 2, None), (None, 4, 3), (None, 1, 6)],
)
def test_a_resume_on_other_shards_makes_no_pass_larger(run, asked, shards, micro_batch):
    """A replica's 12 sequences, over two shards before, in passes of 2 or of all 6; a pass divides a share."""
    started = replace(run, name="s", global_batch=24, num_tokens=24 * 64, shards_per_replica=2, micro_batch=asked)
    claim(started)
    resumed = resume_config(started.directory, replace(resumable(started.directory), shards_per_replica=shards))
    assert (resumed.shards_per_replica, resumed.micro_batch) == (shards, micro_batch)


def test_a_run_without_the_index_of_its_data_says_what_to_do(run):
    (run.directory / "data.json").unlink()
    with pytest.raises(UserError, match=r"data.json can't be read: .*: restore it from another machine, or start"):
        read_config(run.directory)


def test_a_resume_without_its_data_names_the_setting(run):
    (run.data.prepared / "index.json").unlink()
    with pytest.raises(UserError, match=r"the data of run r is no longer in .*prepared: .* by data.prepared"):
        resume_config(run.directory, resumable(run.directory))


def test_a_resume_on_other_text_is_refused(run):
    check_text(run.directory, run.data, field="data.prepared")
    for digest, num_tokens in (("abc", 41), ("abd", 42)):
        write_index(run.data.prepared, digest, num_tokens)
        with pytest.raises(UserError, match=rf"abc and 42 tokens .*prepared has {digest} and {num_tokens}:"):
            check_text(run.directory, run.data, field="data.prepared")


def test_a_resume_that_would_read_less_of_the_text_is_refused(run):
    shorter = replace(run.data, max_train_tokens=41)
    with pytest.raises(UserError, match=r"abc and 42 tokens .*prepared has abc and 41:"):
        check_text(run.directory, shorter, field="data.prepared")


@pytest.mark.parametrize("name", ["r", "seeds/r"])
def test_a_claimed_directory_is_the_runs_own_whatever_its_name(tmp_path, name):
    write_index(tmp_path)
    config = resolve(replace(tiny(), num_replicas=1, name=name, runs=tmp_path), vocab_size=257, prepared=tmp_path)
    claim_together(config, alone(config.precision))
    with pytest.raises(UserError, match="already holds a run"):
        claim_together(config, alone(config.precision))


def claim_on_two_machines(config: TrainConfig, folders: list[list[Path]]) -> list[str]:
    """Claim a run's directory in this machine's folder of each pair; the refusals, "" where there is none."""
    world = world_on_cpu(config, is_first_on_machine=True)
    refusals = []
    for pair in folders:
        try:
            claim_together(replace(config, runs=pair[world.replica]), world)
            refusals.append("")
        except (UserError, ExchangeError) as error:
            refusals.append(f"{type(error).__name__}: {error}")
    return refusals


def test_an_earlier_run_on_the_disk_of_one_machine_is_refused_on_all_machines(run, tmp_path):
    """A shared disk, and disks of their own, are claimed first; an earlier run has the same settings."""
    shared, own, stale = [[tmp_path / f"{kind}-{m}" for m in (0, 1)] for kind in ("shared", "own", "stale")]
    shared[1] = shared[0]
    claim(replace(run, runs=stale[1]))
    refusals = run_replicas(claim_on_two_machines, 2, run, [shared, own, stale])
    refusal = f"{stale[1]}/r already holds a run: choose another name, or resume it"
    assert refusals[1] == ["", "", f"UserError: {refusal}"]
    assert refusals[0][:2] == ["", ""] and refusals[0][2].startswith("ExchangeError: ")
    assert f"replica 1 failed: {refusal}" in refusals[0][2]
    assert all((folder / "r" / "config.json").exists() for folder in (*shared, *own))
    assert not stale[0].exists(), "nothing was claimed"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("runs/one", r"; did you mean \S*/runs/ones\?$"),
        ("ones", r"; did you mean \S*/runs/ones\?$"),
        ("runs", r"; name one of the runs in it: \S*/runs/ones$"),
        ("runs/other", r"config\.json is missing; there are \S*/runs/ones$"),
        ("nowhere/other", r"config\.json is missing$"),
    ],
)
def test_a_directory_without_a_run_is_refused_with_those_near_it(tmp_path, name, hint):
    (tmp_path / "runs" / "ones").mkdir(parents=True)
    (tmp_path / "runs" / "ones" / "config.json").touch()
    with pytest.raises(UserError, match=f"holds no run: .*{hint}"):
        read_config(tmp_path / name)


@pytest.mark.parametrize("store", ["s3://bucket/run", "HERE/store"])
def test_a_store_is_not_resumed_but_joined(tmp_path, store):
    (tmp_path / "store" / "log").mkdir(parents=True)
    (tmp_path / "store" / "log" / "0000000000").touch()
    store = store.replace("HERE", str(tmp_path))
    with pytest.raises(
        UserError, match=f"resume={store} is a store, .*: leave it out, and set rendezvous={store} "
    ):
        resumable(Path(store))


def test_a_directory_without_a_run_and_a_config_that_is_none_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        resumable(tmp_path)
    for content, sentence in (
        (b"{", "can't be read"),
        (b"\xff", "can't be read"),
        (b'{"format": 1}', "it has no object as model"),
        (
            b'{"format": true}',
            "is of format True, and this diloco reads format 1: use the release of diloco that wrote it",
        ),
        (b"{}", "names no format, and this diloco reads format 1: use the release of diloco that wrote it"),
        (b'{"format": 2, "model": {}}', "is of format 2, and this diloco reads format 1: use the release"),
    ):
        (run.directory / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=rf"config.json.* {sentence}"):
            read_config(run.directory)


def test_a_config_without_its_text_or_of_another_vocabulary_is_refused(run):
    file = run.directory / "config.json"
    values = json.loads(file.read_text())
    for section, name, value, sentence in (
        ("data", "prepared", None, "it lacks data.prepared"),
        ("model", "vocab_size", 7, "model.vocab_size=7"),
    ):
        file.write_text(json.dumps(values | {section: values[section] | {name: value}}))
        with pytest.raises(FileError, match=rf"config.json can't be read: {sentence}"):
            read_config(run.directory)


@pytest.mark.parametrize(
    ("held", "here", "expected"),
    [
        ([[], []], [], 0),
        ([[20, 40], [20]], [0], 20),
        ([[20], []], [0], 0),  # replica 1 was killed while it wrote its first
        ([[80], [60]], [0], "no step is held by every replica .they hold .80., .60."),
        ([[80, 100], []], [0], "bring the checkpoints that are missing back, or start over under another name"),
        ([[20], [20]], [0, 1], 20),
        ([[], [20]], [0], "holds checkpoints of replica 0, which now runs elsewhere: .* the node rank it had"),
    ],
)
def test_replicas_resume_at_the_newest_step_that_all_hold(run, monkeypatch, held, here, expected):
    """Two replicas, at most 11 steps apart; those in `here` have checkpoints on this disk."""
    for replica in here:
        folder = run.checkpoints / f"replica-{replica}"
        folder.mkdir(parents=True)
        for step in held[replica] or [40]:
            (folder / f"step-{step:08d}.sha256").touch()
    monkeypatch.setattr(runs, "share", lambda exchange, mine, kind: held)
    world = SimpleNamespace(everyone=None, num_replicas=2, num_ranks=1)
    if isinstance(expected, int):
        assert newest_common_step(run.checkpoints, world, held[0], steps_apart=run.steps_apart) == expected
    else:
        with pytest.raises(UserError, match=expected):
            newest_common_step(run.checkpoints, world, held[0], steps_apart=run.steps_apart)


def test_a_second_command_hears_who_trains_there(tmp_path):
    directory = tmp_path / "runs" / "one"
    check_not_running(directory)
    with running(directory):
        who = rf"process {os.getpid()} on {socket.gethostname()} since 20.*"
        for attempt in (lambda: running(directory).__enter__(), lambda: check_not_running(directory)):
            with pytest.raises(
                UserError, match=rf"one is in use: {who} trains there; wait for it, or choose"
            ) as error:
                attempt()
            assert error.value.field == "name"
        (directory / "config.json").touch()
    check_not_running(directory)
    with running(directory):
        pass
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "running"]


def test_a_grid_waits_for_the_command_before(tmp_path):
    def wait():
        with running(tmp_path / "one", waits=True):
            return ended.is_set()

    ended = threading.Event()
    with ThreadPoolExecutor() as threads:
        with running(tmp_path / "one"):
            waiting = threads.submit(wait)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            ended.set()
        assert waiting.result(10)


def test_a_directory_to_which_nothing_was_written_goes_away(tmp_path):
    with pytest.raises(ZeroDivisionError), running(tmp_path / "one"):
        _ = 1 / 0
    assert not (tmp_path / "one").exists()


def test_a_lock_on_a_file_that_was_just_removed_is_taken_again(tmp_path, monkeypatch):
    """The command before ends between this one's look at the file and its lock: a third would lock a new file."""
    flock, ended = fcntl.flock, []

    def end_before(file, kind):
        if not ended:
            ended.append(shutil.rmtree(tmp_path / "one"))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", end_before)
    with (
        running(tmp_path / "one"),
        pytest.raises(UserError, match=rf"is in use: process {os.getpid()}"),
        running(tmp_path / "one"),
    ):
        pass


def test_an_error_is_not_hidden_by_a_directory_that_was_deleted(tmp_path):
    with pytest.raises(ZeroDivisionError), running(tmp_path / "one"):
        shutil.rmtree(tmp_path / "one")
        _ = 1 / 0


def test_without_locks_a_run_goes_on_after_one_sentence(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with running(tmp_path / "one"):
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path}/one/running can't be locked (Function not implemented): nobody will notice if a second "
            "command trains in this directory"
        ]
