import os
import subprocess
import sys

import pytest

from diloco.cli._explain import explained, hinted
from diloco.errors import DilocoError, UserError


def end(error: BaseException, **hint) -> int:
    with pytest.raises(SystemExit) as end, explained(), hinted("call it again", **hint):
        raise error
    return end.value.code


@pytest.mark.parametrize(
    ("error", "exit_code", "sentence"),
    [
        (UserError("a mistake"), 2, "a mistake"),
        (DilocoError("a failure"), 1, "a failure; call it again"),
        (OSError(28, "No space left on device"), 1, "no space left on device; call it again"),
        (KeyboardInterrupt(), 130, "interrupted; call it again"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(error, exit_code, sentence, capsys):
    assert end(error) == exit_code
    assert capsys.readouterr().err == f"diloco: {sentence}\n"


def test_a_hint_waits_until_something_has_begun(tmp_path, capsys):
    begun = (tmp_path / "config.json").exists
    assert end(DilocoError("a failure"), when=begun) == 1
    (tmp_path / "config.json").touch()
    assert end(DilocoError("a failure"), when=begun) == 1
    assert capsys.readouterr().err == "diloco: a failure\ndiloco: a failure; call it again\n"


def test_a_bug_shows_its_traceback():
    with pytest.raises(ValueError, match="a bug"), explained():
        raise ValueError("a bug")


def test_every_error_shows_its_traceback_on_request(monkeypatch, capsys):
    monkeypatch.setenv("DILOCO_TRACEBACK", "1")
    assert end(UserError("a mistake")) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "UserError: a mistake" in printed


@pytest.mark.parametrize(("redirection", "encoding"), [(">&-", "utf-8"), ("> /dev/null", "ascii")])
def test_an_output_that_is_closed_or_lacks_a_letter_is_no_failure(redirection, encoding):
    command = f'"$0" -m diloco scaling predict --num-params 1e9 --num-replicas 4 {redirection}'
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    process = subprocess.run(
        ["sh", "-c", command, sys.executable], env=environment, capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, "")
