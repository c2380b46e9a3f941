"""The chat page in Chromium: how soon there is something to see, and how long it answers nobody.

    python benchmarks/page.py                  every case, five times what is quick
    python benchmarks/page.py --only stream    one of: paint, messages, conversations, stream

A server of its own process with a service that says given words at a given pace, so that what is
measured is the page. A long task is one of the browser's main thread of more than 50 ms, as the
browser counts them (PerformanceObserver). Needs playwright, and Debian's package chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from browsing import QUEUE, chromium

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
PAINT_MS, RELOAD_MS, TASK_MS = 300, 150, 50  # what is promised
TIMES = 5
MESSAGES, CONVERSATIONS, TOKENS, PACE_S = 10_000, 500, 4000, 0.005
LIMIT_MS = 60_000
SERVER = """
import sys
from pathlib import Path
from fake_service import FakeService
from mtmd.web.app import create_app
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

WORDS = '''## Part {n}

Some **words** with `code`, a [link](https://example.org) and \\\\(x^{n}\\\\), as answers have them.

| a | b |
|---|--:|
| 1 | {n} |

```python
def part_{n}(x):
    return x + {n}
```

- one thing
- and another

'''
service, settings = FakeService(pace_s=float(sys.argv[2])), ServerSettings(port=0)
service.context = 1 << 20
service.words = "".join(WORDS.format(n=n) for n in range(int(sys.argv[3]) // 40 + 1))
store = Store(None)
for number in range(int(sys.argv[5])):
    made = store.create("anybody", f"Conversation {number} about something")
    store.add(made.id, None, "user", f"question {number}")
if int(sys.argv[4]):
    long, parent = store.create("anybody", "The long one"), None
    for number in range(int(sys.argv[4])):
        text = f"What is thing {number}?" if number % 2 == 0 else WORDS.format(n=number)
        parent = store.add(long.id, parent, ("user", "assistant")[number % 2], text).id
app = create_app(service, settings, store)
server = Server(app, settings, bind(settings))
print(server.url, long.id if int(sys.argv[4]) else "", flush=True)
server.serve(service.close)
"""
WATCH = """
window.longTasks = [];
const watch = (type, seen) => new PerformanceObserver((list) => seen(list.getEntries()))
  .observe({ type, buffered: true });
watch("longtask", (tasks) => { for (const { duration } of tasks) longTasks.push(duration); });
watch("largest-contentful-paint", (paints) => { window.largest = paints.at(-1).startTime; });
"""
PAINTS = """() => ({
  first: performance.getEntriesByName("first-contentful-paint")[0].startTime,
  largest: window.largest,
  sent: performance.getEntriesByType("resource").filter((one) => one.transferSize > 0).length,
})"""
Row = tuple[str, str, str]


@contextmanager
def serving(messages: int = 0, conversations: int = 0) -> Iterator[tuple[str, str]]:
    """Its address, and the path of the long conversation."""
    arguments = [str(PACE_S), str(TOKENS), str(messages), str(conversations)]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, "page", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=SUPPORT,
    )
    assert process.stdout
    try:
        url, _, long = process.stdout.readline().rstrip("\n").partition(" ")
        yield url, f"/c/{long}"
    finally:
        process.terminate()
        process.communicate()


class Window:
    """One window of a browser that has never been here."""

    def __init__(self, browser: Any, url: str) -> None:
        self.context = browser.new_context(viewport=QUEUE, base_url=url)
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)

    def paints(self) -> dict[str, float]:
        self.page.wait_for_timeout(300)
        result: dict[str, float] = self.page.evaluate(PAINTS)
        return result

    def tasks(self) -> list[float]:
        """Milliseconds of each long task since this was asked last."""
        self.page.wait_for_timeout(500)
        result: list[float] = self.page.evaluate("() => window.longTasks.splice(0)")
        return result

    def say(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_selector(".message.answer.last .actions")


def reported(tasks: list[float]) -> str:
    return (
        f"{len(tasks)} over 50 ms, the longest {max(tasks):.0f} ms" if tasks else "none over 50 ms"
    )


def paint(browser: Any) -> Iterator[Row]:
    with serving() as (url, _):
        first, again, requested, tasks = [], [], [], []
        for number in range(TIMES + 1):
            window = Window(browser, url)
            window.page.goto("/")
            window.page.wait_for_selector(".sample")
            fresh = window.paints()
            window.page.reload()
            window.page.wait_for_selector(".sample")
            saved = window.paints()
            if number:  # the first one warms the server
                first.append(fresh["first"])
                again.append(saved["first"])
                requested.append(saved["sent"])
                tasks += window.tasks()
            window.context.close()
        spread = "median {:.0f} ms, {:.0f} to {:.0f}"
        yield (
            "first paint, nothing cached",
            spread.format(median(first), min(first), max(first)),
            f"{PAINT_MS} ms",
        )
        yield (
            "first paint of a reload",
            spread.format(median(again), min(again), max(again)),
            f"{RELOAD_MS} ms",
        )
        yield "requests that a reload sends", str(max(requested)), ""
        yield "tasks of an empty chat", reported(tasks), "none"


def messages(browser: Any) -> Iterator[Row]:
    with serving(messages=MESSAGES) as (url, long):
        window = Window(browser, url)
        page = window.page
        number = f"{MESSAGES:,} messages"
        page.goto("/")
        page.wait_for_selector(".sample")
        yield "the first page that a browser opens", reported(window.tasks()), "none"
        page.click(f".item a[href$='{long}']")
        page.wait_for_selector(".message.last")
        yield f"{number}: opened", reported(window.tasks()), "none"
        page.reload()
        page.wait_for_selector(".message.last")
        yield f"{number}: reloaded", reported(window.tasks()), "none"
        page.mouse.move(640, 300)
        for _ in range(60):
            page.mouse.wheel(0, -1200)
            page.wait_for_timeout(50)
        yield f"{number}: scrolled up over 70,000 pixels", reported(window.tasks()), "none"
        page.click("#down")
        page.wait_for_selector(".message.last")
        yield f"{number}: back to the end", reported(window.tasks()), "none"
        page.type("#prompt", "a question of some words")
        yield f"{number}: typed", reported(window.tasks()), "none"
        page.press("#prompt", "Enter")
        page.wait_for_selector("#stop:visible")
        page.wait_for_timeout(2000)
        page.click("#stop")
        page.wait_for_selector("#send:visible")
        yield f"{number}: asked, and stopped after two seconds", reported(window.tasks()), "none"
        window.context.close()


def conversations(browser: Any) -> Iterator[Row]:
    with serving(conversations=CONVERSATIONS) as (url, _):
        window = Window(browser, url)
        page = window.page
        number = f"{CONVERSATIONS} conversations"
        page.goto("/")
        page.wait_for_selector(".item >> nth=499")
        yield f"{number}: opened", reported(window.tasks()), "none"
        page.click(".item a >> nth=3")
        page.wait_for_selector(".message.user")
        yield f"{number}: one of them shown", reported(window.tasks()), "none"
        page.type("#search", "question 4", delay=60)
        page.wait_for_selector(".item .around")
        page.fill("#search", "")
        page.wait_for_selector(".item >> nth=499")
        yield f"{number}: searched", reported(window.tasks()), "none"
        page.click(".problem button")
        page.wait_for_selector("#stop:visible")
        page.click("#stop")
        page.wait_for_selector("#send:visible")
        yield f"{number}: one answered", reported(window.tasks()), "none"
        window.context.close()


def stream(browser: Any) -> Iterator[Row]:
    with serving() as (url, _):
        window = Window(browser, url)
        window.page.goto("/")
        window.page.wait_for_selector("#welcome")
        window.tasks()
        window.page.click("#open-settings")
        window.page.fill("[name=max_tokens]", str(TOKENS))
        window.page.click("#settings >> text=Done")
        window.say("write")
        yield (
            f"an answer of {TOKENS:,} tokens, {1 / PACE_S:.0f} a second at most",
            reported(window.tasks()),
            "none",
        )
        window.page.reload()
        window.page.wait_for_selector(".message.answer .foot")
        yield "the same, reloaded", reported(window.tasks()), "none"
        window.context.close()


CASES: dict[str, Callable[[Any], Iterator[Row]]] = {
    "paint": paint,
    "messages": messages,
    "conversations": conversations,
    "stream": stream,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES)
    chosen = parser.parse_args().only
    print("| what | found | promised |\n|---|---|---|")
    with chromium() as browser:
        for name, run in CASES.items():
            if chosen in (None, name):
                for row in run(browser):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
