"""Log probabilities of the tokens of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence, Token

SCORED_AT_ONCE = 32  # rows of logits: a copy of each is made


def is_scored(sequence: Sequence) -> bool:
    """Return whether log probabilities of tokens of its prompt are still missing."""
    return sequence.scores is not None and len(sequence.scores) + 1 < sequence.prompt_tokens


def score(sequence: Sequence, prompt: Prompt, logits: Tensor) -> None:
    """Add the scores of tokens of a prompt: logits [N, V] after each of the next N that are read
    are about the tokens behind them. What is read once more, as its sequence was preempted, has its
    scores already.
    """
    scores = sequence.scores
    assert scores is not None
    tokens = [token for span in prompt.spans for token in span.tokens]
    start = sequence.done + 1
    for first in range(0, len(logits), SCORED_AT_ONCE):
        stop = min(first + SCORED_AT_ONCE, len(logits))
        targets = tokens[start + first : start + stop]
        scored = len(scores) - (start + first - 1)
        if scored >= len(targets):
            continue
        rows = logits[first : first + len(targets)].float().log_softmax(1)
        own = rows.gather(1, rows.new_tensor(targets, dtype=torch.int64)[:, None])
        ranks = (rows > own).sum(1) + 1
        best = rows.topk(min(prompt.prompt_alternatives or 0, rows.shape[1]))
        lines = zip(
            *(targets, own[:, 0].tolist(), ranks.tolist()),
            *(best.indices.tolist(), best.values.tolist()),
            strict=True,
        )
        for token, logprob, rank, ids, values in list(lines)[scored:]:
            scores.append(Token(token, logprob, tuple(zip(ids, values, strict=True)), rank))
