"""A headless Chromium that a test drives: it opens pages, runs script in them, presses keys and takes pictures."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
MODIFIERS = {"Shift": 8, "Control": 2}


class Page:
    """One open page; `console` has what it said there, errors of its script and of its policy included."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._count = socket, 0
        self.console: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv(timeout=60))
            if told.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.console.append(json.dumps(told["params"]))
            if told.get("id") == self._count:
                assert "error" not in told, told
                found: dict[str, Any] = told["result"]
                return found

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Load a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def get(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.get(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str, *modifiers: str) -> None:
        """Press a key, as a person does."""
        about = {
            "key": key,
            "windowsVirtualKeyCode": KEYS[key],
            "modifiers": sum(MODIFIERS[name] for name in modifiers),
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text and not modifiers else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Put text where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """The whole page, or what its window shows, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A browser with one page, which ends with the block; it keeps its files in `folder`."""
    profile = folder / "chromium"
    command = [CHROMIUM, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told, end = profile / "DevToolsActivePort", time.monotonic() + 30
        while not told.exists() or not told.read_text().strip():
            assert time.monotonic() < end, "the browser does not start"
            time.sleep(0.05)
        port = told.read_text().split()[0]
        target = next(t for t in httpx.get(f"http://127.0.0.1:{port}/json").json() if t["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=1 << 26) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)


@dataclass(frozen=True)
class Look:
    """What a browser found: messages on the console, the document after loading, a PNG file."""

    console: list[str]
    dom: str
    picture: Path


def look_at(path: Path, folder: Path, width: int = 1280, height: int = 900) -> Look:
    """Load the file `path` in a window of `width` x `height`; the picture goes into `folder`."""
    picture = folder / f"{path.stem}-{width}.png"
    with browsing(folder) as page:
        page.open(path.as_uri(), width, height)
        page.picture(picture, whole=False)
        return Look(page.console, page.get("document.documentElement.outerHTML"), picture)
