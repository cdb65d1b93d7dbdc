"""Python programs that a process starts become forks of it: it has imported torch, which takes seconds each time.

A fork begins as a new interpreter would where that matters: with its own streams, signals, arguments and exits.
"""

import atexit
import contextlib
import ctypes
import logging
import multiprocessing.process
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import thread as threads
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


def fork_pythons() -> None:
    """From now on, this process forks itself where `subprocess` or `multiprocessing` would start Python anew."""
    execute, spawn = subprocess.Popen._execute_child, util.spawnv_passfds

    def execute_child(self: Any, args: Any, *others: Any) -> None:
        words = [args] if isinstance(args, (str, bytes)) else [*map(os.fspath, args)]
        at = words.index(sys.executable) if sys.executable in words[:-1] else -1
        if at < 0 or re.fullmatch("-[^cmu]", words[at + 1]) or words[at + 1 : at + 3] == ["-m", "pytest"]:
            return execute(self, args, *others)
        prefix, words = words[:at], [word for word in words[at + 1 :] if word != "-u"]
        _, preexec_fn, _, pass_fds, cwd, env, *_ = others
        streams, start_new_session = others[9:15], others[20]

        def begin() -> None:
            for number, end in enumerate((streams[0], streams[3], streams[5])):
                if end != -1:
                    os.dup2(end, number)
            _keep_open(pass_fds)
            if cwd is not None:
                os.chdir(cwd)
            if start_new_session:
                os.setsid()
            if preexec_fn is not None:
                preexec_fn()
            if prefix:
                assert prefix[:3] == ["ip", "netns", "exec"], prefix
                enter(prefix[3], prefix[-1])

        self.pid, self._child_created = _forked(begin, words, env), True
        self._close_pipe_fds(*streams)
        return None

    def spawnv_passfds(path: Any, args: Any, passfds: Collection[int]) -> int:
        words = [*map(os.fsdecode, args)]
        if not re.match("from multiprocessing.(forkserver|spawn) ", code := words[words.index("-c") + 1]):
            return spawn(path, args, passfds)
        return _forked(lambda: _keep_open(passfds), ["-c", code, *words[words.index("-c") + 2 :]], None)

    subprocess.Popen._execute_child = execute_child
    util.spawnv_passfds = spawnv_passfds


_START = subprocess.Popen._execute_child, util.spawnv_passfds


def start_pythons() -> None:
    """From now on, this process starts new interpreters again."""
    subprocess.Popen._execute_child, util.spawnv_passfds = _START


def _forked(begin: Callable[[], None], words: Sequence[str], environment: Mapping[str, str] | None) -> int:
    """The process number of a fork that is a Python program."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        begin()
        code = _be_python(words, environment)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _keep_open(descriptors: Collection[int]) -> None:
    """Close all files but the three streams and these, as a new interpreter would find it."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def enter(namespace: str, host_name: str) -> None:
    """Enter a network namespace of this machine, under a host's name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        assert libc.setns(file.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(_CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    name = host_name.encode()
    assert libc.sethostname(name, len(name)) == 0, os.strerror(ctypes.get_errno())


_WARNINGS = [("ignore", None, kind, None, 0) for kind in (DeprecationWarning, ImportWarning, ResourceWarning)]
"""Python's own filters, almost: those of a test make errors of warnings."""


def _be_python(words: Sequence[str], environment: Mapping[str, str] | None) -> int:
    """Run the program that an interpreter's arguments name, and return its exit code."""
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    warnings.filters[:] = _WARNINGS
    warnings._filters_mutated()
    logging.root.handlers.clear()
    atexit._clear()
    util._finalizer_registry.clear()
    multiprocessing.process._children.clear()
    threads._threads_queues.clear()  # those of the process that was forked are not here
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    atexit.register(util._exit_function)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code: Any = None
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [*words], str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
