"""The page of `diloco report`: its content beside the files of the runs, and in a browser where there is one."""

import html
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from tests.experiments.papers.made_up import made_up

from diloco.cli._command import train_command
from diloco.cli.main import main
from diloco.cli.train import _parsed as parsed
from diloco.data.shards import read_index, write_record
from diloco.experiments.papers import experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import write_rows
from diloco.report.setup import moment
from diloco.report.sources import Sources
from diloco.report.text import differing_settings, shown_names
from diloco.training.config.config import TrainConfig
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import Budget
from diloco.training.data_parallel import ring_all_reduce_bytes
from diloco.training.records.metrics import read_metrics
from diloco.training.records.runs import read_asked
from diloco.training.records.tail import RunTail

EVIL = "$x$ & </script><script>document.title=1<"
EXPERIMENTS = ("compression", "evaluated_parameters", "scaling")
"""Experiments: one over names, one with the paper's numbers, and one with zero-shot accuracies."""


def reported(tmp_path: Path, *sources: Path) -> dict:
    """The content of a report's page."""
    file = tmp_path / "report.html"
    main(["report", *map(str, sources), "--output", str(file)])
    return content(file)


def content(file: Path) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', file.read_text())
    return json.loads(text)


def charts_of(section: dict) -> dict[str, dict]:
    return {chart["title"].partition(",")[0]: chart for chart in section["charts"]}


@pytest.fixture(scope="module")
def file(finished_run, tmp_path_factory) -> Path:
    """A report of a run and of experiments."""
    folder = tmp_path_factory.mktemp("report")
    reported(folder, finished_run, *write_tables(folder))
    return folder / "report.html"


def write_tables(folder: Path) -> list[Path]:
    """The tables of the experiments."""
    tables = [folder / f"{name}.csv" for name in EXPERIMENTS]
    for table in tables:
        rows = made_up(experiment(table.stem, TIERS["small"]()))
        write_rows([{"tier": "small", **row} for row in rows], table)
    return tables


@pytest.fixture(scope="module")
def run(file) -> dict:
    """The section of the run."""
    return content(file)["sections"][0]


def test_the_file_is_the_page_of_the_same_moment_and_loads_nothing(file, finished_run):
    sources = Sources([str(finished_run)], command_of=train_command)
    sources.again()
    assert content(file)["sections"][:1] == json.loads(sources.page().as_json())["sections"]
    text = file.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and "@import" not in text
    assert "default-src 'none'; script-src 'sha256-" in text and "unsafe" not in text and "connect-src" not in text


def test_the_facts_are_those_of_the_files(run, finished_run):
    summary = json.loads((finished_run / "summary.json").read_text())
    facts = run["facts"]
    loss, error = (float(number) for number in facts["held-out loss"].split(" ± "))
    assert loss == pytest.approx(summary["eval_loss"], abs=5e-5)
    assert error == pytest.approx(summary["eval_standard_error"], abs=5e-5)
    sent = float(facts["sent per replica"].removesuffix(" MB")) * 1e6
    assert sent == pytest.approx(summary["bytes_sent_per_replica"], abs=5e3)
    speed = float(facts["tokens/s"].replace(",", ""))
    assert speed == pytest.approx(summary["tokens_per_second"], abs=0.51)
    names = ("step", "tokens", "parameters", "outer hash", "H", "replicas")
    params, hash_ = f"{summary['num_params']:,}", summary["outer_hash"][:16]
    assert [facts[name] for name in names] == ["120 of 120", "61,440", params, hash_, "10", "2"]


def test_one_thing_has_one_number_and_one_name_wherever_it_is_shown(run, finished_run, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    steps = [read_metrics(finished_run, replica) for replica in (0, 1)]
    loss = fmean(fmean(step.loss for step in each[114:]) for each in steps)  # 5 % of 120 steps
    utilization = fmean(
        1 - sum(step.blocked_seconds for step in each) / sum(step.step_seconds for step in each) for each in steps
    )
    words = {
        "training loss": (f"{loss:.4f}", "mean of the last 5 % of steps"),
        "compute utilization": (f"{utilization:.1%}", "mean of all steps"),
    }
    main(["watch", str(finished_run)])
    watched = capsys.readouterr().out
    trained = (finished_run.parents[1] / "printed.txt").read_text()
    sources = Sources([str(finished_run)])
    sources.again()
    (served,) = json.loads(sources.page().as_json())["sections"]
    for name, (number, meaning) in words.items():
        for printed in (trained, watched):  # the terminal that trains, and the one that watches
            assert re.findall(rf"^ ?{name} +(\S.*?) *$", printed, re.M) == [f"{number}, {meaning}"]
        for section in (served, run):  # the live page, and the report
            assert section["facts"][name] == f"{number}, {meaning}"
            chart = charts_of(section)[name.capitalize()]
            assert [series["value"] for series in chart["series"] if series["label"] == "mean"] == [number]
            assert meaning in chart["about"]
    assert trained.splitlines()[-1] == "next: diloco report runs/streaming, diloco chat runs/streaming --serve"
    held_out = run["facts"]["held-out loss"]
    assert re.findall(r"^held-out loss +(.*)$", trained, re.M) == [held_out]
    assert charts_of(run)["Held-out loss"]["series"][-1]["value"] == held_out.split()[0]


def test_the_curves_are_those_of_the_metrics(run, finished_run):
    summary = json.loads((finished_run / "summary.json").read_text())
    first, other = (read_metrics(finished_run, replica) for replica in (0, 1))
    charts = charts_of(run)
    for series, steps in zip(charts["Training loss"]["series"], (first, other), strict=False):
        assert series["points"] == [[step.tokens, pytest.approx(step.loss, rel=1e-4)] for step in steps]
    assert charts["Held-out loss"]["series"][-1]["points"][-1] == [
        summary["num_tokens"],
        pytest.approx(summary["eval_loss"], rel=1e-4),
    ]
    own, data_parallel = charts["Bytes sent by a replica"]["series"]
    assert own["points"][-1][1] == pytest.approx(summary["bytes_sent_per_replica"], rel=1e-4)
    each = ring_all_reduce_bytes(summary["num_params"], 2)
    assert data_parallel["points"] == [[step.tokens, pytest.approx(each * step.step, rel=1e-4)] for step in first]
    merges = [(outer, step.step) for step in first for outer in step.outer_steps]
    for title, name in (
        ("Norm of the mean outer gradient", "outer_gradient_norm"),
        ("Cosine between", "cosine"),
        ("Cosine of successive", "successive_cosine"),
        ("Gain of the outer step", "gain"),
    ):
        chart = next(chart for start, chart in charts.items() if start.startswith(title))
        for fragment, series in enumerate(chart["series"]):
            outer_steps = [outer for outer, _ in merges if outer.fragment == fragment]
            assert series["points"] == [
                [outer.sent_step, pytest.approx(value, rel=1e-4)]
                for outer in outer_steps
                if (value := getattr(outer, name)) is not None
            ]
    lanes = charts["Sends and merges in the first rounds"]["lanes"]
    assert len(lanes) == 3 * 2
    for lane, fragment in zip(lanes[::2], range(3), strict=True):
        bars = [[outer.sent_step, merged] for outer, merged in merges if outer.fragment == fragment]
        assert lane["bars"] == [bar for bar in bars if bar[0] <= 10 + 2 * 10]


def test_the_result_comes_first_and_the_command_makes_the_run_again(run, finished_run):
    summary = json.loads((finished_run / "summary.json").read_text())
    factor = summary["data_parallel_bytes_per_replica"] / summary["bytes_sent_per_replica"]
    assert run["headline"] == (
        f"57.8k parameters, 2 replicas: held-out loss {summary['eval_loss']:.3g} after 61.4k tokens, "
        f"{factor:.0f}× fewer bytes than Data-Parallel"
    )
    assert run["main"][0] == "held-out loss" and {*run["main"]} > {"sent per replica", "tokens/s"}
    setup = run["setup"]
    of_run, of_config = (
        ("command", "date", "machine", "data"),
        ("model", "batch", "inner optimizer", "learning rate"),
    )
    assert list(setup) == [*of_run, *of_config]
    assert setup["machine"].startswith(summary["machine"]) and re.search(r" \d+ cores, ", setup["machine"])
    assert setup["date"] == moment((finished_run / "metrics-0.jsonl").stat().st_mtime)
    assert "text.jsonl, " in setup["data"] and "tokenizer bytes" in setup["data"]
    assert setup["learning rate"] == "warm-up of 12 steps up to 0.004, then a cosine to 5%"
    program, verb, *words = shlex.split(setup["command"])
    asked, (command, budget) = read_asked(finished_run), parsed(words)
    assert (program, verb, budget) == ("diloco", "train", Budget(asked.num_tokens, "tokens"))
    data = replace(command.config.data, prepared=asked.data.prepared)
    assert replace(command.config, runs=asked.runs, data=data, num_tokens=asked.num_tokens) == asked


@pytest.mark.parametrize(("ratio", "claim", "fact"), [(1.5, ", 1.5× fewer", ", 1.5× as"), (0.5, "", ", 0.5× as")])
def test_a_run_that_sends_more_than_data_parallel_does_not_say_fewer(finished_run, tmp_path, ratio, claim, fact):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    summary = json.loads((run / "summary.json").read_text())
    summary["bytes_sent_per_replica"] = round(summary["data_parallel_bytes_per_replica"] / ratio)
    (run / "summary.json").write_text(json.dumps(summary))
    sources = Sources([str(run)])
    sources.read()
    (section,) = sources.page().sections
    assert section.headline.partition(" tokens")[2].startswith(claim) and (
        claim or "fewer" not in section.headline
    )
    assert fact in section.facts["Data-Parallel"]


def test_no_command_is_shown_of_a_run_whose_schedule_was_changed_on_its_way(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    config = json.loads((run / "config.json").read_text())
    config["optimizer"] |= {"start_step": 60, "start_rate": 2e-4}
    (run / "config.json").write_text(json.dumps(config))
    assert "command" not in reported(tmp_path, run)["sections"][0]["setup"]


def test_texts_that_the_model_wrote_are_shown_as_they_are(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    texts = [{"prompt": "The", "text": f" {EVIL}\n"}, {"prompt": "", "text": "…"}]
    (run / "samples.json").write_text(json.dumps(texts))
    assert reported(tmp_path, run)["sections"][0]["samples"] == texts
    assert EVIL not in (tmp_path / "report.html").read_text()
    for damaged in ("{", '[{"prompt": 3, "text": ""}]', '{"prompt": "", "text": ""}', "[" * 5000):
        (run / "samples.json").write_text(damaged)
        (sample,) = reported(tmp_path, run)["sections"][0]["samples"]
        assert "samples.json can't be read" in sample["text"]


def test_an_experiment_has_its_verdict_its_panels_and_its_rows(file):
    sections = content(file)["sections"][1:]
    assert [section["title"] for section in sections] == [*EXPERIMENTS]
    for section in sections:
        one = experiment(section["title"], TIERS["small"]())
        rows = made_up(one)
        measured, verdict = one.finding(rows)
        assert section["facts"] == {"verdict": verdict} and f"Measured: {measured}." in section["notes"]
        assert len(section["table"]["rows"]) == len(rows)
        for panel, chart in zip(one.panels(rows), section["charts"], strict=True):
            curves = [series["points"] for series in chart["series"]]
            assert [[point[1:] for point in curve] for curve in curves] == [
                [list(point[1:]) for point in points] for points in panel.curves.values()
            ]
            assert (chart["about"] == "The paper's numbers.") == panel.published


def test_nothing_that_a_stranger_wrote_is_markup(finished_run, tmp_path):
    run = tmp_path / EVIL.replace("/", "∕")
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"outer_hash": EVIL}))
    (section,) = reported(tmp_path, run)["sections"]
    assert section["title"] == run.name and section["facts"]["outer hash"] == EVIL[:16]
    text = (tmp_path / "report.html").read_text()
    assert text.count("<script") == text.count("</script>") == 2 and html.escape(run.name) in text


def test_a_run_in_a_directory_whose_name_is_not_utf8_is_reported(finished_run, tmp_path):
    run = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    (section,) = reported(tmp_path, run)["sections"]
    assert section["title"] == run.name and "caf?</title>" in (tmp_path / "report.html").read_text()


def test_several_runs_are_compared_at_the_top(finished_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("checkpoints"))
    config, summary = (json.loads((other / f"{name}.json").read_text()) for name in ("config", "summary"))
    config["optimizer"]["learning_rate"] = 0.25
    (other / "config.json").write_text(json.dumps(config))
    (other / "summary.json").write_text(json.dumps(summary | {"eval_loss": 9.25}))
    compared, *runs = reported(tmp_path, finished_run, other)["sections"]
    assert [run["title"] for run in runs] == ["streaming, learning_rate=0.004", "other, learning_rate=0.25"]
    columns = dict(zip(compared["table"]["columns"], zip(*compared["table"]["rows"], strict=True), strict=True))
    assert (columns["run"], columns["learning_rate"]) == (("streaming", "other"), ("0.004", "0.25"))
    names = [*columns]
    assert names[:5] == ["run", "state", "held-out loss", "sent", "learning_rate"]
    assert compared["table"]["colors"] == [0, 1] == [one["color"] for one in runs]
    percent = 100 * (9.25 / summary["eval_loss"] - 1)
    assert compared["headline"] == (f"other: held-out loss {percent:.1f} % above streaming's, as many bytes sent")
    assert columns["held-out loss"][1].startswith("9.2500")
    assert len({*columns["loss, last 5 %"]}) == 1
    meaning = "training loss, mean of the last 5 % of steps"
    assert compared["table"]["meanings"]["loss, last 5 %"] == meaning
    held_out = charts_of(compared)["Held-out loss"]["series"]
    assert [(series["label"], series["points"][-1][1]) for series in held_out if not series["thin"]] == [
        ("learning_rate=0.004", pytest.approx(summary["eval_loss"], rel=1e-4)),
        ("learning_rate=0.25", 9.25),
    ]
    assert shown_names(["checkpoint.every_steps", "seed", "evaluation.every_steps"]) == [
        *("checkpoint.every_steps", "seed", "evaluation.every_steps"),
    ]


@pytest.fixture
def baseline(finished_run, tmp_path) -> Path:
    """The same run as a Data-Parallel one that sent 87 times as much and whose held-out loss is 3.3 % lower."""
    other = tmp_path / "baseline"
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("checkpoints"))
    config, summary = (json.loads((other / f"{name}.json").read_text()) for name in ("config", "summary"))
    (other / "config.json").write_text(json.dumps(config | {"method": "data_parallel"}))
    changed = {"eval_loss": summary["eval_loss"] / 1.033, "bytes_sent_per_replica": 87 * sent_by(finished_run)}
    (other / "summary.json").write_text(json.dumps(summary | changed | {"method": "data_parallel"}))
    for path in other.glob("metrics-*.jsonl"):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [json.dumps(step | {"bytes_sent": 87 * step["bytes_sent"]}) for step in steps]
        path.write_text("".join(f"{line}\n" for line in lines))
    return other


def sent_by(run: Path) -> int:
    return json.loads((run / "summary.json").read_text())["bytes_sent_per_replica"]


def test_runs_are_set_beside_the_data_parallel_one(finished_run, baseline, tmp_path):
    compared, *runs = reported(tmp_path, finished_run, baseline)["sections"]
    assert compared["headline"] == "streaming: held-out loss 3.3 % above baseline's, 87× fewer bytes sent"
    charts = charts_of(compared)
    sent = charts["Bytes sent by a replica"]
    totals = [one["points"][-1][1] for one in sent["series"]]
    assert totals == [pytest.approx(factor * sent_by(finished_run), rel=1e-4) for factor in (1, 87)]
    assert sent["y_log"] and "logarithmic" in sent["y"]
    names = compared["table"]["columns"]
    assert names[:6] == ["run", "state", "held-out loss", "sent", "method", "loss, last 5 %"]
    column = names.index("sent")
    assert [one["value"] for one in sent["series"]] == [row[column] for row in compared["table"]["rows"]]
    for section in (compared, *runs):  # on common axes: a curve on a linear one would be flat
        rate = charts_of(section)["Sent by a replica"]
        assert rate["y"] == "Mbit/s, logarithmic" and rate["y_log"] and not rate["from_zero"]
        assert all(point[1] > 0 for one in rate["series"] for point in one["points"])
    assert not compared["charts"][0]["x_log"]


def test_runs_of_different_lengths_share_a_logarithmic_axis(finished_run, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(finished_run, short, ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
    for path in short.glob("metrics-*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:11]))
    for section in reported(tmp_path, finished_run, short)["sections"]:
        chart = charts_of(section)["Training loss"]
        assert chart["x_log"] and chart["x"] == "tokens of all replicas, logarithmic"


def test_the_speed_is_one_number_in_facts_legends_and_comparison(finished_run, tmp_path):
    """In a store too, whose summary counts each contributor as if it had been there from first to last."""
    joined = tmp_path / "joined"
    shutil.copytree(finished_run, joined, ignore=shutil.ignore_patterns("checkpoints", "metrics-1.jsonl"))
    config, summary = (json.loads((joined / f"{name}.json").read_text()) for name in ("config", "summary"))
    (joined / "config.json").write_text(json.dumps(config | {"num_replicas": 1, "rendezvous": "store"}))
    changed = {"num_replicas": 3, "tokens_per_second": 1.5 * summary["tokens_per_second"]}
    (joined / "summary.json").write_text(json.dumps(summary | changed))
    compared, *runs = reported(tmp_path, finished_run, joined)["sections"]
    column = compared["table"]["columns"].index("tokens/s")
    numbers = [row[column] for row in compared["table"]["rows"]]
    assert numbers == [run["facts"]["tokens/s"] for run in runs]
    for section, values in ((compared, numbers), *((run, [n]) for run, n in zip(runs, numbers, strict=True))):
        assert [one["value"] for one in charts_of(section)["Speed of all replicas"]["series"]] == values
    steps = [step for step in read_metrics(joined, 0) if step.new_tokens is not None]
    pace = sum(step.new_tokens for step in steps) / sum(step.step_seconds for step in steps)
    assert float(numbers[1].replace(",", "")) == pytest.approx(pace, abs=0.51)


def test_a_run_that_goes_on_is_reported_so_far(finished_run, tmp_path, capsys):
    run = tmp_path / "half"
    shutil.copytree(finished_run, run)
    (run / "summary.json").unlink()
    lines = (run / "metrics-0.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics-0.jsonl").write_text("".join(lines[:30]) + lines[30][:20])
    (run / "metrics-1.jsonl").unlink()
    (section,) = reported(tmp_path, run)["sections"]
    assert (section["facts"]["step"], section["part"]) == ("30 of 120", 0.25)
    assert section["headline"].startswith("57.8k parameters")
    assert section["notes"] == ["No metrics of replica 1 are on this machine."]
    (run / "metrics-0.jsonl").write_text("".join(lines[:2]))  # nothing has been sent yet
    (section,) = reported(tmp_path, run)["sections"]
    assert section["facts"]["step"] == "2 of 120" and "Sends" not in charts_of(section)
    (run / "metrics-0.jsonl").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run)])
    assert "has no metrics of any step yet" in capsys.readouterr().err


def test_a_replica_of_a_store_is_reported_beside_the_others(finished_run, tmp_path):
    """M is the number of those that contributed, and the steps are the replica's own."""
    run = tmp_path / "joined"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints", "metrics-1.jsonl"))
    config, summary = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "summary"))
    config["diloco"]["overlap_steps"] = 2
    (run / "config.json").write_text(json.dumps(config | {"num_replicas": 1, "rendezvous": "store"}))
    (run / "summary.json").write_text(json.dumps(summary | {"num_replicas": 3}))
    (section,) = reported(tmp_path, run)["sections"]
    assert (section["facts"]["replicas"], section["facts"]["step"]) == ("3", "120, 100.0% of the run")
    (run / "summary.json").unlink()
    (section,) = reported(tmp_path, run)["sections"]
    assert section["facts"]["replicas"] == "come and go" and section["standing"] != "finished"


def test_a_page_replaces_pages_and_no_other_file(tmp_path, capsys):
    (table,) = write_tables(tmp_path)[:1]
    file = tmp_path / "report.html"
    for before in ("", "<!DOCTYPE HTML>\n<p>An older page"):
        file.write_text(before)
        reported(tmp_path, table)
        assert content(file)["sections"]
    before = table.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(table), "--output", str(table)])
    assert f"{table} is no HTML page, and is not replaced: choose another --output" in capsys.readouterr().err
    assert table.read_bytes() == before


def test_a_number_with_a_comma_is_named(tmp_path, capsys):
    row = made_up(experiment("freezing", TIERS["small"]()))[0]
    write_rows([{"tier": "small", **row, "eval_loss": "2,31"}], tmp_path / "freezing.csv")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path / "freezing.csv"), "--output", str(tmp_path / "report.html")])
    assert "freezing.csv, row 1: eval_loss must be a number, not '2,31'" in capsys.readouterr().err


def test_text_and_precision_are_settings_and_places_are_none():
    base = recipe("tiny")
    other = replace(base, precision="fp32", data=replace(base.data, train=("other.txt",)))
    assert differing_settings(with_configs(base, other)) == {
        "data.train": [str(base.data.train), "('other.txt',)"],
        "precision": ["auto", "fp32"],
    }
    data = replace(base.data, cache=Path("c"), prepared=Path("p"))
    elsewhere = replace(base, name="x", runs=Path("there"), device="cpu", data=data)
    assert differing_settings(with_configs(base, elsewhere)) == {}


def with_configs(*configs: TrainConfig) -> list[RunTail]:
    """Runs of which nothing but the configs is known."""
    runs = [RunTail(Path()) for _ in configs]
    for run, config in zip(runs, configs, strict=True):
        run.config = config
    return runs


def of_other_text(finished_run: Path, copy: Path, *, loss: float, bits: float, tokenizer: str = "bytes") -> Path:
    """A copy of a run whose text has other tokens, with results in proportion to its own."""
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    config, data, summary = (
        json.loads((copy / f"{name}.json").read_text()) for name in ("config", "data", "summary")
    )
    index = read_index(Path(config["data"]["prepared"]))
    (shard,) = index.splits["held_out"]
    other = replace(
        index,
        settings=replace(index.settings, tokenizer=tokenizer),
        splits=index.splits | {"held_out": (replace(shard, tokens_digest="1f"),)},
        digest="2d",
    )
    prepared = copy.with_name(f"{copy.name}_text")
    prepared.mkdir()
    write_record(prepared / "index.json", other)
    config["data"] |= {"prepared": str(prepared), "tokenizer": tokenizer}
    summary["eval_loss"] *= loss
    summary["eval_bits_per_byte"] *= bits
    for name, values in (("config", config), ("data", data | {"digest": "2d"}), ("summary", summary)):
        (copy / f"{name}.json").write_text(json.dumps(values))
    return copy


def test_runs_of_other_tokenizers_compare_in_bits_per_byte(finished_run, tmp_path, capsys, monkeypatch):
    other = of_other_text(finished_run, tmp_path / "other", loss=1.7, bits=0.8, tokenizer="bpe:600")
    compared, _, section = reported(tmp_path, finished_run, other)["sections"]
    assert compared["headline"] == "streaming: held-out bits per byte 25.0 % above other's, as many bytes sent"
    rows = [dict(zip(compared["table"]["columns"], row, strict=True)) for row in compared["table"]["rows"]]
    assert [row["tokenizer"] for row in rows] == ["bytes", "bpe:600"] and rows[1]["digest"] == "2d"
    assert float(rows[1]["bits per byte"]) == pytest.approx(0.8 * float(rows[0]["bits per byte"]), abs=1e-4)
    assert section["setup"]["data"].endswith("tokenizer bpe:600")
    monkeypatch.setenv("COLUMNS", "300")
    capsys.readouterr()
    main(["watch", str(finished_run), str(other)])
    assert "bits per byte" in capsys.readouterr().out


def test_runs_of_other_texts_do_not_compare(finished_run, tmp_path):
    other = of_other_text(finished_run, tmp_path / "other", loss=0.9, bits=0.9)
    index = read_index(tmp_path / "other_text")
    source = replace(index.settings, source_digest="3c")
    write_record(tmp_path / "other_text" / "index.json", replace(index, settings=source))
    refusal = "held-out losses do not compare: the runs' texts or tokenizers differ"
    compared, *_ = reported(tmp_path, finished_run, other)["sections"]
    assert compared["headline"] == refusal and "digest" in compared["table"]["columns"]
    write_record(tmp_path / "other_text" / "index.json", replace(index, digest="4b"))
    compared, _, section = reported(tmp_path, finished_run, other)["sections"]
    assert compared["headline"] == refusal
    assert section["setup"]["data"] == f"{tmp_path / 'other_text'}, digest 2d"


def test_runs_of_one_held_out_text_compare_whatever_they_train_on(finished_run, tmp_path):
    other = of_other_text(finished_run, tmp_path / "other", loss=1.1, bits=1.1)
    config = json.loads((finished_run / "config.json").read_text())
    index = read_index(tmp_path / "other_text")
    held_out = {"held_out": read_index(Path(config["data"]["prepared"])).splits["held_out"]}
    write_record(tmp_path / "other_text" / "index.json", replace(index, splits=index.splits | held_out))
    compared, *_ = reported(tmp_path, finished_run, other)["sections"]
    assert compared["headline"] == "other: held-out loss 10.0 % above streaming's, as many bytes sent"
