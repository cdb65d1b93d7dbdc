"""Inference servers that load each version of followed weights from a directory: SGLang and vLLM.

SGLang loads by `POST /update_weights_from_disk`. It waits for running requests, goes back to the weights from
before where it can't load, and names the version in the `meta_info` of each answer. Source:
https://docs.sglang.io/advanced_features/sglang_for_rl.html

vLLM shows its endpoints only where VLLM_SERVER_DEV_MODE=1 started it. `/pause?mode=wait` lets running requests end
and clears the caches, the workers' `reload_weights` reads the directory, `/update_weight_version` (newer servers)
keeps the version for `/weight_info`, and `/resume` goes on. vLLM undoes nothing: a server that failed to load
stays paused until it loads a version, since its weights may be of two. Source:
https://docs.vllm.ai/en/latest/training/weight_transfer/, https://docs.vllm.ai/en/latest/training/async_rl/ and
`vllm/entrypoints/serve/dev/` of https://github.com/vllm-project/vllm
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from diloco.errors import DilocoError, UserError, nearest, printable

KEY = "DILOCO_SERVER_KEY"
"""The environment variable with the key of servers that ask for one."""
_LONGEST_ANSWER = 65_536
_LATER = (429, 502, 503, 504)


class ServerError(DilocoError):
    """An inference server did not load a version."""


class _NotNowError(Exception):
    """A request that may succeed later: there is no connection, or the server says that it is busy or starting."""


class _NoEndpointError(ServerError):
    """An answer of 404: the server does not know what it was asked."""


@dataclass(frozen=True)
class InferenceServer:
    """A server that is told to load weights.

    Args:
        kind: sglang or vllm.
        url: under which its endpoints are, such as http://127.0.0.1:30000.
        answer_seconds: the longest wait for an answer; loading, and the end of running requests, are part of it.
        patience_seconds: how long a server that can't be reached, or says that it is busy, is asked again.
    """

    kind: str
    url: str
    answer_seconds: float = 600.0
    patience_seconds: float = 60.0

    @classmethod
    def of(cls, text: str, **limits: float) -> "InferenceServer":
        """The server that a text names, such as sglang:http://127.0.0.1:30000.

        Raises:
            UserError: if it names none.
        """
        kind, _, url = text.partition(":")
        if kind not in _LOADS:
            kinds = " and ".join(sorted(_LOADS))
            raise UserError(
                f"notify={text} begins with no kind of server{nearest(kind, _LOADS)}: there are {kinds}, as in "
                "sglang:http://127.0.0.1:30000",
                "notify",
            )
        if not _is_address(url):
            raise UserError(
                f"notify={text} needs the address of the server, as in {kind}:http://127.0.0.1:30000; a key goes "
                f"into {KEY}",
                "notify",
            )
        if url.rstrip("/").endswith("/v1"):
            raise UserError(f"notify={text}: leave out /v1, under which no weights are loaded", "notify")
        return cls(kind, url.rstrip("/"), **limits)

    def load(self, directory: Path, version: int) -> None:
        """Let the server load the weights in a directory that it sees under the same path.

        Args:
            directory: of a model in transformers' format; a link is resolved, so that it may change meanwhile.
            version: kept by the server beside the weights.

        Raises:
            ServerError: if it did not load them.
        """
        deadline, pause = time.monotonic() + self.patience_seconds, 0.5
        while True:
            try:
                return _LOADS[self.kind](self, str(directory.resolve()), str(version))
            except _NotNowError as error:
                if time.monotonic() + pause > deadline:
                    raise ServerError(f"{self.url} did not load version {version}: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        """The answer to a request, empty where it is no JSON object.

        Raises:
            ServerError: if the server refuses, or does not answer in time.
            _NotNowError: if it can't be reached, or says that it is busy.
        """
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = b"" if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url + path, data, headers, method="POST")
            with urlopen(request, timeout=self.answer_seconds) as response:
                answer = _object(response.read(_LONGEST_ANSWER))
        except HTTPError as error:
            with error:
                text = _text(error.read(_LONGEST_ANSWER))
            sentence = f"{self.url}{path} answered {error.code}{f' ({text})' if text else ''}"
            if error.code == 404:
                raise _NoEndpointError(sentence) from error
            raise (_NotNowError if error.code in _LATER else ServerError)(sentence) from error
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path} did not answer within {self.answer_seconds:g} s") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise ServerError(f"{self.url} could not be reached within {self.answer_seconds:g} s") from error
            words = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise _NotNowError(f"{self.url}{path} can't be reached ({words})") from error
        return answer


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return whole and parts.scheme in ("http", "https") and not (parts.username or parts.query or parts.fragment)


def _load_sglang(server: InferenceServer, directory: str, version: str) -> None:
    answer = server.post("/update_weights_from_disk", {"model_path": directory, "weight_version": version})
    if answer.get("success") is not True:
        raise ServerError(f"{server.url} did not load version {version}: {_text(json.dumps(answer).encode())}")


def _load_vllm(server: InferenceServer, directory: str, version: str) -> None:
    try:
        server.post("/pause?mode=wait")
    except _NoEndpointError as error:
        raise ServerError(f"{error}: start vLLM with VLLM_SERVER_DEV_MODE=1, which adds the endpoint") from error
    try:
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}})
    except (ServerError, _NotNowError) as error:
        paused = f"{error}; it stays paused until it loads a version, since its weights may be of two"
        raise type(error)(paused) from error
    with suppress(_NoEndpointError):  # older servers keep no version
        server.post("/update_weight_version", {"new_version": version})
    server.post("/resume")


_LOADS: dict[str, Callable[[InferenceServer, str, str], None]] = {"sglang": _load_sglang, "vllm": _load_vllm}


def _object(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _text(content: bytes) -> str:
    return printable(" ".join(content.decode(errors="replace").split()))[:300]
