"""Log probabilities of a prompt's tokens: arrays of numbers, and the text of each distinct id."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import OptionError

PROMPT_LOGPROBS_MAX = 131_072  # of one request: about 10 MB of JSON


def check_prompt_logprobs(field: str, tokens: int, alternatives: int, answers: int = 1) -> None:
    """Raise OptionError where `answers` replies to a prompt of `tokens` tokens would have more log
    probabilities than one request may have. Each token has its own and those of its
    `alternatives`.
    """
    number = tokens * (1 + alternatives) * answers
    if number > PROMPT_LOGPROBS_MAX:
        raise OptionError(
            f"{field}: found {tokens:,} prompt tokens x {1 + alternatives} log probabilities x "
            f"{answers} answers = {number:,}, expected at most {PROMPT_LOGPROBS_MAX:,} in a "
            "request; use a shorter prompt, fewer alternatives or fewer answers"
        )


@dataclass(frozen=True)
class PromptTokenInfo:
    """A token of the prompt. `logprob` is its log probability, and `rank` is 1 plus the number of
    tokens that are more probable at its place; both are None for the first token. `top` are (text,
    log probability) of the most probable tokens there, in order, and `top_ids` are their ids.
    """

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]
    rank: int | None = None
    top_ids: tuple[int, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """Return a dict of JSON types."""
        top = [
            {"id": id, "text": text, "logprob": logprob}
            for id, (text, logprob) in zip(self.top_ids, self.top, strict=True)
        ]
        return {
            "id": self.id,
            "text": self.text,
            "logprob": self.logprob,
            "rank": self.rank,
            "top": top,
        }


@dataclass(frozen=True, eq=False)
class PromptLogprobs(abc.Sequence[PromptTokenInfo]):
    """The tokens of a prompt, as a sequence whose items are made when they are read.

    `ids` int32 [T, 1 + K] and `logprobs` float32 [T, 1 + K] have each token itself and then its K
    alternatives; `ranks` int32 [T] are of the tokens themselves. The first row of all but `ids`
    means nothing. `distinct` int32 [D] are the ids that occur, and `texts` what they spell.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    distinct: NDArray[np.int32]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> PromptTokenInfo: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[PromptTokenInfo, ...]: ...

    def __getitem__(self, index: int | slice) -> PromptTokenInfo | tuple[PromptTokenInfo, ...]:
        if isinstance(index, slice):
            return tuple(self._token(i) for i in range(*index.indices(len(self))))
        return self._token(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptLogprobs) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.ids.tobytes())

    def __repr__(self) -> str:
        return repr(tuple(self))

    @cached_property
    def _text_of(self) -> dict[int, str]:
        return dict(zip(self.distinct.tolist(), self.texts, strict=True))

    def _token(self, index: int) -> PromptTokenInfo:
        own, *others = self.ids[index].tolist()
        texts = self._text_of
        if not index:
            return PromptTokenInfo(own, texts[own], None, ())
        logprob, *values = self.logprobs[index].tolist()
        top = tuple((texts[i], value) for i, value in zip(others, values, strict=True))
        rank = int(self.ranks[index])
        return PromptTokenInfo(own, texts[own], logprob, top, rank, tuple(others))
