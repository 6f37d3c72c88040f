"""A headless Chromium, controlled through chromedriver with the W3C WebDriver protocol and the standard library."""

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START_WITHIN_S = 60.0
ANSWER_WITHIN_S = 120.0
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,900"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, from the standard


class Browser:
    """One WebDriver session."""

    def __init__(self, driver_url: str) -> None:
        self._url = driver_url
        options = {"alwaysMatch": {"goog:chromeOptions": {"args": ARGUMENTS}}}
        session = self._call("POST", "/session", {"capabilities": options})
        self._url += f"/session/{session['sessionId']}"

    def load(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Runs JavaScript in the page, and returns its value."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def type_into(self, selector: str, text: str) -> None:
        """Types into an element, key by key."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def emulate(self, command: str, **parameters: Any) -> None:
        """Calls a command of the `Emulation` domain of Chromium's DevTools protocol."""
        self._call("POST", "/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": parameters})

    def quit(self) -> None:
        self._call("DELETE", "", None)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Starts a browser with its driver, and ends both."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.quit()
    finally:
        driver.terminate()
        driver.wait(START_WITHIN_S)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
