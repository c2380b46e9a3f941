"""A browser for the tests of the pages, and the steps a person takes in it."""

from __future__ import annotations

import base64
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
CHROMIUM = next(
    (
        result
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (result := shutil.which(name))
    ),
    None,
)
QUEUE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 720}
SERIOUS = ["serious", "critical"]
LIMIT_MS = 20_000
# With LATE_BROWSER_MS=150, everything that happens in a browser on its own happens that late: a test
# that does not wait for it fails, as it may on a busy machine.
LATE = os.environ.get("LATE_BROWSER_MS") and (
    (Path(__file__).parent / "late_browser.js")
    .read_text()
    .replace("MILLISECONDS", str(int(os.environ["LATE_BROWSER_MS"])))
)
CALM = {"reduced_motion": "reduce"}  # colours that fade in have no contrast for a while
USUAL = {"viewport": QUEUE, **CALM}
_left = {}  # by browser: the context of a usual window that was closed
LOOK = """async (serious) => {
    const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"];
    const found = [];
    for (const [theme, runOnly] of [["light", { type: "tag", values: tags }], ["dark", ["color-contrast"]]]) {
        document.documentElement.dataset.theme = theme;
        const { violations } = await axe.run(document, { resultTypes: ["violations"], preload: false, runOnly });
        for (const { id, impact, nodes } of violations)
            if (serious.includes(impact)) found.push(...nodes.map(({ html }) => [theme, id, html.slice(0, 120)]));
    }
    delete document.documentElement.dataset.theme;
    return found;
}"""


@contextmanager
def chromium():
    if CHROMIUM is None:
        pytest.skip("NO BROWSER, SO THE PAGES ARE NOT TESTED: install Debian's package chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="NO PLAYWRIGHT, SO THE PAGES ARE NOT TESTED: pip install playwright",
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        _left.pop(browser, None)
        browser.close()


@contextmanager
def stored(page, address, method="GET", maximum=1):
    """The first requests, which do not reach the server until the end."""
    result = []

    def hold(route):
        if route.request.method == method and len(result) < maximum:
            result.append(route)
        else:
            route.continue_()

    page.route(address, hold)
    yield result
    for route in result:
        route.continue_()
    page.unroute(address)


class Visitor:
    """One person with one window. What the browser complains of is collected, and is an error at
    the end unless `expects` it.

    A new context takes a second of the processor, most of it for a process of its own. So one that
    was left serves the next person with the usual window: with no cookie, permission or data of
    the one before, whose server had another port, and so was another origin.
    """

    def __init__(self, browser, url, size=QUEUE, begins="#welcome", **context):
        requested = {"viewport": size, **CALM, **context}
        self.browser, self.url, self.is_usual = browser, url, requested == USUAL
        left = _left.pop(browser, None) if self.is_usual else None
        self.context = left or browser.new_context(**requested)
        if LATE and not left:
            self.context.add_init_script(LATE)
        self.context.set_default_timeout(LIMIT_MS)
        before, self.page = self.context.pages, self.context.new_page()
        self.complaints, self.expects, self.fingers = [], (), context.get("is_mobile", False)
        self.page.on(
            "console",
            lambda m: (
                self.complaints.append(f"{m.type}: {m.text}")
                if m.type in ("error", "warning")
                else None
            ),
        )
        self.page.on("pageerror", lambda e: self.complaints.append(f"exception: {e}"))
        self.go("/")
        self.page.wait_for_selector(begins)
        for page in before:  # by which the process was kept until now
            page.close()

    def go(self, path):
        self.page.goto(f"{self.url}{path}")

    def close(self):
        if self.is_usual and self.browser not in _left:
            self._leave()
        else:
            self.context.close()
        unexpected = [c for c in self.complaints if not any(e in c for e in self.expects)]
        assert not unexpected, unexpected

    def _leave(self):
        self.page.unroute_all()
        self.page.goto("about:blank")
        session = self.context.new_cdp_session(self.page)
        everything = {"origin": self.url, "storageTypes": "all"}
        session.send("Storage.clearDataForOrigin", everything)
        session.detach()
        self.context.clear_cookies()
        self.context.clear_permissions()
        _left[self.browser] = self.context

    def until(self, expression):
        """Playwright's own wait evaluates text inside the page, which its policy forbids."""
        self.wait(lambda: self.page.evaluate(expression))

    def wait(self, condition):
        """While the browser goes on."""
        end = time.monotonic() + LIMIT_MS / 1000
        while not condition():
            assert time.monotonic() < end
            self.page.wait_for_timeout(20)

    def attach(self, *paths):
        before = self.page.locator(".thumb").count()
        self.page.set_input_files("#files", [str(p) for p in paths])
        self.until(
            f"document.querySelectorAll('.thumb:not(.loading)').length === {before + len(paths)}"
        )

    def paste(self, path):
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page.evaluate(
            """async (data) => {
            const blob = new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], { type: "image/png" });
            await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        }""",
            base64.b64encode(Path(path).read_bytes()).decode(),
        )
        self.page.focus("#prompt")
        self.page.keyboard.press("Control+V")
        self.page.wait_for_selector(".thumb:not(.loading)")

    def say(self, text, wait=True):
        self.page.fill("#prompt", text)
        if self.fingers:  # there Enter breaks the line
            self.page.click("#send")
        else:
            self.page.press("#prompt", "Enter")
        if wait:
            self.answered(text)

    def answered(self, text=None):
        """Wait until the last message is a whole answer, to `text` if that is given."""
        if text is not None:
            self.page.wait_for_selector(
                f".message.user .bubble:text-is({text!r})" if "\n" not in text else ".message.user"
            )
        self.page.wait_for_selector(".message.answer.last .actions")
        self.page.wait_for_selector("#send:visible")

    def texts(self, kind):
        return [
            t.strip()
            for t in self.page.locator(
                f".message.{kind} .{'bubble' if kind == 'user' else 'text'}"
            ).all_inner_texts()
        ]

    def lists(self, *titles, in_order=True):
        """Wait until the conversations are these; they come a moment later than their answers."""
        requested, end = list(titles), time.monotonic() + LIMIT_MS / 1000
        while True:
            result = self.page.locator("#list .item a > span:first-child").all_inner_texts()
            if (result if in_order else sorted(result)) == requested:
                return
            assert time.monotonic() < end, (result, requested)
            self.page.wait_for_timeout(30)

    def axe(self):
        """Serious findings as (theme, rule, element), [] where there are none: of all rules in the
        light theme, of contrast in the dark one, which changes colours and nothing else.
        """
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        result = self.page.evaluate(LOOK, SERIOUS)
        return [tuple(one) for one in result]

    def overflow(self):
        """Pixels by which the page is wider than the window, or its thread than the room it has."""
        return self.page.evaluate("""() => Math.max(...[document.documentElement, document.querySelector("#scroll")].filter(Boolean)
            .map((one) => one.scrollWidth - one.clientWidth))""")
