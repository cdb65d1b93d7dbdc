"""The standard streams of a command: what strangers wrote is shown by a terminal, and never obeyed."""

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, cast

from diloco.errors import printable


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
