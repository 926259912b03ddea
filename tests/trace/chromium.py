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
        answer = {}
        while answer.get("id") != self._sent:
            message = bytearray()
            while (byte := self._from.read(1)) != b"\0":
                assert byte, "the browser has ended"
                message += byte
            answer = json.loads(message)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, script: str):
        """The value of an expression; a promise is waited for."""
        how = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, file: Path) -> None:
        """Loads a file."""
        self.call("Page.navigate", url=file.as_uri())
        self.run("new Promise(done => document.readyState == 'complete' ? done() : onload = done)")

    def hover(self, selector: str) -> None:
        """Moves the mouse to the middle of an element."""
        element = f"document.querySelector('{selector}')"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        place = self.run(f"{element}.getClientRects()[0].toJSON()")
        x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextmanager
def chromium(folder: Path):
    """A page of a browser whose profile lies in a folder."""
    (its_input, ours_out), (ours_in, its_output) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,800"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
    places = [(os.POSIX_SPAWN_DUP2, its_input, 3), (os.POSIX_SPAWN_DUP2, its_output, 4)]
    browser = os.posix_spawn(CHROMIUM, [CHROMIUM, *options], os.environ, file_actions=places)
    os.close(its_output)  # so that the pipe ends with the browser
    try:
        with open(ours_out, "wb", buffering=0) as to_browser, open(ours_in, "rb") as from_browser:
            yield Page(to_browser, from_browser)
    finally:
        os.close(its_input)
        os.kill(browser, signal.SIGTERM)
        os.waitpid(browser, 0)
