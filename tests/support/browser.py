"""A real Chromium without a window, driven by the DevTools protocol over a websocket.

    async with browser() as opened:
        page = await opened.open("http://127.0.0.1:30000/ui", width=1280, height=800)
        await page.until("document.title !== ''")
        assert page.errors == []

Debian's package `chromium` is enough; `CHROMIUM` names another binary. Tests skip where there is none.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.running_time import running_s

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
START_S = 60.0
NO_CHROMIUM = "no Chromium is installed (Debian: apt-get install chromium; else CHROMIUM names the binary)"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []  # of the console, uncaught exceptions, requests that failed to load
        self.requested: list[str] = []  # URLs
        self.loaded = asyncio.Event()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; its result. RuntimeError with the browser's words if it refuses."""
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        reply = await asyncio.wait_for(future, START_S)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        result: dict[str, Any] = reply["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, by JSON. AssertionError with the exception that it threw."""
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, within_s: float = 15.0) -> Any:
        """Wait until an expression is true, and return it."""
        end_s = running_s() + within_s
        while not (value := await self.evaluate(expression)):
            assert running_s() < end_s, f"not so within {within_s} s: {expression}"
            await asyncio.sleep(0.1)
        return value

    async def click(self, x: float, y: float) -> None:
        """Press and release the mouse at a place of the window."""
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def key(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def show(self, *, width: int, height: int, scheme: str = "light", calm: bool = False) -> None:
        """Size of the window, colour scheme, and whether motion is reduced."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        features.append({"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"})
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> Path:
        """The window as a PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                future = self._replies.pop(content["id"], None)
                if future is not None and not future.done():
                    future.set_result(content)
                continue
            parameters = content.get("params", {})
            match content.get("method"):
                case "Page.loadEventFired":
                    self.loaded.set()
                case "Runtime.exceptionThrown":
                    details = parameters["exceptionDetails"]
                    self.errors.append(details.get("exception", {}).get("description", details["text"]))
                case "Runtime.consoleAPICalled" if parameters["type"] in {"error", "assert"}:
                    self.errors.append(" ".join(str(one.get("value")) for one in parameters["args"]))
                case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                    self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
                case "Network.requestWillBeSent":
                    self.requested.append(parameters["request"]["url"])


class Browser:
    """A running Chromium."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._port = port
        self._pages: list[Page] = []

    async def open(self, url: str, *, width: int = 1280, height: int = 900, **shown: Any) -> Page:
        """A tab at this address; `shown` as for `Page.show`."""
        async with self._session.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as reply:
            target = await reply.json()
        socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20)
        page = Page(socket)
        self._pages.append(page)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        await page.show(width=width, height=height, **shown)
        page.loaded.clear()
        await page.send("Page.navigate", url=url)
        await asyncio.wait_for(page.loaded.wait(), START_S)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A Chromium with a profile of its own, which ends with the block."""
    assert CHROMIUM is not None, NO_CHROMIUM
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *_FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession(trust_env=False) as session:
                opened = Browser(session, port)
                try:
                    yield opened
                finally:
                    await opened.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    end_s = running_s() + START_S
    while True:
        with suppress(OSError, ValueError, IndexError):
            return int(file.read_text().splitlines()[0])
        assert process.returncode is None, f"Chromium ended with {process.returncode}"
        assert running_s() < end_s, f"Chromium did not start within {START_S} s"
        await asyncio.sleep(0.05)
