"""The page, read by a browser without a screen where there is one."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from tests.browser import DESK, PHONE, needs_chromium, opened_page
from tests.experiments.papers.made_up import made_up

from diloco.cli.main import main
from diloco.experiments.papers import experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import write_rows
from diloco.report.html import page as parts
from diloco.report.labels import shown_names

pytest.importorskip("matplotlib")
EXPERIMENTS = ("compression", "evaluated_parameters", "scaling")
"""Experiments: one over names, one with the paper's numbers, and one with zero-shot accuracies."""


@pytest.fixture(scope="module")
def page(finished_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    tables = []
    for name in EXPERIMENTS:
        one = experiment(name, TIERS["small"]())
        tables.append(folder / f"{name}.csv")
        write_rows([{"tier": "small", **row} for row in made_up(one)], tables[-1])
    main(["report", str(finished_run), *map(str, tables), "--output", str(folder / "report.html")])
    return folder / "report.html"


def facts(text: str) -> dict[str, str]:
    pairs = re.findall(r'<dd data-fact="([^"]+)">([^<]*)</dd>', text)
    return {html.unescape(name): html.unescape(value) for name, value in pairs}


def check_numbers(text: str, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    shown = facts(text)
    loss, error = (float(number) for number in shown["held-out loss"].split(" ± "))
    assert loss == pytest.approx(summary["eval_loss"], abs=5e-5)
    assert error == pytest.approx(summary["eval_standard_error"], abs=5e-5)
    assert shown["parameters"] == f"{summary['num_params']:,}"
    assert float(shown["compute utilization"].rstrip("%")) / 100 == pytest.approx(
        summary["compute_utilization"], abs=6e-4
    )
    sent = float(shown["sent per replica"].removesuffix(" MB")) * 1e6
    assert sent == pytest.approx(summary["bytes_sent_per_replica"], abs=5e3)
    assert shown["outer hash"] == summary["outer_hash"][:16]
    assert {f"{name}: verdict" for name in EXPERIMENTS} <= set(shown)


def test_the_page_has_the_numbers_and_asks_for_nothing(page, finished_run):
    text = page.read_text()
    check_numbers(text, finished_run)
    assert not re.search(r'(src|href)="(?!data:)', text) and "@import" not in text
    assert text.count("<h2>") == 1 + len(EXPERIMENTS)
    captions = [html.unescape(caption) for caption in re.findall("<figcaption>([^<]+)", text)]
    wanted = ("Training loss", "Compute utilization", "Bytes sent", "Held-out", "What was sent", "Norm", "Cosine")
    assert all(any(caption.startswith(start) for caption in captions) for start in wanted)
    assert sum("the paper's numbers" in caption for caption in captions) == 3


@needs_chromium
def test_nothing_is_wider_than_the_screen_or_missing(page, tmp_path):
    with opened_page(tmp_path / "profile") as opened:
        for width, height in (PHONE, DESK):
            opened.open(page.as_uri(), size=(width, height))
            opened.wait_until("document.readyState == 'complete' && document.images.length > 9")
            broken, small = "!image.naturalWidth", "image.clientWidth < 300"
            for wrong in (broken, small):
                assert opened.value(f"[...document.images].filter(image => {wrong}).length") == 0
            assert opened.value("document.documentElement.scrollWidth") <= opened.value("innerWidth") == width
        assert opened.console == []


def test_nothing_that_a_stranger_wrote_is_markup(tmp_path):
    evil = '"><script>alert(1)</script>&'
    sections = (
        parts.heading(evil),
        parts.paragraph(evil),
        parts.facts({evil: evil}),
        parts.table([evil], [[evil]]),
    )
    parts.write_page(evil, sections, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text and text.count("&quot;&gt;&lt;script&gt;") == 2 + 1 + 1 + 3 + 2


def test_several_runs_are_compared_at_the_top(finished_run, tmp_path):
    other = tmp_path / "$x$ & <other>"
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("checkpoints"))
    config, summary = (json.loads((other / f"{name}.json").read_text()) for name in ("config", "summary"))
    config["optimizer"]["learning_rate"] = 0.25
    (other / "config.json").write_text(json.dumps(config))
    (other / "summary.json").write_text(json.dumps(summary | {"eval_loss": 9.25}))
    main(["report", str(finished_run), str(other), "--output", str(tmp_path / "two.html")])
    text = (tmp_path / "two.html").read_text()
    assert re.findall("<h2>([^<]+)", text) == ["2 runs", "Run streaming", f"Run {html.escape(other.name)}"]
    rows = [re.findall("<t[hd]>([^<]*)", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    assert rows[0][:5] == ["run", "learning_rate", "tokens", "training loss", "held-out loss"]
    assert [row[:2] for row in rows[1:]] == [["streaming", "0.004"], [html.escape(other.name), "0.25"]]
    assert [row[4] for row in rows[1:]] == [f"{summary['eval_loss']:.4f}", "9.2500"]
    assert shown_names(["checkpoint.every_steps", "seed", "evaluation.every_steps"]) == [
        *("checkpoint.every_steps", "seed", "evaluation.every_steps"),
    ]
    assert text.index("Training loss, the mean over the replicas") < text.index("Run streaming")


def test_a_run_that_goes_on_is_reported_so_far(finished_run, tmp_path, capsys):
    run = tmp_path / "half"
    shutil.copytree(finished_run, run)
    (run / "summary.json").unlink()
    lines = (run / "metrics-0.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics-0.jsonl").write_text("".join(lines[:30]) + lines[30][:20])
    (run / "metrics-1.jsonl").unlink()
    main(["report", str(run), "--output", str(tmp_path / "half.html")])
    text = html.unescape((tmp_path / "half.html").read_text())
    assert "The run is not finished: step 30 of 120." in text and "replica 1 are on another machine" in text
    (run / "metrics-0.jsonl").write_text("".join(lines[:2]))  # nothing has been sent yet
    main(["report", str(run), "--output", str(tmp_path / "begun.html")])
    assert "step 2 of 120." in html.unescape((tmp_path / "begun.html").read_text())
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
    main(["report", str(run), "--output", str(tmp_path / "joined.html")])
    text = html.unescape((tmp_path / "joined.html").read_text())
    assert facts(text)["replicas"] == "3" and facts(text)["steps"] == "120, 100.0% of the run"
    (run / "summary.json").unlink()
    main(["report", str(run), "--output", str(tmp_path / "joined.html")])
    text = html.unescape((tmp_path / "joined.html").read_text())
    assert facts(text)["replicas"] == "come and go" and "not finished: step 120, 100.0% of the run" in text


def test_a_number_with_a_comma_is_named(tmp_path, capsys):
    row = made_up(experiment("freezing", TIERS["small"]()))[0]
    write_rows([{"tier": "small", **row, "eval_loss": "2,31"}], tmp_path / "freezing.csv")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path / "freezing.csv"), "--output", str(tmp_path / "report.html")])
    assert "freezing.csv, row 1: eval_loss must be a number, not '2,31'" in capsys.readouterr().err
