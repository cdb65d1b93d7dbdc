import os
import signal
import time

import pytest

from diloco.data.contained import MIB, Contained
from diloco.errors import UserError

WORK = """
import os, signal, time
from diloco.errors import UserError

def working(word):
    def work(request):
        match request:
            case b"refuse":
                raise UserError("it is refused")
            case b"grow":
                bytearray(2**29)
            case b"sleep":
                time.sleep(60)
            case b"crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case b"abort":
                os.abort()
            case b"bug":
                raise KeyError("a bug")
            case b"pid":
                return str(os.getpid()).encode()
        return word.encode() + request
    return work
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "diloco_test_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    with Contained("diloco_test_work:working", "hello ", doing="a file can't be read") as process:
        yield process


def ask(process, request):
    return process.ask(request, most_bytes=256 * MIB, most_seconds=0.5 if request == b"sleep" else 60)


def test_it_answers_refuses_and_outlives_a_crash(process):
    assert ask(process, b"you") == b"hello you"
    assert ask(process, b"x" * 2**20) == b"hello " + b"x" * 2**20
    with pytest.raises(UserError, match=r"^it is refused$"):
        ask(process, b"refuse")
    with pytest.raises(UserError, match=r"^a file can't be read: it takes more than 256 MiB of memory$"):
        ask(process, b"grow")
    with pytest.raises(AssertionError, match="KeyError: 'a bug'"):
        ask(process, b"bug")
    first = ask(process, b"pid")
    start = time.monotonic()
    with pytest.raises(UserError, match=r"^a file can't be read: it takes more than 0 seconds$"):
        ask(process, b"sleep")
    assert time.monotonic() - start < 30
    assert ask(process, b"pid") != first
    with pytest.raises(UserError, match=r"the library that reads it crashed \(SIGSEGV\)"):
        ask(process, b"crash")
    with pytest.raises(UserError, match=r"more than 256 MiB"):
        ask(process, b"abort")


def test_it_is_gone_after_the_block(process):
    pid = int(ask(process, b"pid"))
    os.kill(pid, signal.SIGINT)  # which Ctrl-C sends to both
    assert ask(process, b"you") == b"hello you"
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_in_the_working_directory_are_not_run(tmp_path, monkeypatch):
    (tmp_path / "token.py").write_text("raise SystemExit(3)")  # a name of Python's own
    monkeypatch.chdir(tmp_path)
    process = Contained("builtins:bytes", doing="a file can't be read")
    with process, pytest.raises(AssertionError, match="'bytes' object is not callable"):
        ask(process, b"you")
