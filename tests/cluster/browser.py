"""A headless Chromium, driven by the Chrome DevTools protocol over tornado's websocket."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the path of SCALELATENT_BROWSER, else of the first browser of BROWSER_NAMES; None if absent."""
    names = [name] if (name := os.environ.get("SCALELATENT_BROWSER")) else BROWSER_NAMES
    return next((found for name in names if (found := shutil.which(name))), None)


class BrowserTab:
    """One tab of the browser, and what the tab reported.

    ``errors`` has console errors and warnings, uncaught exceptions and failed loads; ``requests`` has the
    URLs that the page requested.
    """

    def __init__(self, url: str) -> None:
        import asyncio

        from tornado.websocket import websocket_connect

        self.loop = asyncio.new_event_loop()

        async def connect() -> Any:
            return await websocket_connect(url, max_message_size=1 << 28)

        self.socket = self.loop.run_until_complete(connect())
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 30.0, **params: Any) -> dict[str, Any]:
        import asyncio

        self._number += 1
        number = self._number

        async def talk() -> dict[str, Any]:
            await self.socket.write_message(json.dumps({"id": number, "method": method, "params": params}))
            while True:
                message = json.loads(await self.socket.read_message())
                if message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']}")
                    return dict(message["result"])
                self._record_event(message.get("method", ""), message.get("params", {}))

        return self.loop.run_until_complete(asyncio.wait_for(talk(), timeout))

    def _record_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str, width: int = 1280, height: int = 900, scale: float = 1.0) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=False)  # fmt: skip
        self.call("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0, accept: Callable[[Any], bool] = bool) -> Any:
        """Return the value of a JavaScript expression once ``accept`` holds; fail after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            value = self.js(expression)
            if accept(value):
                return value
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{expression} is {value!r} after {seconds:.0f} s; errors: {self.errors}"
                )
            time.sleep(0.1)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        async def leave() -> None:
            self.socket.close()

        self.loop.run_until_complete(leave())
        self.loop.close()


@contextmanager
def browser() -> Iterator[BrowserTab]:
    """Start a Chromium with one tab, yield the tab, and end the Chromium after the test."""
    chromium = find_chromium()
    assert chromium is not None
    with tempfile.TemporaryDirectory(prefix="scalelatent-chromium-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file, deadline = Path(folder, "DevToolsActivePort"), time.monotonic() + 30
            while not (port_file.exists() and port_file.read_text().count("\n")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{chromium} did not start (exit status {process.poll()})")
                time.sleep(0.05)
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            page = BrowserTab(tabs[0]["webSocketDebuggerUrl"])
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
