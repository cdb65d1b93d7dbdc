"""The systems that are compared: how each is started, and with which settings of its own."""

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.servers import Server

from diloco.training.processes import end_with_parent


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of the table."""

    title: str
    module: str
    """The replica's, in peer_study."""
    victim: int = 0
    """The replica that is killed; replica 0 starts first."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its replicas."""
    heartbeat_ms: int = 5000
    """Time after which torchft's lighthouse takes a replica for dead; 5000 is its default."""


PATIENT_GRADIENTMAIL = {"poll_interval": 0.1, "lease_every": 1.0, "lease_timeout": 3.0, "carry": True}

SYSTEMS = {
    "diloco": System(title="diloco", module="diloco_replica"),
    "torchft": System(title="torchft", module="torchft_replica"),
    "torchft_1s": System(title="torchft, heartbeat timeout 1 s", module="torchft_replica", heartbeat_ms=1000),
    "gradientmail": System(title="GradientMail, its closer dies", module="gradientmail_replica"),
    "gradientmail_other": System(title="GradientMail, another node dies", module="gradientmail_replica", victim=2),
    "gradientmail_tuned": System(
        title="GradientMail, polls of 0.1 s, leases of 3 s, `Carry`, its closer dies",
        module="gradientmail_replica",
        options=PATIENT_GRADIENTMAIL,
    ),
}


def missing(system: System, gradientmail_python: str | None) -> str | None:
    """The reason why a system can't be measured here; None if it can."""
    if system.module == "torchft_replica" and importlib.util.find_spec("torchft") is None:
        return "torchft is absent: pip install '.[peers]'"
    if system.module == "gradientmail_replica":
        needed = "a Python 3.12 or newer with `pip install 'gradientmail[s3,torch]'`"
        if gradientmail_python is None:
            return f"GradientMail was not asked for: give {needed} as --gradientmail-python"
        if subprocess.run(
            [gradientmail_python, "-c", "import gradientmail, boto3, torch"], check=False
        ).returncode:
            return f"{gradientmail_python} can't import GradientMail: give {needed}"
    return None


def needs_store(system: System) -> bool:
    """True if its replicas meet in a store."""
    return system.module != "torchft_replica"


def meeting_place(system: System, server: Server | None) -> AbstractContextManager[str]:
    """The place where the replicas of a run meet: a new prefix of a bucket, or a lighthouse."""
    if not needs_store(system):
        return _lighthouse(system.heartbeat_ms)
    assert server is not None, "there is one where a system needs it"
    return nullcontext(server.new_url())


def python_of(system: System, gradientmail_python: str | None) -> str:
    """The interpreter of a system's replicas."""
    if system.module == "gradientmail_replica":
        assert gradientmail_python is not None, "it was asked for"
        return gradientmail_python
    return sys.executable


def versions(gradientmail_python: str | None) -> str:
    """The peers' versions, for the head of the table."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    parts = [f"torch {torch.__version__}"]
    for python, name in ((sys.executable, "torchft-nightly"), (gradientmail_python, "gradientmail")):
        if python is not None:
            done = subprocess.run([python, "-c", code, name], check=False, capture_output=True, text=True)
            parts += [f"{name} {done.stdout.strip()}"] if done.returncode == 0 else []
    return ", ".join(parts)


@contextmanager
def _lighthouse(heartbeat_ms: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    command = [program, "--bind", address, "--min_replicas", "2", "--heartbeat_timeout_ms", str(heartbeat_ms)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
    )
    time.sleep(1.0)
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()
