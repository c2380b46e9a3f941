"""One sequence on its way through the engine, in plain numbers: the one record that batcher, engine
and runner share. Tensors stay elsewhere: the spans of its prompt with the engine, what it keeps in
its layers with the cache.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, field

from mtmd.base.errors import MtmdError


@dataclass(frozen=True)
class Token:
    """A token of an answer, its log probability before temperature and filters, and those of the
    most probable ones. `rank`, of a prompt's tokens: 1 plus the number of more probable ones.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(eq=False)
class Sequence:
    """`total` counts its tokens, prompt and answer so far, `done` those whose keys and values are
    kept: they lie in its `pages`, in order. `slot` is its place among recurrent states, None while
    it waits.

    `blocks` are stretches (start, stop) not to be cut; `keys` those of the prompt's full pages;
    `snapshot_at`: the token at whose end its recurrent states are to be copied, if it has any.
    `position`: that of the first token that has not been laid out, in the engine the first of the
    answer.

    `owner`: for whom it is; places and batches are shared out among owners.

    `proposal` are tokens that may come next, to be verified in the next batch. `behind`: tokens
    of its answer, besides the last, that have to be read once more, because its recurrent states
    were set back to before them.

    `finish` is "stop", "length", "cancelled" or "error", None while it runs. Times are in
    milliseconds: waiting for a place, reading the prompt, and all after the first token; `reused`
    counts prompt tokens that were known already.
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
    proposal: tuple[int, ...] = ()
    behind: int = 0

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of the answer so far; the stop token is not among them."""
    finish: str | None = None
    error: MtmdError | None = None

    reused: int = 0
    preemptions: int = 0
    """How often it had to give its place up, for want of memory or for another owner."""
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
    are not wanted. A prompt whose tokens are is read whole, whatever is known of it.
    """
    _new: list[Token] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens still to be read, 1 while it decodes, and those it is behind."""
        return self.total - self.done

    @property
    def decoding(self) -> bool:
        return self.left == 1 + self.behind

    def chunk(self, room: int) -> int:
        """How many of its next tokens to run given `room`: no more, but to the end of a block that
        begins at the first of them.
        """
        stop = min(self.done + room, self.total)
        if self.snapshot_at is not None and self.done < self.snapshot_at < stop:
            # The state of a recurrence is known only where a batch ends.
            stop = self.snapshot_at
        for start, end in self.blocks:
            if start < stop < end:
                return (start if start > self.done else end) - self.done
        return stop - self.done

    def append(self, token: Token) -> None:
        """One more token of the answer."""
        self.tokens.append(token.id)
        self._new.append(token)
        self.total += 1

    @property
    def has_new(self) -> bool:
        """Whether tokens came since it was last asked."""
        return bool(self._new)

    def take(self) -> list[Token]:
        """The tokens that came since it was last asked."""
        taken, self._new = self._new, []
        return taken
