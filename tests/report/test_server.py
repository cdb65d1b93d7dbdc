"""The live page: real requests to a real server, and a real browser where there is one."""

import http.client
import json
import re
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.browser import DESK, PHONE, needs_chromium, opened_page
from tests.rendezvous.handwritten import Handwritten
from tests.rendezvous.test_timeline import read_timeline

from diloco.errors import UserError
from diloco.rendezvous.log.entries import Leave
from diloco.report import server as live
from diloco.report.page import Page
from diloco.report.server import LiveServer
from diloco.report.sources import Sources

EVIL = '<img src=x onerror="document.title=1">'


@pytest.fixture
def runs(finished_run, tmp_path, monkeypatch) -> Path:
    """A directory of a run that is half over, and a finished one with another learning rate."""
    monkeypatch.setattr(live, "_FRESH_SECONDS", 0.0)
    shutil.copytree(finished_run, tmp_path / "runs" / "other", ignore=shutil.ignore_patterns("checkpoints"))
    config = json.loads((finished_run / "config.json").read_text())
    config["optimizer"]["learning_rate"] = 0.25
    half = tmp_path / "runs" / EVIL
    half.mkdir()
    (half / "config.json").write_text(json.dumps(config))
    shutil.copy(finished_run / "data.json", half)
    grow(half, finished_run, 60)
    return tmp_path / "runs"


def grow(run: Path, whole: Path, num_steps: int) -> None:
    for replica in (0, 1):
        lines = (whole / f"metrics-{replica}.jsonl").read_text().splitlines(keepends=True)
        path = run / f"metrics-{replica}.jsonl"
        with path.open("a") as file:
            file.write("".join(lines[:num_steps])[path.stat().st_size :])


@pytest.fixture
def serve() -> Iterator:
    """A function that serves sources, and returns the server."""
    servers = []

    def start(*sources: Path, address: str = "127.0.0.1") -> LiveServer:
        servers.append(LiveServer(Sources(list(map(str, sources))), title=f"runs {EVIL}", address=address))
        threading.Thread(target=servers[-1].serve, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def port_of(server: LiveServer) -> int:
    return urlsplit(server.url).port or 0


def answer(
    server: LiveServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response, content


def sections(server: LiveServer) -> list[dict]:
    return json.loads(answer(server, "/page.json")[1])["sections"]


def test_the_page_has_the_curves_and_the_facts_of_every_run(runs, serve, finished_run):
    compared, half, whole = sections(serve(runs))
    assert [(one["title"], one["standing"]) for one in (half, whole)] == [
        (f"{EVIL}, learning_rate=0.25", "running"),
        ("other, learning_rate=0.004", "finished"),
    ]
    facts, summary = half["facts"], json.loads((finished_run / "summary.json").read_text())
    assert facts["step"] == "60 of 120" and "since step 60" in facts["in flight"] and half["part"] == 0.5
    assert float(whole["facts"]["held-out loss"].split()[0]) == pytest.approx(summary["eval_loss"], abs=5e-5)
    charts = {chart["title"].partition(",")[0]: chart["series"] for chart in compared["charts"]}
    assert list(charts) == [
        *("Training loss", "Held-out loss", "Bytes sent by a replica", "Speed of all replicas"),
        *("Compute utilization", "Sent by a replica", "Merged by a replica"),
    ]
    means = [series for series in charts["Held-out loss"] if not series["thin"]]
    assert [one["points"][-1][0] for one in means] == [30720, 61440]
    assert all(0 <= y <= 1 for one in charts["Compute utilization"] for _, y in one["points"])
    # Of one run, the curves are those of its replicas.
    (alone,) = sections(serve(runs / "other"))
    assert [one["label"] for one in alone["charts"][0]["series"]] == ["replica 0", "replica 1", "mean"]
    assert len(alone["charts"][0]["series"][0]["points"]) == 120


def test_runs_that_have_not_begun_are_shown_so(tmp_path, serve):
    shown = sections(serve(tmp_path / "one", tmp_path / "other"))
    assert [one["standing"] for one in shown[1:]] == ["not begun"] * 2 and not shown[0]["charts"]


def test_the_page_of_a_store_follows_its_log(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(live, "_FRESH_SECONDS", 0.0)
    server = serve(tmp_path / "run")
    assert sections(server)[0]["standing"] == "not begun"
    run = Handwritten(tmp_path / "run")
    run.train(2)
    (shown,) = sections(server)
    assert (shown["standing"], shown["facts"]["outer steps"], len(shown["table"]["rows"])) == ("running", "4", 3)
    run.append(Leave(finished=False), author=1)
    run.close()
    (ended,) = sections(server)
    assert ended["standing"] == "finished" and ended["table"]["rows"][-1][:2] == ["0 a", "left"]
    losses, replicas, contributors, tokens = shown["charts"]
    assert losses["title"] == "Training loss"
    assert [lane["label"] for lane in replicas["lanes"]] == ["0 a", "1 b", "2 c"]
    timeline = read_timeline(str(run.directory))
    for chart, numbers in ((contributors, timeline.contributors), (tokens, timeline.tokens)):
        assert [y for _, y in chart["series"][0]["points"]] == numbers


def test_a_store_has_progress_time_to_go_and_loss_by_its_log(tmp_path):
    run = Handwritten(tmp_path / "run", facts={"num_tokens": 2000})
    run.train(2)
    alone = Sources([str(run.directory)])
    alone.again()
    run.train_on(4)
    alone.again()
    tokens = run.state.tokens // 2
    (store,) = alone.page().sections
    assert store.part == tokens / 2000 and store.facts["part of the run"] == f"{tokens / 2000:.1%}"
    assert store.eta == store.facts["ETA"] and re.fullmatch(r"\d+:\d\d", store.eta)
    assert store.headline.startswith(
        f"{tokens / 1000:g}k of 2k tokens counted in 8 outer steps; 3 replicas contributed"
    )
    loss, meaning = store.facts["training loss"].split(", ")
    assert (loss, meaning) == ("1.7500", "mean of the last 5 % of outer steps")
    assert "training loss" in store.main and "loss so far" not in store.facts, "a page shows the curve"
    (curve,) = store.charts[0].series
    assert [*curve.points] == [(step, 4.75 - (step - 1) // 2) for step in range(1, 9)]
    assert store.charts[0].title == "Training loss" and curve.value == loss and meaning in store.charts[0].about
    (store,) = alone.page(with_charts=False).sections
    assert store.facts["loss so far"] == "4.75 ██▆▆▃▃▁▁ 1.75" and not store.charts
    run.close()
    alone.again()
    (store,) = alone.page().sections
    assert (store.part, store.eta, store.standing) == (1.0, "", "finished")
    own = Handwritten(tmp_path / "own")  # another program's run has no budget
    own.train(2)
    without_budget = Sources([str(own.directory)])
    without_budget.again()
    (store,) = without_budget.page().sections
    assert store.part is None and store.eta == "" and store.setup == {}


def test_only_this_machines_own_pages_get_an_answer(runs, serve):
    server = serve(runs)
    port = port_of(server)
    for host in (f"127.0.0.1:{port}", f"LocalHost:{port}", "[::1]:9", "[::1]"):
        assert answer(server, "/", Host=host)[0].status == 200
    for host in (
        *(f"evil.example:{port}", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::1", "::1"),
        *(f"evil.example@127.0.0.1:{port}", "localhost/evil.example", "localhost?", "localhost#x", "127.0.0.1:x"),
    ):
        response, content = answer(server, "/page.json", Host=host)
        assert response.status == 421 and "sections" not in content, host
    for path in ("/../other/config.json", "/config.json", "//etc", "/%2e%2e/x", "/page.json/", "/?"):
        assert answer(server, path)[0].status == 404
    assert answer(server, "/", method="POST")[0].status == 501
    response, content = answer(server, "/", method="HEAD")
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert (content, response.headers["X-Content-Type-Options"]) == ("", "nosniff")
    with socket.create_connection(("127.0.0.1", port)) as connection:  # without a Host
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 421 " in connection.recv(100)


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/{token}/page.json", "127.0.0.1", 200),
        ("/{token}/page.json", "localhost:9", 200),
        ("/{token}/", "127.0.0.1", 200),
        ("/{token}", "127.0.0.1", 200),  # as a phone's owner may type it
        ("/page.json", "127.0.0.1", 404),
        ("/", "127.0.0.1", 404),
        ("//page.json", "127.0.0.1", 404),
        ("/{other}/page.json", "127.0.0.1", 404),
        ("/{token}x/page.json", "127.0.0.1", 404),
        ("/{upper}/page.json", "127.0.0.1", 404),
        ("/?{token}/page.json", "127.0.0.1", 404),
        ("/%C3%A9/page.json", "127.0.0.1", 404),
        ("{token}/page.json", "127.0.0.1", 404),
        ("/{token}/config.json", "127.0.0.1", 404),
        ("/{token}/../other/config.json", "127.0.0.1", 404),
        ("/{token}/page.json", "evil.example", 421),
        ("/{token}/page.json", "", 421),
    ],
)
def test_other_devices_need_the_token_and_a_name_of_this_machine(opened, path, host, status):
    token = urlsplit(opened.url).path.strip("/")
    path = path.format(token=token, upper=token.upper(), other=f"{'b' if token[0] == 'a' else 'a'}{token[1:]}")
    response, content = answer(opened, path, Host=host)
    assert response.status == status
    assert (status == 200) == ("sections" in content or "<title>" in content)
    assert token not in content


@pytest.mark.parametrize("address", ["0.0.0.0", *["::"] * socket.has_dualstack_ipv6()])
def test_the_address_that_is_printed_is_answered_and_so_is_ipv4_beside_ipv6(runs, serve, monkeypatch, address):
    monkeypatch.setattr(live, "_outer_address", lambda _: "Machine.local")  # as on one without a route out
    server = serve(runs, address=address)
    url = urlsplit(server.url)
    assert url.hostname == "machine.local" and answer(server, url.path, Host=url.netloc)[0].status == 200
    connection = http.client.HTTPConnection("127.0.0.2", port_of(server), timeout=20)
    connection.request("GET", url.path)
    assert connection.getresponse().status == 200
    connection.close()


@pytest.fixture(scope="module")
def opened(finished_run) -> Iterator[LiveServer]:
    """A server on every address of the machine."""
    server = LiveServer(Sources([str(finished_run)]), title=f"runs {EVIL}", address="0.0.0.0")
    threading.Thread(target=server.serve, daemon=True).start()
    yield server
    server.close()


def test_a_server_for_other_devices_has_a_long_token_of_its_own_and_names_the_machine(opened, serve, runs):
    tokens = [urlsplit(one.url).path.strip("/") for one in (opened, serve(runs, address="0.0.0.0"))]
    assert all(re.fullmatch("[a-z2-7]{16}", token) for token in tokens) and tokens[0] != tokens[1]
    assert urlsplit(opened.url).hostname not in ("0.0.0.0", "", None) and opened.is_open
    alone = serve(runs, address="localhost")
    assert urlsplit(alone.url).path == "/" and not alone.is_open
    assert answer(opened, f"/{tokens[0]}/", method="POST")[0].status == 501


@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.7", "a b", "x" * 300])
def test_an_address_of_another_machine_is_refused(address):
    with pytest.raises(UserError, match=re.escape(f"address={address}")):
        LiveServer(Sources([]), title="", address=address)


def test_losses_that_overflow_when_they_are_added_up_leave_the_page_json(runs, serve):
    for replica in (0, 1):
        path = runs / EVIL / f"metrics-{replica}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"loss": 1.7e308}) + "\n" for line in lines))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    page = json.loads(answer(serve(runs), "/page.json")[1], parse_constant=refuse)
    loss = page["sections"][1]["charts"][0]["series"]
    assert [one["points"][0][1] for one in loss if one["points"]] == [1.7e308, 1.7e308]


def test_a_browser_that_goes_away_is_no_news(runs, serve, monkeypatch, capsys):
    asked, gone = threading.Event(), threading.Event()

    def late_page(_: Sources) -> Page:
        asked.set()
        gone.wait(10)
        return Page(note="", sections=[])

    monkeypatch.setattr(Sources, "page", late_page)
    port = port_of(serve(runs))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"GET /page.json HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert asked.wait(10)
    answering = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    assert answering
    gone.set()
    for thread in answering:
        thread.join(10)
    assert capsys.readouterr().err == ""


def test_connections_beyond_a_bound_are_closed_until_others_end(runs, serve, monkeypatch):
    monkeypatch.setattr(live, "_MOST_CONNECTIONS", 2)
    server = serve(runs)
    held = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(2)]
    for connection in held:
        connection.sendall(b"GET / HTTP/1.0\r\n")  # which does not end
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        answer(server, "/")
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert answer(server, "/")[0].status == 200
            break
        except (http.client.RemoteDisconnected, ConnectionResetError):
            assert time.monotonic() < deadline


def test_a_port_that_is_taken_is_refused(runs, serve):
    port = port_of(serve(runs))
    with pytest.raises(UserError, match=f"port={port} can't be used"):
        LiveServer(Sources([]), title="", port=port)
    with pytest.raises(UserError, match=r"port=99999 can't be used \(it must be below 65536\)"):
        LiveServer(Sources([]), title="", port=99999)


def test_the_home_of_nobody_is_refused_before_anything_is_served():
    with pytest.raises(UserError, match="~nobody-at-all/runs: "):
        Sources(["~nobody-at-all/runs"])


@pytest.mark.slow
@needs_chromium
def test_a_browser_draws_a_run_while_it_goes_on(runs, serve, finished_run, tmp_path):
    step = "document.querySelector('[data-fact=step]').textContent"
    curve = "document.querySelector('figure path[stroke-width=\"1.8\"]').getAttribute('d').length"
    with opened_page(tmp_path / "profile") as page:
        page.open(serve(runs).url, size=PHONE)
        page.wait_until(
            "document.querySelectorAll('figure').length == 7 + 11 + 12"
        )  # one held-out loss is no curve
        assert page.value(step) == "60 of 120"
        before = page.value(curve)
        grow(runs / EVIL, finished_run, 120)
        page.wait_until(f"{step} == '120 of 120'")
        assert page.value(curve) > before
        assert page.value("document.documentElement.scrollWidth") <= page.value("innerWidth") == PHONE[0]
        # In one column, as wide as the screen allows; the text of a chart is legible.
        assert page.value("new Set([...document.querySelectorAll('figure')].map(f => f.offsetLeft)).size") == 1
        assert (
            page.value("Math.min(...[...document.querySelectorAll('figure > svg')].map(s => s.clientWidth))") > 300
        )
        # What a stranger wrote is text.
        assert page.value("document.querySelectorAll('h2')[1].textContent") == f"{EVIL}, learning_rate=0.25"
        assert page.value("document.querySelectorAll('img').length") == 0 and page.value("document.title") != "1"
        # What was folded stays so when there is news.
        page.value("document.querySelectorAll('main > details > summary')[2].click()")
        page.wait_until("document.querySelectorAll('figure').length == 7 + 12")
        page.resize(DESK)
        page.wait_until("new Set([...document.querySelectorAll('figure')].map(f => f.offsetLeft)).size == 3")
        assert page.console == []
