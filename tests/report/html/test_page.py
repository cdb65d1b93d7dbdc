"""The page, read by a browser without a screen where there is one."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.experiments.papers.made_up import made_up

from diloco.cli.main import main
from diloco.experiments.papers.recipes import experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.rows import write_rows
from diloco.report.html import page as parts

pytest.importorskip("matplotlib")
EXPERIMENTS = ("compression", "evaluated_parameters", "scaling")
"""Experiments: one over names, one with the paper's numbers, and one with zero-shot accuracies."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
PHONE, DESK = (390, 844), (1280, 900)


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


def browser(*flags: str) -> subprocess.CompletedProcess:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=True)


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
@pytest.mark.parametrize("size", [PHONE, DESK])
def test_nothing_is_wider_than_the_screen_or_missing(page, size, tmp_path):
    width, height = size
    script = """<script>
      const broken = [...document.images].filter(image => !image.naturalWidth).length;
      const small = [...document.images].filter(image => image.clientWidth < 300).length;
      const sizes = [document.documentElement.scrollWidth, window.innerWidth, broken, small].join(' ');
      parent.postMessage(sizes, '*');
    </script></body>"""
    measured, around = tmp_path / "measured.html", tmp_path / "around.html"
    measured.write_text(page.read_text().replace("</body>", script))
    # A browser's own window is 500 pixels wide at the least.
    around.write_text(
        "<script>addEventListener('message', event => { document.title = event.data; });</script>"
        f'<iframe src="measured.html" width="{width}" height="{height}" frameborder="0"></iframe>'
    )
    wide = f"--window-size={max(500, width + 20)},{height + 20}"
    printed = browser(wide, "--virtual-time-budget=10000", "--dump-dom", around.as_uri()).stdout
    scroll, inner, broken, small = map(int, re.search(r"<title>([\d ]+)</title>", printed)[1].split())
    assert scroll <= inner == width and (broken, small) == (0, 0)


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
