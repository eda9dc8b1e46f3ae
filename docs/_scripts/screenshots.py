"""Opens every page of the built site in headless Chromium, on a wide screen and on a phone.

    python docs/_scripts/screenshots.py build/site [--shots FOLDER] [--pages WORD ...]

It fails where a page is wider than the screen, asks another host for anything, logs an error or
lacks a file. With --shots it writes a PNG of each page and width.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS = {1440: 900, 390: 844}
SECONDS = 60
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# What sticks out, for the message.
WIDEST = """
[...document.querySelectorAll("body *")].filter(
  (e) => e.getBoundingClientRect().right > innerWidth + 1
    && !e.closest(".fp-scroll, pre, nav, dialog")
).slice(0, 3).map((e) => e.tagName + "." + e.className).join(" ")
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_):
        """Writes nothing."""


class Browser:
    """Headless Chromium, spoken to through a pipe; use it in a `with` statement."""

    def __init__(self, program: str):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        flags = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        # Chromium reads commands from 3 and writes answers to 4.
        script = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *flags],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._pending, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._pending:
                message, _, self._pending = self._pending.partition(b"\0")
                yield json.loads(message)
            found = os.read(self._in, 1 << 16)
            if not found:
                raise RuntimeError("the browser has ended")
            self._pending += found

    def call(self, method: str, **parameters) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result.

        Raises:
            RuntimeError: the browser refuses it, or has ended.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)
        raise AssertionError

    def wait_for(self, method: str) -> None:
        """Returns when an event of this name has been seen since `events` was cleared."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(next(self._messages()))

    def value(self, expression: str) -> Any:
        """Evaluates JavaScript in the page, waiting for a promise, and returns what it gives."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return result["result"].get("value")

    def open(self, url: str, width: int) -> None:
        """Opens a page as a screen of this width shows it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=WIDTHS[width],
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")
        self.value("new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))")

    def shoot(self, path: Path, whole: bool) -> None:
        """Writes a PNG of what is seen, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def faults_of(browser: Browser, home: str) -> Iterator[str]:
    """Yields what is wrong with the page that is open."""
    page, screen = browser.value("[document.documentElement.scrollWidth, innerWidth]")
    if page > screen:
        yield f"is {page} px wide on a screen of {screen}: {browser.value(WIDEST)}"
    for event in browser.events:
        told = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            url = told["request"]["url"]
            if not url.startswith((home, "data:", "blob:", "about:")):
                yield f"asks for {url}"
        elif event.get("method") == "Network.responseReceived":
            if told["response"]["status"] >= 400:
                yield f"lacks {told['response']['url']}"
        elif event.get("method") == "Runtime.exceptionThrown":
            yield f"throws {told['exceptionDetails'].get('text')}"
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            yield f"logs {told['entry']['text']}"


def main() -> int:
    """Opens all pages; returns 1 if anything is wrong with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, help="folder for a PNG of each page and width")
    parser.add_argument("--whole", action="store_true", help="shots of whole pages, not one screen")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("--pages", nargs="*", default=[], help="only pages with these words")
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed")
    pages = sorted(p.relative_to(arguments.site) for p in arguments.site.rglob("*.html"))
    if arguments.pages:
        pages = [p for p in pages if any(word in str(p) for word in arguments.pages)]
    handler = functools.partial(_Quiet, directory=str(arguments.site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    threading.Timer(SECONDS + 15 * len(pages), os._exit, (2,)).start()
    found = 0
    with Browser(program) as browser:
        for page in pages:
            for width in WIDTHS:
                browser.open(home + str(page), width)
                faults = list(faults_of(browser, home)) if page.name != "404.html" else []
                for fault in faults:
                    print(f"{page} at {width} px {fault}")
                found += len(faults)
                if arguments.dark:
                    browser.value("document.body.dataset.mdColorScheme = 'slate'")
                if arguments.shots:
                    arguments.shots.mkdir(parents=True, exist_ok=True)
                    name = "-".join([*page.with_suffix("").parts, str(width)])
                    browser.shoot(arguments.shots / f"{name}.png", arguments.whole)
    print(f"{len(pages)} pages, {len(WIDTHS)} widths: {found} faults")
    return 1 if found else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the timer would keep the process
