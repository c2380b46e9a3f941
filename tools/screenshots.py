"""The pictures of the chat page in README.md and docs/: a server with the demo model, and Chromium.

    python tools/screenshots.py                   # writes docs/images/page-light.webp and others
    python tools/screenshots.py --states FOLDER   # every state of the page, to be looked at

Needs what the tests of the pages need: playwright, and Debian's package chromium.
"""

from __future__ import annotations

import argparse
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from mtmd import load
from mtmd.web.app import create_app
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WINDOW = {"width": 1200, "height": 900}
SCALE = 1.5  # of the pictures, for screens with fine pixels
LIMIT_MS = 60_000
CHROMIUMS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
CHATS = (
    ("word.png", "What does the text say?"),
    ("four.png", "How many shapes are there?"),
    ("shapes.png", "Where is the cross? Give its box."),
)


@contextmanager
def server() -> Iterator[str]:
    with load() as model, TemporaryDirectory() as folder, closing(Store(Path(folder))) as store:
        report, settings = model.warm_up(), ServerSettings(port=0)
        app = create_app(model.service, settings, store, warmup=report)
        running = Server(app, settings, bind(settings))
        thread = threading.Thread(target=running.serve, args=(model.service.close,))
        thread.start()
        try:
            yield running.url
        finally:
            running.stop()
            thread.join()


def ask(page: Any, picture: str, question: str) -> None:
    """A new chat with a picture and its answer."""
    page.goto("/")
    page.wait_for_selector("#welcome")
    page.set_input_files("#files", str(ROOT / "examples" / picture))
    page.wait_for_selector(".thumb:not(.loading)")
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.answer.last .actions")


def compare(page: Any, picture: str, question: str) -> None:
    """A new chat in which a message has two answers, side by side."""
    page.goto("/")
    page.click("#add")
    page.click("#compare-open")
    page.fill("[name=temperature-b]", "1.2")
    page.fill("[name=seed-b]", "4")
    page.click("#compare-form .primary")
    page.set_input_files("#files", str(ROOT / "examples" / picture))
    page.wait_for_selector(".thumb:not(.loading)")
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".go-on >> nth=1")


def in_both_themes(page: Any, name: str) -> None:
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        save(page, f"{name}-{theme}")


def save(page: Any, name: str) -> None:
    """As WebP, a third of a PNG's size."""
    page.wait_for_timeout(400)  # what fades in is there
    IMAGES.mkdir(exist_ok=True)
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.convert("RGB").save(IMAGES / f"{name}.webp", "WEBP", quality=82, method=6)


def all_states(browser: Any, folder: Path) -> None:
    """In both themes, by their names."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from page_states import states

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as files:
        for name, person in states(browser, Path(files)):
            for theme in ("light", "dark"):
                person.page.emulate_media(color_scheme=theme)
                person.page.screenshot(path=folder / f"{name}-{theme}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is not installed; pip install playwright")
    result = next((c for c in CHROMIUMS if Path(c).exists()), None)
    if result is None:
        sys.exit("there is no Chromium; sh tools/browser.sh installs it")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=result, args=["--no-sandbox"])
        if chosen.states:
            all_states(browser, chosen.states)
        else:
            documented(browser)
        browser.close()


def documented(browser: Any) -> None:
    with server() as url:
        page = browser.new_page(viewport=WINDOW, device_scale_factor=SCALE, base_url=url)
        page.set_default_timeout(LIMIT_MS)
        for picture, question in CHATS:
            ask(page, picture, question)
        page.locator(".message.last .receipt summary").click()
        in_both_themes(page, "page")
        compare(page, "four.png", "Describe the image.")
        in_both_themes(page, "compare")
        for location, name in (("/", "welcome"), ("/diagnostics", "diagnostics")):
            page.goto(location)
            page.wait_for_load_state("networkidle")
            in_both_themes(page, name)
        page.close()


if __name__ == "__main__":
    main()
