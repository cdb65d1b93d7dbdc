"""The commands of the README and the tutorials, one after another, as their reader types them."""

import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.processes import run_mains
from tests.running import EXAMPLES, ROOT, losses, replicas_agree, torchrun

from diloco.cli.main import main

TUTORIALS = ROOT / "docs" / "tutorial"
FIRST_HOUR = [
    ROOT / "README.md",
    *(TUTORIALS / f"{name}.md" for name in ("first-run", "own-loop", "two-machines", "three-machines")),
]
NOT_HERE = re.compile(r"\b(HOST|DIR|BUCKET)\b|^(make|export) |^diloco demo")
"""Commands that need a second machine, text from the network, or an installation, or have tests of their own."""
SHORTER = {
    "diloco train laptop --name laptop": (
        " --num-tokens 5120 --global-batch 2 --sequence-length 128 --diloco.sync-every 10"
        " --evaluation.num-tokens 5000"
    ),
    "diloco train tiny --method data_parallel --name baseline": " --num-tokens 5120",
}
"""Flags with which a command ends sooner; nothing that it prints stands on the page."""
PAGE = TUTORIALS / "transformers-model.md"
FEWER_TOKENS = {
    "diloco train tiny --model.hf gpt2.json --data.train texts --name my-gpt2": " --num-tokens 10240",
    "diloco train --resume runs/my-gpt2 --num-tokens 61440": " --num-tokens 20480",
}
"""The flags that take the place of the page's own, where no number of the page follows from them."""
IMPORTS = ("transformers.models.gpt2.modeling_gpt2", "peft", "torch.utils.tensorboard", "diloco.training.loop")
pytestmark = pytest.mark.slow


def commands(page: str) -> Iterator[str]:
    """Each command of the blocks without a language, its lines together."""
    return (command for command, _ in commands_and_outputs(page))


def commands_and_outputs(page: str) -> Iterator[tuple[str, str]]:
    """Each command of the blocks without a language, its lines together, and the text that is shown after it."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for (language, block), (next_language, output) in itertools.pairwise([*blocks, ("", "")]):
        lines = iter([] if language else re.sub(r"\\\n +", "", block).splitlines())
        together = []
        for line in lines:
            end = "END" if line.endswith("<<'END'") else '"' if line.startswith("python -c") else None
            while end is not None and not line.endswith(f"\n{end}"):
                line += "\n" + next(lines)
            together.append(re.sub(" +# .*", "", line))
        outputs = [""] * (len(together) - 1) + [output if next_language == "text" else ""]
        yield from zip(together, outputs, strict=bool(together))


def run_code(code: str) -> None:
    exec(code, {})


def run_shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def answer(text: str, words: list[str]) -> None:
    sys.stdin = io.StringIO(text)
    main(words)


def call(command: str) -> tuple[Any, ...]:
    """The function that does what a command does, and its arguments."""
    words = shlex.split(command)
    if words[0] == "echo":
        _, text, _, _, *others = words
        return answer, text + "\n", others
    if words[0] in ("diloco", "torchrun"):
        return main if words[0] == "diloco" else torchrun, words[1:]
    return (run_code, words[2]) if words[0] == "python" else (run_shell, command)


def timed(function: Any, *arguments: Any) -> None:
    start = time.monotonic()
    function(*arguments)
    sys.stderr.write(f"\n{time.monotonic() - start}")


def shape(line: str) -> str:
    """The line without its numbers, hashes and units of bytes."""
    return re.sub(r"[0-9a-f]{16}|\d[\d.,:]*", "#", re.sub(r"\b[kMG]B\b", "B", line))


def check_shown(block: str, printed: str, *, exactly: bool) -> None:
    """Hold that a command has printed what the page shows, and the numbers that depend on no machine."""
    shapes = {shape(line) for line in printed.splitlines()}
    for line in block.splitlines():
        assert line == "…" or shape(line) in shapes, line
    same = r"^(?:tokens|parameters|replicas|sent per replica|Data-Parallel)  .*|[\d,]+ bytes sent"
    for part in re.findall(same, block, re.MULTILINE) if exactly else []:
        assert part in printed, part


def hashes(printed: str) -> list[str]:
    return re.findall(r"outer hash +(\w{16})\b", printed)


def test_the_first_hour_by_the_commands_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "examples").symlink_to(EXAMPLES)  # the reader is in a clone
    pages = {page: [c for c in commands(page.read_text()) if not NOT_HERE.search(c)] for page in FIRST_HOUR}
    # A command of the README that a tutorial gives a name is not run twice.
    unique = {re.sub(" --name [a-z]+", "", command): command for named in pages.values() for command in named}
    calls = {command: (timed, *call(command + SHORTER.get(command, ""))) for command in unique.values()}
    done = run_mains([*calls.values()], folder=tmp_path, timeout_seconds=300, imports=IMPORTS[2:])
    printed = {command: one.stdout.replace(f"{tmp_path}/", "") for command, one in zip(calls, done, strict=True)}
    seconds = {c: float(one.stderr.rpartition("\n")[2]) for c, one in zip(calls, done, strict=True)}
    for command, taken in seconds.items():
        sys.stdout.write(f"{taken:5.1f} s  {command}{SHORTER.get(command, '')}\n")
    for page, named in pages.items():
        first = unique[re.sub(" --name [a-z]+", "", named[0])]
        assert first not in SHORTER, page
        for command, block in commands_and_outputs(page.read_text()):
            if block:
                check_shown(block, printed[command], exactly=command not in SHORTER)
    names = " --name first", " --name both"
    first, both = (hashes(text) for name in names for c, text in printed.items() if c.endswith(name))
    assert first == both and len(first) == 1
    own_loop, store = (text for end in ("own_loop.py", "wait") for c, text in printed.items() if c.endswith(end))
    assert replicas_agree(own_loop, num_processes=2) and losses(own_loop)[-1] < 1, "chance is log 32 = 3.47"
    assert len(hashes(store)) == 2 and len({*hashes(store)}) == 1
    (plan,) = (text for c, text in printed.items() if c.startswith("diloco plan"))
    answer = re.search(r"## Does it fit .*?## ", FIRST_HOUR[0].read_text(), re.DOTALL)[0]
    assert {*re.findall(r"\d[\d.]*\b", answer)} <= {*re.findall(r"\d[\d.]*", plan)}, "the README's figures"


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_the_commands_of_the_page_do_what_it_says(tmp_path):
    page = PAGE.read_text()
    shorter = {
        c: c.partition(" --num-tokens")[0] + FEWER_TOKENS[c] if c in FEWER_TOKENS else c for c in commands(page)
    }
    calls = {command: call(run) for command, run in shorter.items()}
    done = run_mains([*calls.values()], folder=tmp_path, timeout_seconds=300, imports=IMPORTS)
    printed = dict(zip(calls, [one.stdout for one in done], strict=True))
    (dry_run,) = (text for command, text in printed.items() if command.endswith("--dry-run"))
    for line in re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines():
        assert line == "…" or line in dry_run.splitlines()
    first, resumed, extended, adapted = re.findall(r"outer hash +(\w+)", "".join(printed.values()))
    assert first == resumed and len({first, extended, adapted}) == 3
    held_out = [float(loss) for loss in re.findall(r"held-out loss +([0-9.]+)", "".join(printed.values()))]
    assert held_out[0] == held_out[1] > held_out[2] == held_out[3] and held_out[4] < held_out[1]
    theirs, ours = (printed[c] for c in printed if "do_sample=False" in c or c.endswith("--temperature 0"))
    assert theirs == ours and len(ours) > 20
    assert f"sent per replica     {re.search(r'[0-9.]+ kB: the', page)[0][:-5]}" in printed[[*printed][-3]]
    assert (tmp_path / "my-adapters" / "adapter_model.safetensors").exists()
    assert (tmp_path / "my-adapted-gpt2" / "model.safetensors").exists()
