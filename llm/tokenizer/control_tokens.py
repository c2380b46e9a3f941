"""What keeps a user's text from spelling control tokens.

User text can hold the spelling of one ("<end_of_turn>"). `seal` makes such text harmless before it
enters a chat template: it puts an invisible mark inside each spelling, and `Tokenizer.encode` cuts
the text at the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import Any

import tokenizers

from mtmd.kernels.errors import PromptError

# A Unicode noncharacter: reserved for use inside a program, never part of text that is exchanged.
SEAL = "\ufdd0"


class ControlTokens:
    """Those of one tokenizer: their `spellings`, and the `ids` that no user's text may become."""

    def __init__(self, inner: tokenizers.Tokenizer, spellings: Iterable[str], ids: Set[int]):
        self._inner = inner
        self._spellings = _Spellings(spellings, inner.normalizer)
        self.ids = ids

    def seal(self, text: str) -> str:
        """Text in which no control token can be found, wherever a template puts it. Text without
        their spellings is unchanged.

        Raises PromptError if the tokenizer turns a single character of the text into one of them.
        """
        text = self._spellings.seal(text)
        # Normalisers can make a special token out of other characters (NFKC: fullwidth "＜").
        # Rather than foresee them, look.
        while True:
            pieces = [self._split(piece) for piece in text.split(SEAL)]
            sealed = SEAL.join(pieces)
            if sealed == text:
                return text
            text = sealed

    def _split(self, piece: str) -> str:
        """`piece` with a seal between all characters that became a special token."""
        if not piece:
            return piece
        encoded = encode_piece(self._inner, piece)
        out, done = [], 0
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if token not in self.ids:
                continue
            if end - start < 2:
                raise PromptError(
                    f"the text has {piece[start:end]!r}, which this model's tokenizer reads as the "
                    "control token "
                    f"{self._inner.id_to_token(token)!r}; remove it"
                )
            out += [piece[done:start], SEAL.join(piece[start:end])]
            done = end
        return "".join([*out, piece[done:]])


class _Spellings:
    """Seals by spelling: breaks each special string in a text, and a beginning of one at the text's
    end.
    """

    def __init__(self, control: Iterable[str], normalizer: Any) -> None:
        self._normalizer = normalizer
        spellings = {text for text in control if len(text) > 1}
        # The look-ahead consumes one character only, so overlapping spellings are all found.
        self._pattern = (
            re.compile(f"(?={'|'.join(map(re.escape, sorted(spellings)))}).", re.S)
            if spellings
            else None
        )
        spellings |= {self._normalize(text) for text in spellings}
        self._prefixes = {text[:n] for text in spellings for n in range(1, len(text))}
        self._longest = max(map(len, self._prefixes), default=0)

    def seal(self, text: str) -> str:
        text = text.replace(SEAL, "")
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: match[0] + SEAL, text)
        # A template may put two texts side by side: "<end_of_" must not wait for a "turn>". It may
        # also trim the blanks between them.
        stem = text.rstrip()
        return stem + SEAL + text[len(stem) :] if self._begins_special(stem) else text

    def _begins_special(self, stem: str) -> bool:
        tail = stem[-self._longest :] if self._longest else ""
        return any(
            view[-n:] in self._prefixes
            for view in (tail, self._normalize(tail))
            for n in range(1, len(view) + 1)
        )

    def _normalize(self, text: str) -> str:
        try:
            return self._normalizer.normalize_str(text) if self._normalizer is not None else text
        except (TypeError, UnicodeError):  # a lone surrogate; `encode` says so to the user
            return text


def encode_piece(inner: tokenizers.Tokenizer, piece: str) -> tokenizers.Encoding:
    """A text without seals, as tokens. Raises PromptError for text that is not valid Unicode."""
    try:
        return inner.encode(piece, add_special_tokens=False)
    except (TypeError, UnicodeError) as error:  # a lone surrogate, which UTF-8 cannot write
        raise PromptError(
            "the text is not valid Unicode: it has half of a surrogate pair; send UTF-8 text"
        ) from error
