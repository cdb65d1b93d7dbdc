"""Work on a file that somebody else made, in a process of its own: with limited memory and time, free to crash.

Libraries in C++ and Rust can't be interrupted, allocate what a file asks for, and end the process they fail in.
"""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Self

from diloco.errors import UserError

MIB = 2**20

_REQUEST = struct.Struct("<QdQ")
"""Bytes of memory, seconds, and the bytes of the request that follows."""
_ANSWER = struct.Struct("<cQ")
"""One of the outcomes, and the bytes of the answer that follows."""
_DONE, _REFUSED, _NO_MEMORY, _BUG = b"d", b"r", b"m", b"b"


class Contained:
    """A process that answers requests with a function that `factory` makes there.

    It starts with the first request, and anew with the first after it crashed. Memory is limited on Linux only.

    Args:
        factory: `module:name` of a function that is called with `arguments` at the first request.
        arguments: texts.
        doing: how the errors begin that are not the function's own, such as `a.parquet can't be read`.
    """

    def __init__(self, factory: str, *arguments: str, doing: str) -> None:
        self.doing = doing
        self._command = [sys.executable, "-P", "-m", __name__, factory, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes, *, most_bytes: int, most_seconds: float) -> bytes:
        """The function's answer to `request`.

        Args:
            request: its argument.
            most_bytes: memory that it may take, beyond what the process took after it was made.
            most_seconds: time that it may take.

        Raises:
            UserError: if the function raises one, takes more memory or time, or crashes.
        """
        if self._process is None:
            self._process = self._start()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(_REQUEST.pack(most_bytes, most_seconds, len(request)))
            stdin.write(request)
            stdin.flush()
            outcome, size = _ANSWER.unpack(_exactly(stdout, _ANSWER.size))
            answer = _exactly(stdout, size)
        except (BrokenPipeError, EOFError):
            ending = _ending(self._process.wait(), most_bytes, most_seconds)
            self.close()
            raise UserError(f"{self.doing}: {ending}") from None
        if outcome == _NO_MEMORY:
            raise UserError(f"{self.doing}: {_no_memory(most_bytes)}")
        if outcome == _REFUSED:
            raise UserError(*json.loads(answer))
        assert outcome == _DONE, answer.decode()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            # Other allocators reserve more address space than they use, which is what is limited.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "2",
        }
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None, "both are pipes"
                with suppress(BrokenPipeError):  # a request that the process did not read
                    pipe.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ending(code: int, most_bytes: int, most_seconds: float) -> str:
    if code == -signal.SIGALRM:
        return f"it takes more than {most_seconds:,.0f} seconds"
    if code in (-signal.SIGABRT, -signal.SIGKILL):
        return _no_memory(most_bytes)
    return f"the library that reads it crashed ({signal.Signals(-code).name if code < 0 else code})"


def _no_memory(most_bytes: int) -> str:
    return f"it takes more than {most_bytes // MIB:,} MiB of memory"


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _serve(factory: str, *arguments: str) -> None:
    """Answer requests from standard input on standard output until the first ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever library it is in
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = factory.partition(":")
    make = getattr(import_module(module), name)
    answer: Callable[[bytes], bytes] | None = None
    mapped_bytes = _mapped_bytes()
    while header := sys.stdin.buffer.read(_REQUEST.size):
        most_bytes, most_seconds, size = _REQUEST.unpack(header)
        request = sys.stdin.buffer.read(size)
        _limit_memory(mapped_bytes + most_bytes)
        signal.setitimer(signal.ITIMER_REAL, most_seconds)
        try:
            if answer is None:
                answer = make(*arguments)
                mapped_bytes = _mapped_bytes()
                _limit_memory(mapped_bytes + most_bytes)
            assert answer is not None
            outcome, content = _DONE, answer(request)
        except UserError as error:
            outcome, content = _REFUSED, json.dumps([str(error), *error.fields]).encode()
        except MemoryError:
            outcome, content = _NO_MEMORY, b""
        except BaseException:  # Rust's panics are no Exception
            outcome, content = _BUG, traceback.format_exc().encode(errors="replace")
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(_ANSWER.pack(outcome, len(content)))
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


def _limit_memory(most_bytes: int) -> None:
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            most_bytes = min(most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, hard))


def _mapped_bytes() -> int:
    """The address space of this process; 0 where that is not limited."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
