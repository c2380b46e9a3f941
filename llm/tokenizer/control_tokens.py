"""Describes what keeps a user's text from spelling control tokens.

User text can hold the spelling of one ("<end_of_turn>"). `seal` makes such text harmless before it
enters a chat template: it puts an invisible mark inside each spelling, and `Tokenizer.encode` cuts
the text at the marks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Set
from typing import Any

import tokenizers

from mtmd.base.errors import ModelError, PromptError
from mtmd.base.panics import panics_as
from mtmd.llm.tokenizer.gguf_vocabulary import TOKEN_CHARS_MAX

# A Unicode noncharacter: reserved for use inside a program, never part of text that is exchanged.
SEAL = "\ufdd0"
# This one and those beside it have uses here, which no text from outside may interfere with.
_INSIDE = re.compile("[\ufdd0-\ufdef]")
# A second look finds what normalising makes of the parts; no tokenizer is known to need a third.
ROUNDS = 4
LONG = 4096  # characters, which take about a millisecond


class ControlTokens:
    """Control tokens of one tokenizer: their `spellings`, and the `ids` that no user's text may
    become.
    """

    def __init__(self, inner: tokenizers.Tokenizer, spellings: Iterable[str], ids: Set[int]):
        self._inner = inner
        self._spellings = _Spellings(spellings, inner.normalizer)
        self.ids = ids

    def seal(self, text: str) -> str:
        """Text in which no control token can be found, wherever a template puts it. Text without
        their spellings is unchanged.

        Raises PromptError if the tokenizer turns a single character of the text into one of them.
        """
        # Normalisers can make a special token out of other characters (NFKC: fullwidth "＜").
        # Rather than foresee them, look.
        pieces = self._spellings.seal(text).split(SEAL)
        return SEAL.join(self._without_special(piece, ROUNDS) for piece in pieces)

    def _without_special(self, piece: str, rounds: int) -> str:
        """`piece` with seals wherever it, or what they leave of it, becomes a special token. After
        so many rounds they stand between all its characters.
        """
        sealed = self._split(piece) if rounds else SEAL.join(piece)
        if sealed == piece:
            return piece
        return SEAL.join(self._without_special(part, rounds - 1) for part in sealed.split(SEAL))

    def _split(self, piece: str) -> str:
        """`piece` with a seal between all characters that became a special token."""
        if not piece:
            return piece
        if self.ids.isdisjoint(encode_piece(self._inner, piece).ids):
            return piece
        encoded = encode_piece(self._inner, piece, offsets=True)
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

    Spellings stand in sorted lists, in which those that a text may begin with are beside it: a
    place in a text costs a search among them, and they take no more memory than their characters.
    """

    def __init__(self, control: Iterable[str], normalizer: Any) -> None:
        """Raises ModelError for a spelling that is longer than any model has."""
        self._normalizer = normalizer
        spellings = {text for text in control if len(text) > 1}
        self._all = sorted(spellings | {self._normalize(text) for text in spellings})
        longest = max(self._all, key=len, default="")
        if len(longest) > TOKEN_CHARS_MAX:
            raise ModelError(
                f"the tokenizer has a control token of {len(longest)} characters "
                f"({longest!r:.40}), expected at most {TOKEN_CHARS_MAX}; is the file broken?"
            )
        self._longest = len(longest)
        # One that begins with another is found by that.
        self._shortest: list[str] = []
        for text in sorted(spellings):
            if not self._shortest or not text.startswith(self._shortest[-1]):
                self._shortest.append(text)
        self._begins = (
            re.compile(f"{_any(text[0] for text in spellings)}(?={_any(t[1] for t in spellings)})")
            if spellings
            else None
        )

    def seal(self, text: str) -> str:
        text = text if text.isascii() else _INSIDE.sub("", text)
        if self._begins is not None:
            text = self._break(text, self._begins)
        # A template may put two texts side by side: "<end_of_" must not wait for a "turn>". It may
        # also trim the blanks between them.
        stem = text.rstrip()
        return stem + SEAL + text[len(stem) :] if self._begins_special(stem) else text

    def _break(self, text: str, begins: re.Pattern[str]) -> str:
        """A seal after the first character of each spelling: of two that overlap, in both."""
        out, done = [], 0
        for match in begins.finditer(text):
            rest = text[match.start() : match.start() + self._longest]
            # All that stands between a beginning of `rest` and `rest` begins alike.
            at = bisect_right(self._shortest, rest)
            if at and rest.startswith(self._shortest[at - 1]):
                out.append(text[done : match.end()])
                done = match.end()
        return SEAL.join([*out, text[done:]])

    def _begins_special(self, stem: str) -> bool:
        tail = stem[-self._longest :] if self._longest else ""
        return any(
            self._is_beginning(view[start:])
            for view in (tail, self._normalize(tail))
            for start in range(len(view))
        )

    def _is_beginning(self, text: str) -> bool:
        """Return whether a spelling begins with `text`, and goes on."""
        at = bisect_right(self._all, text)
        return at < len(self._all) and self._all[at].startswith(text)

    def _normalize(self, text: str) -> str:
        try:
            return self._normalizer.normalize_str(text) if self._normalizer is not None else text
        except (TypeError, UnicodeError):  # a lone surrogate; `encode` says so to the user
            return text


def _any(chars: Iterable[str]) -> str:
    """A pattern for one of `chars`."""
    return f"[{''.join(map(re.escape, sorted(set(chars))))}]"


def encode_piece(
    inner: tokenizers.Tokenizer, piece: str, offsets: bool = False
) -> tokenizers.Encoding:
    """A text without seals, as tokens; where they begin and end only with `offsets`. Raises
    PromptError for text that is not valid Unicode, and for one that the library gives up on.
    """
    try:
        with panics_as(_given_up):
            if len(piece) < LONG:
                return inner.encode(piece, add_special_tokens=False)
            # `encode` keeps the interpreter, for a tenth of a second where a text is long
            encode = inner.encode_batch if offsets else inner.encode_batch_fast
            return encode([piece], add_special_tokens=False)[0]
    except (TypeError, UnicodeError) as error:  # a lone surrogate, which UTF-8 cannot write
        raise PromptError(
            "the text is not valid Unicode: it has half of a surrogate pair; send UTF-8 text"
        ) from error


def _given_up(words: str) -> PromptError:
    return PromptError(
        f"found a text that this model's tokenizer gives up on ({words}); expected one that can be "
        "cut into tokens: shorten or change it"
    )
