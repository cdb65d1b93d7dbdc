"""The standard streams of a command: what strangers wrote is shown by a terminal, and never obeyed.

A command that goes wrong ends with one sentence and an exit code, or, for a bug, with its traceback.
"""

import io
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, cast

from diloco.errors import UserError, exit_code_of, printable


@contextmanager
def safe_streams() -> Iterator[None]:
    """Have control characters replaced in all that is printed in this context: names, paths, texts of errors.

    Standard output keeps them where it is no terminal, since others may read it as it is. A console of rich writes
    past these streams: take `Screen`.
    """
    with ExitStack() as stack:
        for stream, redirected in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a locale that lacks a character is no failure
                if stream is sys.stderr or stream.isatty():
                    stack.enter_context(redirected(cast(Any, _Stream(stream))))
        yield


@contextmanager
def styled() -> Iterator[None]:
    """Let help be printed with the colors of the library that prints it."""
    with redirect_stdout(getattr(sys.stdout, "rich_proxied_file", sys.stdout)):
        yield


class _Stream:
    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.rich_proxied_file = stream
        """The stream that rich writes to in place of this one."""

    def write(self, text: str) -> int:
        # A return goes to the beginning of the own line alone: bars of progress use it.
        return self.rich_proxied_file.write("\r".join(map(printable, text.split("\r"))))

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


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
