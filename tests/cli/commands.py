"""Commands as tests run them."""

import subprocess
import sys

import pytest

from diloco.cli.main import main

_LOADED = """
import sys
from diloco.cli.main import main

for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code
print(*({{"torch", "numpy", "tyro"}} & set(sys.modules)))
"""


def loaded(*commands: list[str]) -> tuple[str, set[str]]:
    """The output of commands in a process of their own, and the heavy modules that they have loaded."""
    code = _LOADED.format(commands=commands)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    printed, _, modules = process.stdout.removesuffix("\n").rpartition("\n")
    return printed, set(modules.split())


def refusal(capsys, *arguments: str) -> str:
    """The one sentence with which a command refuses a user's mistake."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    sentence = capsys.readouterr().err
    assert sentence.startswith("diloco: ") and sentence.count("\n") == 1
    return sentence.removeprefix("diloco: ").removesuffix("\n")
