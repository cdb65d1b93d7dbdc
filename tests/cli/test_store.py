import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.servers import Server

from diloco.cli.main import main


@pytest.mark.slow
def test_a_check_is_printed_as_text_or_as_json(directory: Server, capsys: pytest.CaptureFixture[str]):
    main(["store", "check", directory.url, "--rounds", "3", "--racers", "2"])
    assert "3 of 3 races of 2 had one winner" in capsys.readouterr().out
    main(["store", "check", directory.url, "--rounds", "3", "--racers", "2", "--json"])
    checked = json.loads(capsys.readouterr().out)
    assert checked["refusal"] is None and checked["num_racers"] == 2 and checked["several_won"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ftp://host/run"], "diloco: ftp://host/run: give a directory, or s3://bucket/prefix"),
        (["/none/run"], "diloco: /none does not exist: make it, or mount it, first"),
        (["{}", "--racers", "1"], "diloco: --racers=1 must be at least 2"),
        (["{}", "--rounds", "0"], "diloco: --rounds=0 must be at least 1"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["store", "check", *(argument.format(tmp_path) for argument in arguments)])
    assert capsys.readouterr().err.startswith(sentence)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize(
    ("options", "sentence"), [("size=1m", "no space left on device"), ("ro", "read-only file system")]
)
def test_a_directory_that_is_full_or_read_only(options: str, sentence: str, tmp_path: Path, capsys):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"can't mount: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(SystemExit, match="1"):
            main(["store", "check", str(tmp_path), "--rounds", "1"])
        error = capsys.readouterr().err
        assert sentence in error and str(tmp_path) in error and error.count("\n") == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)
