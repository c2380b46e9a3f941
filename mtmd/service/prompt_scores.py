"""The log probabilities of one prompt, which all answers to it share."""

from __future__ import annotations

from collections import abc
from threading import Lock

import numpy as np

from mtmd.llm.engine.sequence import Sequence, Token
from mtmd.prompt_logprobs import PromptLogprobs


class PromptScores:
    """`answers` is the number of answers to the prompt: the first one scores it, and the others
    read `tokens`, those of the prompt from the second on, or None until all are scored.
    """

    def __init__(self, answers: int = 1) -> None:
        self.answers = answers
        self.tokens: list[Token] | None = None
        self._made: PromptLogprobs | None = None
        self._making = Lock()

    def note(self, sequence: Sequence) -> None:
        """Take the scores of a sequence that has read and scored the whole prompt."""
        scores = sequence.scores
        if self.tokens is None and scores is not None and len(scores) + 1 == sequence.prompt_tokens:
            self.tokens = scores

    def spelled(self, first: int, spell: abc.Callable[[int], str]) -> PromptLogprobs:
        """Return all tokens of the prompt, whose first is `first`; the same object for each answer.
        Each distinct id is spelled once.
        """
        with self._making:
            if self._made is None:
                assert self.tokens is not None
                self._made = _spelled(self.tokens, first, spell)
            return self._made


def _spelled(
    tokens: abc.Sequence[Token], first: int, spell: abc.Callable[[int], str]
) -> PromptLogprobs:
    width = 1 + max((len(token.top) for token in tokens), default=0)
    ids = np.full((len(tokens) + 1, width), first, np.int32)
    logprobs, ranks = np.zeros(ids.shape, np.float32), np.zeros(len(ids), np.int32)
    for row, token in enumerate(tokens, 1):
        ids[row] = [token.id, *(i for i, _ in token.top)]
        logprobs[row] = [token.logprob or 0.0, *(value for _, value in token.top)]
        ranks[row] = token.rank or 0
    distinct = np.unique(ids)
    return PromptLogprobs(ids, logprobs, ranks, distinct, tuple(map(spell, distinct.tolist())))
