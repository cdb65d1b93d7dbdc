"""The chat of the live page: real requests to a real server, and a real browser where there is one."""

import http.client
import json
import re
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from tests.browser import DESK, PHONE, needs_chromium, opened_page
from tests.cli.test_generate import likeliest
from tests.report.test_looks import CUT
from tests.report.test_server import EVIL, port_of

from diloco.cli.main import main
from diloco.errors import UserError
from diloco.report import chat as chats
from diloco.report.chat import MOST_CHARACTERS, Chat
from diloco.report.reach import reach
from diloco.report.server import LiveServer
from diloco.report.sources import Sources
from diloco.training.records.finished import RunModel
from diloco.training.records.runs import read_config

JSON = {"Content-Type": "application/json"}


def served(run: Path, **values) -> LiveServer:
    server = LiveServer(Sources([str(run)]), title=f"run {EVIL}", chat=Chat(str(run), **values))
    threading.Thread(target=server.serve, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def server(finished_run) -> Iterator[LiveServer]:
    one = served(finished_run)
    yield one
    one.close()


def question(text: str = "the cat ", max_tokens: int = 30, temperature: float = 0.0) -> str:
    return json.dumps({"text": text, "max_tokens": max_tokens, "temperature": temperature})


def post(server: LiveServer, body: str | bytes | None, path: str = "/chat", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    connection.request("POST", path, body, JSON | {name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, content


def events(content: str) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


def text_of(content: str) -> str:
    return "".join(event.get("text", "") for event in events(content))


def test_the_answer_is_the_newest_models_own_text_token_by_token(server, finished_run):
    status, content = post(server, question())
    (expected,) = likeliest(finished_run, "the cat ", num_tokens=30)
    first, *pieces, last = events(content)
    assert (status, first, last) == (200, {"step": 120}, {"end": ""})
    assert text_of(content) == expected.partition("\n\n")[0] + ("\n\n" if "\n\n" in expected else "")
    assert len(pieces) > 10 and all(len(piece["text"]) <= 2 for piece in pieces)
    (empty,) = likeliest(finished_run, "", num_tokens=5)
    assert text_of(post(server, question("", 5))[1]) == empty


def test_each_answer_has_draws_of_its_own(server):
    answers = [text_of(post(server, question(temperature=1.5))[1]) for _ in range(2)]
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "says"),
    [
        ("/chat", question(), {"Origin": "http://evil.example"}, 403, "another site"),
        ("/chat", question(), {"Origin": "null"}, 403, "another site"),
        ("/chat", question(), {"Origin": "http://127.0.0.1:1"}, 403, "another site"),
        ("/chat", question(), {"Sec_Fetch_Site": "cross-site"}, 403, "another site"),
        ("/chat", question(), {"Sec_Fetch_Site": "same-site"}, 403, "another site"),
        ("/chat", question(), {"Host": "evil.example"}, 421, "not served"),
        ("/chat", question(), {"Content_Type": "text/plain"}, 415, "application/json"),
        ("/chat", question(), {"Content_Length": "x"}, 411, "length"),
        ("/chat", question(), {"Content_Length": "-5"}, 411, "length"),
        ("/chat", question(), {"Content_Length": "9" * 5000}, 413, "more than"),
        ("/chat", " " * (1 << 17) + question(), {}, 413, "more than 131,072 bytes"),
        ("/chat", question("x" * (MOST_CHARACTERS + 1)), {}, 400, "more than 8,000 characters"),
        ("/chat", question(max_tokens=1001), {}, 400, "max_tokens"),
        ("/chat", question(max_tokens=0), {}, 400, "max_tokens"),
        ("/chat", question(temperature=-1), {}, 400, "temperature"),
        ("/chat", '{"text": "x", "max_tokens": 5, "temperature": NaN}', {}, 400, "can't be read"),
        ("/chat", '{"text": "\\ud800", "max_tokens": 5, "temperature": 1}', {}, 400, "can't be read"),
        ("/chat", '{"text": "x", "max_tokens": 5, "temperature": 1, "more": 2}', {}, 400, "more"),
        ("/chat", b"\xff", {}, 400, "can't be read"),
        ("/chat", "", {}, 400, "can't be read"),
        ("/", question(), {}, 501, "nothing can be sent"),
        ("/chat.json", question(), {}, 501, "nothing can be sent"),
    ],
)
def test_requests_of_other_sites_and_of_wrong_forms_are_refused(server, path, body, headers, status, says):
    answered, content = post(server, body, path, **headers)
    assert (answered, says in content) == (status, True), content


def test_the_own_page_and_programs_are_answered(server):
    own = f"127.0.0.1:{port_of(server)}"
    for headers in (
        {},
        {"Origin": f"http://{own}", "Sec_Fetch_Site": "same-origin"},
        {"Origin": f"https://{own}"},
    ):
        assert post(server, question(max_tokens=1), **headers)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20)
    connection.request("GET", "/chat")
    assert connection.getresponse().status == 404
    connection.close()


@pytest.fixture
def slow(monkeypatch) -> Iterator[threading.Event]:
    """Answers that wait for an event after their first piece, and say how many were being written."""
    go_on, lock, running = threading.Event(), threading.Lock(), []

    def answer(*_: object, **__: object) -> Iterator[str]:
        with lock:
            running.append(1)
        try:
            yield f"{len(running)} "
            assert go_on.wait(30)
            yield "end"
        finally:
            with lock:
                running.pop()

    monkeypatch.setattr(chats, "answer", answer)
    yield go_on
    go_on.set()


def first_piece(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """The answer to a question, of which the first two lines have come."""
    connection.request("POST", "/chat", question(), JSON)
    response = connection.getresponse()
    assert [*json.loads(response.readline())] == ["step"] and json.loads(response.readline())["text"]
    return response


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("_MOST_ASKING", 1, "1 answers are being written"),
        ("_TURN_SECONDS", 0.05, "others' answers took more than"),
    ],
)
def test_who_asks_too_much_is_sent_away(finished_run, slow, monkeypatch, limit, value, says):
    monkeypatch.setattr(chats, limit, value)
    one = served(finished_run)
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(one), timeout=60)) as connection:
        response = first_piece(connection)
        status, content = post(one, question())
        assert status == 503 and says in content
        slow.set()
        assert events(response.read().decode())[-1] == {"end": ""}
    assert text_of(post(one, question())[1]) == "1 end"
    one.close()


def test_two_who_ask_are_answered_one_after_the_other(server, slow):
    answers: list[str] = []
    askers = [threading.Thread(target=lambda: answers.append(post(server, question())[1])) for _ in range(2)]
    for asker in askers:
        asker.start()
    threading.Timer(0.3, slow.set).start()
    for asker in askers:
        asker.join(60)
    assert [text_of(answer) for answer in answers] == ["1 end", "1 end"]


def test_a_browser_that_stops_ends_its_answer_and_is_no_news(server, slow, capfd):
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = "POST /chat HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(question())}\r\n\r\n{question()}".encode())
        received = b""
        while b'"text"' not in received:
            received += connection.recv(1000)
    slow.set()
    assert text_of(post(server, question())[1]) == "1 end"
    assert capfd.readouterr().err == ""


def test_a_run_that_goes_on_answers_with_its_newest_checkpoint(finished_run, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("outer.safetensors", "summary.json"))
    steps = [*(run / "checkpoints").glob("replica-*/step-*")]
    away = tmp_path / "away"
    away.mkdir()

    def move(names: str, source: Path, to: Path) -> None:
        for path in source.glob(names):
            shutil.move(path, to / path.name)

    replica = run / "checkpoints" / "replica-0"
    shutil.rmtree(run / "checkpoints" / "replica-1")
    numbers = sorted({int(path.name.split("-")[1].split(".")[0]) for path in steps})
    one = served(run)
    move("*", replica, away)
    status, content = post(one, question())
    assert status == 400 and "no checkpoint yet" in content
    loads: list[int] = []
    load = chats.load_model
    monkeypatch.setattr(chats, "load_model", lambda *a, **k: loads.append(1) or load(*a, **k))
    for step in numbers[-2:]:
        move(f"step-{step:08}*", away, replica)
        for _ in range(2):
            assert events(post(one, question())[1])[0] == {"step": step}
    assert len(loads) == 2
    one.close()


def test_values_and_places_that_cant_be_are_refused_at_the_start(finished_run, tmp_path):
    for values, sentence in (
        ({"max_tokens": 1001}, "max_tokens=1001 must be at most 1000"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=sentence):
            Chat(str(finished_run), **values)
    with pytest.raises(UserError, match="holds no run"):
        Chat(str(tmp_path))


def test_the_command_serves_the_chat_on_the_page_of_its_run(finished_run, monkeypatch, capsys):
    serve, answered = LiveServer.serve, []

    def ask(server: LiveServer) -> None:
        threading.Thread(target=serve, args=(server,)).start()
        with urlopen(server.url, timeout=20) as page, urlopen(f"{server.url}chat.json", timeout=20) as facts:
            answered.extend([b'id="ask"' in page.read(), json.load(facts)["max_tokens"]])
        answered.append(events(post(server, question())[1])[0])

    monkeypatch.setattr(LiveServer, "serve", ask)
    main(["chat", str(finished_run), "--serve", "--max-tokens", "50"])
    assert answered == [True, 50, {"step": 120}]
    assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/ \(Ctrl-C ends it\)\n", capsys.readouterr().out)


def test_the_page_says_what_larger_models_take(server, finished_run):
    with urlopen(f"{server.url}chat.json", timeout=20) as answer:
        facts = json.load(answer)
    summary = json.loads((finished_run / "summary.json").read_text())
    config = read_config(finished_run)
    far = facts.pop("reach")
    assert facts == {
        "max_tokens": 200,
        "temperature": 0.8,
        "most_tokens": 1000,
        "most_characters": MOST_CHARACTERS,
    }
    own = reach(config, num_tokens=summary["num_tokens"], tokens_per_second=summary["tokens_per_second"])
    assert own is not None and far == json.loads(json.dumps(asdict(own)))


def test_the_final_parameters_follow_the_last_checkpoint(finished_run, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "copy"
    shutil.copytree(finished_run, run)
    final = (run / "outer.safetensors").rename(tmp_path / "final")
    monkeypatch.chdir(tmp_path)
    chat = Chat("copy")  # by its name in runs
    threads = []

    def model() -> RunModel:
        list(chat.answer(question().encode()))
        threads.append(torch.get_num_threads())
        assert chat._model is not None
        return chat._model

    before = model()
    final.rename(run / "outer.safetensors")
    after = model()
    assert before.step == after.step == 120 and before is not after
    assert threads[0] == 1 and threads[1] == chat._num_threads


def test_a_watched_page_has_no_chat(finished_run):
    one = LiveServer(Sources([str(finished_run)]), title="")
    threading.Thread(target=one.serve, daemon=True).start()
    with urlopen(one.url, timeout=20) as answer:
        assert b"/chat" not in answer.read()
    assert post(one, question())[0] == 501
    one.close()


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_an_answer_as_it_is_written(server, finished_run, tmp_path):
    (expected,) = likeliest(finished_run, "the cat ", num_tokens=30)
    talk = "document.getElementById('talk').textContent"
    with opened_page(tmp_path / "profile") as page:
        for size in (PHONE, DESK):
            page.open(server.url, size=size)
            page.wait_until(
                "document.querySelectorAll('figure').length && document.getElementById('tokens').value == 200"
            )
            for name, value in (("tokens", "30"), ("temperature", "0"), ("ask", "the cat ")):
                page.value(f"document.getElementById('{name}').value = '{value}'")
            page.value("document.getElementById('send').click()")
            page.wait_until("document.getElementById('stop').hidden && !document.getElementById('send').disabled")
            assert page.value(talk).startswith("the cat ")
            assert page.value(talk)[8:] in expected + "\n\n"
            assert page.value("document.getElementById('state').textContent") == "by the model of step 120"
            # What is typed is text, and an answer can be stopped.
            page.value(f"document.getElementById('ask').value = {json.dumps(EVIL)}")
            page.value("document.getElementById('tokens').value = '1000'")
            page.value("document.getElementById('temperature').value = '5'")
            page.value("document.getElementById('send').click(); document.getElementById('stop').click()")
            page.wait_until("document.getElementById('state').textContent == 'stopped'")
            assert EVIL in page.value(talk) and page.value("document.images.length") == 0
            page.value("document.querySelector('#reach summary').click()")
            assert page.value("document.querySelectorAll('#larger tr').length") == 4
            assert page.value(CUT) == []
        assert page.console == []
