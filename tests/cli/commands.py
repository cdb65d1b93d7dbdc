"""Commands as tests run them."""

import subprocess
import sys

import pytest

from diloco.cli.main import main

_LOADED = """
import sys
from diloco.cli.main import main

try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
print(sorted({{"torch", "numpy", "tyro"}} & set(sys.modules)))
"""


def loaded(*arguments: str) -> str:
    """The output of a command, and then the heavy modules that it loaded."""
    command = [sys.executable, "-c", _LOADED.format(arguments=arguments)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return process.stdout


def refusal(capsys, *arguments: str) -> str:
    """The one sentence with which a command refuses a user's mistake."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    sentence = capsys.readouterr().err
    assert sentence.startswith("diloco: ") and sentence.count("\n") == 1
    return sentence.removeprefix("diloco: ").removesuffix("\n")
