"""From logits to the next token: greedy, or drawn at random from the most probable ones
(`candidates.py`), after penalties: for repetition (Keskar et al. 2019, "CTRL"), and OpenAI's.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np
import torch

from mtmd.kernels.errors import MtmdError
from mtmd.kernels.resources.threads import one_thread
from mtmd.llm.sampling.candidates import candidates, pick
from mtmd.llm.sampling.options import Sampling
from mtmd.llm.sampling.rows import Row, numbers_of, tensor_of

__all__ = ["Sampler", "Sampling", "check_peak"]

POINTS = 16  # random numbers made at once
_own = threading.local()


class Sampler:
    """Draws tokens for one request. It has its own random generator, so other requests do not
    change its answers.

    `seed` is the one in use, also when `Sampling.seed` was None.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        # 32 bits are enough to tell requests apart, and short enough to be typed again.
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator(device="cpu").manual_seed(self.seed)
        self._next: deque[float] = deque()

    def __call__(
        self,
        logits: Row,
        seen: Sequence[int],
        written: Sequence[int] = (),
        forbidden: Collection[int] = (),
    ) -> int:
        """The next token from `logits` [V] (any float dtype, any device) after the tokens `seen`,
        those `written` of the answer. One of `forbidden` comes only where there is no other.

        -inf marks a token that must not be chosen. Raises MtmdError for NaN or +inf, or if every
        token is at -inf.
        """
        if logits.ndim != 1 or not len(logits):
            raise MtmdError(f"the logits have shape {list(logits.shape)}; expected [V], one row")
        own = _memory(len(logits))
        sampling, values = self.sampling, _float32(logits, own)
        if forbidden or changes(sampling, seen, written):
            if values is not own:
                np.copyto(own, values)
                values = own
            forbid(values, forbidden)
            penalize(values, seen, sampling.repetition_penalty)
            adjust(values, written, sampling)
        # Of equal logits the first; NaN, if there is one, counts as the largest
        token = int(values.argmax())
        check_peak(float(values[token]), logits)
        if sampling.temperature == 0:
            return token
        tokens, weights = candidates(values, sampling, own)
        index = pick(weights, self._point())
        return index if tokens is None else int(tokens[index])

    def points(self, count: int) -> list[float]:
        """The next `count` random numbers, which stay the next: `use` says how many were used."""
        while len(self._next) < count:
            made = torch.rand(POINTS, dtype=torch.float64, generator=self._generator)
            self._next.extend(made.tolist())
        return list(islice(self._next, count))

    def use(self, count: int = 1) -> None:
        for _ in range(count):
            self._point()

    def _point(self) -> float:
        self.points(1)
        return self._next.popleft()


def _memory(count: int) -> np.ndarray:
    """fp32 [count] of this thread, for the next token: new memory takes longer than the work."""
    if len(getattr(_own, "values", ())) < count:
        _own.values = np.empty(count, np.float32)
    result: np.ndarray = _own.values[:count]
    return result


def _float32(logits: Row, own: np.ndarray) -> np.ndarray:
    """Logits in numpy's hands, `own` where they had to be widened: by torch that would wake its
    threads.
    """
    if isinstance(logits, torch.Tensor):
        if logits.dtype not in (torch.float32, torch.bfloat16):
            with one_thread():
                logits = logits.float()
        if logits.device.type != "cpu" or logits.requires_grad:
            logits = logits.detach().cpu()
        logits = numbers_of(logits)
    if logits.dtype == np.uint16:
        np.left_shift(logits, 16, out=own.view(np.uint32), dtype=np.uint32)
        return own
    return logits.astype(np.float32, copy=False)


def forbid(logits: np.ndarray, tokens: Collection[int]) -> None:
    """fp32 logits [V] of these tokens become -inf, in place, unless none would be left."""
    places = [token for token in tokens if token < len(logits)]
    before = logits[places]
    logits[places] = -np.inf
    if logits.max() == -np.inf:
        logits[places] = before


def changes(sampling: Sampling, seen: Sequence[int], written: Sequence[int]) -> bool:
    """Whether anything is asked that changes logits."""
    return bool(
        (seen and sampling.repetition_penalty != 1)
        or sampling.logit_bias
        or (written and (sampling.frequency_penalty or sampling.presence_penalty))
    )


def penalize(logits: np.ndarray, seen: Sequence[int], penalty: float) -> None:
    """Logits [V] of the tokens `seen` are divided by `penalty` where positive, multiplied where
    negative, in place.

    Raises MtmdError for a token outside the vocabulary.
    """
    if penalty == 1 or not seen:
        return
    tokens = np.array(seen, np.int64)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= len(logits):
        raise MtmdError(
            f"the tokens seen range from {low} to {high}; expected 0 to {len(logits) - 1}, the "
            "rows of the model's output; is the tokenizer of another checkpoint?"
        )
    found, factor = logits[tokens], np.float32(penalty)
    with np.errstate(over="ignore"):
        logits[tokens] = np.where(found < 0, found * factor, found / factor)


def adjust(logits: np.ndarray, written: Sequence[int], sampling: Sampling) -> None:
    """Biases are added to fp32 logits [V], and the penalties of the tokens `written` taken off, in
    place: OpenAI's formula (platform.openai.com/docs, "frequency and presence penalties"). Raises
    MtmdError for a token outside the vocabulary.
    """
    assert isinstance(sampling.logit_bias, tuple)  # the options made it so
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        if max(tokens) >= len(logits):
            raise MtmdError(f"logit_bias: found token {max(tokens)}, expected below {len(logits)}")
        np.add.at(logits, list(tokens), np.array(biases, np.float32))
    if written and (sampling.frequency_penalty or sampling.presence_penalty):
        found, counts = np.unique(np.array(written, np.int64), return_counts=True)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[found] -= penalties.astype(np.float32)


def check_peak(best: float, row: Row) -> None:
    """Raises MtmdError unless the largest logit is finite. NaN is the largest if there is one."""
    if math.isfinite(best):
        return
    logits = tensor_of(row)
    bad = int(logits.isnan().sum()) or int((logits == best).sum())
    raise MtmdError(
        f"the model's output has {best:g} in {bad} of {len(logits)} logits; expected finite "
        "numbers. "
        "Try --dtype fp32; if that does not help, the weights are broken"
    )
