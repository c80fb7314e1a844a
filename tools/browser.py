"""Drives a page in Chromium, which it starts without a window.

They talk over a pipe: https://chromedevtools.github.io/devtools-protocol.

    python -m tools.browser --ckpt DIR

draws docs/page.png: the page of a server that was started with these options, and a conversation.
"""

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Chromium reads commands from descriptor 3, and writes to 4.
START = "import os, sys; a, b, *argv = sys.argv[1:]; os.dup2(int(a), 3); os.dup2(int(b), 4)"
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]


def chromium() -> str | None:
    """Returns the path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """A page of a browser, and the addresses that it has fetched."""

    def __init__(self, to: int, back: int):
        self.to, self.back = os.fdopen(to, "wb", buffering=0), os.fdopen(back, "rb", buffering=0)
        self.rest, self.count, self.session, self.fetched = b"", 0, {}, list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = dict(sessionId=attached["sessionId"])
        self.call("Network.enable")
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> Any:
        self.count += 1
        told = dict(id=self.count, method=method, params=params, **self.session)
        self.to.write(json.dumps(told).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.count:
            if answer.get("method") == "Network.requestWillBeSent":
                self.fetched.append(answer["params"]["request"]["url"])
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            if not (part := self.back.read(1 << 16)):
                raise RuntimeError("Chromium has ended")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        known = dict(expression=expression, returnByValue=True, awaitPromise=True)
        result = self.call("Runtime.evaluate", **known)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} did not become true")
            time.sleep(0.02)

    def open(self, address: str) -> None:
        self.value("window.isOld = true")
        self.call("Page.navigate", url=address)
        self.wait("!window.isOld && document.readyState == 'complete'")

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the size of the page, and whether its reader prefers light or dark."""
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [dict(name="prefers-color-scheme", value=scheme)]
        self.call("Emulation.setEmulatedMedia", features=features)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = dict(Enter=13, Escape=27, Tab=9)[key]
        known = dict(key=key, code=key, windowsVirtualKeyCode=code)
        text = dict(text="\r") if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **known, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def picture(self) -> bytes:
        """The page as a PNG file."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Yields an empty page."""
    path = chromium()
    assert path is not None, "Chromium is not installed"
    theirs, to = os.pipe()
    back, their_end = os.pipe()
    given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, their_end)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        argv = [*map(str, given), path, *OPTIONS, f"--user-data-dir={home}"]
        start = [sys.executable, "-c", f"{START}; os.execv(argv[0], argv)", *argv]
        process = subprocess.Popen(start, pass_fds=given, stderr=subprocess.DEVNULL)
        for end in (theirs, their_end, *given):
            os.close(end)
        try:
            yield Page(to, back)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    if chromium() is None:
        sys.exit("error: Chromium is not installed")
    options = ["--serve", "127.0.0.1:0", *sys.argv[1:]]
    command = [sys.executable, "-m", "llama3.main", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        while not (found := re.search(r"http://\S+:\d+", line := server.stderr.readline())):
            if not line:  # it has ended
                raise SystemExit(server.wait())
            sys.stderr.write(line)
        with browser() as page:
            page.look(720, 640)
            page.open(found[0])
            for id, value in (("temperature", 0), ("max_tokens", 64)):
                page.value(f"document.getElementById('{id}').value = {value}")
            for warm in (False, True):  # at first, the browser and the programs are cold
                for i, text in enumerate(
                    ("What is the capital of France?", "What can I see there?"), 1
                ):
                    page.type(text)
                    page.press("Enter")
                    page.wait(f"document.body.innerText.split('tokens/s').length > {i}")
                if not warm:
                    page.value("document.getElementById('clear').click()")
            (ROOT / "docs" / "page.png").write_bytes(page.picture())
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
