"""A headless Chromium through its debugging pipe: two descriptors and JSON between zero bytes, no other library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. `events` are all that it said, in order."""

    def __init__(self, program: str, profile: Path, seconds: float = 60.0) -> None:
        self.deadline = time.monotonic() + seconds
        self.events: list[dict[str, Any]] = []
        self._number, self._received = 0, b""
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        # The browser reads descriptor 3 and writes 4; a shell moves ours there, whatever numbers they have.
        flags = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        flags += ["--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # which refuses to work for root
        script = f'exec 3<&{from_us} 4>&{to_us}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", program, *flags],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise ConnectionError(f"the browser ended with status {self._process.wait(10)}")
            self._received += piece
        text, self._received = self._received.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, address: str) -> None:
        self.events.clear()
        failure = self.command("Page.navigate", url=address).get("errorText")
        assert not failure, failure
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def show(self, width: int, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def complaints(self) -> list[Any]:
        """What a person would see in red in the console."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
