"""A real browser for tests: Chromium without a window, driven through pipes by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
]
OPTIONS = (
    "--headless",
    "--no-sandbox",  # in containers and as root there is no other way; the pages are ours
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
LONGEST_S = 120.0
"""Seconds that an answer may take on a machine that is busy."""


class Browser:
    """A running browser with one page.

    Attributes:
        complaints: What the console has said: errors, warnings, exceptions, refused requests.
        requests: Addresses that the page has asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._read, self._calls = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file, and wait until it says that it is ready."""
        self.call("Page.navigate", url="about:blank")
        self.complaints.clear()
        self.requests.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.absolute().as_uri())
        deadline = time.monotonic() + LONGEST_S
        while not self.evaluate("location.protocol === 'file:' && document.documentElement?.dataset.ready === 'true'"):
            assert time.monotonic() < deadline, f"the page never became ready: {self.complaints}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Compute JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press or release the mouse at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, file: Path) -> bytes:
        """Save what the window shows as PNG."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(data)
        return data

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and give its result."""
        self._calls += 1
        number = self._calls
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + LONGEST_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, said: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(said["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {said['message']}")
        elif event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start a browser, and end it.

    Args:
        profile: An empty directory for its files.
    """
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    ours, theirs = (to_browser[1], from_browser[0]), (to_browser[0], from_browser[1])
    command = shlex.join([PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"])
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} 3<&{theirs[0]} 4>&{theirs[1]}"],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in theirs:
        os.close(descriptor)
    try:
        browser = Browser(*ours)
        yield browser
        browser._session = None
        browser.call("Browser.close")
        process.wait(LONGEST_S)
    finally:
        process.kill()
        process.wait()
        for descriptor in ours:
            os.close(descriptor)
