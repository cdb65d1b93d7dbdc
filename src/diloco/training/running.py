"""The lock on a run's directory: one command trains in it at a time, and a second one hears which."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from diloco.errors import UserError
from diloco.files import make_directory, writing

_LOG = logging.getLogger("diloco")
LOCK_FILE = "running"
"""The file that is locked, and names the process that has locked it."""
_MOST_ATTEMPTS = 100


@contextmanager
def running(directory: Path, *, waits: bool = False, setting: str = "name") -> Iterator[None]:
    """Hold the lock on a run's directory; a directory that nothing else was written to is removed at the end.

    The operating system drops the lock of a process that is killed.

    Args:
        directory: the run's.
        waits: wait until no other process holds it.
        setting: the one that chooses the directory.

    Raises:
        UserError: if another process holds it, with its number, machine and time, and this one does not wait.
    """
    with _locked(directory, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), setting) as file:
        with writing(directory / LOCK_FILE):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}")
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # somebody may have deleted the directory
                file.truncate(0)
                if [path.name for path in directory.iterdir()] == [LOCK_FILE]:
                    (directory / LOCK_FILE).unlink()
                    directory.rmdir()


def _locked(directory: Path, kind: int, setting: str) -> IO[str]:
    """The lock file, locked: the one that stands there now, not one that another command has just removed.

    Raises:
        UserError: as `running`.
    """
    path = directory / LOCK_FILE
    for _ in range(_MOST_ATTEMPTS):
        make_directory(directory)
        with writing(path), suppress(FileNotFoundError), ExitStack() as stack:
            file = stack.enter_context(path.open("a+"))
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
    with suppress(FileNotFoundError), (directory / LOCK_FILE).open() as file:
        _lock(directory, file, fcntl.LOCK_SH | fcntl.LOCK_NB, "name")


def _lock(directory: Path, file: IO[str], kind: int, setting: str) -> None:
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        file.seek(0)
        who = file.read() or "another process"
        raise UserError(
            f"{directory} is in use: {who} trains there; wait for it, or choose another {setting}", setting
        ) from None
    except OSError as error:
        _LOG.warning(
            "%s can't be locked (%s): nobody will notice if a second command trains in this directory",
            *(directory / LOCK_FILE, error.strerror),
        )
