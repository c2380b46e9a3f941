"""The page in Firefox: one walk through what is new to browsers, for it is slow to start."""

from __future__ import annotations

import base64
from pathlib import Path

from browsing import AXE
from marionette import firefox
from serving import running

from mtmd.web.app import create_app
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

SHAPES = Path(__file__).parents[3] / "examples" / "shapes.png"
ANSWER = """<think>first *this*</think>

| a | b |
|---|--:|
| 1 | **2** |

```python
x = 1
```

- [x] done \\(x^2\\)

[{"bbox_2d": [0, 0, 500, 500], "label": "corner"}]"""
PASTE = """const [data] = arguments;
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "shapes.png", { type: "image/png" }));
    document.querySelector("#files").files = transfer.files;
    document.querySelector("#files").dispatchEvent(new Event("change"));"""
SAY = """document.querySelector("#prompt").value = arguments[0];
    document.querySelector("#composer").requestSubmit();"""
AUDIT = """const done = arguments[arguments.length - 1];
    window.axe.run(document, { resultTypes: ["violations"] }).then((found) => done(found.violations
        .filter(({ impact }) => ["serious", "critical"].includes(impact)).map(({ id, nodes }) => [id, nodes[0].html])));"""


def answered(browser, count):
    browser.until(f"document.querySelectorAll('.message.answer .foot').length === {count}")
    browser.until("!document.querySelector('#send').hidden")


def test_the_page_in_firefox(fake, tmp_path):
    app = create_app(fake, ServerSettings(port=0), Store(None))
    with running(fake, app) as server, firefox(tmp_path) as browser:
        fake.words = ANSWER
        browser.go(server.url)
        browser.until("document.querySelector('#welcome:not([hidden])')")
        browser.run(PASTE, base64.b64encode(SHAPES.read_bytes()).decode())
        browser.until("document.querySelector('.thumb:not(.loading)')")
        browser.run(SAY, "look")
        answered(browser, 1)
        for shown in (
            "td strong",
            ".code-number",
            ".task .katex",
            ".figure rect",
            ".item .first[src]",
        ):
            browser.until(f"Boolean(document.querySelector({shown!r}))")
        assert (
            browser.run("return document.querySelector('.thought summary').textContent")
            == "Thoughts, 2 words"
        )
        browser.run("document.querySelector('.region').click()")
        browser.until("document.querySelector('.thumb:not(.loading)')")
        browser.run("document.querySelector('.thumb .picture').click()")
        browser.until("document.querySelector('#viewer-image').naturalWidth === 128")
        browser.run("document.querySelector('#viewer-turn').click()")
        browser.until("document.querySelector('.thumb:not(.loading)')")
        browser.run("document.querySelector('#viewer-close').click()")
        browser.run(SAY, "and this")
        answered(browser, 2)
        assert [p.size for p in fake.tickets[-1].pictures] == [(256, 256), (128, 128)]
        browser.go(browser.run("return location.href"))
        answered(browser, 2)
        browser.run(AXE)
        assert browser.run_async(AUDIT) == []
        assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
        browser.go(f"{server.url}/diagnostics")
        browser.until("document.querySelectorAll('#last tbody tr').length === 2")
