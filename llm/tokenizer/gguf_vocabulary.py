"""The vocabulary in a GGUF's metadata, checked: the file may be hostile, so nothing is used before
its type and range were seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtmd.kernels.errors import ModelError

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(
    1, 7
)  # token_type, of llama.h; 0 is "undefined"

# Twice or more of what the largest files in use have, so that a file made to keep us busy is
# refused within seconds.
TOKENS_MAX = 1 << 19
SPECIAL_TOKENS_MAX = 1 << 16
TOKEN_CHARS_MAX = 2048
MERGES_MAX = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is spelled as the file has it, `types[i]` is its token_type; `ids` leaves the
    padding rows out.

    `where` names the file, for errors.
    """

    metadata: Mapping[str, Any]
    where: str
    tokens: list[str] = field(init=False)
    types: list[int] = field(init=False)
    ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ModelError naming the key that is missing, of another type, of another length, or
        has a token twice.
        """
        tokens = self.strings("tokens", TOKENS_MAX)
        longest = max(tokens, key=len, default="")
        if not tokens or len(longest) > TOKEN_CHARS_MAX:
            raise self.error(
                "tokens",
                f"{len(tokens)} tokens, the longest of {len(longest)} characters",
                f"1 or more, of up to {TOKEN_CHARS_MAX}",
            )
        kinds = self.numbers("token_type", int, len(tokens)) or [NORMAL] * len(tokens)
        if not set(kinds) <= set(range(7)):
            raise self.error(
                "token_type",
                f"the type {next(kind for kind in kinds if not 0 <= kind <= BYTE)}",
                "0 to 6",
            )
        if (
            special := sum(map(kinds.count, (UNKNOWN, CONTROL, USER_DEFINED)))
        ) > SPECIAL_TOKENS_MAX:
            raise self.error(
                "token_type",
                f"{special} control and user-defined tokens",
                f"at most {SPECIAL_TOKENS_MAX}",
            )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "types", kinds)
        object.__setattr__(self, "ids", self._by_spelling())

    def _by_spelling(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            # llama.cpp's converter fills embedding rows beyond the tokenizer's own tokens with
            # these
            if kind == UNUSED and text == f"[PAD{i}]":
                continue
            if ids.setdefault(text, i) != i:
                raise self.error(
                    "tokens", f"{text!r:.60} twice, as {ids[text]} and {i}", "each token once"
                )
        return ids

    def error(self, key: str, found: str, expected: str) -> ModelError:
        return ModelError(
            f"{self.where}: {PREFIX}{key} has {found}; expected {expected} (is the file broken? "
            "convert the model again)"
        )

    def get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def text(self, key: str) -> str:
        """A short text; it must be there."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, "nothing" if value is None else f"{value!r:.60}", "a name")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"{value!r:.60}", "true or false")
        return default if value is None else value

    def id(self, key: str) -> int | None:
        """A token id, None if the file has no such key."""
        value = self.get(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 0 <= value < len(self.tokens)
        ):
            raise self.error(key, f"{value!r:.60}", f"a token id, 0 to {len(self.tokens) - 1}")
        return value

    def strings(self, key: str, limit: int) -> list[str]:
        """A list of texts; it must be there."""
        value = self.get(key)
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            raise self.error(
                key, "nothing" if value is None else f"{value!r:.60}", "a list of texts"
            )
        if len(value) > limit:
            raise self.error(key, f"{len(value)} entries", f"at most {limit}")
        return list(value)

    def numbers(self, key: str, kind: type, length: int) -> list[Any]:
        """`length` numbers of the Python type `kind`, or [] if the file has no such key."""
        value = self.get(key)
        if value is None:
            return []
        if hasattr(value, "tolist"):  # a numpy array, an array.array
            value = value.tolist()
        if not isinstance(value, (list, tuple)) or not all(
            type(number) is kind for number in value
        ):
            raise self.error(key, f"{value!r:.60}", f"a list of {kind.__name__}")
        if len(value) != length:
            raise self.error(key, f"{len(value)} entries", f"one for each of the {length} tokens")
        if not all(map(math.isfinite, value)):
            raise self.error(key, "a number that is not finite", "finite numbers")
        return list(value)
