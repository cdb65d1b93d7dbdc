"""The directory of a run, and its life: created, running, resumed, finished."""

import fcntl
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, NamedTuple

from diloco.auto import AUTO
from diloco.data.config import DataConfig
from diloco.data.shards import INDEX_FILE
from diloco.errors import FileError, UserError, listed
from diloco.exchange.transport import barrier, fail_together, share
from diloco.files import expanded, make_directory, write_json, writing
from diloco.schema import read_json, without_format
from diloco.training.config.config import (
    FORMAT,
    TrainConfig,
    differences,
    fields_with,
    from_json,
    to_json,
    with_value,
)
from diloco.training.config.engine_settings import check
from diloco.training.config.resolve import TextFacts, resolve, resolved, text_facts
from diloco.training.optimizer import learning_rate
from diloco.training.processes import under_a_launcher
from diloco.training.records.checkpoints import finished_steps
from diloco.training.records.samples import SAMPLES_FILE
from diloco.training.records.summary import OUTER_FILE, SUMMARY_FILE
from diloco.training.world import World

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"
_MOST_BYTES = 1 << 20
"""Size of the largest file that is read: no config takes as much."""


def check_unclaimed(asked: TrainConfig) -> None:
    """Refuse a config whose directory already holds a run.

    Raises:
        UserError: if it does; it names the store that a replica in the directory belongs to.
        FileError: as `read_asked`.
    """
    directory = asked.directory
    if not (directory / CONFIG_FILE).exists():
        return
    other = None if asked.rendezvous is None else read_asked(directory).rendezvous
    if other is not None and other != asked.rendezvous:
        raise UserError(
            f"{directory} already holds a replica of the run in {other}, and not of that in "
            f"rendezvous={asked.rendezvous}: choose another name, or set rendezvous={other} to continue it",
            *("name", "rendezvous"),
        )
    raise UserError(f"{directory} already holds a run: choose another name, or resume it", "name")


def own_run(asked: TrainConfig) -> Path | None:
    """The directory of a store's replica that was here before: the command that started it also continues it.

    None where another run, or none, is in the directory, and under a launcher, whose processes would not look at
    the same time.

    Raises:
        UserError: as `read_asked`.
    """
    directory = asked.directory
    if asked.rendezvous is None or not asked.name or under_a_launcher() or not (directory / CONFIG_FILE).exists():
        return None
    return directory if read_asked(directory).rendezvous == asked.rendezvous else None


def claim(asked: TrainConfig) -> None:
    """Make the directory of a new run, with its config as asked and the facts of its text.

    Raises:
        UserError: if it already holds a run.
    """
    directory = asked.directory
    check_unclaimed(asked)
    make_directory(directory)
    write_json(directory / DATA_FILE, asdict(text_facts(asked.data)))
    _write_config(directory, asked)


def _write_config(directory: Path, asked: TrainConfig) -> None:
    write_json(directory / CONFIG_FILE, {"format": FORMAT, **to_json(asked)})


def claim_together(asked: TrainConfig, world: World) -> None:
    """Claim the directory of a new run on every machine, whether the machines share a disk or not.

    Nothing is claimed before all machines have looked, so that one which shares the disk of replica 0 does not
    take its claim for an earlier run.

    Raises:
        UserError: if this machine's directory already holds a run.
        ExchangeError: if that of another machine does.
    """
    with fail_together(world.everyone):
        if world.is_first_on_machine:
            check_unclaimed(asked)
        barrier(world.everyone)
        if world.everyone.replica == 0:
            claim(asked)
        barrier(world.everyone)
        if world.is_first_on_machine and not (asked.directory / CONFIG_FILE).exists():
            claim(asked)
        barrier(world.everyone)


def read_config(directory: Path) -> TrainConfig:
    """The resolved config of a run; its name and place are those of the directory now.

    Raises:
        UserError: if the directory holds no run.
        FileError: if its config, or the facts of its text, can't be read, or is of another version.
    """
    asked = read_asked(directory)
    assert asked.data.prepared is not None, "it was read so"
    vocab_size = text_at_start(directory).vocab_size
    try:
        return resolve(asked, vocab_size=vocab_size, prepared=asked.data.prepared)
    except UserError as error:
        raise FileError(f"{directory / CONFIG_FILE} can't be read: {error}", *error.fields) from None


def read_asked(directory: Path) -> TrainConfig:
    """The config of a run as it was asked for, with the place of its text; else as `read_config`."""
    path = directory / CONFIG_FILE
    if not path.exists():
        raise no_run(directory)
    values = without_format(read_json(path, dict[str, Any], most_bytes=_MOST_BYTES), FORMAT, source=str(path))
    config = from_json(TrainConfig, values, source=str(path))
    if config.data.prepared is None:
        raise FileError(f"{path} can't be read: it lacks data.prepared: restore it from another machine")
    return replace(config, name=directory.name, runs=directory.parent)


def run_directory(source: Path | str) -> Path:
    """The directory of the run that a user has named: the one of this name, or the run of this name in `runs`.

    Raises:
        UserError: if neither holds a run; it names the runs that there are, the nearest first.
    """
    directory = expanded(source)
    for path in (directory, TrainConfig.runs / directory):
        if (path / CONFIG_FILE).exists():
            return path
    raise no_run(directory)


def no_run(directory: Path) -> UserError:
    """The error for a directory without a run, with the runs that may have been meant."""
    error = f"{directory} holds no run: {directory / CONFIG_FILE} is missing"
    if below := newest_runs(directory):
        return UserError(f"{error}; name one of the runs in it: {listed(below)}")
    nearby = (directory.parent / TrainConfig.runs, directory.parent)
    names = {path.name: path for near in nearby for path in newest_runs(near)}
    if matches := get_close_matches(directory.name, names, n=1):
        return UserError(f"{error}; did you mean {names[matches[0]]}?")
    return UserError(f"{error}; there are {listed(list(names.values()))}" if names else error)


def newest_runs(directory: Path) -> list[Path]:
    """The runs in a directory, the newest first."""
    configs = list[tuple[float, Path]]()
    with suppress(OSError):
        for file in directory.glob(f"*/{CONFIG_FILE}"):
            configs.append((file.stat().st_mtime, file.parent))
    return [path for _, path in sorted(configs, reverse=True)]


def check_text(directory: Path, data: DataConfig, *, field: str) -> None:
    """Refuse a run whose text is gone, and other text than it was started on.

    Args:
        directory: of the run.
        data: the text, prepared.
        field: the setting that names the text's directory.

    Raises:
        UserError: if it is gone, or the facts of the text differ.
        FileError: if the text's index can't be read.
    """
    prepared = data.prepared
    assert prepared is not None, "a run's config is resolved"
    if not (prepared / INDEX_FILE).exists():
        raise UserError(
            f"the data of run {directory.name} is no longer in {prepared}: name its directory by {field}", field
        )
    started, here = text_at_start(directory), text_facts(data)
    if here != started:
        raise UserError(
            f"the run was started on data with digest {started.digest} and {started.num_tokens:,} tokens of "
            f"training text, and {prepared} has {here.digest} and {here.num_tokens:,}: name the "
            f"directory with the same text by {field}",
            field,
        )


def text_at_start(directory: Path) -> TextFacts:
    """The text that a run was started on."""
    try:
        return read_json(directory / DATA_FILE, TextFacts, most_bytes=_MOST_BYTES)
    except FileError as error:
        raise FileError(f"{error}: restore it from another machine, or start over") from None


def resumable(directory: Path) -> TrainConfig:
    """The config of a run, to be changed for a resume: values that follow from others are left out again.

    Raises:
        UserError: as `read_config`, and for a store.
    """
    if not (directory / CONFIG_FILE).exists():
        _refuse_store(directory)
    saved = read_asked(run_directory(directory))
    # What is left out now follows from the shards, and from the length of the phase that begins, if one does.
    return replace(saved, micro_batch=None, optimizer=replace(saved.optimizer, warmup_steps=None))


def _refuse_store(directory: Path) -> None:
    from diloco.rendezvous.log.log import is_store
    from diloco.rendezvous.store import CREDENTIALS

    store = re.sub(rf"^({'|'.join(CREDENTIALS)}):/(?!/)", r"\1://", str(directory))  # a path has one slash of it
    if is_store(store):
        raise UserError(
            f"resume={store} is a store, and no run's directory: leave it out, and set rendezvous={store} to join "
            "the run, or to continue a replica by its name",
            *("resume", "rendezvous"),
        )


def resume_config(directory: Path, asked: TrainConfig) -> TrainConfig:
    """The config to resume with, as asked: what is left out is the run's own.

    Args:
        directory: of the run.
        asked: what `resumable` gives, with changes.

    Raises:
        UserError: if a change would make it another run, with both values; if a fragment is never sent in a
            shorter one; and if the run has results and no checkpoint, since it would begin anew and replace them.
    """
    saved, saved_asked = read_config(directory), read_asked(directory)
    if not asked.recipe:  # a store's replica that was started again without one
        asked = replace(asked, recipe=saved.recipe)
    if not schedule_changes(saved, asked):
        if asked.optimizer.warmup_steps is None:
            asked = with_value(asked, "optimizer.warmup_steps", saved_asked.optimizer.warmup_steps)
    elif asked.optimizer.weight_decay is None:  # a phase of another length has the same
        asked = with_value(asked, "optimizer.weight_decay", saved.optimizer.weight_decay)
    if asked.diloco.outer == saved_asked.diloco.outer == AUTO:  # in a phase of another length, too
        asked = with_value(asked, "diloco.outer", saved.diloco.outer)
    is_asked, is_same_share = saved_asked.micro_batch is not None, asked.process_batch == saved.process_batch
    if asked.micro_batch is None and (is_asked or not is_same_share):
        assert saved.micro_batch is not None, "the config is resolved"
        # No pass is larger than before: a process with more of the batch may have no memory for it.
        asked = replace(asked, micro_batch=math.gcd(saved.micro_batch, asked.process_batch))
    assert asked.data.prepared is not None, "the text is prepared"
    now = resolve(asked, vocab_size=saved.model.vocab_size, prepared=asked.data.prepared)
    for name, (old, value) in differences(saved, now).items():
        _check_change(directory, asked, name, old, value)
    if now.num_steps < saved.num_steps:
        check(now)
    check_text(asked.directory, asked.data, field="data.prepared")
    results = [name for name in (SUMMARY_FILE, OUTER_FILE) if (directory / name).exists()]
    held = [finished_steps(saved.checkpoints, replica) for replica in range(saved.num_replicas)]
    if results and saved.rendezvous is None and not any(held):
        raise UserError(
            f"{directory} has {results[0]}, and no checkpoint to go on from: bring {saved.checkpoints} back, or "
            "start a new run"
        )
    return asked


def unwritten_changes(asked: TrainConfig) -> dict[str, Any]:
    """The settings that a resume changes and that its run's file does not hold yet, by dotted name."""
    changed = differences(read_asked(asked.directory), asked)
    return {name: value for name, (_, value) in changed.items() if name in _changeable() and value is not None}


def _changeable() -> set[str]:
    return {*fields_with(TrainConfig, "may_change_on_resume"), *fields_with(TrainConfig, "begins_a_phase")}


def _check_change(directory: Path, asked: TrainConfig, name: str, old: Any, value: Any) -> None:
    """Refuse a change with which a resume would not continue the same run."""
    of_the_schedule = fields_with(TrainConfig, "begins_a_phase")
    if name in of_the_schedule and asked.rendezvous is not None:
        raise UserError(
            f"{name}={value} with rendezvous={asked.rendezvous}: the run's log says {old} to all replicas: "
            "set it to that, or leave it out",
            *(name, "rendezvous"),
        )
    if name not in _changeable() or (name == "rendezvous" and None in (old, value)):
        raise UserError(
            f"{directory} was started with {name}={old}, and now {value} is asked for: a resume continues the "
            "same run; leave it out, or start a new run",
            name,
        )


def newest_common_step(directory: Path, world: World, saved: Sequence[int], *, steps_apart: int) -> int:
    """The newest step that every replica holds; 0 if none has saved any, since all share the initial state.

    Args:
        directory: of the run's checkpoints.
        world: of this process.
        saved: the steps that this process holds.
        steps_apart: the largest number of steps by which a replica may be ahead of another.

    Raises:
        UserError: if a replica lacks checkpoints that it has saved.
    """
    held = share(world.everyone, [*saved], list[int])
    for replica in range(world.num_replicas):
        if not set(finished_steps(directory, replica)) <= set(held[replica * world.num_ranks]):
            raise UserError(
                f"this machine holds checkpoints of replica {replica}, which now runs elsewhere: "
                "start each machine with the node rank it had"
            )
    common = set.intersection(*map(set, held))
    newest = max((max(steps, default=0) for steps in held), default=0)
    # Every replica has taken these steps, and should have saved what another has saved at them.
    taken = {step for steps in held for step in steps if step <= newest - steps_apart}
    if taken and not common:
        raise UserError(
            f"no step is held by every replica (they hold {', '.join(map(str, held[:: world.num_ranks]))}): "
            "bring the checkpoints that are missing back, or start over under another name"
        )
    return max(common, default=0)


_LOG = logging.getLogger("diloco")


LOCK_FILE = "running"
"""The file that is locked. A line names the process that has locked it, and after an end before the run's how that
came; another says how to go on."""
_MOST_ATTEMPTS = 100
_SECONDS_OF_A_LOOK = 0.2
"""Longer than `lock_of` holds the lock."""


@contextmanager
def running(directory: Path, *, waits: bool = False, setting: str = "name", hint: str = "") -> Iterator[None]:
    """Hold the lock on a run's directory; a directory that nothing else was written to is removed at the end.

    The operating system drops the lock of a process that is killed.

    Args:
        directory: the run's.
        waits: wait until no other process holds it.
        setting: the one that chooses the directory.
        hint: how to go on after an end that nobody could foresee; an error says so by its notes.

    Raises:
        UserError: if another process holds it, with its number, machine and time, and this one does not wait.
    """
    with _locked(directory, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), setting) as file:
        now, left = f"{datetime.now():%Y-%m-%d %H:%M:%S}", ""
        with writing(directory / LOCK_FILE):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n{hint}")
            file.flush()
        try:
            yield
        except BaseException as error:
            how = (str(error) or type(error).__name__).splitlines()[0]
            left = f"{how}\n{'; '.join(getattr(error, '__notes__', ()))}"
            raise
        finally:
            with suppress(OSError):  # somebody may have deleted the directory
                file.truncate(0)
                file.write(left[:_MOST_LETTERS])
                file.flush()
                if [path.name for path in directory.iterdir()] == [LOCK_FILE]:
                    (directory / LOCK_FILE).unlink()
                    directory.rmdir()


class RunLock(NamedTuple):
    """The lock on a run's directory, as another process sees it."""

    is_held: bool | None
    """True if a process trains there; None if that can't be known from here."""
    how: str = ""
    """The end of the last process, where none holds it; empty where that is not known."""
    hint: str = ""
    """The command to go on with."""


def lock_of(directory: Path) -> RunLock:
    """The lock on a run's directory."""
    try:
        with (directory / LOCK_FILE).open(encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return RunLock(is_held=True)
            except OSError:  # a file system without locks
                return RunLock(is_held=None)
            how, _, hint = file.read(_MOST_LETTERS).partition("\n")
    except OSError:  # of a group, the machine with replica 0 has it
        return RunLock(is_held=None)
    if not how.startswith("process "):
        return RunLock(False, how, hint)
    if f" on {socket.gethostname()} since " not in how:
        return RunLock(is_held=None)  # its lock may not reach this machine
    return RunLock(False, f"{how} was killed", hint)


_MOST_LETTERS = 4096


def _locked(directory: Path, kind: int, setting: str) -> IO[str]:
    """The lock file, locked: the one that stands there now, not one that another command has just removed.

    Raises:
        UserError: as `running`.
    """
    path = directory / LOCK_FILE
    for _ in range(_MOST_ATTEMPTS):
        make_directory(directory)
        with writing(path), suppress(FileNotFoundError), ExitStack() as stack:
            file = stack.enter_context(path.open("a+", encoding="utf-8", errors="replace"))
            _lock(directory, file, kind, setting)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                stack.pop_all()
                return file
    raise UserError(f"{path} is removed again and again by other commands: choose another {setting}", setting)


def check_not_running(directory: Path) -> None:
    """Refuse a directory in which another process trains.

    Raises:
        UserError: as `running`.
    """
    with suppress(FileNotFoundError), (directory / LOCK_FILE).open(encoding="utf-8", errors="replace") as file:
        _lock(directory, file, fcntl.LOCK_SH | fcntl.LOCK_NB, "name")


def _lock(directory: Path, file: IO[str], kind: int, setting: str) -> None:
    """Lock a run's directory; refuse one in which another process trains."""
    try:
        with suppress(BlockingIOError):
            return fcntl.flock(file, kind)
        time.sleep(_SECONDS_OF_A_LOOK)
        fcntl.flock(file, kind)
    except BlockingIOError:
        file.seek(0)
        who = file.readline().strip() or "another process"
        raise UserError(
            f"{directory} is in use: {who} trains there; wait for it, or choose another {setting}", setting
        ) from None
    except OSError as error:
        _LOG.warning(
            "%s can't be locked (%s): nobody will notice if a second command trains in this directory",
            *(directory / LOCK_FILE, error.strerror),
        )


def schedule_changes(saved: TrainConfig, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields of the schedule in which a resume differs from its run, with both values.

    The resume need not be resolved: a warm-up that is left out asks for nothing.
    """
    changed, of_the_schedule = differences(saved, config), fields_with(TrainConfig, "begins_a_phase")
    return {name: both for name, both in changed.items() if name in of_the_schedule and both[1] is not None}


def with_phase(saved: TrainConfig, asked: TrainConfig, step: int) -> TrainConfig:
    """The config, as asked, with which a run goes on from a step, at which a new phase of its schedule begins.

    Args:
        saved: the run's own, resolved.
        asked: the resume's.
        step: the last that was taken; 0 begins anew.
    """
    rate = learning_rate(saved.optimizer, step, num_steps=saved.num_steps) if step else 0.0
    return replace(asked, optimizer=replace(asked.optimizer, start_step=step, start_rate=rate))


def continued(asked: TrainConfig, world: World, step: int) -> TrainConfig:
    """The resolved config of a resume from a step, which is also written down where it changes the run's.

    The results of a run that was finished are removed where the schedule changes: they are those of fewer steps.

    Raises:
        UserError: if the run is to end before that step, or its warm-up does not end.
    """
    saved, config = read_config(asked.directory), resolved(asked)
    is_changed, outdated = bool(unwritten_changes(asked)), ()
    if schedule_changes(saved, config):
        asked, outdated = with_phase(saved, asked, step), (OUTER_FILE, SUMMARY_FILE, SAMPLES_FILE)
    config = resolved(asked)
    barrier(world.everyone)  # each process has read the file
    if world.is_first_on_machine and (is_changed or outdated):
        for name in outdated:
            (config.directory / name).unlink(missing_ok=True)
        _write_config(config.directory, asked)
    return config
