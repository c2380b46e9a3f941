"""A server that is ended by kill -9 at any moment of an answer, and started again on the same data
folder, while somebody reads along in a browser: what was read stays, the answer goes on or says where
it ended, and nothing is sent twice.

    python tests/hostile/answer_kills.py --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from browsing import Visitor, chromium

SUPPORT = Path(__file__).parents[1] / "support"
WORDS, PACE_S = 80, 0.02
SLOW_S, QUICK_S = (
    0.25,
    0.0,
)  # a word, before the kill and after it, where words decide about its moment
LONGER = 1.1, 0.2  # than the words take: until a little behind the end, share and seconds
CLICK = "name => { const one = document.querySelector(name); one?.click(); return one ? 1 : 0 }"
# One process imports everything, and a server is a fork of it: started anew within milliseconds.
SERVERS = """
import os, signal, sys
from pathlib import Path
from fake_service import FakeService
from mtmd.web.app import create_app
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

class Counting(FakeService):
    def answer(self, messages, pictures):
        begun = messages[-1]["content"].split() if messages[-1]["role"] == "assistant" else []
        rest = " ".join(f"w{n}" for n in range(len(begun), int(sys.argv[2])))
        return f" {rest}" if begun else rest

def serve(port, pace_s):
    service, settings = Counting(pace_s), ServerSettings(port=port)
    store = Store(Path(sys.argv[1]))
    server = Server(create_app(service, settings, store), settings, bind(settings))
    print(os.getpid(), server.url, flush=True)
    server.serve(service.close)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        try:
            port, pace_s = line.split()
            serve(int(port), float(pace_s))
        finally:
            print(0, "ended", flush=True)  # for who waits for the line of one that could not start
            os._exit(0)
"""
SHOWN = """() => {
  const answer = [...document.querySelectorAll(".message.answer .text")].at(-1);
  return answer && !answer.closest("[hidden]") ? answer.textContent.trim() : "";
}"""


class Servers:
    def __init__(self, folder: Path, words: int) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", SERVERS, str(folder), str(words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        )
        self.url, self._pid, self._port, self.pace_s = "", 0, 0, PACE_S

    def start(self, pace_s: float = PACE_S) -> None:
        """On the port that the one before had."""
        assert self._parent.stdin and self._parent.stdout
        self._parent.stdin.write(f"{self._port} {pace_s}\n")
        self._parent.stdin.flush()
        pid, self.url = self._parent.stdout.readline().split()
        assert self.url != "ended", "the server could not start"
        self._pid, self._port = int(pid), int(self.url.rsplit(":", 1)[1])
        self.pace_s = pace_s

    def kill(self) -> None:
        """And wait until it is gone: its port is its own until then."""
        with suppress(ProcessLookupError):
            while True:
                os.kill(self._pid, signal.SIGKILL)
                time.sleep(0.005)

    def close(self) -> None:
        self.kill()
        self._parent.kill()
        with self._parent:
            pass


@dataclass(frozen=True)
class Kill:
    """When: this many seconds after the message was sent, or when so many words are shown, of an
    answer that is too slow to end before on any machine, and quick afterwards. Whether somebody
    waits before the server is started again.
    """

    seconds: float = 0.0
    words: int | None = None
    wait: bool = False

    @property
    def paces_s(self) -> tuple[float, float]:
        return (PACE_S, PACE_S) if self.words is None else (SLOW_S, QUICK_S)

    def until(self, page: Any, answer: int) -> None:
        if self.words:
            text = page.locator(".message.answer").nth(answer).locator(".text")
            text.filter(has_text=f"w{self.words - 1}").wait_for()
        else:
            page.wait_for_timeout(self.seconds * 1000)


def spread(kills: int, seed: int, words: int = WORDS) -> list[Kill]:
    """Over an answer's life."""
    chance, (share, more) = random.Random(seed), LONGER
    whole_s = words * PACE_S * share + more
    return [
        Kill((turn + chance.random()) / kills * whole_s, wait=chance.random() < 0.5)
        for turn in range(kills)
    ]


def run(browser: Any, folder: Path, kills: Sequence[Kill], words: int = WORDS) -> Counter[str]:
    """What became of the answers. Raises AssertionError for the first thing that should not be."""
    counts = Counter[str]()
    servers, whole = Servers(folder, words), " ".join(f"w{n}" for n in range(words))
    try:
        servers.start(kills[0].paces_s[0])
        person = Visitor(browser, servers.url)
        person.expects = ("ERR_", "404", "Failed to load resource")
        for turn, kill in enumerate(kills):
            if turn % 2 == 0:
                person.page.click("#new-chat")
                person.page.wait_for_selector("#welcome:visible")
            counts += _one(person, servers, f"question {turn}", whole, kill)
        person.close()
    finally:
        servers.close()
    return counts


def _one(person: Any, servers: Servers, text: str, whole: str, kill: Kill) -> Counter[str]:
    page, counts = person.page, Counter[str]()
    before = page.locator(".message.answer").count()

    pace_s, pace_after_s = kill.paces_s
    if servers.pace_s != pace_s:
        servers.kill()
        servers.start(pace_s)

    def shown() -> str:
        return page.evaluate(SHOWN) if page.locator(".message.answer").count() > before else ""

    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    kill.until(page, before)
    servers.kill()
    read = shown()
    if kill.wait:
        page.wait_for_timeout(700)
        assert shown().startswith(read), (read, shown())
        read = shown()
    servers.start(pace_after_s)
    end = time.monotonic() + 60
    while not page.is_visible("#send") or not _ended(page, before):
        assert time.monotonic() < end, page.inner_text("main")
        if page.is_visible("#send") and page.input_value("#prompt") == text:
            page.press("#prompt", "Enter")
            counts["sent again"] += 1
        elif page.is_visible(".problem button"):
            # by a script: it goes where the server is found again meanwhile
            counts["asked again"] += page.evaluate(CLICK, ".problem button")
        page.wait_for_timeout(50)
    result = shown()
    assert result.startswith(read) and whole.startswith(result), (read, result)
    asides = page.locator(".message.answer.last .aside")
    if result == whole:
        counts["whole"] += 1
    else:
        counts["said where it ended"] += 1
        end_of = "Interrupted when the server stopped." + (" Continue" if result else "")
        assert asides.inner_text() == end_of, asides.inner_text()
    assert page.input_value("#prompt") == ""
    _once(person, text)
    page.reload()
    page.wait_for_selector(".message.answer.last .foot")
    saved = shown()
    assert saved == result, (result, saved)
    if saved != whole:
        again = asides.locator("button") if saved else page.get_by_label("Answer again").last
        again.click()
        page.wait_for_selector(".message.answer.last .branches:has-text('2 / 2')")
        person.answered()
        assert shown() == whole
        counts["gone on with"] += 1
    return counts


def _ended(page: Any, before: int) -> bool:
    """Whether there is an answer more, which is written no more."""
    ends = page.locator(".message.answer .foot")
    return ends.count() > before and ends.count() == page.locator(".message.answer").count()


def _once(person: Any, text: str) -> None:
    """The server has the message once, with one answer, and the page shows it once."""
    page, number = person.page, person.page.url.rsplit("/", 1)[1]
    result = page.request.get(f"{person.url}/api/conversations/{number}").json()["messages"]
    (requested,) = [m for m in result if m["role"] == "user" and m["text"] == text]
    answers = [m for m in result if m["parent"] == requested["id"]]
    assert len(answers) == 1, answers
    assert page.locator(f".message.user .bubble:text-is({text!r})").count() == 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        print(dict(run(browser, Path(name), spread(options.kills, options.seed))))
