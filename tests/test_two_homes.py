"""The commands of the page on two homes, typed in two network namespaces: 50 Mbit/s down, 10 up, and 30 ms."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partialmethod
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from string import Template
from typing import Any

import pytest
from benchmarks.network.laboratory import Laboratory
from tests.benchmarks.test_laboratory import can_make_namespaces
from tests.forks import enter
from tests.processes import program
from tests.running import ROOT
from tests.servers import running_seaweedfs
from tests.test_tutorial import call, commands

from diloco.data.tokenizers import train_bpe
from diloco.errors import UserError
from diloco.rendezvous.status import Look
from diloco.rendezvous.store_rendezvous import StoreRendezvous

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "tutorial" / "two-homes.md").read_text()
DIARY = "Dear diary, today was a day like all others, and yet I wonder what tomorrow will bring. "
SHORTER = " --num-tokens 100k --sequence-length 64 --micro-batch 8 --optimizer.learning-rate 4e-3"
"""Flags with which a tiny model is fine-tuned in seconds."""
FASTER = " --micro-batch 8"
"""The flag with which the other home keeps pace."""
IMPORTS = ("transformers.models.llama.modeling_llama", "peft")
BASE = "python -c 'from tests.test_two_homes import write_base; write_base(\"base\")'"
"""The command that saves the model, in a process that has imported transformers."""
PORT, ROUND_TRIP_SECONDS = 8333, 0.03
POLL_SECONDS = 0.1
"""Time between two looks into the bucket; with 0.5 s the rounds of so fast steps take most of them."""
RELAY = """
import asyncio, sys
address, port, path, delay = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
async def pass_on(reader, writer):
    clock, arrived = asyncio.get_running_loop().time, asyncio.Queue()
    async def deliver():
        while (chunk := await arrived.get())[1]:
            await asyncio.sleep(chunk[0] + delay - clock())
            writer.write(chunk[1])
            await writer.drain()
        writer.close()
    delivering = asyncio.ensure_future(deliver())
    while chunk := await reader.read(1 << 16):
        arrived.put_nowait((clock(), chunk))
    arrived.put_nowait((0, b""))
    await delivering
async def serve(reader, writer):
    to_store = await asyncio.open_unix_connection(path)
    await asyncio.gather(pass_on(reader, to_store[1]), pass_on(to_store[0], writer), return_exceptions=True)
async def main():
    async with await asyncio.start_server(serve, address, port) as server:
        print("serving", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""
"""A relay from the network to the store's socket, which keeps every byte for half of the round trip, each way."""


def be_shell(typed: Connection) -> None:
    """Start commands, each in the namespace of a home, and tell their process numbers."""
    init = StoreRendezvous.__init__
    StoreRendezvous.__init__ = partialmethod(init, poll_seconds=POLL_SECONDS)
    while True:
        home, command, path = typed.recv()
        if (pid := os.fork()) == 0:
            os.setsid()
            output, code = os.open(path, os.O_WRONLY | os.O_CREAT), 1
            os.dup2(output, 1), os.dup2(output, 2)
            try:
                enter(*home)
                function, *arguments = call(command)
                function(*arguments)
                code = 0
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stdout.flush()
                Path(f"{path}.code").write_text(str(code))
                os._exit(0)
        typed.send(pid)


class Shell:
    """Types commands in the namespaces of homes."""

    def __init__(self, laboratory: Laboratory, folder: Path, environment: Mapping[str, str]) -> None:
        self._laboratory, self._folder, self._environment = laboratory, folder, environment
        self._num_typed, self._pids = 0, list[int]()
        self._typed, theirs = Pipe()
        self._running = program(be_shell, theirs, folder=folder, imports=IMPORTS, **environment)

    def __enter__(self) -> "Shell":
        self._running.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for pid in self._pids:  # where the test has failed, one may stand still
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._running.__exit__(*error)

    def type(self, number: int, command: str) -> "Typed":
        self._num_typed += 1
        path = self._folder / f"typed-{self._num_typed}"
        home = self._laboratory.namespace(number), self._laboratory.address(number)
        command = Template(command).substitute(self._environment)
        self._typed.send((home, command, str(path)))
        self._pids.append(self._typed.recv())
        return Typed(self._pids[-1], path)


class Typed:
    """A program that runs in a home."""

    def __init__(self, pid: int, path: Path) -> None:
        self.pid, self._path, self._code = pid, path, path.with_name(f"{path.name}.code")

    def printed(self) -> str:
        until(self._code.exists)
        output = self._path.read_text()
        assert self._code.read_text() == "0", output
        return output


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def counts(url: str) -> list[int]:
    """The number of outer steps that have counted each replica, in the order of their joins."""
    look = Look(url, with_timeline=True)
    try:
        status = look.again()
    except UserError:
        return []  # there is no run yet
    assert not status.finished, "the run ended before the other home was back: give it more tokens"
    return [len(life.counted) for life in look.timeline.lives]


def write_base(folder: str) -> None:
    """A tiny Llama, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=64, bos_token_id=256, eos_token_id=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_bpe([DIARY] * 9, 280, Path(folder) / "tokenizer.json")


@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_make_namespaces(), reason="needs root, and iproute2's ip and tc")
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_two_homes_train_one_model_and_one_of_them_leaves(tmp_path, use_environment):
    for folder in ("notes", "store"):
        (tmp_path / folder).mkdir()
    for number in range(40):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"{number}. {DIARY}" * 40)
    typed = [command for command in commands(PAGE) if not re.match("pip|export|python", command)]
    check, prepare, at_home, away, *afterwards = typed
    with ExitStack() as stack:
        server = stack.enter_context(running_seaweedfs(tmp_path / "store"))
        laboratory = stack.enter_context(Laboratory(3))
        laboratory.set_links(gbit_s=10.0)
        for number in range(2):
            laboratory.set_link(number, up_gbit_s=0.01, down_gbit_s=0.05)
        there, socket = laboratory.address(2), str(tmp_path / "store" / "s3.sock")
        relay = [sys.executable, "-c", RELAY, there, str(PORT), socket, str(ROUND_TRIP_SECONDS / 2)]
        serving = stack.enter_context(laboratory.start(2, relay, stdout=subprocess.PIPE, text=True))
        stack.callback(serving.kill)
        assert serving.stdout.readline() == "serving\n"
        url, path = server.new_url(), f"{ROOT}:{ROOT / 'src'}"
        environment = {
            **server.environment,
            "AWS_ENDPOINT_URL": f"http://{there}:{PORT}",
            "AWS_ALLOW_HTTP": "true",
        }
        environment |= {"PLACE": url, "MODEL": "base", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        shell = stack.enter_context(Shell(laboratory, tmp_path, environment))
        use_environment(server.environment)
        shell.type(0, BASE).printed()
        shell.type(0, prepare).printed()
        checking = shell.type(1, check)
        training = shell.type(0, at_home + SHORTER)
        until(lambda: len(counts(url)) == 1)
        gone = shell.type(1, away + FASTER)
        until(lambda: all(counts(url)) and len(counts(url)) == 2)
        os.killpg(gone.pid, signal.SIGKILL)
        before = counts(url)
        until(lambda: counts(url)[0] > before[0])
        os.killpg(training.pid, signal.SIGSTOP)  # the run is not to end before the other is back
        back = shell.type(1, away + FASTER)
        until(lambda: counts(url)[2:] >= [1])  # the home that stands still keeps nobody
        os.killpg(training.pid, signal.SIGCONT)
        outputs = [one.printed() for one in (training, back)]
        assert re.search(r"one winner(.|\n)* 1 MiB: ([5-9]|10)\.?\d* Mbit/s up", checking.printed())
        evaluated, _, written = (shell.type(0, command).printed() for command in afterwards)
        lives = Look(url, with_timeline=True)
        lives.again()
    hashes = [re.findall(r"outer hash +(\w+)", output) for output in outputs]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 1, outputs
    by_name = {name: [life for life in lives.timeline.lives if life.name == name] for name in ("home", "away")}
    assert [len(by_name[name]) for name in by_name] == [1, 2] and all(
        life.counted for life in lives.timeline.lives
    )
    assert re.findall(r"held-out loss +(\S+)", outputs[0]) == re.findall(r"held-out loss +(\S+)", evaluated)
    assert written.strip(), "the model has gone on with the diary, until it took the stop token"
    assert (tmp_path / "tuned" / "model.safetensors").exists()
