"""What is said comes in order and whole, whoever reads it when; and an engine that can hear or tell
nothing any more ends, and so tells it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import pytest

from mtmd.engine_process.engine import FAILED
from mtmd.engine_process.link import CAN_SEND_NOW, Link
from mtmd.engine_process.outbox import Outbox

MUTE = """
import threading
from mtmd.engine_process.engine import end_by
from mtmd.engine_process.outbox import Outbox
class Link:
    def send(self, value):
        raise ValueError("neither")
Outbox(Link(), end_by).put(("mtmd", "said"))
threading.Event().wait()
"""
DEAF = """
import threading
from mtmd.engine_process import engine
from mtmd.engine_process.messages import Call
engine.load = lambda *_, **__: threading.Event().wait()
class Link:
    calls = [Call(1, "load", "", ("", {}, 20))]
    def receive(self):
        if self.calls:
            return [self.calls.pop()]
        raise OSError("neither")
    def send(self, value):
        pass
engine.EngineProcess(Link()).run()
"""


@pytest.mark.parametrize("program", [MUTE, DEAF], ids=["mute", "deaf"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
def test_it_ends_whether_its_stderr_is_read_or_not(program: str, is_read: bool) -> None:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            if is_read:
                assert "neither" in process.stderr.read()
            else:
                process.stderr.close()
            assert process.wait(60) == FAILED
        finally:
            process.kill()


@pytest.fixture(params=[False, CAN_SEND_NOW], ids=["by its thread", "by who puts it"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Outbox, Link]]:
    """An outbox, and who reads what it sends."""
    ours, its = (Link(one) for one in socket.socketpair())
    failures: list[BaseException] = []
    outbox = Outbox(ours, failures.append, sends_now=request.param)
    yield outbox, its
    its.end()
    outbox.close()
    ours.close()
    its.close()
    assert not failures


def stated(link: Link, number: int) -> list[Any]:
    """The next `number` that come, and no more."""
    result: list[Any] = []
    while len(result) < number:
        result += link.receive()
    assert len(result) == number
    return result


def test_what_is_gathered_is_sent_without_the_thread() -> None:
    class Ear:
        """Of a link, what is heard, and in which thread it was said."""

        heard: ClassVar[list[object]] = []

        def send_now(self, items: list[Any]) -> bool:
            self.heard += [threading.get_ident(), items]
            return True

    failures: list[BaseException] = []
    outbox = Outbox(cast(Link, Ear()), failures.append, sends_now=True)
    items: list[Any] = [("event", number, "text") for number in range(3)]
    with outbox.gathered():
        for item in items:
            outbox.put(item)
    assert Ear.heard == [threading.get_ident(), items] and not failures


def test_what_is_long_comes_after_what_was_said_before_it(ends: tuple[Outbox, Link]) -> None:
    outbox, link = ends
    with outbox.gathered():
        outbox.put(("event", 1, "text"))
        outbox.put(("event", 1, "end"), is_long=True)
        outbox.put(("event", 2, "text"))
    assert stated(link, 3) == [("event", 1, "text"), ("event", 2, "text"), ("event", 1, "end")]


def test_nobody_who_puts_waits_for_a_reader(ends: tuple[Outbox, Link]) -> None:
    outbox, link = ends
    items = [("event", number, "a" * 10_000) for number in range(500)]
    for item in items:
        with outbox.gathered():
            outbox.put(item)
    assert stated(link, len(items)) == items


@pytest.mark.parametrize("text", ["a", "a" * 5_000, "a" * 300_000], ids=len)
def test_nothing_is_lost_or_overtaken_where_nobody_reads_for_a_while(
    ends: tuple[Outbox, Link], text: str
) -> None:
    outbox, link = ends
    threads: list[threading.Thread] = []
    result: list[Any] = []
    reader = threading.Thread(target=lambda: result.extend(stated(link, 600)))

    def speaker(who: int, say: Callable[[Any], None]) -> None:
        def run() -> None:
            for number in range(200):
                say((f"event {who}", number, text))

        threads.append(threading.Thread(target=run))

    def say_gathered(item: Any) -> None:
        outbox.put((f"before {item[0]}", item[1], None))
        with outbox.gathered():
            outbox.put(item)

    speaker(1, say_gathered)
    speaker(2, outbox.put)
    for thread in threads:
        thread.start()
    reader.start()
    for thread in [*threads, reader]:
        thread.join(60)
    for who in (1, 2):
        own = [item for item in result if item[0].endswith(f"event {who}")]
        before = [f"before event {who}"] if who == 1 else []
        assert [(name, number) for name, number, _ in own] == [
            (name, number) for number in range(200) for name in (*before, f"event {who}")
        ]


def test_a_value_that_nobody_knows_is_told_of_either_way() -> None:
    ours, its = (Link(one) for one in socket.socketpair())
    failures: list[BaseException] = []
    reported = threading.Event()

    def failed(error: BaseException) -> None:
        failures.append(error)
        reported.set()

    outbox = Outbox(ours, failed, sends_now=True)
    with outbox.gathered():
        outbox.put(("event", 1, object()))
    assert len(failures) == 1
    reported.clear()
    outbox.put(("event", 1, object()), is_long=True)
    assert reported.wait(10) and all("object" in str(error) for error in failures)
    outbox.close()
    ours.close()
    its.close()
