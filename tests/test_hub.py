"""The Hugging Face Hub, here a server of this machine: it answers, is away, or lacks a file."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest
from tests.ports import free_port

from diloco.data.corpora import documents
from diloco.data.tokenizers import load_tokenizer, train_bpe
from diloco.errors import UserError
from diloco.hub import check_online, check_reachable, hub_file, push
from diloco.training.records.finished import evaluate_run


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def hub(cache, monkeypatch):
    """A Hub with one repository, `tiny/bpe`, that has a tokenizer.json."""
    train_bpe(["one two three é"] * 9, 260, cache / "tokenizer.json")
    content = (cache / "tokenizer.json").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, *, with_content: bool) -> None:
            is_there = self.path == "/tiny/bpe/resolve/main/tokenizer.json"
            self.send_response(200 if is_there or self.path == "/" else 404)
            headers = {
                "X-Repo-Commit": "0" * 40,
                "ETag": '"tag"',
                "Content-Length": str(len(content) if is_there else 0),
            }
            if not is_there:
                headers["X-Error-Code"] = "EntryNotFound" if self.path.startswith("/tiny/bpe/") else "RepoNotFound"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if with_content and is_there:
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.answer(with_content=False)

        def do_GET(self) -> None:
            self.answer(with_content=True)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield cache
        server.shutdown()


def test_a_tokenizer_is_named_as_on_the_hub(hub, monkeypatch):
    expected = load_tokenizer(hub / "tokenizer.json")
    tokenizer = load_tokenizer("tiny/bpe")
    assert tokenizer.digest == expected.digest and tokenizer.bos_id == expected.bos_id
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")  # from now on it is read from the cache
    assert load_tokenizer("tiny/bpe").digest == expected.digest


def test_a_name_that_the_hub_does_not_know_is_refused(hub):
    with pytest.raises(UserError, match=r"tiny/nothing can't be read from the Hub: "):
        hub_file("tiny/nothing", ("tokenizer.json",))
    with pytest.raises(UserError, match=r"tiny/bpe on the Hub has none of tokenizer\.model"):
        hub_file("tiny/bpe", ("tokenizer.model",))


@pytest.mark.parametrize("name", ["../x", "a/b/c", "./a", "", "a b", "my--tok", "a..b", "gpt2-", "x.git"])
def test_what_can_be_no_name_is_not_asked_for(name):
    assert hub_file(name, ("tokenizer.json",)) is None


@pytest.mark.timeout(40)  # the libraries' own attempts take a minute
def test_a_hub_that_does_not_answer_is_said_at_once(cache, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        UserError, match=r"data.tokenizer=gpt2 is neither .*; gpt2 of the Hub can't be read: .*does not answer"
    ):
        load_tokenizer("gpt2")
    with pytest.raises(
        UserError, match=r"hf:some/text can't be read: the Hugging Face Hub does not answer at http://127"
    ):
        next(documents("hf:some/text"))


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("HF_HUB_OFFLINE", "1", "push_to_hub=me/model, but HF_HUB_OFFLINE forbids to ask the Hub: unset it"),
        ("HF_ENDPOINT", "http://127.0.0.1:{}", "push_to_hub=me/model needs the Hugging Face Hub, which does not"),
    ],
)
def test_nothing_is_exported_for_a_hub_that_will_not_take_it(cache, monkeypatch, variable, value, sentence):
    monkeypatch.setenv(variable, value.format(free_port()))
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_online("push_to_hub", "me/model")


def test_what_was_never_downloaded_is_named_where_nothing_may_be_downloaded(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"tiny/bpe was not downloaded to this machine before, and HF_HUB_OFFLINE"):
        hub_file("tiny/bpe", ("tokenizer.json",))


@pytest.mark.slow
def test_a_task_is_refused_by_its_name_and_then_by_a_hub_that_does_not_answer(cache, monkeypatch):
    from diloco.evaluation import zero_shot

    harness = SimpleNamespace(all_tasks=["hellaswag"])  # to index its own takes many seconds
    monkeypatch.setattr(zero_shot, "_task_manager", lambda include_defaults: harness)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=r"^tasks=hellaswag: the questions can't be read: .* does not answer"):
        evaluate_run(cache, tasks={"hellaswag": None})
    with pytest.raises(UserError, match=r"'hellaswagg' is no task .*: did you mean hellaswag"):
        evaluate_run(cache, tasks={"hellaswagg": None})


def test_a_folder_is_uploaded_to_a_private_repository(hub, monkeypatch):
    calls = []

    class Api:
        def __init__(self, endpoint: str) -> None:
            self.endpoint = endpoint

        def create_repo(self, name: str, **options: bool) -> huggingface_hub.RepoUrl:
            calls.append((name, options))
            return huggingface_hub.RepoUrl(f"{self.endpoint}/me/{name}", endpoint=self.endpoint)

        def upload_folder(self, **options: object) -> None:
            calls.append(options)
            if options["folder_path"] == hub / "refused":
                raise OSError("403 Forbidden\nmore")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push(hub, "model").endswith("/me/model")
    assert calls == [
        ("model", {"private": True, "exist_ok": True}),
        {"repo_id": "me/model", "folder_path": hub},
    ]
    remedy = r"it is written, and hf upload model .*refused tries again$"
    with pytest.raises(UserError, match=rf"refused can't be uploaded to model: 403 Forbidden; {remedy}"):
        push(hub / "refused", "model")


@pytest.mark.parametrize("address", ["http://localhost:80x", "http://local host"])
def test_an_address_of_a_hub_that_is_none_is_a_sentence(cache, monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError, match="does not answer at http://local"):
        check_reachable("gpt2 of the Hub")
