"""Answers that follow a JSON schema: at each place, only tokens that can still lead to such an
answer, and the end only where it is whole.

The grammars are llguidance's (https://github.com/guidance-ai/llguidance): made in milliseconds,
walked along the tokens' spellings.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtmd.kernels.errors import MtmdError, OptionError
from mtmd.llm.sampling.json_schema import grammar_text
from mtmd.llm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMARS = 32  # kept for each tokenizer
UNWRITABLE = (
    "json_schema: no token of the model can come next; a text in the schema has characters that "
    "the model cannot write"
)


class Grammars:
    """The grammars made for one tokenizer. Its spellings are read when the first is asked for: 2 s
    for 262,144 of them. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._spellings: LLTokenizer | None = None
        self._made: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def constraint(self, schema: str, stop: frozenset[int]) -> JsonConstraint:
        """For one answer. `schema` as `schema_text` returns it; `stop` are the tokens that end the
        answer.

        Raises OptionError where no token can end it, or the schema is too complex.
        """
        if not stop:
            raise OptionError(
                "json_schema: found no token that ends the answer, expected one; leave ignore_eos "
                "away"
            )
        with self._lock:
            result = self._made.get(schema)
            if result is None:
                result = self._made[schema] = self._make(schema)
                if len(self._made) > GRAMMARS:
                    self._made.popitem(last=False)
            self._made.move_to_end(schema)
            return JsonConstraint(result.deep_copy(), stop)

    def _make(self, schema: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

        grammar = grammar_text(schema)
        if self._spellings is None:
            # Without slices, which speed up masks of free text by half and take twice the time and
            # five times the memory to make.
            self._spellings = LLTokenizer(
                TokenizerWrapper(_Spellings(self._tokenizer.token_bytes())), slices=[]
            )
        made = LLMatcher(self._spellings, grammar, log_level=0)
        if made.is_error():
            raise OptionError(
                f"json_schema: found a schema that is too complex ({_first_line(made)}), expected "
                "a simpler one"
            )
        return made


class JsonConstraint:
    """An `mtmd.llm.engine.engine.Constraint`: one answer under way."""

    def __init__(self, matcher: LLMatcher, stop: frozenset[int]):
        self._matcher, self._stop = matcher, sorted(stop)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf at every token that may not come next. A copy. Raises MtmdError
        where none may.
        """
        allowed = torch.frombuffer(
            bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8
        )[:-1]  # the last is the library's end
        self._check()
        forbidden = torch.ones(
            len(logits), dtype=torch.bool
        )  # rows beyond the vocabulary stay forbidden
        rows = min(len(allowed), len(logits))
        forbidden[:rows] = allowed[:rows] == 0
        forbidden[[s for s in self._stop if s < len(logits)]] = not self._matcher.is_accepting()
        if forbidden.all():
            raise MtmdError(UNWRITABLE)
        return logits.masked_fill(forbidden.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher)
            raise MtmdError(
                UNWRITABLE
                if reason == "NoExtensionBias"
                else "json_schema: the schema became too complex while the answer was written "
                f"({reason}); simplify it"
            )


class _Spellings:
    """A vocabulary as the library wants it: the bytes of each token, and one more token for the
    end.
    """

    def __init__(self, tokens: list[bytes]):
        self.tokens = [*tokens, b""]
        self.eos_token_id, self.bos_token_id = len(tokens), None
        self.special_token_ids = [i for i, spelling in enumerate(self.tokens) if not spelling]

    def __call__(self, text: Any) -> list[int]:
        """Asked for by the library, never called: `json_schema` forbids forcing."""
        raise TypeError(f"{text!r:.60} is not to be cut into tokens here")


def _first_line(matcher: LLMatcher) -> str:
    """Of an error whose further lines tell the parser's state."""
    lines: list[str] = matcher.get_error().splitlines()
    return lines[0][:160] if lines else "unknown"
