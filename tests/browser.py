"""A real browser without a screen, driven by the DevTools protocol over two pipes."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
PHONE, DESK = (390, 844), (1280, 900)
"""Width and height of screens."""
_SECONDS = 60.0


class Page:
    """One page: it is opened and measured; what its console says is kept."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._numbers, self._rest = reads, writes, itertools.count(1), b""
        self.console: list[str] = []
        """Errors and warnings of the console, the network and the scripts."""
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, size: tuple[int, int]) -> None:
        """Go to a URL on a screen of a size."""
        self.resize(size)
        self._call("Page.navigate", url=url)

    def resize(self, size: tuple[int, int]) -> None:
        """Take another screen."""
        width, height = size
        mobile = width < 500
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait for a JavaScript expression to be true."""
        deadline = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; console: {self.console}"
            time.sleep(0.05)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], _SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._reads, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(parameters["entry"]["text"])


@contextmanager
def opened_page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own.

    Args:
        profile: a directory for the browser's files.
    """
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    # The protocol's file descriptors are 3 and 4; the shell moves ours there.
    script = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    command = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(to_browser[0], from_browser[1]),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(from_browser[0], to_browser[1])
    finally:
        os.close(to_browser[1])  # the browser ends with its pipe
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
