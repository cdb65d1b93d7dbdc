"""The page as a browser lays it out: no text is cut or covered, colours can be read, and runs can be hidden."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import DESK, PHONE, Page, needs_chromium, opened_page
from tests.rendezvous.handwritten import Handwritten
from tests.report.test_page import write_tables

from diloco.cli.main import main
from diloco.report import page
from diloco.report.server import LiveServer
from diloco.report.sources import Sources

BUDGET = 4000
CUT = """
(() => {
  const wrong = [], say = (what, node) => wrong.push(`${what}: ${node.textContent.slice(0, 60)}`);
  const scrolls = (node) => node && node !== document.body &&
    (/auto|scroll/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  for (const node of document.querySelectorAll('body *')) {
    if (node.closest('svg') || !node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    if (/hidden|clip/.test(style.overflowX + style.overflowY) && (node.scrollWidth > node.clientWidth + 1
      || node.scrollHeight > node.clientHeight + 1)) say('hidden', node);
    const box = node.getBoundingClientRect();
    if (!scrolls(node) && (box.left < -1 || box.right > innerWidth + 1)) say('beyond the screen', node);
  }
  for (const svg of document.querySelectorAll('figure > svg')) {
    const frame = svg.getBoundingClientRect(), boxes = [];
    for (const text of svg.querySelectorAll('text')) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1) say('beyond its chart', text);
      if (!text.hasAttribute('transform') && !text.classList.contains('mark')) boxes.push([box, text]);
    }
    boxes.forEach(([a, text], i) => boxes.slice(i + 1).forEach(([b]) => {
      if (a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
        say('covered', text);
    }));
  }
  if (document.documentElement.scrollWidth > innerWidth) wrong.push('the page scrolls sideways');
  return wrong;
})()
"""
"""The texts that are cut, stand beyond the screen or their chart, or cover each other."""


@pytest.fixture(scope="module")
def sources(finished_run, tmp_path_factory) -> list[Path]:
    """Two runs that differ in a long number, one of which goes on; and the store of a third, which goes on."""
    folder = tmp_path_factory.mktemp("looks")
    other = folder / "a-run-with-a-name-that-is-as-long-as-names-of-runs-may-ever-be-0"
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
    config = json.loads((other / "config.json").read_text())
    config["optimizer"]["learning_rate"] = 1 / 3
    (other / "config.json").write_text(json.dumps(config))
    (other / "samples.json").write_text(json.dumps([{"prompt": "<b>The", "text": " cat" * 60 + "x" * 400}]))
    store = Handwritten(folder / "store", facts={"num_tokens": BUDGET})
    store.train(12)
    return [other, finished_run, store.directory]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    with opened_page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.console == []


@pytest.fixture(scope="module")
def report(sources, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    main(["report", *map(str, sources), "--output", str(file)])
    return file


@needs_chromium
@pytest.mark.slow
def test_no_text_is_cut_on_any_screen(sources, report, browser):
    servers = [LiveServer(Sources([str(one) for one in some]), title="live") for some in (sources, sources[2:])]
    for server in servers:
        threading.Thread(target=server.serve, daemon=True).start()
    for url in (*(server.url for server in servers), report.as_uri()):
        for size in (PHONE, DESK):
            browser.open(url, size=size)
            browser.wait_until("document.querySelectorAll('figure').length > 2")
            browser.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
            browser.wait_until("[...document.querySelectorAll('details')].every(d => d.childElementCount > 1)")
            assert browser.value(CUT) == [], (url, size)
    for server in servers:
        server.close()


@needs_chromium
@pytest.mark.slow
def test_a_run_is_hidden_and_shown_again_and_the_axes_are_common(report, browser):
    compared = (
        "[...document.querySelectorAll('details')].find(d => d.querySelector('h2')?.textContent == '2 runs')"
    )
    curves = f"{compared}.querySelectorAll('figure path[stroke-width]').length"
    ticks = (
        "[...document.querySelectorAll('figure')].filter(f => f.textContent.startsWith('Training loss'))"
        ".map(f => [...f.querySelectorAll('text')].map(t => t.textContent).join())"
    )
    browser.open(report.as_uri(), size=DESK)
    browser.wait_until("document.querySelectorAll('figure').length > 9")
    everything = browser.value(curves)
    of_store, *of_runs = browser.value(ticks)
    assert len(of_runs) == 3 and len({*of_runs}) == 1
    assert of_store.startswith("outer steps") and not of_store.endswith("k"), "its steps are not their tokens"
    hide = f"{compared}.querySelector('button').click()"
    browser.value(hide)
    assert browser.value(curves) < everything
    assert browser.value("document.querySelectorAll('button[aria-pressed=false]').length") > 1
    browser.value(hide)
    assert browser.value(curves) == everything
    point = "new PointerEvent('pointermove', { clientX: box.right - 1, clientY: box.top + 99 })"
    box = f"svg = {compared}.querySelector('figure > svg'), box = svg.getBoundingClientRect()"
    browser.value(f"(() => {{ const {box}; svg.dispatchEvent({point}); }})()")
    values = f"[...{compared}.querySelector('.legend').querySelectorAll('b')].map(b => b.textContent)"
    ends = [one["points"][-1][1] for one in losses(report) if one["label"]]
    assert [float(value) for value in browser.value(values)] == pytest.approx(ends, abs=5e-4)
    assert browser.value(f"{compared}.querySelector('figure text').textContent").endswith(": 61.4k")


def losses(report: Path) -> list[dict]:
    """The curves of the training loss of both runs."""
    (compared,) = [section for section in sections(report) if section["title"] == "2 runs"]
    return compared["charts"][0]["series"]


def sections(report: Path) -> list[dict]:
    (text,) = re.findall(r'id="content">(.*?)</script>', report.read_text())
    return json.loads(text)["sections"]


@needs_chromium
@pytest.mark.slow
def test_a_phone_shows_state_and_time_to_go_without_scrolling(sources, browser):
    server = LiveServer(Sources([str(sources[0])]), title="live")
    threading.Thread(target=server.serve, daemon=True).start()
    browser.open(server.url, size=PHONE)
    browser.wait_until("document.querySelectorAll('figure').length > 2")
    assert bottom(browser, ".state") < 300 and bottom(browser, ".lead") < 450
    assert browser.value("document.querySelector('blockquote b').textContent") == "<b>The"
    browser.open("about:blank", size=PHONE)
    server.close()


@pytest.mark.slow
@needs_chromium
def test_every_chart_is_drawn_on_every_screen(browser, tmp_path):
    file = tmp_path / "report.html"
    main(["report", *map(str, write_tables(tmp_path)), "--output", str(file)])
    num_charts = sum(len(section["charts"]) for section in sections(file))
    for width, height in (PHONE, DESK):
        browser.open(file.as_uri(), size=(width, height))
        browser.wait_until("document.readyState == 'complete' && document.querySelectorAll('figure').length > 9")
        assert browser.value("document.querySelectorAll('figure').length") == num_charts
        for wrong in (
            "[...document.querySelectorAll('figure > svg')].filter(s => s.clientWidth < 300)",
            "[...document.querySelectorAll('path')].filter(p => /NaN|Infinity/.test(p.getAttribute('d')))",
        ):
            assert browser.value(f"{wrong}.length") == 0
        assert browser.value("document.documentElement.scrollWidth") <= browser.value("innerWidth") == width


def bottom(browser: Page, selector: str) -> float:
    return browser.value(f"document.querySelector('{selector}').getBoundingClientRect().bottom")


def test_every_chart_has_names_of_its_axes_and_a_sentence(report):
    charts = [chart for section in sections(report) for chart in section["charts"]]
    assert len(charts) > 15
    for chart in charts:
        assert chart["x"] and chart["about"].endswith(".") and (chart["y"] or chart["lanes"]), chart["title"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out_from_the_paper(scheme):
    """Contrasts of WCAG 2.2: 4.5 for text, 3 for curves."""
    style = Path(page.__file__).with_name("page.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): *(#\w+)", style.split("@media screen")[part][:900])) for part in (0, 1)
    )
    colors = light if scheme == "light" else light | dark
    paper = luminance(colors["paper"])
    for name in ("ink", "quiet", *(f"c{index}" for index in range(8))):
        one = luminance(colors[name])
        contrast = (max(one, paper) + 0.05) / (min(one, paper) + 0.05)
        assert contrast >= (4.5 if name in ("ink", "quiet") else 3), (name, contrast)
    assert scheme == "light" or all(dark[name] != light[name] for name in light)


def luminance(color: str) -> float:
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
