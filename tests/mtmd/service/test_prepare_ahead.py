"""How many pictures are prepared beside those being answered, on a machine of which each step is
made up: no clock runs.
"""

from __future__ import annotations

import heapq
import itertools

import pytest

from mtmd.base.cores import Cores
from mtmd.base.errors import OptionError
from mtmd.service.prepare_ahead import MAXIMUM, MINIMUM, PrepareAhead, prepare_ahead

SLOTS = 4


class Machine:
    """Every core prepares a picture in `prepare_s`, the device answers `SLOTS` together, each in
    `answer_s`. So many are under way as are answered at once and may be ahead.
    """

    def __init__(self, prepare_s: float, answer_s: float, stored: int = 1, **chosen: int | None):
        self.now, self.prepare_s, self.answer_s, self.stored = 0.0, prepare_s, answer_s, stored
        self.ahead = PrepareAhead(SLOTS, clock=lambda: self.now, room=1 << 30, **chosen)
        self.number = itertools.count()
        self.events: list[tuple[float, int, bool, float]] = []
        self.waiting = self.answering = self.under_way = self.answered = 0
        self.maximum = 0

    def run(self, pictures: int) -> float:
        """Answers a second of the last half."""
        half = 0.0
        while self.answered < pictures:
            while self.under_way < SLOTS + self.ahead.now:
                self.under_way += 1
                self._at(self.prepare_s, False, self.now)
            while self.waiting and self.answering < SLOTS:
                self.waiting -= 1
                self.answering += 1
                self._at(self.answer_s, True, 0.0)
            self.maximum = max(self.maximum, self.ahead.now)
            self.now, _, is_answer, since = heapq.heappop(self.events)
            if is_answer:
                self.answering -= 1
                self.under_way -= 1
                self.answered += 1
                self.ahead.answered()
                if self.answered == pictures // 2:
                    half = self.now
            else:
                self.waiting += 1
                self.ahead.prepared(since, self.stored)
        return (pictures - pictures // 2) / (self.now - half)

    def _at(self, after: float, is_answer: bool, since: float) -> None:
        heapq.heappush(self.events, (self.now + after, next(self.number), is_answer, since))


def test_a_fast_device_does_not_wait() -> None:
    """A picture takes a core 133 ms, and the device 13 ms: eleven cores keep it busy."""
    fixed = Machine(0.133, 4 * 0.013, requested=MINIMUM, max_cores=32)
    machine = Machine(0.133, 4 * 0.013, max_cores=32)
    assert fixed.run(400) < 0.65 / 0.013
    assert machine.run(400) > 0.99 / 0.013
    assert 11 <= machine.ahead.now <= 14


def test_a_slow_device_has_no_more_than_it_needs() -> None:
    machine = Machine(0.133, 4 * 3.0, max_cores=32)
    assert machine.run(100) == pytest.approx(1 / 3.0, rel=0.05)
    assert machine.maximum == MINIMUM


def test_a_device_that_slows_down_needs_fewer() -> None:
    machine = Machine(0.133, 4 * 0.013, max_cores=32)
    machine.run(200)
    machine.answer_s, machine.answered = 4 * 1.0, 0
    machine.run(100)
    assert machine.maximum > 10 and machine.ahead.now == MINIMUM


@pytest.mark.parametrize(
    ("cores", "stored", "maximum"),
    [(6, 1, 6), (1, 1, MINIMUM), (200, 1, MAXIMUM), (32, 1 << 28, 4), (32, 1 << 31, MINIMUM)],
)
def test_cores_and_memory_bound_it(cores: int, stored: int, maximum: int) -> None:
    machine = Machine(1.0, 1e-4, stored, max_cores=cores)
    machine.run(2000)
    assert machine.maximum == maximum
    assert machine.ahead.now == (1 if stored > 1 << 30 else maximum)


def test_a_pause_says_nothing() -> None:
    """With nothing under way: the number neither falls by it nor goes up and down."""
    machine = Machine(0.133, 4 * 0.013, max_cores=32)
    machine.run(200)
    before = machine.ahead.now
    machine.now += 3600
    for when in range(len(machine.events)):
        machine.events[when] = (machine.now, *machine.events[when][1:3], machine.now - 0.133)
    machine.ahead.begin()
    seen = set()
    for _ in range(8):
        machine.answered = 0
        machine.run(20)
        seen.add(machine.ahead.now)
    assert before > 10 and min(seen) >= before - 2


def test_a_quota_of_the_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.service.prepare_ahead.usable_cores", lambda: Cores(64, quota=3.5))
    assert PrepareAhead(4).maximum == 4


def test_what_is_asked_for_is_kept() -> None:
    machine = Machine(0.133, 4 * 0.013, 1 << 40, requested=7, max_cores=1)
    machine.run(100)
    assert machine.ahead.now == machine.maximum == 7
    assert [prepare_ahead(n) for n in (1, 64, "auto", None)] == [1, 64, None, None]
    for wrong in (0, 65, -1, "8", 2.5, True):
        with pytest.raises(OptionError, match=r"found .* an integer from 1 to 64, or auto"):
            prepare_ahead(wrong)
