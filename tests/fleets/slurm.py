"""A Slurm of three nodes on this machine: slurmctld, and a slurmd per node, in a directory of their own."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.fleets.cases import wait
from tests.ports import free_port

NODES = ("n0", "n1", "n2")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def running_slurm(folder: Path) -> Iterator[None]:
    """Start it, and point Slurm's commands to it; skip where it is not installed."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed: apt-get install slurm-wlm")
    host = socket.gethostname().partition(".")[0]
    lines = [CONFIG.format(host=host, port=free_port(), user=getpass.getuser(), folder=folder)]
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2")
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text("\n".join(lines) + "\n")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(config)
    programs = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    with (folder / "slurm.log").open("w") as log:
        processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in programs]
    try:
        idle = "".join("idle\n" for _ in NODES)
        wait(lambda: slurm("sinfo", "--noheader", "--Node", "--format=%t", check=False) == idle, seconds=30)
        yield
    finally:
        slurm("scancel", "--user", getpass.getuser(), check=False)
        for process in processes[::-1]:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before


def slurm(*command: str, check: bool = True) -> str:
    """The output of one of Slurm's commands."""
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=check).stdout


def begin_now(job: str) -> None:
    """Let a job that was requeued begin: Slurm waits for two minutes."""
    waits = ["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%T %r"]
    wait(lambda: slurm(*waits).split() in (["PENDING", "BeginTime"], ["PENDING", "None"]))
    time.sleep(1.5)  # a node takes a job that begins in the second of its end for the one that has ended
    slurm("scontrol", "update", f"jobid={job}", "StartTime=now")
