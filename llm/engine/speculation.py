"""Describes how many tokens to propose for each sequence, so that one forward may yield several:
speculative decoding (arXiv:2211.17192) with proposals from the text itself (`lookup`). Plain
Python, no tensors.

A proposed token costs a row more in a forward, for nothing where it is rejected. What a row more
costs is measured while the engine runs, against steps without proposals; how likely tokens are
accepted is known from watching. `auto` takes the number of rows with which most tokens are to be
expected in the same time, and none where that is no gain. Two things bound what mistakes can cost:

- a credit, in steps: every plain step adds a little, every step with proposals the tokens it gave
  less the time it took. There are proposals where the credit covers what they risk.
- the first batch with so many rows needs a plan, which takes as long as many steps. It is made when
  as much would have been gained with it before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from mtmd.llm.engine.lookup import Lookup
from mtmd.llm.engine.sequence import Sequence

Mode: TypeAlias = "str | int"
"""`auto`, `off`, or how many tokens to propose wherever there is something to propose."""

SIZES = (2, 4, 8, 16, 32, 64, 128)  # rows of a batch with proposals: few, for each needs a plan
MAX_ROWS = SIZES[-1]
MAXIMUM = 7  # of one sequence: with one row more, products of eight rows
GAIN = 1.05  # tokens in the same time, at least, for a proposal to be worth it
CREDIT, CREDIT_MAX = 0.25, 1.0  # steps, at the beginning and at most
EARNED = 0.015  # of a step, by each: what proposals may cost in the long run
PLAN_STEPS = 12.0  # that the first batch of a size takes longer, until it has been seen
SAMPLES = 7  # of a time: the middle one counts
STATE_BYTES = 512 << 20  # that may be kept to go back to
FORGOTTEN = 256  # steps after which a size is tried anew that was too slow


class Pace:
    """Describes what batches of several rows cost, in steps of one row a sequence. `row`: of a row
    more, before anything is measured.
    """

    def __init__(self, row: float):
        self._row = row
        self._plain: dict[int, deque[float]] = {}
        self._costs: dict[tuple[int, int], deque[float]] = {}
        self._known: dict[tuple[int, int], tuple[float, int]] = {}
        self._steps = 0
        self.planned: set[tuple[int, int]] = set()
        """Sequences and rows of batches that have been run."""

    def record(self, sequences: int, rows: int, seconds: float) -> None:
        """A batch of decoding has taken so long."""
        self._steps += 1
        key = sequences, rows
        self.planned.add(key)
        if rows == sequences:
            self._plain.setdefault(sequences, deque(maxlen=SAMPLES)).append(seconds)
        elif (cost := self.in_steps(sequences, seconds)) is not None:
            costs = self._costs.setdefault(key, deque(maxlen=SAMPLES))
            costs.append(cost)
            self._known[key] = max(median(costs), 1.0), self._steps + FORGOTTEN

    def in_steps(self, sequences: int, seconds: float) -> float | None:
        """A time in steps without proposals, None where none has been seen."""
        plain = self._plain.get(sequences)
        return seconds / median(plain) if plain else None

    def cost(self, sequences: int, rows: int) -> float:
        """Return the cost of a batch of so many rows."""
        cost, until = self._known.get((sequences, rows), (0.0, 0))
        if self._steps < until:
            return cost
        return (1 + self._row * rows) / (1 + self._row * sequences)

    def measured(self) -> tuple[tuple[int, float], ...]:
        """Rows and their cost, of one sequence: what has been seen so far."""
        return tuple(
            (rows, median(costs)) for (one, rows), costs in sorted(self._costs.items()) if one == 1
        )


@dataclass
class Text:
    """Text of one sequence, and how many tokens its answer may yet have."""

    lookup: Lookup
    left: int


def refusal(state_bytes: int) -> str | None:
    """Why nothing is proposed for sequences whose recurrent states, which have to be kept to go
    back to, take so much together.
    """
    if state_bytes <= STATE_BYTES:
        return None
    return (
        f"recurrent states take {state_bytes >> 20} MiB to keep, and {STATE_BYTES >> 20} MiB may "
        "be kept; lower parallel"
    )


def speculation(mode: Mode, context: int, rows: int, state_bytes: int, pace: Pace) -> Speculation:
    """Return the speculation of an engine, with at most so many `rows` in a batch with proposals;
    `state_bytes` as in `refusal`.
    """
    reason = None if mode == "off" else refusal(state_bytes)
    return Speculation("off" if reason else mode, pace, rows, context, reason)


@dataclass
class Speculation:
    """Speculation of one engine. `rows`: the most in a batch with proposals; `refused`: why it is
    off where it was asked for.
    """

    mode: Mode
    pace: Pace
    rows: int
    context: int
    refused: str | None = None
    _texts: dict[Sequence, Text] = field(default_factory=dict)
    _credit: float = CREDIT
    _missed: dict[tuple[int, int], float] = field(default_factory=dict)
    _plan_steps: float = PLAN_STEPS

    def __str__(self) -> str:
        """Return the text for receipts."""
        if self.refused:
            return f"off: {self.refused}"
        return f"up to {self.mode} tokens" if isinstance(self.mode, int) else str(self.mode)

    def reset(self) -> None:
        """Forget all sequences."""
        self._texts.clear()

    def begin(self, sequence: Sequence, prompt: Iterable[int], maximum: int) -> None:
        """A sequence has read its prompt, and answers in at most so many tokens."""
        if self.mode != "off":
            self._texts[sequence] = Text(Lookup(prompt), maximum)

    def push(self, sequence: Sequence, token: int) -> None:
        text = self._texts.get(sequence)
        if text is not None:
            text.lookup.push(token)
            text.left -= 1

    def end(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def propose(self, running: Many[Sequence]) -> None:
        """Give each of the running sequences its proposal for the next batch, or none."""
        for sequence in running:
            sequence.proposal = ()
        if not self._texts:
            return
        if isinstance(self.mode, int):
            for sequence in running:
                self._give(sequence, self.mode)
        elif all(sequence.decoding for sequence in running):
            for sequence, count in self._worth(running).items():
                self._give(sequence, count)

    def _give(self, sequence: Sequence, count: int) -> None:
        text = self._texts.get(sequence)
        if text is not None and sequence.decoding:
            count = min(count, self._room(sequence, text))
            sequence.proposal = text.lookup.expected(count) if count > 0 else ()

    def _room(self, sequence: Sequence, text: Text) -> int:
        """A batch gives a token more than are accepted; the answer and the context have to hold
        them.
        """
        return min(text.left, self.context - sequence.total) - 1

    def _worth(self, running: Many[Sequence]) -> dict[Sequence, int]:
        """Return how many tokens to propose for each sequence. Each is worth its chance; the
        likeliest come first, whosever they are.
        """
        offers: list[tuple[float, Sequence]] = []
        for sequence in running:
            text = self._texts.get(sequence)
            if text is None or text.lookup.source is None:
                continue
            count = min(MAXIMUM, self._room(sequence, text))
            offers += [(chance, sequence) for chance in text.lookup.chances(count)]
        if not offers:
            return {}
        offers.sort(key=lambda offer: -offer[0])
        sequences = len(running)
        given = sum(sequence.left for sequence in running)
        best, rate, rows = 0, GAIN, 0
        for size in SIZES:
            count = size - given
            if count < 1:
                continue
            if size > self.rows or count > len(offers):
                break
            gain = 1 + sum(chance for chance, _ in offers[:count]) / sequences
            pays = gain / self.pace.cost(sequences, size)
            if pays > rate:
                best, rate, rows = count, pays, size
        if not best:
            return {}
        risk = (self.pace.cost(sequences, rows) - 1) * (1 - offers[0][0])
        if risk > self._credit or not self._has_plan(sequences, rows, rate - 1):
            return {}
        result: dict[Sequence, int] = {}
        for _, sequence in offers[:best]:
            result[sequence] = result.get(sequence, 0) + 1
        return result

    def _has_plan(self, sequences: int, rows: int, gain: float) -> bool:
        """Return whether a batch of this size is planned, or is worth it by now."""
        key = sequences, rows
        if key in self.pace.planned:
            return True
        self._missed[key] = self._missed.get(key, 0.0) + gain
        return self._missed[key] >= self._plan_steps

    def ran(self, sequences: int, rows: int, seconds: float, tokens: int, planned: bool) -> None:
        """A batch of decoding, `rows` in all, has given so many tokens. `planned`: a plan was made
        for it, whose time says nothing of the next.
        """
        if planned:
            self.pace.planned.add((sequences, rows))
            took = self.pace.in_steps(sequences, seconds)
            if took is not None and rows > sequences:
                self._plan_steps = min(took, 2 * PLAN_STEPS)  # machine code is made once
            return
        self.pace.record(sequences, rows, seconds)
        earned = EARNED
        if rows > sequences:
            earned += tokens / sequences - self.pace.cost(sequences, rows)
        self._credit = min(self._credit + earned, CREDIT_MAX)
