"""The thought of one answer while it is written: where it begins and ends, how many tokens it may
have, and what is held back until it is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mtmd.llm.engine.prompt import Constraint
from mtmd.llm.sampling.constraint import masked
from mtmd.llm.tokenizer.text_stream import TextStream
from mtmd.thinking.marks import Marks, Piece, Splitter


@dataclass(frozen=True)
class MarkTokens:
    """The marks as tokens: what begins a thought, what ends it, and the ids of special tokens among
    them, which would give no text.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    special: frozenset[int]

    @classmethod
    def of(
        cls, marks: Marks, encode: Callable[[str], Sequence[int]], special: Iterable[int]
    ) -> MarkTokens:
        opening, closing = tuple(encode(marks.opening.rstrip())), tuple(encode(marks.closing))
        used = {i for text in marks.texts for i in encode(text)}
        return cls(opening, closing, frozenset(special) & used)


class Thought:
    """An `mtmd.llm.engine.engine.Thought`: the engine reports each token by `accept` until the
    thought is over; `read` gives its text, for each token in turn. `inside`: the prompt ends inside
    the thought; otherwise the answer may begin with one. After `budget` tokens it is closed by its
    own mark. `bound`: how the answer begins is prescribed, so that nothing but the closing mark may
    end the thought, and what the template writes after it is written.
    """

    def __init__(
        self,
        marks: Marks,
        tokens: MarkTokens,
        stream: TextStream,
        encode: Callable[[str], Sequence[int]],
        *,
        inside: bool,
        budget: int | None = None,
        bound: bool = False,
    ):
        self._marks, self._tokens, self._encode = marks, tokens, encode
        self.stream = stream
        """Its tokens, and those of the answer after it, as text."""
        self._splitter = Splitter(marks, inside)
        self._budget, self._bound, self._spent, self._undecided = budget, bound, 0, 0
        self._forced: deque[int] = deque()
        self._read: deque[tuple[list[Piece], bool | None]] = deque()
        self.tokens = 0
        """Of the thought so far, its marks among them."""

    @property
    def is_over(self) -> bool:
        """Return whether the answer has begun."""
        return self._splitter.is_over

    @property
    def sleeps(self) -> bool:
        """Return whether what is prescribed for the answer is not for the next token."""
        return self._splitter.is_inside or bool(self._forced)

    @property
    def may_begin(self) -> bool:
        """Return whether the next token may be the first of the thought, or of the answer."""
        return not (self.sleeps or self.is_over or self._splitter.had_thought)

    @property
    def opening(self) -> tuple[int, ...]:
        """The tokens that begin a thought."""
        return self._tokens.opening

    @property
    def is_first_alone(self) -> bool:
        """Return whether the first of them can begin nothing but a thought: it is the whole mark,
        or a blank, as which no answer begins.
        """
        return len(self._tokens.opening) == 1 or self._marks.opening[:1].isspace()

    def forced(self) -> int | None:
        """The token that has to come next, None for any."""
        return self._forced[0] if self._forced else None

    def open(self, written: int = 0) -> None:
        """Begin the thought, by all tokens of its mark but so many that are written already."""
        self._forced = deque(self._tokens.opening[written:])

    def close(self) -> int:
        """End the thought. Returns the first token that does, which comes next."""
        self._forced = deque(self._tokens.closing)
        return self._forced[0]

    def close_early(self) -> bool:
        """End a thought that goes on. Returns whether it did: its mark may be due already."""
        if not self._splitter.is_inside or self._forced:
            return False
        self.close()
        return True

    @property
    def must_be_closed(self) -> bool:
        """Return whether the thought goes on, and an answer has to follow it."""
        return self._bound and self.sleeps

    def accept(self, token: int) -> None:
        """The token has been taken."""
        if self._forced:
            self._forced.popleft()
        was_inside = self._splitter.is_inside
        pieces, part = self._push(token), self._part()
        self._read.append((pieces, part))
        self._undecided += 1
        if part is not None:
            self.tokens += self._undecided if part else 0
            self._undecided = 0
        if self._splitter.is_inside:
            self._spent += was_inside
            if self._budget is not None and self._spent >= self._budget and not self._forced:
                self.close()
        elif was_inside and self._bound and not self._forced:
            self._end()

    def _part(self) -> bool | None:
        """Return whether the last token is one of the thought, its marks included; None where that
        is not known yet.
        """
        splitter = self._splitter
        if splitter.is_over:
            return splitter.has_header
        if splitter.is_inside:
            return True
        return True if splitter.had_thought and splitter.holds_blanks_only else None

    def read(self, token: int) -> tuple[list[Piece], bool | None]:
        """The text that is certain after this token, and whether it is one of the thought, None
        where that is not known yet.
        """
        return self._read.popleft() if self._read else (self._push(token), False)

    def finish(self) -> list[Piece]:
        """Return what was held back at the end of the answer."""
        pieces = self._splitter.push(self.stream.finish())
        return [*pieces, *self._splitter.finish(is_mark=bool(self._forced))]

    def _push(self, token: int) -> list[Piece]:
        was_over = self.is_over
        pieces = self._splitter.push(self.stream.push(token))
        if self.is_over and not was_over:
            self.stream.skip(self._tokens.special)
        return pieces

    def _end(self) -> None:
        """The model has ended its thought: what the template writes there is added, where nothing
        is known of what would come instead.
        """
        closing, close = self._marks.closing, self._marks.close
        rest = closing[closing.index(close) + len(close) :]
        written = self._splitter.stored
        if not written.strip():
            self._forced = deque(self._encode(rest.removeprefix(written)))


class AfterThought:
    """An `mtmd.llm.engine.engine.Constraint` that begins once the thought is over. Where the answer
    may begin with a thought, the tokens of its mark are allowed, too. `make` returns the constraint
    of the answer, each time a new one.
    """

    def __init__(self, make: Callable[[], Constraint], thought: Thought):
        self._make, self._inner, self._thought = make, make(), thought
        self._has_read = False
        # How many tokens of the mark are written; None where no thought can begin any more.
        self._written: int | None = 0 if thought.may_begin else None
        self._is_next_allowed = False  # also by what the answer has to look like
        self._requested: np.ndarray | None = (
            None  # before the thought: for the answer's first token
        )

    def begin(self) -> None:
        self._inner.begin()

    def ready(self, wait_s: float = 0) -> bool:
        return self._sleeps() or self._requested is not None or self._inner.ready(wait_s)

    def allowed(self, size: int) -> np.ndarray:
        if self._sleeps():
            return np.full(-(-size // 8), 255, np.uint8)
        bits = self._inner.allowed(size) if self._requested is None else self._requested
        if self._written is not None:
            after = self._thought.opening[self._written]
            self._requested, bits = bits, bits.copy()
            self._is_next_allowed = bool(bits[after // 8] >> after % 8 & 1)
            bits[after // 8] |= 1 << after % 8
        return bits

    def mask(self, logits: Tensor) -> Tensor:
        return logits if self._sleeps() else masked(logits, self.allowed(len(logits)))

    def accept(self, token: int) -> None:
        """Read a token of the answer; those of the thought are skipped. The beginning of a mark
        that may also begin the answer is read as that, until it is known to be a mark: then the
        constraint begins anew.
        """
        thought, written = self._thought, self._written
        if self._sleeps():
            return
        self._written = None
        if written is not None and token == thought.opening[written]:
            if thought.is_first_alone or not self._is_next_allowed:
                thought.open(written)
                return
            if written + 1 < len(thought.opening):
                self._written = written + 1
        self._requested, self._has_read = None, True
        self._inner.accept(token)

    def close(self) -> None:
        self._inner.close()

    def _sleeps(self) -> bool:
        """Return whether the thought goes on. What was read of its mark is no part of the
        answer.
        """
        sleeps = self._thought.sleeps
        if sleeps and self._has_read:
            self._inner.close()
            self._inner, self._requested = self._make(), None
            self._inner.begin()
            self._has_read = False
        return sleeps
