"""The next token of a sequence, from its logits: one by one on the host, or those of a whole batch
where the logits are.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from torch import Tensor

from mtmd.base.errors import MtmdError
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence, State, Token
from mtmd.llm.sampling.batch_sampler import RowRequest, Sampled, sample
from mtmd.llm.sampling.logit_rows import Row, tensor_of


def next_token(
    prompt: Prompt, sequence: Sequence, logits: Row, sampled: Sampled | None = None
) -> tuple[Token, bool]:
    """Return a token, and whether it ends the answer. `sampled`: as chosen already. Raises
    MtmdError.
    """
    thought = prompt.thought if prompt.thinks else None
    forced = thought.forced() if thought else None
    if forced is not None:
        token = forced
        if prompt.is_random:
            prompt.sampler.use()  # each token has its own random number
    elif sampled is None:
        allowed = prompt.constraint.mask(tensor_of(logits)) if prompt.constraint else logits
        written = sequence.tokens
        forbidden = prompt.forbidden(written)
        token = prompt.sampler(allowed, prompt.penalized(written), written, forbidden)
    else:
        if sampled.error is not None:
            raise sampled.error
        token = sampled.token
        if prompt.is_random:
            prompt.sampler.use()
    if token in prompt.stop and forced is None:
        if thought is None or not thought.must_be_closed:
            return _reported(token, logits, prompt, sampled), True
        token, sampled = thought.close(), None
    if prompt.constraint:
        prompt.constraint.accept(token)
    if prompt.thinks and thought:
        thought.accept(token)
    return _reported(token, logits, prompt, sampled), False


def sample_batch(
    parts: abc.Iterable[tuple[Sequence, int]],
    logits: Tensor,
    prompt_of: Callable[[Sequence], Prompt],
) -> dict[Sequence, list[Sampled]]:
    """Return the next tokens of the sequences of a batch, and those after each proposed token, if
    it comes. Each sequence has so many rows of `logits`. A constraint knows only what comes next:
    what comes after proposed tokens is left to `next_token`.
    """
    first, rows, requests, owners = 0, list[int](), list[RowRequest](), list[Sequence]()
    for sequence, count in parts:
        prompt = prompt_of(sequence)
        if sequence.state is State.SAMPLING and prompt.max_tokens > 0:
            for index, request in enumerate(_requests(prompt, sequence, count, logits.shape[1])):
                requests.append(request)
                rows.append(first + index)
                owners.append(sequence)
        first += count
    sampled: dict[Sequence, list[Sampled]] = {}
    if requests:
        for sequence, one in zip(owners, sample(logits, requests, rows), strict=True):
            sampled.setdefault(sequence, []).append(one)
    return sampled


def _requests(
    prompt: Prompt, sequence: Sequence, count: int, size: int
) -> abc.Iterator[RowRequest]:
    allowed = None
    if prompt.constraint is not None:
        try:
            if prompt.constraint.ready():
                allowed = prompt.constraint.allowed(size)
        except MtmdError:
            allowed = None  # it will be raised again, for this sequence only
        if allowed is None:
            return
    # Nor is it known whether a thought has ended by then.
    number = 1 if prompt.constraint is not None or prompt.thinks else count
    points = prompt.sampler.points(number) if prompt.is_random else [0.0] * number
    for index, point in enumerate(points):
        written = [*sequence.tokens, *sequence.proposal[:index]]
        yield RowRequest(
            prompt.sampler.sampling,
            prompt.penalized(written),
            written,
            prompt.forbidden(written),
            point,
            allowed,
            prompt.alternatives,
        )


def _reported(token: int, logits: Row, prompt: Prompt, sampled: Sampled | None) -> Token:
    if sampled is not None and sampled.token == token:
        return Token(token, sampled.logprob, sampled.top)
    return with_probabilities(token, logits, prompt.alternatives)


def with_probabilities(token: int, logits: Row, alternatives: int | None) -> Token:
    """Return a token with the model's own probabilities, before what a constraint allows."""
    if alternatives is None:
        return Token(token)
    logprobs = tensor_of(logits).float().log_softmax(0)
    best = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(token, float(logprobs[token]), top)
