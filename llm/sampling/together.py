"""The next tokens of several sequences at once, where the logits are: one upload of what is asked,
one read-back of what is chosen, whatever the number of sequences.

The formulas, their order and the random numbers are those of `sampler.py`, which chooses one token
on the host: an answer is the same either way, but for the last bits of sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtmd.kernels.errors import MtmdError
from mtmd.llm.sampling.options import Sampling
from mtmd.llm.sampling.sampler import check_peak


@dataclass(frozen=True)
class Wish:
    """What is asked of one row of logits.

    `seen`: tokens that a repetition penalty counts; `written`: those of the answer; `forbidden`:
    tokens that do not come where another may. `point`: a random number in [0, 1), of a row that is
    not greedy. `allowed` [V]: the row as a constraint leaves it, None where there is none.
    `alternatives`: how many of the most probable tokens to tell, None for no probabilities.
    """

    sampling: Sampling
    seen: Sequence[int] = ()
    written: Sequence[int] = ()
    forbidden: frozenset[int] = frozenset()
    point: float = 0.0
    allowed: Tensor | None = None
    alternatives: int | None = None


@dataclass(frozen=True)
class Drawn:
    """A token, and, where they are asked for, its log probability and the most probable tokens with
    theirs; or why there is none.
    """

    token: int = -1
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: MtmdError | None = None


def draw(logits: Tensor, wishes: Sequence[Wish]) -> list[Drawn]:
    """For each row of `logits` [N, V], any float type, any device, what its wish asks for."""
    size = logits.shape[1]
    errors = [_unknown(wish, size) for wish in wishes]
    values = logits.float()
    if any(w.allowed is not None for w in wishes):
        values = torch.stack(
            [
                row if w.allowed is None else w.allowed.float()
                for row, w in zip(values, wishes, strict=True)
            ]
        )
    elif values.data_ptr() == logits.data_ptr():
        values = values.clone()
    asked = _Asked(wishes, size, errors)
    values = asked.applied(values)
    peak, tokens = values.max(1)
    random = [w.sampling.temperature > 0 for w in wishes]
    if any(random):
        drawn = asked.drawn(values, peak)
        tokens = torch.where(asked.column(random, bool, values.device)[:, 0], drawn, tokens)
    found = [tokens[:, None].double(), peak[:, None].double()]
    most = max((w.alternatives for w in wishes if w.alternatives is not None), default=None)
    if most is not None:
        # Probabilities are the model's own, before what a constraint allows.
        logprobs = logits.float().log_softmax(1)
        best = logprobs.topk(min(most, size), 1)
        found += [logprobs.gather(1, tokens[:, None]), best.indices, best.values]
    rows = torch.cat([part.double() for part in found], 1).cpu().tolist()
    return [
        _drawn(row, wish, error, logits[i])
        for i, (row, wish, error) in enumerate(zip(rows, wishes, errors, strict=True))
    ]


def _unknown(wish: Wish, size: int) -> MtmdError | None:
    """What is asked of tokens that are none of the model's."""
    assert isinstance(wish.sampling.logit_bias, tuple)  # the options made it so
    highest = max((token for token, _ in wish.sampling.logit_bias), default=0)
    if highest >= size:
        return MtmdError(f"logit_bias: found token {highest}, expected below {size}")
    if wish.sampling.repetition_penalty != 1 and wish.seen:
        low, high = min(wish.seen), max(wish.seen)
        if low < 0 or high >= size:
            return MtmdError(
                f"the tokens seen range from {low} to {high}; expected 0 to {size - 1}, the rows "
                "of the model's output; is the tokenizer of another checkpoint?"
            )
    return None


def _drawn(row: list[float], wish: Wish, error: MtmdError | None, logits: Tensor) -> Drawn:
    if error is not None:
        return Drawn(error=error)
    try:
        check_peak(row[1], logits)
    except MtmdError as bad:
        return Drawn(error=bad)
    if wish.alternatives is None:
        return Drawn(int(row[0]))
    most = (len(row) - 3) // 2
    top = zip(map(int, row[3 : 3 + most]), row[3 + most :], strict=True)
    return Drawn(int(row[0]), row[2], tuple(top)[: wish.alternatives])


class _Asked:
    """What all rows ask, as numbers side by side: places among the N x V logits, and what is done
    there.
    """

    def __init__(self, wishes: Sequence[Wish], size: int, errors: Sequence[MtmdError | None]):
        self.wishes, self.size = wishes, size
        self.repeated: dict[int, float] = {}
        self.added: Counter[int] = Counter()
        self.without: list[int] = []
        for number, (wish, error) in enumerate(zip(wishes, errors, strict=True)):
            if error is None:
                self._ask(number * size, wish)

    def _ask(self, base: int, wish: Wish) -> None:
        sampling = wish.sampling
        if sampling.repetition_penalty != 1:
            for token in wish.seen:
                self.repeated[base + token] = sampling.repetition_penalty
        assert isinstance(sampling.logit_bias, tuple)
        for token, bias in sampling.logit_bias:
            self.added[base + token] += bias  # type: ignore[assignment]
        if sampling.frequency_penalty or sampling.presence_penalty:
            for token, times in Counter(wish.written).items():
                self.added[base + token] -= (  # type: ignore[assignment]
                    sampling.frequency_penalty * times + sampling.presence_penalty
                )
        self.without += [base + token for token in wish.forbidden if token < self.size]

    def applied(self, values: Tensor) -> Tensor:
        """`values` [N, V] fp32 with biases and penalties, in place."""
        places = [*self.without, *self.repeated, *self.added]
        if not places:
            return values
        amounts = [*self.repeated.values(), *self.added.values()]
        packed = np.empty(2 * len(places), np.float64)
        packed[: len(places)] = places
        packed[len(places) : len(places) + len(self.without)] = 0
        packed[len(places) + len(self.without) :] = amounts
        at, amount = torch.from_numpy(packed).to(values.device).chunk(2)
        at, flat = at.long(), values.view(-1)
        without, repeated = len(self.without), len(self.without) + len(self.repeated)
        if without:
            hidden = values.clone()
            hidden.view(-1)[at[:without]] = -torch.inf
            # Of a row that would have nothing left, nothing is hidden.
            some = hidden.isfinite().any(1, keepdim=True)
            values = torch.where(some, hidden, values)
            flat = values.view(-1)
        if repeated > without:
            place, factor = at[without:repeated], amount[without:repeated].float()
            held = flat[place]
            flat[place] = torch.where(held < 0, held * factor, held / factor)
        if len(places) > repeated:
            flat[at[repeated:]] += amount[repeated:].float()
        return values

    def column(self, numbers: Sequence[float], dtype: type, device: torch.device) -> Tensor:
        """[N, 1]"""
        return torch.from_numpy(np.array(numbers, dtype)[:, None]).to(device)

    def drawn(self, values: Tensor, peak: Tensor) -> Tensor:
        """[N], drawn by each row's random number; of greedy rows anything."""
        options = [w.sampling for w in self.wishes]
        size = values.shape[1]
        packed = self.column(
            [
                n
                for s, w in zip(options, self.wishes, strict=True)
                for n in (
                    s.temperature or 1.0,
                    s.top_k if 0 < s.top_k < size else size,
                    s.top_p,
                    s.min_p,
                    w.point,
                )
            ],
            np.float64,
            values.device,
        ).view(len(options), 5)
        temperature, top_k, top_p, min_p, point = (packed[:, i : i + 1] for i in range(5))
        scores = (values - peak[:, None]) / temperature.float()
        if any(0 < s.top_k < size or s.top_p < 1 for s in options):
            ordered, places = scores.sort(dim=1, descending=True, stable=True)
            kth = ordered.gather(1, top_k.long() - 1)
            ordered = ordered.masked_fill(ordered < kth, -torch.inf)
            if any(s.top_p < 1 for s in options):
                below = ordered.flip(1).softmax(1).cumsum(1).flip(1)
                dropped = (below <= (1 - top_p).float()) & (top_p < 1)
                dropped[:, 0] = False
                ordered = ordered.masked_fill(dropped, -torch.inf)
            scores = torch.empty_like(scores).scatter_(1, places, ordered)
        if any(s.min_p > 0 for s in options):
            parts = scores.softmax(1)
            scores = scores.masked_fill(
                parts < min_p.float() * parts.amax(1, keepdim=True), -torch.inf
            )
        edges = scores.softmax(1).double().cumsum(1)
        return torch.searchsorted(edges, point * edges[:, -1:], right=True)[:, 0].clamp_(
            max=size - 1
        )
