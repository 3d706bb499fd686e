"""A headless Chromium that takes commands over a pipe: the DevTools protocol, without a port."""

from __future__ import annotations

import base64
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

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OFF = ("quic", "background-networking", "component-update", "sync", "gpu", "extensions")
DEADLINE_S = 30.0


def found() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with one empty page; it ends with the block."""
    browser = found()
    assert browser is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--no-first-run", "--remote-debugging-pipe"]
    options += [f"--user-data-dir={profile}", *(f"--disable-{each}" for each in OFF)]
    pipes = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the numbers that Chromium looks at
    process = subprocess.Popen(
        ["bash", "-c", pipes, "bash", browser, *options, "about:blank"],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        process.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)


class Browser:
    """One page: where it is, how wide, what it holds, and what went wrong in it."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._bytes = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.problems: list[str] = []
        """Errors and warnings of the console, exceptions, and files that could not be loaded."""
        self.requested: list[str] = []
        """Addresses of everything that the page has loaded."""
        self._loaded = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def go(self, address: str) -> None:
        """Open a page, and wait until all that it names is loaded."""
        before = self._loaded
        self._call("Page.navigate", url=address)
        deadline = time.monotonic() + DEADLINE_S
        while self._loaded == before:
            self._take(deadline)

    def resize(self, width: int, height: int) -> None:
        """Give the page another width, in CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, what it resolves to."""
        told = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write what is visible now, as PNG."""
        told = self._call("Page.captureScreenshot", optimizeForSpeed=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        call = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            call["sessionId"] = self._session
        os.write(self._writes, json.dumps(call).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while (answer := self._take(deadline)).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _take(self, deadline: float) -> Any:
        """The next message, which is counted if it is an event."""
        while b"\0" not in self._bytes:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._reads], [], [], left)[0], "the browser does not answer"
            more = os.read(self._reads, 1 << 20)
            assert more, "the browser has ended"
            self._bytes += more
        first, _, self._bytes = self._bytes.partition(b"\0")
        message = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, told: Any) -> None:
        if event == "Page.loadEventFired":
            self._loaded += 1
        elif event == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])
        elif event == "Network.loadingFailed" and not told.get("canceled"):
            self.problems.append(f"not loaded: {told['errorText']}")
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(str(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(told["entry"]))
