"""Signs of life between the ranks of a model. Each of the others tells the first, over a connection
and by a thread of their own, how often its work has gone on and what it is at; the first tells them
that it is there.

A process that is stopped gives no sign, and neither does one whose machine is gone: it is waited
for `SILENT_S`. One that gives signs and whose work goes on is waited for as long as that takes:
before the first run of a plan, weights are read and kernels compiled. One that gives signs and
whose work stands still hangs: it is waited for `STILL_S`, and longer where it is at a node that may
take long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from mtmd.base.heartbeat import Heartbeat, heart_here
from mtmd.ranks.wire import Head, Wire

SIGN_S = 1.0  # between two signs, and between two looks
SILENT_S = 8.0
STILL_S = 300.0  # for one weight, kernel or node, as a device's thread is given


class Lull:
    """Time for which nothing has come, for one who looks from time to time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def look(self, came: bool, passed_s: float) -> float:
        """`passed_s` since the last look. One that comes late counts as one that came in time: this
        process was stopped in between, and perhaps the other with it.
        """
        self.seconds = 0.0 if came else self.seconds + min(passed_s, 2 * SIGN_S)
        return self.seconds


class Signs:
    """Given by one of the other ranks about the thread that `heart` is of. `gone` is called once
    there is nobody to work for: with the reason where nothing is heard of the first rank in the
    midst of work, None where it has ended.
    """

    def __init__(self, wire: Wire, heart: Heartbeat, gone: Callable[[str | None], None]):
        self._wire, self.heart, self._gone = wire, heart, gone
        self.doing: str | None = None
        """In words; None between two orders."""
        threading.Thread(target=self._give, name="mtmd signs", daemon=True).start()

    @contextmanager
    def work(self, doing: str) -> Iterator[None]:
        self.doing = doing
        try:
            yield
        finally:
            self.doing = None

    def _give(self) -> None:
        heart, silence = self.heart, Lull()
        try:
            while True:
                self._wire.send(
                    "sign",
                    doing=self.doing,
                    at=heart.at,
                    beats=heart.beats,
                    waits=heart.waits,
                    more_s=heart.more_s,
                )
                start, came = time.monotonic(), False
                while (left := start + SIGN_S - time.monotonic()) > 0:
                    if self._wire.comes(left):
                        self._wire.receive()
                        came = True
                doing = self.doing
                silent_s = silence.look(came or doing is None, time.monotonic() - start)
                if silent_s >= SILENT_S:
                    self._gone(f"has heard nothing of the first for {silent_s:.0f} s while {doing}")
                    return
        except (EOFError, OSError, ValueError):
            self._gone(None)


class _Other:
    """One of the other ranks, as its signs have it."""

    def __init__(self) -> None:
        self.head: Head = {"doing": None, "at": "", "beats": -1, "waits": False, "more_s": 0.0}
        self.silent, self.still = Lull(), Lull()
        self.came = self.moved = False

    def hear(self, head: Head) -> None:
        self.came = True
        idle = head["waits"] or head["doing"] is None
        self.moved |= idle or head["beats"] != self.head["beats"]
        self.head = head

    def look(self, passed_s: float) -> str | None:
        """Why it is lost."""
        silent_s = self.silent.look(self.came, passed_s)
        still_s = self.still.look(self.moved, passed_s)
        self.came = self.moved = False
        if silent_s >= SILENT_S:
            return (
                f"has not responded for {silent_s:.0f} s, last {self.doing}: it "
                "has stopped or cannot be reached"
            )
        if still_s >= STILL_S + self.head["more_s"]:
            return f"hangs: it has stood still for {still_s:.0f} s, {self.doing}"
        return None

    @property
    def doing(self) -> str:
        """Set the name of the weight, kernel or node it is at."""
        head = self.head
        if head["doing"] is None:
            return "waiting for orders"
        waits = "waiting for other ranks while " if head["waits"] else ""
        return f"{waits}{head['doing']}" + (f", at {head['at']}" if head["at"] else "")


class Watch:
    """The first rank's side, which has the others' `wires`, by rank, and closes them. Once started,
    it calls `lost(rank, why)`, on a thread of its own, for one that is stopped or hangs while work
    is under way, once for each.
    """

    def __init__(self, wires: Mapping[int, Wire], lost: Callable[[int, str], None]):
        self._wires, self._lost = dict(wires), lost
        self._others = {rank: _Other() for rank in wires}
        self._working: list[Heartbeat | None] = []
        self._ended = threading.Event()

    def start(self) -> None:
        thread = threading.Thread(target=self._watch, name="mtmd ranks' signs", daemon=True)
        thread.start()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around what the others are to do. Where this thread is watched, too, it is not taken for
        one that hangs while it waits for them.
        """
        heart = heart_here()
        self._working.append(heart)
        try:
            yield
        finally:
            self._working.remove(heart)

    def reported(self) -> str:
        """Return what each of them does, and when it was heard of."""
        return "; ".join(
            f"rank {rank}: {other.doing}, heard of {other.silent.seconds:.0f} s ago"
            for rank, other in sorted(self._others.items())
        )

    def close(self) -> None:
        self._ended.set()
        for wire in list(self._wires.values()):
            wire.shut()

    def hear(self, rank: int, head: Head) -> None:
        if rank in self._others:
            self._others[rank].hear(head)

    def look(self, passed_s: float) -> None:
        """Look at all of them, so long after the last time."""
        working = list(self._working)
        for heart in working:
            if heart is not None and heart.waits:
                heart.beats += 1
        for rank, other in list(self._others.items()):
            if not working:
                other.came = other.moved = True
            why = other.look(passed_s)
            if why is not None:
                del self._others[rank]
                self._lost(rank, why)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.is_set():
            for rank, wire in list(self._wires.items()):
                with self._reaching(rank):
                    if wire.has_room:  # of one that was stopped for a day, buffers are full
                        wire.send("sign")
            while (left := last + SIGN_S - time.monotonic()) > 0 and not self._ended.is_set():
                self._hear(left)
            now = time.monotonic()
            self.look(now - last)
            last = now
        for wire in self._wires.values():
            wire.close()

    def _hear(self, seconds: float) -> None:
        ranks = {wire.connection: rank for rank, wire in self._wires.items()}
        for connection in wait(list(ranks), seconds):
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            with self._reaching(rank):
                self.hear(rank, self._wires[rank].receive()[0])

    @contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        """The connection for orders tells of one that has ended."""
        try:
            yield
        except (EOFError, OSError, ValueError):
            self._others.pop(rank, None)
            self._wires.pop(rank).close()
