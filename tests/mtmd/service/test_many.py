"""Questions under way at once: as many as are answered, and as many more as are prepared."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mtmd.base.errors import OptionError
from mtmd.base.fair_queue import FairSlots
from mtmd.model import Model
from mtmd.prompt.load_image import decoded_bytes
from mtmd.service.many import WAITING, Many
from mtmd.service.prepare_ahead import MAX_BYTES, PrepareAhead
from mtmd.service.ticket import Ticket

WAIT_S = 30.0


class Gate:
    """Work that stays until it is let go, and a count of those at it."""

    def __init__(self) -> None:
        self.changed, self.open, self.at_work = threading.Condition(), False, 0

    def work(self, number: int) -> int:
        with self.changed:
            self.at_work += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.open, WAIT_S)
            self.at_work -= 1
        return number

    def reached(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.at_work >= count, WAIT_S)

    def let_go(self) -> None:
        with self.changed:
            self.open = True
            self.changed.notify_all()


def begun(many: Many, gate: Gate, inputs: Iterator[int]) -> threading.Thread:
    """All results are taken, on a thread."""
    return begun_by(many, gate.work, inputs)


def begun_by(many: Many, work: Any, inputs: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: list(many.results(inputs, work)), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("capacity", [None, 5])
def test_so_many_are_under_way(capacity: int | None) -> None:
    gate, taken = Gate(), list[int]()
    many = Many(2, PrepareAhead(2, requested=6), capacity and FairSlots(capacity))
    requested = 8 if capacity is None else capacity
    assert many.workers == requested
    inputs = (taken.append(n) or n for n in range(500))  # type: ignore[func-returns-value]
    thread = begun(many, gate, inputs)
    assert gate.reached(requested)
    assert gate.at_work == requested and len(taken) <= WAITING * requested
    gate.let_go()
    thread.join(WAIT_S)
    assert len(taken) == 500


def test_more_begin_when_more_are_needed_and_fewer_when_not() -> None:
    gate = Gate()
    ahead = PrepareAhead(1, max_cores=8)
    many = Many(1, ahead)
    thread = begun(many, gate, iter(range(50)))
    assert gate.reached(3) and gate.at_work == 3
    ahead.now = 7
    many._go_on()
    assert gate.reached(8) and gate.at_work == 8
    ahead.now = 1  # far more are begun than may be: no more are taken until they are done
    gate.let_go()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_what_waits_for_a_place_ends_with_the_loop() -> None:
    gate = Gate()
    results = Many(1, PrepareAhead(1, requested=1)).results(range(40), gate.work, ordered=False)
    threading.Timer(0.05, gate.let_go).start()
    assert next(results) in range(40)
    results.close()


def test_none_is_overtaken_by_one_begun_later() -> None:
    order: list[int] = []
    gates = [threading.Event() for _ in range(60)]

    def work(number: int) -> int:
        order.append(number)
        assert gates[number].wait(WAIT_S)
        return number

    many = Many(2, PrepareAhead(2, requested=2, max_cores=64))
    results = many.results(iter(range(60)), work)
    given = threading.Thread(target=lambda: list(results), daemon=True)
    given.start()
    for number, gate in enumerate(gates):
        gate.set()  # one ends, one begins
        reached = min(60, number + 4)
        while len(order) < reached and given.is_alive():
            threading.Event().wait(0.001)
        assert set(order) == set(range(len(order)))
    given.join(WAIT_S)
    assert len(order) == 60


def test_callers_share_the_places_in_turn() -> None:
    """Each asked for more than there are, one gives its up: nobody is refused."""
    slots, gates = FairSlots(5), [Gate(), Gate()]
    manys = [Many(2, PrepareAhead(2, requested=6), slots) for _ in gates]
    first = begun(manys[0], gates[0], iter(range(40)))
    assert gates[0].reached(5)
    results = manys[1].results(iter(range(40)), gates[1].work)
    taken = list[int]()
    second = threading.Thread(target=lambda: taken.extend(results), daemon=True)
    second.start()
    gates[0].let_go()
    assert gates[1].reached(1)
    gates[1].let_go()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert taken == list(range(40)) and slots.in_use == 0


def test_who_leaves_asks_for_places_no_more() -> None:
    slots, gate = FairSlots(1), Gate()
    first = begun(Many(1, PrepareAhead(1, requested=1), slots), gate, iter(range(2)))
    assert gate.reached(1)
    leaves = Many(1, PrepareAhead(1, requested=1), slots)
    results = leaves.results(iter(range(4)), lambda n: n)

    def wait() -> None:
        with pytest.raises(CancelledError):
            next(results)

    waits = threading.Thread(target=wait)
    waits.start()
    while not leaves._claims:
        threading.Event().wait(0.001)
    leaves._stop()
    waits.join(WAIT_S)
    gate.let_go()
    first.join(WAIT_S)
    assert not waits.is_alive() and slots.in_use == 0 and not slots._queue


def test_a_large_picture_waits_until_it_fits() -> None:
    """Before it is decoded; as many as are answered at once need not."""
    many, gate = Many(2, PrepareAhead(2, max_cores=8, room=1000)), Gate()
    many.ahead.now = 6

    def work(number: int) -> int:
        many.make_room(10 if number < 20 else 400)
        if number >= 20:
            gate.work(number)
        return number

    thread = begun_by(many, work, range(60))
    assert gate.reached(2)
    while len(many._waiting) < 6:
        threading.Event().wait(0.001)
    with many._changed:
        assert sum(many._stored.values()) == 800 and gate.at_work == 2
    gate.let_go()
    thread.join(WAIT_S)
    assert not thread.is_alive() and not many._stored


def test_what_a_picture_will_take_is_known_before_it_is_decoded(tmp_path: Any) -> None:
    picture, path = Image.new("RGB", (40, 30)), tmp_path / "a.png"
    picture.save(path)
    known = [picture, path, str(path), path.read_bytes(), np.zeros((30, 40)), [picture], None]
    assert [decoded_bytes(source) for source in known] == [3600] * 6 + [0]
    assert decoded_bytes([picture, str(path)]) == 7200
    unknown = [tmp_path, tmp_path / "none.png", b"no picture", "data:,a", [picture, b""], object()]
    assert [decoded_bytes(source) for source in unknown] == [None] * 6


def test_several_callers_leave_places_to_others(demo: Model) -> None:
    """More at once than the service lets wait, by two who ask many, and one who asks one."""
    service = demo.service
    several = [Many(1, PrepareAhead(1, requested=64), service.bulk_slots) for _ in range(2)]
    requested = Gate()
    threads = [begun(many, requested, iter(range(80))) for many in several]
    assert requested.reached(service.capacity)
    assert demo.answer(None, "How many shapes are there?", max_tokens=1).text is not None
    requested.let_go()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_what_is_measured(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """From reading to the ticket, with the bytes of picture and tiles; and each answer."""
    reported: list[tuple[str, int]] = []
    monkeypatch.setattr(
        PrepareAhead, "prepared", lambda _, __, stored: reported.append(("prepared", stored))
    )
    monkeypatch.setattr(PrepareAhead, "answered", lambda _: reported.append(("answered", 0)))
    picture = Image.new("RGB", (40, 30), "red")
    list(demo.answers([picture, None], prompt_of(2), max_tokens=1, parallel=1))
    assert sorted(what for what, _ in reported) == ["answered"] * 2 + ["prepared"] * 2
    sizes = sorted(cached for what, cached in reported if what == "prepared")
    (prepared,) = demo.prompts.bridge.prepare([demo.load_picture(picture)], anew=True)
    assert sizes == [0, 40 * 30 * 3 + prepared.plan.tiles[0].nbytes]


def prompt_of(count: int) -> list[str]:
    return ["How many shapes are there?"] * count


def test_a_ticket_holds_nothing_unless_it_says_so() -> None:
    assert Ticket(lambda _: None).stored == 0


def test_memory_that_is_not_known_is_taken_for_much(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, room in ((None, MAX_BYTES), (8 << 30, 1 << 30), (1 << 40, MAX_BYTES)):
        monkeypatch.setattr("mtmd.service.prepare_ahead.system_bytes", lambda *_, free=free: free)
        assert PrepareAhead(1).room == room


def test_options(demo: Model, mtmd: Any, tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="prepare_ahead: found 0, expected an integer"):
        demo.answers(["a.png"], prepare_ahead=0)
    for word in ("0", "65", "many", "-1"):
        line = mtmd("batch", "a.png", f"--prepare-ahead={word}", "--out", tmp_path / "a.csv")
        assert (
            f"--prepare-ahead: found {word if word.isdecimal() else repr(word)}" in line.refused()
        )
    assert "found without --each" in mtmd("describe", "a.png", "--prepare-ahead", 3).refused()
    assert "--prepare-ahead: " in mtmd("describe", "--each", "a.png", "--prepare-ahead=x").refused()


def test_batch_and_each_hand_it_on(
    mtmd: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    requested: list[Any] = []
    make = PrepareAhead.__init__

    def init(self: PrepareAhead, *arguments: Any, **chosen: Any) -> None:
        requested.append(arguments)
        make(self, *arguments, **chosen)

    monkeypatch.setattr(PrepareAhead, "__init__", init)
    few = ("--max-tokens", 1, "--threads", 1, "--prepare-ahead", 5)
    assert mtmd("batch", tmp_path / "a.png", "--out", tmp_path / "o.csv", *few).code == 0
    assert mtmd("describe", "--each", tmp_path / "a.png", *few).code == 0
    assert [ahead for _, ahead in requested] == [5, 5]


def test_what_is_done_is_given_before_more_is_taken() -> None:
    """As the next recording, which takes its time to be read."""
    done = threading.Event()
    taken: list[int] = []

    def inputs() -> Iterator[int]:
        for number in range(4):
            taken.append(number)
            yield number
            if number == 1:
                assert done.wait(WAIT_S)
                time.sleep(0.2)

    def work(number: int) -> int:
        if number == 0:
            assert second.wait(WAIT_S)
            done.set()
        else:
            second.set()
        return number

    second = threading.Event()
    results = Many(2).results(inputs(), work)
    assert next(results) == 0 and taken == [0, 1, 2]
    assert list(results) == [1, 2, 3]
