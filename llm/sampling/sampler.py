"""From logits to the next token: greedy, or drawn at random from the most probable ones.

The filters and their order are those of transformers' logits processors: repetition penalty (Keskar
et al. 2019, "CTRL"), temperature, top-k, top-p (Holtzman et al. 2019, "The curious case of neural
text degeneration"), min-p (Nguyen et al. 2024, arXiv 2407.01082).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch

from mtmd.kernels.errors import MtmdError
from mtmd.kernels.resources.threads import one_thread
from mtmd.llm.sampling.options import Sampling

__all__ = ["Sampler", "Sampling", "candidates", "penalize"]


class Sampler:
    """Draws tokens for one request. It has its own random generator, so other requests do not
    change its answers.

    `seed` is the one in use, also when `Sampling.seed` was None.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        # 32 bits are enough to tell requests apart, and short enough to be typed again.
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._widened = np.empty(0, np.uint32)
        self._generator = torch.Generator(device="cpu").manual_seed(self.seed)

    def __call__(
        self, logits: torch.Tensor, seen: Sequence[int], written: Sequence[int] = ()
    ) -> int:
        """The next token from `logits` [V] (any float dtype, any device) after the tokens `seen`,
        those `written` of the answer.

        -inf marks a token that must not be chosen. Raises MtmdError for NaN or +inf, or if every
        token is at -inf.
        """
        if logits.ndim != 1 or not logits.numel():
            raise MtmdError(f"the logits have shape {list(logits.shape)}; expected [V], one row")
        with one_thread():
            if self.sampling.repetition_penalty != 1 and seen:
                logits = penalize(logits.float(), seen, self.sampling.repetition_penalty)
            values = self._float32(logits)
            values = adjusted(torch.from_numpy(values), written, self.sampling).numpy()
            # numpy's is much faster than torch's; of equal logits the first; NaN, if there is one,
            # counts as the largest
            token = int(values.argmax())
            check_peak(float(values[token]), logits)
            if self.sampling.temperature == 0:
                return token
            return self._draw(*candidates(torch.from_numpy(values), self.sampling))

    def _float32(self, logits: torch.Tensor) -> np.ndarray:
        """Logits in numpy's hands, until those of the next token: widening them by torch would wake
        its threads, and new memory for each token takes longer than the work.
        """
        if logits.device.type != "cpu" or logits.requires_grad:
            logits = logits.detach().cpu()
        if logits.dtype != torch.bfloat16:
            plain = logits if logits.dtype == torch.float32 else logits.float()
            values: np.ndarray = plain.numpy()
            return values
        words = logits.contiguous().view(torch.int16).numpy().view(np.uint16)
        if len(self._widened) != len(words):
            self._widened = np.empty(len(words), np.uint32)
        np.left_shift(words, 16, out=self._widened, dtype=np.uint32)
        return self._widened.view(np.float32)

    def points(self, count: int) -> list[float]:
        """The next `count` random numbers, which stay the next: `use` says how many were used."""
        state = self._generator.get_state()
        found = [self._point() for _ in range(count)]
        self._generator.set_state(state)
        return found

    def use(self, count: int = 1) -> None:
        for _ in range(count):
            self._point()

    def _point(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def _draw(self, tokens: torch.Tensor, probabilities: torch.Tensor) -> int:
        """One of `tokens` [N] by `probabilities` [N]: inverse of the cumulated sum, one random
        number whatever N.
        """
        edges = probabilities.double().cumsum(0)
        point = self._point() * edges[-1]
        index = torch.searchsorted(edges, point, right=True)
        return int(tokens[min(int(index), len(tokens) - 1)])


def penalize(logits: torch.Tensor, seen: Sequence[int], penalty: float) -> torch.Tensor:
    """Logits [V] with those of the tokens `seen` divided by `penalty` where positive, multiplied
    where negative. A copy.

    Raises MtmdError for a token outside the vocabulary.
    """
    tokens = torch.tensor(sorted(set(seen)), device=logits.device)
    if int(tokens[0]) < 0 or int(tokens[-1]) >= len(logits):
        raise MtmdError(
            f"the tokens seen range from {int(tokens[0])} to {int(tokens[-1])}; expected 0 to "
            f"{len(logits) - 1}, "
            "the rows of the model's output; is the tokenizer of another checkpoint?"
        )
    result = logits[tokens]
    return logits.index_put((tokens,), torch.where(result < 0, result * penalty, result / penalty))


def adjusted(logits: torch.Tensor, written: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """float32 logits [V] with biases added, and the penalties of the tokens `written` taken off:
    OpenAI's formula (platform.openai.com/docs, "frequency and presence penalties"). A copy, or the
    same where nothing changes. Raises MtmdError for a token outside the vocabulary.
    """
    assert isinstance(sampling.logit_bias, tuple)  # the options made it so
    penalised = bool(written and (sampling.frequency_penalty or sampling.presence_penalty))
    if not sampling.logit_bias and not penalised:
        return logits
    result = logits.clone()
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        if max(tokens) >= len(logits):
            raise MtmdError(f"logit_bias: found token {max(tokens)}, expected below {len(logits)}")
        result.index_add_(0, torch.tensor(tokens), torch.tensor(biases))
    if penalised:
        seen, counts = torch.tensor(list(written)).unique(return_counts=True)
        result[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return result


def candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [N] that may be drawn and their probabilities [N], from float32 `logits` [V] with
    a finite maximum.

    Every step keeps at least the best token.
    """
    # Softmax does not change under a shift; with the best logit at 0 a small temperature cannot
    # overflow.
    scores = (logits - logits.max()) / sampling.temperature
    tokens = torch.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        kth = torch.topk(scores, sampling.top_k).values[-1]
        keep = scores >= kth  # tokens equal to the k-th stay, as in transformers
        tokens, scores = tokens[keep], scores[keep]
    if sampling.top_p < 1:
        # Ascending: the sum from below says how much of the tail may go. Stable, so that of equals
        # the first ids stay.
        order = torch.sort(scores, descending=True, stable=True).indices.flip(0)
        drop = scores[order].softmax(0).cumsum(0) <= 1 - sampling.top_p
        drop[-1] = False
        keep = order[~drop].sort().values  # back in the order of ids
        tokens, scores = tokens[keep], scores[keep]
    probabilities = scores.softmax(0)
    if sampling.min_p > 0:
        keep = probabilities >= sampling.min_p * probabilities.max()
        tokens, probabilities = tokens[keep], scores[keep].softmax(0)
    return tokens, probabilities


def check_peak(best: float, logits: torch.Tensor) -> None:
    """Raises MtmdError unless the largest logit is finite. NaN is the largest if there is one."""
    if math.isfinite(best):
        return
    bad = int(logits.isnan().sum()) or int((logits == best).sum())
    raise MtmdError(
        f"the model's output has {best:g} in {bad} of {len(logits)} logits; expected finite "
        "numbers. "
        "Try --dtype fp32; if that does not help, the weights are broken"
    )
