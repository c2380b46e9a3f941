"""Answers that follow a JSON schema: at each place, only tokens that can still lead to such an
answer, and the end only where it is whole.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.grammar import (
    UNWRITABLE,
    allowed_tokens,
    compile_grammar,
    read_vocabulary,
    take,
)
from mtmd.llm.sampling.json_schema import grammar_text, schema_text
from mtmd.llm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMARS = 32  # kept for each tokenizer


class Grammars:
    """The grammars made for one tokenizer. Its spellings are read when the first is asked for: 2 s
    for 262,144 of them. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._spellings: LLTokenizer | None = None
        self._tokens = 0
        self._made: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self) -> None:
        """Nothing has to be started."""

    def close(self) -> None:
        """Nothing has to be ended."""

    def checked(self, schema: object) -> str | None:
        """Do what `schema_text` does."""
        return schema_text(schema)

    def check(self, text: str) -> None:
        """Raises OptionError for a schema or a grammar, as text, that cannot be followed."""
        grammar_text(text)

    def constraint(self, schema: str, stop: frozenset[int]) -> JsonConstraint:
        """Return the constraint of one answer. `schema` as `schema_text` returns it; `stop` are the
        tokens that end the answer.

        Raises OptionError where no token can end it, or the schema is too complex.
        """
        check_end(stop)
        with self._lock:
            result = self._made.get(schema)
            if result is None:
                result = self._made[schema] = self._make(schema)
                if len(self._made) > GRAMMARS:
                    self._made.popitem(last=False)
            self._made.move_to_end(schema)
            return JsonConstraint(result.deep_copy(), self._tokens, stop)

    def _make(self, schema: str) -> LLMatcher:
        if self._spellings is None:
            tokens = self._tokenizer.token_bytes()
            self._spellings, self._tokens = read_vocabulary(tokens), len(tokens)
        return compile_grammar(self._spellings, schema)


class JsonConstraint:
    """An `mtmd.llm.engine.engine.Constraint`: one answer under way."""

    def __init__(self, matcher: LLMatcher, tokens: int, stop: frozenset[int]):
        self._matcher, self._tokens, self._stop = matcher, tokens, stop

    def begin(self) -> None:
        """Begin; this one has begun already."""

    def ready(self, wait_s: float = 0) -> bool:  # noqa: ARG002
        """Always: `mask` computes what it gives."""
        return True

    def allowed(self, size: int) -> np.ndarray:
        """Do what `allowed_bits` does. Raises OptionError where no token may come next."""
        bits = allowed_tokens(self._matcher)
        return allowed_bits(bits, size, self._tokens, self._stop, self._matcher.is_accepting())

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf at every token that may not come next. A copy. Raises OptionError
        where none may.
        """
        return masked(logits, self.allowed(len(logits)))

    def accept(self, token: int) -> None:
        take(self._matcher, token)

    def close(self) -> None:
        """Close; this one holds nothing."""


def allowed_bits(
    bits: bytes | memoryview, size: int, tokens: int, stop: frozenset[int], may_end: bool
) -> np.ndarray:
    """uint8 [size / 8], a bit for each of `size` logits, the lowest of each byte first: those of
    `bits` (as `grammar.allowed_tokens` gives them, of so many `tokens`), and the tokens of `stop`
    by `may_end`. Raises OptionError where nothing is left.
    """
    result = np.zeros(-(-size // 8), np.uint8)
    known = min(tokens, size)  # behind: rows beyond the vocabulary, and the library's own end
    given = np.frombuffer(bits, np.uint8)[: -(-known // 8)]
    result[: len(given)] = given
    if known % 8:
        result[known // 8] &= (1 << known % 8) - 1
    for token in stop:
        if token < size:
            result[token // 8] &= ~np.uint8(1 << token % 8)
            result[token // 8] |= may_end << token % 8
    if not result.any():
        raise OptionError(UNWRITABLE)
    return result


def masked(logits: Tensor, allowed: np.ndarray) -> Tensor:
    """Logits [V] with -inf where `allowed` (as `allowed_bits` gives it) has no bit. A copy."""
    bits = np.unpackbits(allowed, count=len(logits), bitorder="little")
    forbidden = torch.from_numpy(bits == 0)
    return logits.masked_fill(forbidden.to(logits.device), float("-inf"))


def check_end(stop: frozenset[int]) -> None:
    """Raises OptionError where no token ends an answer."""
    if not stop:
        raise OptionError(
            "json_schema: found no token that ends the answer, expected one; leave ignore_eos away"
        )
