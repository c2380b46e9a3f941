"""Sequences whose constraints are still computing what may come next. Batches run without them."""

from __future__ import annotations

from collections import abc

from torch import Tensor

from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence, State
from mtmd.llm.sampling.logit_rows import Row, tensor_of


class Constraints:
    """Logits [V] of the sequences that wait."""

    def __init__(self) -> None:
        self._waiting: dict[Sequence, tuple[Prompt, Tensor]] = {}

    @staticmethod
    def begin(prompt: Prompt) -> None:
        """Start over: the prompt is about to be read."""
        if prompt.constraint is not None:
            prompt.constraint.begin()

    def hold(self, sequence: Sequence, prompt: Prompt, logits: Row) -> None:
        """Keep the logits of a sequence until its constraint is ready."""
        self._waiting[sequence] = prompt, tensor_of(logits).clone()

    def advance(self, wait_s: float = 0) -> abc.Iterator[tuple[Sequence, Tensor]]:
        """Yield sequences whose constraints are ready by now, or, at the latest, after `wait_s`
        together.
        """
        any_ready = False
        for sequence, (prompt, logits) in list(self._waiting.items()):
            if sequence.state is not State.SAMPLING:
                del self._waiting[sequence]  # it was preempted, and will come here again
                continue
            assert prompt.constraint is not None
            if prompt.constraint.ready(0 if any_ready else wait_s / len(self._waiting)):
                any_ready = True
                del self._waiting[sequence]
                yield sequence, logits

    def end(self, sequence: Sequence, prompt: Prompt) -> None:
        self._waiting.pop(sequence, None)
        prompt.close()

    def reset(self) -> None:
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)
