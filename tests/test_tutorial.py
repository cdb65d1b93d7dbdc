"""The commands of the tutorial on a model of transformers, one after another, as its reader types them."""

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import run_mains

from diloco.cli.main import main

PAGE = Path(__file__).parents[1] / "docs" / "tutorial" / "transformers-model.md"
IMPORTS = ("transformers.models.gpt2.modeling_gpt2", "peft", "torch.utils.tensorboard", "diloco.training.loop")
pytestmark = pytest.mark.slow


def commands(page: str) -> Iterator[str]:
    """Each command of the blocks without a language, its lines together."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        lines = iter([] if language else block.splitlines())
        for line in lines:
            end = "END" if line.endswith("<<'END'") else '"' if line.startswith("python -c") else None
            while end is not None and not line.endswith(f"\n{end}"):
                line += "\n" + next(lines)
            yield line


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
    if words[0] == "diloco":
        return main, words[1:]
    return (run_code, words[2]) if words[0] == "python" else (run_shell, command)


def test_the_commands_of_the_page_do_what_it_says(tmp_path):
    pytest.importorskip("peft")
    page = PAGE.read_text()
    calls = {command: call(command) for command in commands(page)}
    done = run_mains([*calls.values()], folder=tmp_path, timeout_seconds=300, imports=IMPORTS)
    printed = dict(zip(calls, [one.stdout for one in done], strict=True))
    (dry_run,) = (text for command, text in printed.items() if command.endswith("--dry-run"))
    for line in re.search(r"```text\n(.*?)```", page, re.DOTALL)[1].splitlines():
        assert line == "…" or line in dry_run.splitlines()
    first, resumed, extended, adapted = re.findall(r"outer hash +(\w+)", "".join(printed.values()))
    assert first == resumed and len({first, extended, adapted}) == 3
    losses = [float(loss) for loss in re.findall(r"held-out loss +([0-9.]+)", "".join(printed.values()))]
    assert losses[0] == losses[1] > losses[2] == losses[3] and losses[4] < losses[1]
    theirs, ours = (printed[c] for c in printed if "do_sample=False" in c or c.endswith("--temperature 0"))
    assert theirs == ours and len(ours) > 20
    assert f"sent per replica     {re.search(r'[0-9.]+ kB: the', page)[0][:-5]}" in printed[[*printed][-3]]
    assert (tmp_path / "my-adapters" / "adapter_model.safetensors").exists()
    assert (tmp_path / "my-adapted-gpt2" / "model.safetensors").exists()
