"""Proposed tokens on their way through a batch, and the recurrent states to go back to where some
were wrong.
"""

from __future__ import annotations

from collections import abc

from mtmd.llm.engine.lookup import PICTURE
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence, State
from mtmd.llm.engine.speculation import Speculation
from mtmd.llm.state import Cache, Snapshot


class Drafts:
    """`speculation` decides what is proposed."""

    def __init__(self, speculation: Speculation, cache: Cache):
        self.speculation, self._cache = speculation, cache
        self._states: dict[Sequence, Snapshot] = {}
        """Before proposed tokens: states after a sequence's `done` tokens."""

    def begin(self, sequence: Sequence, prompt: Prompt) -> None:
        """Follow a sequence that has read its prompt."""
        tokens = (
            token
            for span in prompt.spans
            for token in (span.tokens if span.is_text else (PICTURE,) * len(span))
        )
        self.speculation.begin(sequence, tokens, prompt.max_tokens)

    def propose(self, running: abc.Iterable[Sequence]) -> None:
        """Set the proposals of the next batch, of all but those that wait for a constraint."""
        self.speculation.propose([s for s in running if s.state is not State.SAMPLING])

    def save(self, parts: abc.Iterable[tuple[Sequence, int]]) -> None:
        """Copy the recurrent states that the proposals in a batch are about to change."""
        if not self._cache.recurrent:
            return
        for sequence, count in parts:
            if count <= sequence.left:
                self._states.pop(sequence, None)
            elif sequence not in self._states:
                assert sequence.slot is not None
                self._states[sequence] = self._cache.snapshot(sequence.slot)

    def advance(self, sequence: Sequence, proposed: int, accepted: int, done: int) -> bool:
        """Note how many proposed tokens were right; before the batch `done` tokens had been read.
        Returns whether recurrent states have seen wrong tokens, and were set back.
        """
        sequence.proposed += proposed
        sequence.accepted += accepted
        if sequence.state is State.FINISHED or not proposed:
            return False
        states = self._states.pop(sequence, None)
        if states is None or accepted == proposed:
            return False
        assert sequence.slot is not None
        self._cache.restore(sequence.slot, states)
        self._states[sequence] = states
        sequence.rewind(done)
        return True

    def discard(self, sequence: Sequence) -> None:
        """Forget the states of a sequence that is read again from the start."""
        self._states.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        self.speculation.end(sequence)
        self.discard(sequence)

    def reset(self) -> None:
        self.speculation.reset()
        self._states.clear()
