"""A headless Chromium, driven through its DevTools protocol over a pipe: no package is needed."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """A page of the browser; commands have the protocol's names."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from, self._sent, self._session = to_browser, from_browser, 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params):
        """The browser's answer to a command; events are passed over."""
        self._sent += 1
        command = {"id": self._sent, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(command).encode() + b"\0")
        self._to.flush()
        while True:
            answer = json.loads(b"".join(iter(self._byte, b"\0")))
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]

    def _byte(self) -> bytes:
        if not (byte := self._from.read(1)):
            raise EOFError("the browser has ended")
        return byte

    def run(self, script: str):
        """The value of an expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, file: Path, *, width: int = 1280, height: int = 800) -> None:
        """Loads a file, in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=file.as_uri())
        self.run("new Promise(done => document.readyState == 'complete' ? done() : onload = done)")

    def hover(self, element: str) -> None:
        """Moves the mouse to the middle of an element, which an expression names."""
        script = f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
        script += "const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2]"
        x, y = self.run(script + "})()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextmanager
def chromium(folder: Path):
    """A page of a browser whose profile lies in a folder."""
    (its_input, ours_out), (ours_in, its_output) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    command = [CHROMIUM, *options, f"--user-data-dir={folder}"]
    places = [(os.POSIX_SPAWN_DUP2, its_input, 3), (os.POSIX_SPAWN_DUP2, its_output, 4)]
    browser = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=places)
    os.close(its_input)
    os.close(its_output)
    with open(ours_out, "wb") as to_browser, open(ours_in, "rb") as from_browser:
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.kill(browser, signal.SIGTERM)
            os.waitpid(browser, 0)
