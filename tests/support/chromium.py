"""Look at a page with headless Chromium over its DevTools protocol: console, requests, values, a picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_TIMEOUT_S = 60.0


@dataclass
class Visit:
    """What one visit to a page showed."""

    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    value: Any = None
    picture: bytes = b""


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def visit(
    url: str,
    *,
    width: int = 1200,
    height: int = 900,
    dark: bool = False,
    scale: float = 1.0,
    full_page: bool = True,
    script: str | None = None,
    crop: bool = False,
) -> Visit:
    """Open ``url``, evaluate ``script`` in it and take a picture (PNG). Widths are CSS pixels.

    With ``crop`` the script's value is the height of the picture.
    """
    program = find_chromium()
    if program is None:
        raise FileNotFoundError("chromium is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return asyncio.run(
                _visit(Path(profile), url, width, height, dark, scale, full_page, script, crop)
            )
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()


async def _visit(
    profile: Path,
    url: str,
    width: int,
    height: int,
    dark: bool,
    scale: float,
    full_page: bool,
    script: str | None,
    crop: bool,
) -> Visit:
    port = await _port(profile / "DevToolsActivePort")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json(content_type=None) if page["type"] == "page"]
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = _Page(socket)
            await page.open(url, width, height, dark, scale)
            if script is not None:
                page.seen.value = await page.evaluate(script)
            size = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
            wide, tall = await page.evaluate(size) if full_page else (width, height)
            tall = page.seen.value if crop else tall
            clip = {"x": 0, "y": 0, "width": wide, "height": tall, "scale": 1}
            shot = await page.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
            page.seen.picture = base64.b64decode(shot["data"])
            return page.seen


class _Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._loaded = False
        self.seen = Visit()

    async def open(self, url: str, width: int, height: int, dark: bool, scale: float) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        while not self._loaded:
            self._note(await self._receive())

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"the script failed: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    async def _receive(self) -> dict[str, Any]:
        return dict(json.loads((await self._socket.receive(timeout=60)).data))

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.seen.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.seen.console.append(str(params["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled":
            self.seen.console.append(f"{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.seen.console.append(f"{params['entry']['level']}: {params['entry']['text']}")


async def _port(file: Path) -> int:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline:
        if file.is_file() and (lines := file.read_text().splitlines()) and lines[0].isdigit():
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise TimeoutError(f"chromium did not start within {START_TIMEOUT_S:.0f} s")
