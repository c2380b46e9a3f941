"""Questions under way at once: as many as are answered, and as many more as are prepared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from mtmd.kernels.errors import OptionError
from mtmd.model import Model
from mtmd.service.many import WAITING, Many
from mtmd.service.measures.prepare_ahead import MOST_BYTES, PrepareAhead
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
    thread = threading.Thread(target=lambda: list(many.results(inputs, gate.work)), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("capacity", [None, 5])
def test_so_many_are_under_way(capacity: int | None) -> None:
    gate, taken = Gate(), list[int]()
    many = Many(2, PrepareAhead(2, asked=6), capacity)
    wanted = 8 if capacity is None else capacity
    assert many.workers == wanted
    inputs = (taken.append(n) or n for n in range(500))  # type: ignore[func-returns-value]
    thread = begun(many, gate, inputs)
    assert gate.reached(wanted)
    assert gate.at_work == wanted and len(taken) <= WAITING * wanted
    gate.let_go()
    thread.join(WAIT_S)
    assert len(taken) == 500


def test_more_begin_when_more_are_needed_and_fewer_when_not() -> None:
    gate = Gate()
    ahead = PrepareAhead(1, most_cores=8)
    many = Many(1, ahead)
    thread = begun(many, gate, iter(range(50)))
    assert gate.reached(3) and gate.at_work == 3
    ahead.now = 7
    with many._changed:
        many._changed.notify_all()
    assert gate.reached(8) and gate.at_work == 8
    ahead.now = 1  # far more are begun than may be: no more are taken until they are done
    gate.let_go()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_what_waits_for_a_place_ends_with_the_loop() -> None:
    gate = Gate()
    results = Many(1, PrepareAhead(1, asked=1)).results(range(40), gate.work, ordered=False)
    threading.Timer(0.05, gate.let_go).start()
    assert next(results) in range(40)
    results.close()


def test_what_is_measured(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """From reading to the ticket, with the bytes of picture and tiles; and each answer."""
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(
        PrepareAhead, "prepared", lambda _, __, held: told.append(("prepared", held))
    )
    monkeypatch.setattr(PrepareAhead, "answered", lambda _: told.append(("answered", 0)))
    picture = Image.new("RGB", (40, 30), "red")
    list(demo.answers([picture, None], prompt_of(2), max_tokens=1, parallel=1))
    assert sorted(what for what, _ in told) == ["answered"] * 2 + ["prepared"] * 2
    sizes = sorted(held for what, held in told if what == "prepared")
    (prepared,) = demo.prompts.bridge.prepare([demo.load_picture(picture)], anew=True)
    assert sizes == [0, 40 * 30 * 3 + prepared.plan.tiles[0].nbytes]


def prompt_of(count: int) -> list[str]:
    return ["How many shapes are there?"] * count


def test_a_ticket_holds_nothing_unless_it_says_so() -> None:
    assert Ticket(lambda _: None).held == 0


def test_memory_that_is_not_known_is_taken_for_much(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, room in ((None, MOST_BYTES), (8 << 30, 1 << 30), (1 << 40, MOST_BYTES)):
        monkeypatch.setattr(
            "mtmd.kernels.plan.free_memory.system_bytes", lambda *_, free=free: free
        )
        assert PrepareAhead(1)._room == room


def test_options(demo: Model, mtmd: Any, tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="prepare_ahead: found 0, expected an integer"):
        demo.answers(["a.png"], prepare_ahead=0)
    for word in ("0", "65", "many", "-1"):
        line = mtmd("batch", "a.png", f"--prepare-ahead={word}", "--out", tmp_path / "a.csv")
        assert (
            f"--prepare-ahead: found {word if word.isdecimal() else repr(word)}" in line.refused()
        )
    assert "beside" in mtmd("describe", "a.png", "--prepare-ahead", 3).refused()
    assert "--prepare-ahead: " in mtmd("describe", "--each", "a.png", "--prepare-ahead=x").refused()


def test_batch_and_each_hand_it_on(
    mtmd: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    asked: list[Any] = []
    make = PrepareAhead.__init__

    def init(self: PrepareAhead, *arguments: Any, **chosen: Any) -> None:
        asked.append(arguments)
        make(self, *arguments, **chosen)

    monkeypatch.setattr(PrepareAhead, "__init__", init)
    few = ("--max-tokens", 1, "--threads", 1, "--prepare-ahead", 5)
    assert mtmd("batch", tmp_path / "a.png", "--out", tmp_path / "o.csv", *few).code == 0
    assert mtmd("describe", "--each", tmp_path / "a.png", *few).code == 0
    assert [ahead for _, ahead in asked] == [5, 5]
