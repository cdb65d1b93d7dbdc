import os
import subprocess
import sys
from pathlib import Path

import pytest

import diloco

LOADED = """
import sys
from diloco.cli import main

try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
print(sorted({{"torch", "numpy", "tyro"}} & set(sys.modules)))
"""


def python(code: str, folder: Path | None = None) -> str:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(("flag", "expected"), [("--help", "train"), ("--version", diloco.__version__)])
def test_help_and_version_load_nothing_heavy(flag, expected):
    output = python(LOADED.format(arguments=[flag]))
    assert expected in output and output.endswith("[]\n")


def test_importing_the_package_and_its_schedule_loads_nothing_heavy():
    assert python("import sys, diloco, diloco.schedule; print('torch' in sys.modules)") == "False\n"


def test_every_public_name_can_be_loaded():
    assert all(getattr(diloco, name) is not None for name in diloco.__all__)
    assert set(diloco.__all__) == set(dir(diloco))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = diloco.Nothing


def test_a_command_that_does_not_exist_is_refused():
    process = subprocess.run([sys.executable, "-m", "diloco", "trian"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and "trian" in process.stderr


def test_help_of_a_recipe_names_every_field():
    process = subprocess.run(
        [sys.executable, "-m", "diloco", "train", "laptop", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "120"},
    )
    for flag in ("--num-replicas", "--diloco.sync-every", "--optimizer.learning-rate", "--data.train", "--resume"):
        assert flag in process.stdout


def test_data_prepare_writes_a_directory_that_train_can_read(tmp_path):
    (tmp_path / "text.txt").write_text("one two three " * 100)
    (tmp_path / "held.txt").write_text("four five six " * 20)
    flags = ["--output", "prepared", "--train", "text.txt", "--held-out", "held.txt"]
    process = subprocess.run(
        [sys.executable, "-m", "diloco", "data", "prepare", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert "train: 1 documents, 1,401 tokens" in process.stdout
    assert (tmp_path / "prepared" / "index.json").exists()
