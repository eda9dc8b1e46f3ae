"""Opens every page of the built site in headless Chromium, on a wide screen and on a phone.

    python docs/_scripts/screenshots.py build/site [--shots FOLDER] [--pages WORD ...]

It fails where a page is wider than the screen, breaks code in a table inside a word, asks another
host for anything, logs an error or lacks a file. With --shots it writes a PNG of each page and
width.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path

from playwright import sync_api

SCREENS = ((1440, 900), (390, 844))  # width and height, px
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Text of what sticks out, for the message.
WIDEST = """
() => [...document.querySelectorAll("body *")].filter(
  (e) => e.getBoundingClientRect().right > innerWidth + 1
    && !e.closest(".md-typeset__scrollwrap, pre, nav, dialog")
).slice(0, 3).map((e) => e.tagName + "." + e.className).join(" ")
"""
# Code in tables that takes more lines than it has words.
BROKEN = """
() => [...document.querySelectorAll("table code")].filter(
  (e) => e.getClientRects().length > e.textContent.trim().split(/\\s+/).length
).slice(0, 3).map((e) => e.textContent).join(", ")
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Server of the site's files that keeps its log off the terminal."""

    def log_message(self, *_):
        """Drops a line of the log."""


def faults_of(context: sync_api.BrowserContext, home: str, path: str, shot: Path | None):
    """Opens a page and returns what is wrong with it."""
    page, found = context.new_page(), []
    foreign = lambda url: not url.startswith((home, "data:", "blob:", "about:"))
    page.on("request", lambda x: foreign(x.url) and found.append(f"asks for {x.url}"))
    page.on("response", lambda x: x.status >= 400 and found.append(f"lacks {x.url}"))
    page.on("pageerror", lambda error: found.append(f"throws {error}"))
    page.on("console", lambda x: x.type == "error" and found.append(f"logs {x.text}"))
    page.goto(home + path, wait_until="networkidle")
    width, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if width > screen:
        found.append(f"is {width} px wide on a screen of {screen}: {page.evaluate(WIDEST)}")
    if broken := page.evaluate(BROKEN):
        found.append(f"breaks code inside a word: {broken}")
    if shot:
        page.screenshot(path=shot)
    page.close()
    return found


def serve(site: Path) -> str:
    """Serves the site on a free port of this machine; returns its address."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def main() -> int:
    """Opens all pages; returns 1 if anything is wrong with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, help="folder for a PNG of each page and width")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("--pages", nargs="*", default=[""], help="only pages with these words")
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed")
    paths = (str(p.relative_to(arguments.site)) for p in arguments.site.rglob("*.html"))
    pages = sorted(p for p in paths if any(word in p for word in arguments.pages))
    home, faults = serve(arguments.site), 0
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, height in SCREENS:
            scheme = "dark" if arguments.dark else "light"
            size = {"width": width, "height": height}
            context = browser.new_context(viewport=size, color_scheme=scheme)
            for path in pages:
                name = f"{path.removesuffix('.html').replace('/', '-')}-{width}.png"
                shot = arguments.shots and arguments.shots / name
                for fault in faults_of(context, home, path, shot):
                    print(f"{path} at {width} px {fault}")
                    faults += 1
            context.close()
        browser.close()
    print(f"{len(pages)} pages, {len(SCREENS)} widths: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
