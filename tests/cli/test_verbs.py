"""Small verbs: `bench`, `data`, and those that read a finished run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diloco.cli.eval import _files, _print_result
from diloco.cli.main import main
from diloco.errors import UserError


def test_measurements_are_printed_as_a_table_or_as_json(tmp_path, capsys):
    save_file({"a": torch.tensor([0.0] * 4 + [1.0] * 6)}, tmp_path / "gradient.safetensors")
    command = [
        "bench",
        "wire",
        "--values",
        "1000",
        "--gradient",
        str(tmp_path / "gradient.safetensors"),
        "--wires",
    ]
    main([*command, "e3m0", "int2:block=64", "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert first["wire"] == "e3m0:block=256,stochastic=false" and first["relative_error"] == 0
    assert second["bits_per_value"] == pytest.approx(8 * (32 + 4 * 16 + 250) / 1000)
    main([*command, "bf16"])
    assert "bf16" in capsys.readouterr().out


def test_text_is_prepared_in_a_directory(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three " * 100)
    (tmp_path / "held.txt").write_text("four five six " * 20)
    sources = ["--train", str(tmp_path / "text.txt"), "--held-out", str(tmp_path / "held.txt")]
    main(["data", "prepare", "--output", str(tmp_path / "prepared"), *sources])
    assert "train: 1 documents, 1,401 tokens" in capsys.readouterr().out
    assert (tmp_path / "prepared" / "index.json").exists()


def test_a_task_has_the_file_that_its_name_begins():
    arc, easy, piqa = map(Path, ("arc.jsonl", "arc_easy.jsonl", "piqa_1.jsonl"))
    assert _files("", (arc, piqa)) == {"arc": arc, "piqa_1": piqa}
    assert _files("piqa,arc,hellaswag", (arc, easy, piqa)[::2]) == {"piqa": piqa, "arc": arc, "hellaswag": None}
    assert _files("arc,arc_easy", (easy,)) == {"arc": None, "arc_easy": easy}
    assert _files("arc_easy,arc", (easy, arc)) == {"arc": arc, "arc_easy": easy}
    for data, words in (
        (("piqa_1.jsonl", "piqa_2.jsonl"), "belong to the task 'piqa'"),
        (("arc.jsonl",), "named after"),
    ):
        with pytest.raises(UserError, match=words) as error:
            _files("piqa", tuple(map(Path, data)))
        assert "data" in error.value.fields


def test_a_metric_is_printed_with_its_standard_error_under_a_filter_too(capsys):
    scores = {"acc": 0.5, "acc_stderr": 0.25, "exact_match,strict": 0.125, "exact_match_stderr,strict": 0.0625}
    loss = {"eval_loss": 1.0, "eval_standard_error": None, "eval_tokens": 8, "eval_bits_per_byte": 1.0}
    _print_result({"run": "a", "parameters": "outer", "step": 1, **loss, "tasks": {"gsm8k": scores}})
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows == [["gsm8k", "acc      0.5000 ± 0.2500"], ["gsm8k", "exact_match,strict 0.1250 ± 0.0625"]]


def test_a_damaged_summary_is_named(finished_run, tmp_path, capsys):
    path = tmp_path / finished_run.name
    shutil.copytree(finished_run, path)
    (path / "summary.json").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(path)])
    assert "summary.json can't be read: Input data was truncated" in capsys.readouterr().err
