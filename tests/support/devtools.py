"""A real browser, driven through its DevTools: open a page, ask it things, take its picture."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.support.cluster_help import Processes, wait_until

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--no-proxy-server", "--hide-scrollbars", "--window-size=1920,1080", "--remote-debugging-port=0"),
)
SECONDS = 60


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium found; install it (Debian: apt install chromium)")
    return found


class Page:
    """One tab. What it logs or throws is kept in ``troubles``."""

    def __init__(self, running: Processes, folder: Path) -> None:
        profile = folder / "profile"
        running.start(browser(), *FLAGS, f"--user-data-dir={profile}", "about:blank", env={"HOME": str(folder)})
        port_file = profile / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") > 0, SECONDS)
        port = int(port_file.read_text().split()[0])
        self.loop = asyncio.new_event_loop()
        self.numbers, self.troubles = 0, []
        self.socket = self.loop.run_until_complete(self._connect(self._target(port)))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    async def _connect(self, url: str) -> WebSocketClientConnection:
        return await websocket_connect(url, max_message_size=1 << 28)

    def _target(self, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
            found = [target for target in json.load(answer) if target["type"] == "page"]
        return str(found[0]["webSocketDebuggerUrl"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one DevTools command."""
        return self.loop.run_until_complete(asyncio.wait_for(self._call(method, params), SECONDS))

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.numbers += 1
        number = self.numbers
        await self.socket.write_message(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            text = await self.socket.read_message()
            assert text is not None, "the browser went away"
            message = json.loads(text)
            if message.get("id") == number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            told = message.get("params", {})
            if message.get("method") == "Runtime.exceptionThrown":
                self.troubles.append(str(told["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
                self.troubles.append(f"{told['entry']['text']} {told['entry'].get('url')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, name: str) -> str:
        """What stands in the element with this id; nothing if there is none."""
        return str(self.ask(f"(document.getElementById({json.dumps(name)}) || {{}}).textContent || ''"))

    def picture(self, file: Path) -> Path:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return file

    def close(self) -> None:
        self.socket.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
