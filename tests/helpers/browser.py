"""A page in a headless browser: its contents, console messages and requests.

::

    chromium --remote-debugging-pipe    fd 3 <-- commands, fd 4 --> answers and events, in JSON
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Page:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, is_dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        self._ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def evaluate(self, code: str) -> Any:
        result = self._ask("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Messages on the console, and exceptions, since the page was opened."""
        return [event["params"] for event in self._events if event["method"] in COMPLAINTS]

    @property
    def requests(self) -> list[str]:
        """The URLs requested since the page was opened."""
        sent = [e for e in self._events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no chromium on the PATH; on Debian: apt-get install chromium")
    ends = []
    for low in (*os.pipe(), *os.pipe()):  # above 4, so that the shell can move them there
        ends.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(low)
    of_browser, own = (ends[0], ends[3]), (ends[1], ends[2])
    start = f'exec "$@" 3<&{of_browser[0]} 4>&{of_browser[1]}'
    command = ["bash", "-c", start, "bash", program, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [*command, "--remote-debugging-pipe"], pass_fds=of_browser, stderr=subprocess.DEVNULL
    )
    for end in of_browser:
        os.close(end)
    try:
        yield Page(*own)
    finally:
        process.kill()
        process.wait()
        for end in own:
            os.close(end)
