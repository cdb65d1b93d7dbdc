"""Names, paths and errors that strangers chose: a terminal shows them, and obeys none."""

import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.live import Live
from rich.text import Text

from diloco.cli._streams import safe_streams
from diloco.cli.main import main
from diloco.errors import printable
from diloco.report.terminal.screen import Screen

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202egpj.exe"
"""Sets a terminal's title, clears it, and reverses what follows."""
SHOWN = "\ufffd]0;owned\ufffd\ufffd[2J\ufffd2J\ufffdgpj.exe"


def in_a_terminal(*arguments: str, folder: Path) -> str:
    """The text that a command writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "diloco", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=os.environ | {"TERM": "xterm"}
    ):
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 4096):
                written += piece
        except OSError:  # nobody writes any more
            pass
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.usefixtures("forked_pythons")
@pytest.mark.slow
def test_an_error_and_a_sentence_in_a_terminal(tmp_path):
    assert in_a_terminal("eval", EVIL, folder=tmp_path) == (
        f"diloco: {SHOWN} holds no run: {SHOWN}/config.json is missing\n"
    )
    folder = tmp_path / EVIL
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 999)
    (folder / EVIL).touch()
    written = in_a_terminal("data", "prepare", "--output", "out", "--train", EVIL, folder=tmp_path)
    assert SHOWN in written and not re.search("owned\x07|\x1b.2J|\x9b|\u202e", written)


def test_help_keeps_its_colors_in_a_terminal(tmp_path):
    assert "\x1b[" in in_a_terminal("eval", "--help", folder=tmp_path)


def test_a_run_is_watched(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("one", EVIL):
        shutil.copytree(finished_run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
    main(["watch", str(tmp_path)])
    written = capsys.readouterr().out
    assert "\ufffd]0;" in written and "\x1b" not in written


def test_an_error_in_a_log(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["eval", EVIL])
    assert capsys.readouterr().err == f"diloco: {SHOWN} holds no run: {SHOWN}/config.json is missing\n"
    assert printable(EVIL) == SHOWN


def test_a_live_display_keeps_its_own_movements_and_bars_their_returns(monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with safe_streams():
            with Live(console=Screen(force_terminal=True), refresh_per_second=1) as live:
                live.update(Text("row\x1b]0;title"))
            sys.stdout.write("a bar\rthe same bar")
        terminal.flush()
    written = b""
    with suppress(OSError):  # at the end
        while part := os.read(ours, 1 << 16):
            written += part
    os.close(ours)
    shown = written.decode()
    assert "\x1b[?25l" in shown and "a bar\rthe same bar" in shown
    assert "row\ufffd]0;title" in shown and shown.count("\ufffd") == shown.count("\ufffd]0;title")
