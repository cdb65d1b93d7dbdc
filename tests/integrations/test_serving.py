"""Inference servers that load versions: a real HTTP server that speaks SGLang's and vLLM's endpoints."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ports import free_port

import diloco
from diloco.cli.main import main
from diloco.errors import UserError
from diloco.integrations.serving import KEY, InferenceServer, ServerError


class Serving(ThreadingHTTPServer):
    """A server with weights that it loads from a directory, and faults that a test asks for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.weights: dict[str, torch.Tensor] = {}
        self.version: str | None = None
        self.paused = False
        self.directories: list[str] = []
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.faults: dict[str, list[tuple[int, Any]]] = {}
        """The next answers of an endpoint, in place of what it does; the status 0 is silence."""
        self.over = threading.Event()

    def load(self, directory: str) -> str:
        """Load weights whole, or name the reason why not."""
        self.directories.append(directory)
        try:
            self.weights = load_file(Path(directory, "model.safetensors"))
        except OSError as error:
            return str(error)
        return ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status and the answer, as of sglang 0.5 and vLLM 0.32."""
        match path.partition("?")[0]:
            case "/update_weights_from_disk":
                if reason := self.load(body["model_path"]):
                    return 400, {"success": False, "message": f"Failed to update weights: {reason}."}
                self.version = body["weight_version"]
                return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}
            case "/pause":
                assert path.endswith("?mode=wait")
                self.paused = True
                return 200, {"status": "paused"}
            case "/collective_rpc":
                assert self.paused and body["method"] == "reload_weights"
                if reason := self.load(body["kwargs"]["weights_path"]):
                    return 500, {"error": {"message": reason}}
                return 200, {"results": [None]}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True, "new_version": self.version}
            case "/resume":
                self.paused = False
                return 200, {"status": "resumed"}
            case _:
                return 404, {"detail": "Not Found"}


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server, endpoint = self.server, self.path.partition("?")[0]
        assert isinstance(server, Serving)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        server.asked.append(endpoint)
        server.keys.append(self.headers["Authorization"])
        if faults := server.faults.get(endpoint):
            status, answer = faults.pop(0)
        else:
            status, answer = server.answer(self.path, json.loads(content or b"{}"))
        if not status:
            server.over.wait(10)
            return
        written = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def saved(folder: Path, value: float) -> Path:
    """A directory with weights."""
    folder.mkdir()
    save_file({"weight": torch.full((3,), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


LOAD = {
    "sglang": ["/update_weights_from_disk"],
    "vllm": ["/pause", "/collective_rpc", "/update_weight_version", "/resume"],
}
"""The requests of one version."""


@pytest.mark.parametrize("kind", LOAD)
def test_each_version_is_loaded_whole_under_its_number(serving, tmp_path, monkeypatch, kind):
    monkeypatch.setenv(KEY, "secret")
    server, link = InferenceServer.of(f"{kind}:{serving.url}/"), tmp_path / "current"
    for number in (3, 4):
        link.unlink(missing_ok=True)
        link.symlink_to(saved(tmp_path / str(number), number))
        server.load(link, number)
        assert serving.weights["weight"].tolist() == [number] * 3 and serving.version == str(number)
        assert not serving.paused
    assert serving.directories == [str(tmp_path / "3"), str(tmp_path / "4")], "no link, which may change meanwhile"
    assert serving.asked == 2 * LOAD[kind] and set(serving.keys) == {"Bearer secret"}


@pytest.mark.parametrize("kind", LOAD)
def test_a_server_that_starts_anew_is_asked_again(serving, tmp_path, kind):
    serving.faults = {LOAD[kind][-1]: [(503, {})]}
    InferenceServer.of(f"{kind}:{serving.url}", patience_seconds=20).load(saved(tmp_path / "0", 5), 0)
    assert serving.weights["weight"].tolist() == [5] * 3 and serving.version == "0" and not serving.paused


def test_a_vllm_that_keeps_no_version_loads(serving, tmp_path):
    serving.faults = {"/update_weight_version": [(404, {})]}
    InferenceServer.of(f"vllm:{serving.url}").load(saved(tmp_path / "1", 5), 1)
    assert serving.weights["weight"].tolist() == [5] * 3 and not serving.paused


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", LOAD)
def test_diloco_follow_goes_on_after_a_version_that_a_server_did_not_load(serving, tmp_path, capsys, kind):
    place, command = tmp_path / "place", ["follow", str(tmp_path / "place"), "--to", str(tmp_path / "to")]
    command += ["--notify", f"{kind}:{serving.url}"]
    refusal = {LOAD[kind][0]: [(401, b"no")]}
    with diloco.Publisher(str(place)) as publisher:

        def publish(step: int) -> None:
            publisher.publish({"weight": torch.full((3,), float(step))}, step=step)

        publish(10)
        main([*command, "--once"])
        assert serving.weights["weight"].tolist() == [10] * 3 and serving.version == "0"
        serving.faults = {endpoint: list(answers) for endpoint, answers in refusal.items()}
        with pytest.raises(SystemExit, match="1"):
            main([*command, "--once"])

        def publish_two_and_stop() -> None:
            wait_until(lambda: serving.version == "0")
            serving.faults = refusal
            publish(20)
            wait_until(lambda: not any(refusal.values()))
            publish(30)
            wait_until(lambda: serving.version == "2" and not serving.paused)
            (place / "versions" / "0000000003").write_text("no header")

        thread, serving.version = threading.Thread(target=publish_two_and_stop), None
        thread.start()
        with pytest.raises(SystemExit, match="1"):
            main(command)
        thread.join()
    assert serving.weights["weight"].tolist() == [30] * 3
    output = capsys.readouterr()
    loaded = [f"version {number}: loaded by {serving.url}" for number in (0, 0, 2)]
    assert [line for line in output.out.splitlines() if "loaded" in line] == loaded
    assert output.err.count("answered 401 (no)") == 2 and "(no): the next version is tried" in output.err


def test_a_server_loads_though_another_one_refuses(serving, tmp_path):
    with diloco.Publisher(str(tmp_path / "place")) as publisher:
        publisher.publish({"weight": torch.full((3,), 7.0)}, step=1)
    with Serving() as other:
        other.faults = {"/update_weights_from_disk": [(401, b"no")]}
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        servers = [f"sglang:{other.url}", f"vllm:{serving.url}"]
        with pytest.raises(SystemExit, match="1"):
            main(["follow", str(tmp_path / "place"), "--to", str(tmp_path / "to"), "--once", "--notify", *servers])
        other.shutdown()
        thread.join()
    assert serving.weights["weight"].tolist() == [7] * 3 and not serving.paused


REFUSALS: list[tuple[str, str, tuple[int, Any], str]] = [
    (
        "sglang",
        "/update_weights_from_disk",
        (400, {"message": "shape\x1b mismatch"}),
        r"answered 400 .*shape\\u001b m",
    ),
    ("sglang", "/update_weights_from_disk", (200, {"success": False}), "did not load version 7: .*false"),
    ("sglang", "/update_weights_from_disk", (200, b"\xff\x1b[2J"), "did not load version 7"),
    ("sglang", "/update_weights_from_disk", (401, b"\x1b[2Jno"), "answered 401 .\ufffd.2Jno"),
    ("sglang", "/update_weights_from_disk", (0, b""), "did not answer within 2 s"),
    ("sglang", "/update_weights_from_disk", (503, {}), "did not load version 7: .* answered 503"),
    ("vllm", "/pause", (404, {}), "start vLLM with VLLM_SERVER_DEV_MODE=1"),
    (
        "vllm",
        "/collective_rpc",
        (500, {"error": "no such file"}),
        "no such file.*; it stays paused until it loads",
    ),
    ("vllm", "/collective_rpc", (0, b""), "did not answer within 2 s; it stays paused"),
    ("vllm", "/resume", (400, {}), "/resume answered 400"),
]
"""A kind of server, the endpoint that fails, its answer, and what the error says."""


@pytest.mark.parametrize(("kind", "endpoint", "answer", "sentence"), REFUSALS)
def test_a_version_that_was_not_loaded_is_an_error_and_the_next_one_is_loaded(
    serving, tmp_path, kind, endpoint, answer, sentence
):
    serving.faults = {endpoint: [answer]}
    limits = {"answer_seconds": 30 if answer[0] else 2, "patience_seconds": 0.1}
    server = InferenceServer.of(f"{kind}:{serving.url}", **limits)
    with pytest.raises(ServerError, match=sentence) as error:
        server.load(saved(tmp_path / "7", 7), 7)
    assert "\x1b" not in str(error.value) and serving.version != "8"
    assert serving.paused == (endpoint in ("/collective_rpc", "/resume"))
    if not answer[0]:
        server = InferenceServer.of(f"{kind}:{serving.url}")  # with more time
    server.load(saved(tmp_path / "8", 8), 8)
    assert serving.weights["weight"].tolist() == [8] * 3 and serving.version == "8" and not serving.paused


def test_a_server_that_is_not_there_is_an_error():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match=f"{url} did not load version 2: .*can't be reached .Connection refused"):
        InferenceServer.of(f"sglang:{url}", patience_seconds=0.1).load(Path(), 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("http://127.0.0.1:30000", "begins with no kind of server: there are sglang and vllm"),
        ("sglnag:http://127.0.0.1:30000", "did you mean sglang"),
        ("sglang:", "needs the address"),
        ("vllm:ftp://127.0.0.1", "needs the address"),
        ("vllm:http://:8000", "needs the address"),
        ("vllm:http://host:80000", "needs the address"),
        ("vllm:http://host:8000?key=1", "needs the address"),
        ("vllm:http://user:key@host:8000", f"a key goes into {KEY}"),
        ("vllm:http://host:8000/v1/", "leave out /v1"),
    ],
)
def test_a_text_that_names_no_server_is_refused(text, sentence):
    with pytest.raises(UserError, match=re.escape(text) + ".*" + sentence) as error:
        InferenceServer.of(text)
    assert error.value.fields == ("notify",)
