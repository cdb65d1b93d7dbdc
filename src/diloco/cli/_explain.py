"""The end of a command when something goes wrong: one sentence and an exit code, or a bug's traceback."""

import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco.errors import UserError, exit_code_of


@contextmanager
def explained() -> Iterator[None]:
    """End the process with one sentence and an exit code where something goes wrong that can be expected to.

    A bug shows its traceback; with DILOCO_TRACEBACK set every error does. A pipe that `| head` closed is silent.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # `>&-` closes it
                sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        exit_code = exit_code_of(error)
        if exit_code is None:
            raise
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and _nobody_reads():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        elif os.environ.get("DILOCO_TRACEBACK"):
            traceback.print_exception(error)
        else:
            notes = getattr(error, "__notes__", ())
            print("diloco: " + "; ".join([_sentence(error), *notes]), file=sys.stderr, flush=True)
        raise SystemExit(exit_code) from None


def _sentence(error: BaseException) -> str:
    """An error's message; that of the operating system without its number, where it names no file."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    if type(error) is OSError and error.strerror and error.filename is None:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error)


def _nobody_reads() -> bool:
    """True if standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def hinted(hint: str | Callable[[], str], *, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Add to a failure's sentence how to go on; not to a user's mistake, and only `when` there is a way."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if exit_code_of(error) != UserError.exit_code and when():
            error.add_note(hint if isinstance(hint, str) else hint())
        raise
