"""Goes from logits to the next token: greedy, or drawn at random from the most probable ones
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

from mtmd.base.errors import MtmdError
from mtmd.kernels.cpu.sampling.rows import draw
from mtmd.kernels.resources.threads import one_thread
from mtmd.llm.sampling.host_filters import candidates, pick
from mtmd.llm.sampling.logit_rows import Row, numbers_of, tensor_of
from mtmd.llm.sampling.options import Sampling

__all__ = ["Sampler", "Sampling", "check_peak"]

POINTS = 16  # random numbers made at once
LOWEST = {np.dtype(np.float32): -math.inf, np.dtype(np.uint16): 0xFF80}  # -inf
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
        sampling, values = self.sampling, _numbers(logits)
        if changes(sampling, seen, written):
            values = _copied(values)
            penalize(values, seen, sampling.repetition_penalty)
            adjust(values, written, sampling)
        point = 0.0 if sampling.temperature == 0 else self.points(1)[0]
        token, peak = self._drawn_without(values, [t for t in forbidden if t < len(values)], point)
        check_peak(peak, logits)
        if sampling.temperature > 0:
            self.use()
        return token

    def _drawn_without(
        self, values: np.ndarray, forbidden: list[int], point: float
    ) -> tuple[int, float]:
        """Return it with `forbidden` at -inf meanwhile, unless none would be left."""
        if not forbidden:
            return self._drawn(values, point)
        if not values.flags.writeable:
            values = values.copy()
        before = values[forbidden]
        values[forbidden] = LOWEST[values.dtype]
        try:
            result = self._drawn(values, point)
        finally:
            values[forbidden] = before
        return self._drawn(values, point) if result[1] == -math.inf else result

    def _drawn(self, values: np.ndarray, point: float) -> tuple[int, float]:
        """A token, which means something where the largest logit, beside it, is finite."""
        sampling = self.sampling
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        token, peak = draw(values, sampling.temperature, *filters, point)
        if token is not None or not math.isfinite(peak):
            return token or 0, peak
        own = _copied(values)
        tokens, weights = candidates(own, sampling, own)
        index = pick(weights, point)
        return (index if tokens is None else int(tokens[index])), peak

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


def _numbers(logits: Row) -> np.ndarray:
    """Logits in numpy's hands, fp32 or bf16 as uint16. Other types are widened, by torch, which
    would wake its threads for that.
    """
    if isinstance(logits, torch.Tensor):
        if logits.dtype not in (torch.float32, torch.bfloat16):
            with one_thread():
                logits = logits.float()
        if logits.device.type != "cpu" or logits.requires_grad:
            logits = logits.detach().cpu()
        logits = numbers_of(logits)
    if logits.dtype not in (np.float32, np.uint16):
        logits = logits.astype(np.float32)
    return np.ascontiguousarray(logits)


def _copied(values: np.ndarray) -> np.ndarray:
    """Copy as fp32 that may be written to, in memory of this thread: new memory takes longer than
    the work.
    """
    own = getattr(_own, "values", None)
    if own is None or len(own) < len(values):
        own = _own.values = np.empty(len(values), np.float32)
    result: np.ndarray = own[: len(values)]
    if values.dtype == np.uint16:
        np.left_shift(values, 16, out=result.view(np.uint32), dtype=np.uint32)
    elif values.base is not own:
        np.copyto(result, values)
    return result


def may_change(sampling: Sampling) -> bool:
    """Return whether logits of an answer may be changed, at its first token or at a later one."""
    return bool(
        sampling.repetition_penalty != 1
        or sampling.logit_bias
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def changes(sampling: Sampling, seen: Sequence[int], written: Sequence[int]) -> bool:
    """Return whether anything is asked that changes logits."""
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
    result, factor = logits[tokens], np.float32(penalty)
    with np.errstate(over="ignore"):
        logits[tokens] = np.where(result < 0, result * factor, result / factor)


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
        result, counts = np.unique(np.array(written, np.int64), return_counts=True)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[result] -= penalties.astype(np.float32)


def check_peak(best: float, row: Row) -> None:
    """Raises MtmdError unless the largest logit is finite. NaN is the largest if there is one."""
    if math.isfinite(best):
        return
    logits = tensor_of(row)
    bad = int(logits.isnan().sum()) or int((logits == best).sum())
    raise MtmdError(
        f"the model's output has {best:g} in {bad} of {len(logits)} logits; expected finite "
        "numbers. "
        "Try dtype='fp32' (--dtype fp32); if that does not help, the weights are broken"
    )
