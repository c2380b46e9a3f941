"""The vocabulary in a GGUF's metadata, checked: the file may be hostile, so nothing is used before
its type and range were seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtmd.base.errors import ModelError

PREFIX = "tokenizer.ggml."
# token_type, of llama.h
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
NAMED_IDS = (
    *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"),
    *("padding_token_id", "unknown_token_id"),
)

# Twice or more of what the largest files in use have, so that a file made to keep us busy is
# refused within seconds.
TOKENS_MAX = 1 << 19
SPECIAL_TOKENS_MAX = 1 << 16
TOKEN_CHARS_MAX = 2048
MERGES_MAX = 1 << 20

# Spellings that nothing but the end of a turn has, whatever type files in use give them: official
# ones have "<end_of_turn>" as plain text. llama.cpp has a list of its own (src/llama-vocab.cpp,
# special_eog_ids); ends of fill-in-the-middle, which are on it, end no chat.
TURN_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<turn|>",
        "<|tool_response>",  # where the answer's tool call ends, in Gemma 4
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "[EOS]",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "[e~[",
    }
)
TAG_END = "</s>"  # ends a turn as a control token alone: many vocabularies have it as HTML
# What ends a part of an answer, and not the answer, where all of a set are in the vocabulary.
INNER_ENDS = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}),
    TAG_END: ({"<|tool_response>"}, {"<|plamo:eos|>"}),
}


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is spelled as the file has it, `types[i]` is its token_type, CONTROL for `ends`,
    which are the tokens spelled as ends of a turn, whatever the file says. `ids` leaves the padding
    rows out, and of tokens that are spelled alike has the one that text becomes; the others are in
    `repeated`, each with that one's id.

    `where` names the file, for errors. `notes` say what in the file was not believed.
    """

    metadata: Mapping[str, Any]
    where: str
    tokens: list[str] = field(init=False)
    types: list[int] = field(init=False)
    ids: dict[str, int] = field(init=False)
    repeated: dict[int, int] = field(init=False)
    ends: frozenset[int] = field(init=False)
    notes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ModelError naming the key that is missing, of another type or another length."""
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
        ids, repeated = self._by_spelling()
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "repeated", repeated)
        ends, mistyped = self._turn_ends()
        object.__setattr__(self, "ends", ends)
        object.__setattr__(self, "notes", (*_of_types(mistyped), *_of_repeated(tokens, repeated)))

    def _by_spelling(self) -> tuple[dict[str, int], dict[int, int]]:
        tokens, types = self.tokens, self.types
        # llama.cpp's converter fills embedding rows beyond the tokenizer's own tokens with these
        padding = {i for i, t in enumerate(types) if t == UNUSED and tokens[i] == f"[PAD{i}]"}
        # Named ones first: those are what the model was trained on.
        named = [i for key in NAMED_IDS if (i := self.id(key)) is not None]
        numbers = [i for i in dict.fromkeys((*named, *range(len(tokens)))) if i not in padding]
        ids = dict(zip(map(tokens.__getitem__, numbers), numbers, strict=True))
        if len(ids) == len(numbers):
            return ids, {}
        ids, repeated = {}, {}
        for i in numbers:
            if (first := ids.setdefault(tokens[i], i)) != i:
                repeated[i] = first
        return ids, repeated

    def _turn_ends(self) -> tuple[frozenset[int], list[str]]:
        """Ends of a turn by their spelling, and those that the file has as another type."""
        spelled = TURN_ENDS & self.ids.keys()
        if TAG_END in self.ids and self.types[self.ids[TAG_END]] == CONTROL:
            spelled |= {TAG_END}
        for text, sets in INNER_ENDS.items():
            if any(others <= self.ids.keys() for others in sets):
                spelled -= {text}
        mistyped = [text for text in spelled if self.types[self.ids[text]] != CONTROL]
        for text in mistyped:
            self.types[self.ids[text]] = CONTROL
        ends = {self.ids[text] for text in spelled}
        return frozenset(
            ends | {i for i, first in self.repeated.items() if first in ends}
        ), mistyped

    def stop_tokens(self) -> frozenset[int]:
        """Return the ids that end an answer: those the file names, and ends of a turn."""
        named = (self.id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        return self.ends | {i for i in named if i is not None}

    def error(self, key: str, result: str, expected: str) -> ModelError:
        return ModelError(
            f"{self.where}: {PREFIX}{key} has {result}; expected {expected} (is the file broken? "
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
        if not isinstance(value, (list, tuple)) or not set(map(type, value)) <= {str}:
            raise self.error(
                key, "nothing" if value is None else f"{value!r:.60}", "a list of texts"
            )
        if len(value) > limit:
            raise self.error(key, f"{len(value)} entries", f"at most {limit}")
        return list(value)

    def numbers(self, key: str, kind: type, length: int) -> list[Any]:
        """`length` numbers of the Python type `kind`, or [] if the file has no such key. Integers
        are taken for floats.
        """
        value = self.get(key)
        if value is None:
            return []
        if hasattr(value, "tolist"):  # a numpy array, an array.array
            value = value.tolist()
        kinds = {int, float} if kind is float else {kind}
        if not isinstance(value, (list, tuple)) or not set(map(type, value)) <= kinds:
            raise self.error(key, f"{value!r:.60}", f"a list of {kind.__name__}")
        if len(value) != length:
            raise self.error(key, f"{len(value)} entries", f"one for each of the {length} tokens")
        if not all(map(math.isfinite, value)):
            raise self.error(key, "a number that is not finite", "finite numbers")
        return list(value)


def _of_types(mistyped: list[str]) -> tuple[str, ...]:
    if not mistyped:
        return ()
    return (f"{', '.join(sorted(mistyped))}: ends of a turn, though the file's types differ",)


def _of_repeated(tokens: list[str], repeated: dict[int, int]) -> tuple[str, ...]:
    if not repeated:
        return ()
    shown = ", ".join(repr(tokens[i])[:24] for i in list(repeated)[:3])
    return (f"vocabulary entries that are there before: {len(repeated)}, as {shown}",)
