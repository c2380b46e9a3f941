"""One sequence on its way through the engine, in plain numbers: the record that scheduler, engine
and runner share. It holds no tensors: the engine has the spans of its prompt, the cache the states
of its layers.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, field
from enum import Enum

from mtmd.base.errors import MtmdError
from mtmd.llm.engine.spans import Seen


@dataclass(frozen=True)
class Token:
    """A token of an answer, its log probability before temperature and filters, and those of the
    most probable ones. `rank`, of a prompt's tokens: 1 plus the number of more probable ones.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class State(Enum):
    """Describes where a sequence is. The methods of `Sequence` change it, and nothing else does:

    WAITING -> READING or DECODING (`admit`)
    READING, DECODING -> SAMPLING (`advance`, when all tokens are read)
    SAMPLING -> DECODING (`append`), and back while proposals are right (`accept`)
    any -> WAITING (`preempt`), READING or DECODING (`restart`, `rewind`), FINISHED (`end`)
    """

    WAITING = "waiting"
    """It has no slot."""
    READING = "reading"
    """The next batch reads a part of its prompt, or of its answer after it was preempted."""
    DECODING = "decoding"
    """The next batch gives its next token."""
    SAMPLING = "sampling"
    """All is read: its next token is to be chosen, as soon as its constraint is ready."""
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """`total` counts its tokens, prompt and answer so far, `done` those whose keys and values are
    cached: they lie in its `pages`, in order. `slot` is its place among recurrent states, None
    while it waits.

    `blocks` are stretches (start, stop) not to be cut; `keys` those of the prompt's full pages;
    `snapshot_at`: the token at whose end its recurrent states are to be copied, if it has any.
    `position`: that of the first token that has not been laid out, in the engine the first of the
    answer. Slots and batches are shared out among owners.

    `adapters`: the scale of each of the model's adapters, none of any where it is empty.

    `pictures` are those that its tokens attend to; `context_stored`: their keys and values are in
    the slot.

    `proposal` are tokens that may come next, to be verified in the next batch. `behind`: tokens
    of its answer, besides the last, that have to be read once more, because its recurrent states
    were set back to before them.

    `finish` is "stop", "length", "cancelled" or "error", None before the end. Times are in
    milliseconds: waiting for a slot, reading the prompt, and all after the first token; `reused`
    counts prompt tokens that were cached already.
    """

    total: int
    blocks: tuple[tuple[int, int], ...] = ()
    keys: abc.Sequence[bytes] = ()
    done: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    snapshot_at: int | None = None
    position: int = 0
    owner: str = ""
    adapters: tuple[float, ...] = ()
    pictures: tuple[Seen, ...] = ()
    context_stored: bool = False
    proposal: tuple[int, ...] = ()
    behind: int = 0
    state: State = State.WAITING

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of the answer so far; the stop token is not among them."""
    finish: str | None = None
    error: MtmdError | None = None

    reused: int = 0
    preemptions: int = 0
    """How often it lost its slot, for want of memory or for another owner."""
    proposed: int = 0
    """Proposed tokens that were verified, and those that were right."""
    accepted: int = 0
    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None
    """When its first token was chosen."""
    last: Token | None = None
    """The stop token that ended it."""
    scores: list[Token] | None = None
    """The tokens of its prompt from the second on, as far as they have been read; None where they
    are not requested. A prompt that is scored is read whole, whatever is cached of it.
    """
    _new: list[Token] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens still to be read, 1 while it decodes, and those it is behind."""
        return self.total - self.done

    @property
    def decoding(self) -> bool:
        return self.state is State.DECODING

    def chunk(self, room: int) -> int:
        """Return how many of its next tokens to run given `room`: no more, but to the end of a
        block that begins at the first of them.
        """
        stop = min(self.done + room, self.total)
        if self.snapshot_at is not None and self.done < self.snapshot_at < stop:
            # The state of a recurrence is known only where a batch ends.
            stop = self.snapshot_at
        for start, end in self.blocks:
            if start < stop < end:
                return (start if start > self.done else end) - self.done
        return stop - self.done

    def admit(self, slot: int, pages: list[int], done: int) -> None:
        """Take a slot, and pages in which the first `done` tokens are cached."""
        self.slot, self.pages, self.done = slot, pages, done
        self.context_stored = False
        self._update()

    def advance(self, count: int) -> None:
        """Note that a batch has read `count` tokens; those beyond what was left are a proposal."""
        self.done, self.behind = self.done + min(count, self.left), 0
        self.context_stored = True
        self._update()

    def append(self, token: Token) -> None:
        """Add a token to the answer."""
        self.tokens.append(token.id)
        self._new.append(token)
        self.total += 1
        self._update()

    def accept(self) -> None:
        """Note that the last token was proposed, and so has been read already."""
        self.done += 1
        self._update()

    def rewind(self, done: int) -> None:
        """Go back to recurrent states after `done` tokens: those of the answer are read again."""
        self.done, self.behind = done, self.total - 1 - done
        self._update()

    def restart(self, pages: list[int]) -> None:
        """Forget what was read, and keep the slot."""
        self.pages, self.done, self.behind = pages, 0, 0
        self._update()

    def preempt(self) -> None:
        """Wait again, without slot and pages."""
        self.slot, self.pages, self.done, self.behind = None, [], 0, 0
        self.preemptions += 1
        self.state = State.WAITING

    def end(self, finish: str, error: MtmdError | None = None) -> None:
        self.slot, self.pages, self.finish, self.error = None, [], finish, error
        self.state = State.FINISHED

    def _update(self) -> None:
        if not self.left:
            self.state = State.SAMPLING
        elif self.left == 1 + self.behind:
            self.state = State.DECODING
        else:
            self.state = State.READING

    @property
    def has_new(self) -> bool:
        """Return whether tokens came since `take`."""
        return bool(self._new)

    def take(self) -> list[Token]:
        """Return the tokens that came since the last call."""
        taken, self._new = self._new, []
        return taken
