"""The next tokens of several sequences at once, where the logits are: one upload of all that is
batch, grammars included, one read-back of what is chosen, whatever the number of sequences.

The formulas, their order and the random numbers are those of `sampler.py`, which chooses one token
on the host: an answer is the same either way, but for the last bits of sums.

No row is sorted as a whole: what `top_k` and `top_p` keep is found among the `HEAD` largest, and
how much the others have follows from the sum of all. Where that is not enough, as in a row in which
thousands are about as likely, the row is sorted after all, which takes another upload and
read-back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import MtmdError
from mtmd.kernels.backends.side_stream import host_bytes
from mtmd.llm.sampling.options import Sampling
from mtmd.llm.sampling.sampler import check_peak

HEAD = 1024  # of the largest of a row, which are put in order
ALIGN = 16  # bytes between two parts of what is uploaded
TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True)
class RowRequest:
    """Describes how to choose a token from one row of logits.

    `seen`: tokens that a repetition penalty counts; `written`: those of the answer; `forbidden`:
    tokens that do not come where another may. `point`: a random number in [0, 1), of a row that is
    not greedy. `allowed` uint8 [V / 8]: a bit for each token that a constraint allows, the lowest
    of each byte first; None where there is none.
    `alternatives`: how many of the most probable tokens to report, None for no probabilities.
    """

    sampling: Sampling
    seen: Sequence[int] = ()
    written: Sequence[int] = ()
    forbidden: frozenset[int] = frozenset()
    point: float = 0.0
    allowed: np.ndarray | None = None
    alternatives: int | None = None


@dataclass(frozen=True)
class Sampled:
    """A token, and, where they are requested, its log probability and the most probable tokens with
    theirs; or why there is none.
    """

    token: int = -1
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: MtmdError | None = None


def sample(
    logits: Tensor,
    requests: Sequence[RowRequest],
    rows: Sequence[int] | None = None,
    head: int | None = HEAD,
) -> list[Sampled]:
    """Choose a token from each of these `rows` of `logits` [N, V], or from all, as its request
    says; any float type, any device. `head`: how many of the largest are put in order at first,
    None for all; the result is the same.
    """
    size = logits.shape[1]
    errors = [_unknown(request, size) for request in requests]
    rows = range(len(logits)) if rows is None else rows
    batch = _Requests(requests, size, errors, rows, logits.device)
    if list(rows) != list(range(len(logits))):  # most often all of them, in their order
        logits = logits.index_select(0, batch.rows)
    values = logits.float()
    if values.data_ptr() == logits.data_ptr():
        values = values.clone()
    values = batch.applied(values)
    peak, tokens = values.max(1)
    enough = torch.ones_like(tokens, dtype=torch.bool)
    if any(w.sampling.temperature > 0 for w in requests):
        drawn, enough = batch.drawn(values, peak, _head(requests, size, head))
        is_random = batch.is_random
        tokens = torch.where(is_random, drawn, tokens)
        enough = enough | ~is_random | ~peak.isfinite()
    match = [enough[:, None].double(), tokens[:, None].double(), peak[:, None].double()]
    maximum = max((w.alternatives for w in requests if w.alternatives is not None), default=None)
    if maximum is not None:
        # Probabilities are the model's own, before what a constraint allows.
        logprobs = logits.float().log_softmax(1)
        best = logprobs.topk(min(maximum, size), 1)
        match += [logprobs.gather(1, tokens[:, None]), best.indices, best.values]
    lines = torch.cat([part.double() for part in match], 1).cpu().tolist()
    result = [
        _sampled(line[1:], request, error, logits[i])
        for i, (line, request, error) in enumerate(zip(lines, requests, errors, strict=True))
    ]
    if short := [i for i, line in enumerate(lines) if not line[0]]:
        again = sample(logits, [requests[i] for i in short], short, None)
        for i, one in zip(short, again, strict=True):
            result[i] = one
    return result


def _head(requests: Sequence[RowRequest], size: int, head: int | None) -> int:
    """Return how many of the largest are put in order: `head` for `top_p`, the `top_k` of every
    row.
    """
    if head is None:
        return size
    maximum = max((w.sampling.top_k for w in requests if w.sampling.top_k < size), default=0)
    minimum = head if any(w.sampling.top_p < 1 for w in requests) else 1
    return min(max(minimum, maximum), size)


def _unknown(request: RowRequest, size: int) -> MtmdError | None:
    """Return the error of a request about tokens that the model does not have."""
    assert isinstance(request.sampling.logit_bias, tuple)  # the options made it so
    highest = max((token for token, _ in request.sampling.logit_bias), default=0)
    if highest >= size:
        return MtmdError(f"logit_bias: found token {highest}, expected below {size}")
    if request.sampling.repetition_penalty != 1 and request.seen:
        low, high = min(request.seen), max(request.seen)
        if low < 0 or high >= size:
            return MtmdError(
                f"the tokens seen range from {low} to {high}; expected 0 to {size - 1}, the rows "
                "of the model's output; is the tokenizer of another checkpoint?"
            )
    return None


def _sampled(
    row: list[float], request: RowRequest, error: MtmdError | None, logits: Tensor
) -> Sampled:
    if error is not None:
        return Sampled(error=error)
    try:
        check_peak(row[1], logits)
    except MtmdError as bad:
        return Sampled(error=bad)
    if request.alternatives is None:
        return Sampled(int(row[0]))
    maximum = (len(row) - 3) // 2
    top = zip(map(int, row[3 : 3 + maximum]), row[3 + maximum :], strict=True)
    return Sampled(int(row[0]), row[2], tuple(top)[: request.alternatives])


class _Requests:
    """Describes what all rows ask, as numbers side by side, brought to the device at once: which
    rows they are, tokens that grammars allow, places among the N x V logits and what is done there,
    and how each row is drawn.
    """

    def __init__(
        self,
        requests: Sequence[RowRequest],
        size: int,
        errors: Sequence[MtmdError | None],
        rows: Sequence[int],
        device: torch.device,
    ):
        self.requests, self.size = requests, size
        self.repeated: dict[int, float] = {}
        self.added: Counter[int] = Counter()
        self.without: list[int] = []
        for number, (request, error) in enumerate(zip(requests, errors, strict=True)):
            if error is None:
                self._add(number * size, request)
        stored = [number for number, request in enumerate(requests) if request.allowed is not None]
        bits = [request.allowed for request in requests if request.allowed is not None]
        locations = [*self.without, *self.repeated, *self.added]
        amounts = [0.0] * len(self.without) + [*self.repeated.values(), *self.added.values()]
        parts = (
            np.array(rows, np.int64),
            np.array(stored, np.int64),
            np.array(locations, np.int64),
            np.array(amounts, np.float64),
            np.array([self._options(request) for request in requests], np.float64),
            np.stack(bits) if bits else np.empty((0, -(-size // 8)), np.uint8),
        )
        self.rows, self._stored, self._at, self._amounts, self._drawing, self._bits = upload(
            parts, device
        )

    def _add(self, base: int, request: RowRequest) -> None:
        sampling = request.sampling
        if sampling.repetition_penalty != 1:
            for token in request.seen:
                self.repeated[base + token] = sampling.repetition_penalty
        assert isinstance(sampling.logit_bias, tuple)
        for token, bias in sampling.logit_bias:
            self.added[base + token] += bias  # type: ignore[assignment]
        if sampling.frequency_penalty or sampling.presence_penalty:
            for token, times in Counter(request.written).items():
                self.added[base + token] -= (  # type: ignore[assignment]
                    sampling.frequency_penalty * times + sampling.presence_penalty
                )
        self.without += [base + token for token in request.forbidden if token < self.size]

    def _options(self, request: RowRequest) -> tuple[float, ...]:
        s = request.sampling
        top_k = s.top_k if 0 < s.top_k < self.size else self.size
        return s.temperature or 1.0, top_k, s.top_p, s.min_p, request.point, s.temperature > 0

    @property
    def is_random(self) -> Tensor:
        """bool [N]"""
        return self._drawing[:, 5] > 0

    def applied(self, values: Tensor) -> Tensor:
        """`values` [N, V] fp32 with what grammars allow, biases and penalties, in place."""
        if len(self._stored):
            bit = torch.arange(8, dtype=torch.uint8, device=values.device)
            forbidden = (self._bits[:, :, None] >> bit & 1).flatten(1)[:, : self.size] == 0
            left = values.index_select(0, self._stored).masked_fill(forbidden, -torch.inf)
            values.index_copy_(0, self._stored, left)
        at, amount, flat = self._at, self._amounts, values.view(-1)
        without, repeated = len(self.without), len(self.without) + len(self.repeated)
        if without:
            hidden = values.clone()
            hidden.view(-1)[at[:without]] = -torch.inf
            # Of a row that would have nothing left, nothing is hidden.
            some = hidden.isfinite().any(1, keepdim=True)
            values = torch.where(some, hidden, values)
            flat = values.view(-1)
        if repeated > without:
            location, factor = at[without:repeated], amount[without:repeated].float()
            stored = flat[location]
            flat[location] = torch.where(stored < 0, stored * factor, stored / factor)
        if len(at) > repeated:
            flat[at[repeated:]] += amount[repeated:].float()
        return values

    def drawn(self, values: Tensor, peak: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """[N], drawn by each row's random number, and whether the `head` largest were enough for
        that; of greedy rows anything.
        """
        options = [w.sampling for w in self.requests]
        size = self.size
        temperature, top_k, top_p, min_p, point = (self._drawing[:, i : i + 1] for i in range(5))
        scores = (values - peak[:, None]) / temperature.float()
        enough = torch.ones(len(options), dtype=torch.bool, device=values.device)
        if any(0 < s.top_k < size or s.top_p < 1 for s in options):
            ordered = scores.topk(head, 1).values if head < size else scores.sort(1, True).values
            some = top_k < size
            kth = ordered.gather(1, torch.where(some, top_k.long() - 1, 0))
            kth = torch.where(some, kth, -torch.inf)
            scores = scores.masked_fill(scores < kth, -torch.inf)
            if any(s.top_p < 1 for s in options):
                ordered = ordered.masked_fill(ordered < kth, -torch.inf)
                saved, enough = _nucleus(scores, ordered, top_p)
                scores = scores.masked_fill(~saved, -torch.inf)
        if any(s.min_p > 0 for s in options):
            parts = scores.softmax(1)
            scores = scores.masked_fill(
                parts < min_p.float() * parts.amax(1, keepdim=True), -torch.inf
            )
        edges = scores.softmax(1).double().cumsum(1)
        result = torch.searchsorted(edges, point * edges[:, -1:], right=True)[:, 0]
        return result.clamp_(max=size - 1), enough


def _nucleus(scores: Tensor, ordered: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of `scores` [N, V], 0 the largest, are among the fewest that have `top_p` [N, 1]
    of all, of equals the first; and whether the largest of them, `ordered` [N, K] from the largest
    on, were enough to tell [N].

    From the largest on, in double precision, so that what comes behind changes nothing.
    """
    total = scores.exp().sum(1, keepdim=True, dtype=torch.float64)
    sums = ordered.exp().cumsum(1, dtype=torch.float64)
    above = torch.cat([torch.zeros_like(total), sums[:, :-1]], 1)
    # What each has together with all that come behind it.
    gone = ((total - above) / total).float() <= (1 - top_p).float()
    gone[:, 0] = False
    count = (~gone).sum(1, keepdim=True)
    minimum = ordered.gather(1, count - 1)
    equal = scores == minimum
    first = equal.cumsum(1, dtype=torch.int32) <= count - (ordered > minimum).sum(1, keepdim=True)
    is_all = top_p >= 1
    saved = (scores > minimum) | (equal & first) | is_all
    is_whole = ordered.shape[1] == scores.shape[1]
    enough = gone[:, -1:] | ordered[:, -1:].isneginf() | is_all
    return saved, enough[:, 0] | is_whole


def upload(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays, side by side in one copy to the device, which waits for nothing."""
    offsets, size = [], 0
    for part in parts:
        offsets.append(size)
        size += -(-part.nbytes // ALIGN) * ALIGN
    # torch hands page-locked memory out again only when what was copied from it has left
    host = host_bytes((size,)) if device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
    for part, offset in zip(parts, offsets, strict=True):
        host.numpy()[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[offset : offset + part.nbytes].view(TYPES[part.dtype]).view(part.shape)
        for part, offset in zip(parts, offsets, strict=True)
    ]
