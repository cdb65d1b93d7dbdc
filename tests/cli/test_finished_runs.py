"""`diloco eval`, `export` and `report` on runs that are damaged, or are none."""

import shutil

import pytest

from diloco.cli.main import main


def test_a_damaged_summary_is_named(finished_run, tmp_path, capsys):
    path = tmp_path / finished_run.name
    shutil.copytree(finished_run, path)
    (path / "summary.json").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(path)])
    assert "summary.json can't be read: Input data was truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["eval", "nowhere"], "nowhere holds no run"),
        (["export", "nowhere", "--to", "hf", "--output", "x"], "nowhere holds no run"),
        (["report", "nowhere"], "nowhere holds no run"),
        (["report", "results.csv"], "results.csv is neither a run's directory nor an experiment's CSV"),
        (["report"], "name a run's directory, or an experiment's CSV"),
        (["eval", "RUN", "--data", "nowhere.jsonl"], "nowhere.jsonl can't be read as questions: No such file"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, finished_run, capsys):
    arguments = [str(finished_run) if argument == "RUN" else argument for argument in arguments]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1
