"""A headless Chromium over its own debugging pipe: pages are opened, clicked and read as a person would do it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

_NAMES = "chromium", "chromium-browser", "google-chrome"
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
_KEYS = {"ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36}
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)


class Browser:
    """One page in one browser; a context manager.

    Parameters
    ----------
    page : Path
    profile : Path
        An empty folder.
    """

    def __init__(self, page: Path, profile: Path, anchor: str = "") -> None:
        ours, theirs = os.pipe(), os.pipe()  # read here, written there; and the other way round
        self._read, self._write = ours[0], theirs[1]

        def pipes() -> None:
            # the browser reads from 3 and writes to 4, whatever numbers the ends had
            moved = os.dup(theirs[0]), os.dup(ours[1])
            os.dup2(moved[0], 3)
            os.dup2(moved[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *_QUIET, f"--user-data-dir={profile}"], preexec_fn=pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(ours[1])
        os.close(theirs[0])
        self._number, self._left, self._session = 0, b"", None
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.requests: list[str] = []
        self.ask("Page.navigate", url=page.resolve().as_uri() + anchor)
        self._until("Page.loadEventFired")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def _until(self, event: str) -> None:
        while self._next().get("method") != event:
            pass

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has gone"
            self._left += more
        line, _, self._left = self._left.partition(b"\0")
        found = json.loads(line)
        if found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["params"]))
        if found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
            self.errors.append(found["params"]["entry"]["text"])
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["params"]["request"]["url"])
        return found

    # --- as a person does

    def value(self, expression: str) -> Any:
        """What an expression is on the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Visible text of an element."""
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, wherever that is on the screen."""
        place = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, words: str) -> None:
        """Write into whatever has the focus."""
        self.ask("Input.insertText", text=words)

    def press(self, key: str) -> None:
        """Press one key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key])

    def screenshot(self, path: Path) -> None:
        """The page as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
