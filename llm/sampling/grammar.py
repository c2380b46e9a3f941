"""Grammars of llguidance (https://github.com/guidance-ai/llguidance) over a model's tokens: made in
milliseconds, walked along the tokens' spellings. Loads without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mtmd.base.errors import OptionError
from mtmd.base.panics import panics_as
from mtmd.llm.sampling.json_schema import grammar_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

UNWRITABLE = (
    "json_schema: no token of the model can come next; a text in the schema has characters that "
    "the model cannot write"
)


def read_vocabulary(tokens: Sequence[bytes]) -> LLTokenizer:
    """`tokens`: the bytes that each adds to an answer. A second for 500,000 of them."""
    from llguidance import LLTokenizer, TokenizerWrapper

    # Without slices, which speed up masks of free text by half and take twice the time and five
    # times the memory to make.
    return LLTokenizer(TokenizerWrapper(_Spellings(tokens)), slices=[])


def compile_grammar(vocabulary: LLTokenizer, schema: str) -> LLMatcher:
    """`schema` as `schema_text` returns it. Raises OptionError."""
    from llguidance import LLMatcher

    grammar = grammar_text(schema)
    with panics_as(_too_complex):
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise _too_complex(_first_line(matcher))
    return matcher


def allowed_tokens(matcher: LLMatcher) -> bytes:
    """The tokens that may come next, a bit each, the lowest of each byte first; one bit more is for
    the library's own end. Raises OptionError where the schema cannot be followed.
    """
    with panics_as(_grown):
        result: bytes = matcher.compute_bitmask()
    check(matcher)
    return result


def check(matcher: LLMatcher) -> None:
    """Raises OptionError for what went wrong with it."""
    if matcher.is_error():
        reason = _first_line(matcher)
        raise OptionError(UNWRITABLE) if reason == "NoExtensionBias" else _grown(reason)


def take(matcher: LLMatcher, token: int) -> None:
    """The token is the next of the answer. Raises OptionError."""
    with panics_as(_grown):
        matcher.consume_token(token)
    check(matcher)


def _too_complex(reason: str) -> OptionError:
    return OptionError(
        f"json_schema: found a schema that is too complex ({reason}), expected a simpler one"
    )


def _grown(reason: str) -> OptionError:
    return OptionError(
        f"json_schema: the schema became too complex while the answer was written ({reason}); "
        "simplify it"
    )


def _first_line(matcher: LLMatcher) -> str:
    """Return the first line of an error whose further lines tell the parser's state."""
    lines: list[str] = matcher.get_error().splitlines()
    return lines[0][:160] if lines else "unknown"


class _Spellings:
    """A vocabulary as the library wants it: the bytes of each token, and one more token for the
    end.
    """

    def __init__(self, tokens: Sequence[bytes]):
        spellings = [*tokens, b""]
        self.eos_token_id, self.bos_token_id = len(tokens), None
        self.special_token_ids = [i for i, spelling in enumerate(spellings) if not spelling]
        # Grammars name them by their ids; without spellings of their own, one would allow all.
        self.tokens = [spelling or b"\xff[%d]" % i for i, spelling in enumerate(spellings)]

    def __call__(self, text: Any) -> list[int]:
        """Asked for by the library, never called: `json_schema` forbids forcing."""
        raise TypeError(f"{text!r:.60} is not to be cut into tokens here")
