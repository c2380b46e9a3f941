"""Token ids that arrive one at a time, as text: whole characters only, and stop strings
watched for.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import tokenizers

from mtmd.base.errors import ModelError, OptionError

# Decoders look at the tokens before only to place blanks; one would do, a few more cost nothing.
CONTEXT_TOKENS = 4

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Incremental detokenisation. The pieces joined are what `Tokenizer.decode` gives for all ids
    at once, less a character that has only begun where the ids end.

    A piece never ends inside a character. Work per token is bounded: byte-level tokens go through
    an incremental UTF-8 decoder; for the other kinds only the tokens since the last piece are
    decoded, after a few tokens of context. Byte-fallback tokens (`<0xE2>`) wait until their run
    ends: the reference decoder turns a whole run into U+FFFD if any byte of it is wrong, so no part
    of it is certain earlier.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        skipped: frozenset[int],
        repeated: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`repeated` ids give the text of the ids that are their values."""
        self._repeated = repeated
        kinds = decoder_kinds(inner)
        if "ByteLevel" in kinds and kinds != ["ByteLevel"]:
            raise ModelError(
                f"tokenizer.json has the decoders {kinds}; expected ByteLevel to be the only one"
            )
        self._inner = inner
        self._skipped = skipped
        self._utf8 = (
            codecs.getincrementaldecoder("utf-8")("replace") if kinds == ["ByteLevel"] else None
        )
        self._byte_fallback = "ByteFallback" in kinds
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain after this token, possibly empty."""
        token = self._repeated.get(token, token)
        spelling = self._inner.id_to_token(token)
        if spelling is None or token in self._skipped:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(_byte_level(spelling))
        self._pending.append(token)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(spelling):
            return ""
        return self._flush()

    def skip(self, tokens: Iterable[int]) -> None:
        """Give no text for these tokens from now on."""
        self._skipped |= frozenset(tokens)

    def finish(self) -> str:
        """Return the rest. What has only begun of a character is left out: an answer that is cut
        there can be continued. The stream is then empty and can be used again.
        """
        if self._utf8 is not None:
            self._utf8.reset()
            return ""
        self._pending = self._whole(self._pending)
        text = self._flush()
        self._context = []
        return text

    def _whole(self, pending: list[int]) -> list[int]:
        """Byte tokens without those of a character that has only begun, where all before are
        right.
        """
        spelled = (self._inner.id_to_token(i) or "" for i in pending)
        data = bytes(int(text[3:5], 16) for text in spelled)
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(data)
        except UnicodeDecodeError:
            return pending
        begun = len(decoder.getstate()[0])
        return pending[: len(pending) - begun]

    def _flush(self) -> str:
        if not self._pending:
            return ""
        before = self._inner.decode(self._context, skip_special_tokens=False)
        both = self._context + self._pending
        text = self._inner.decode(both, skip_special_tokens=False)[len(before) :]
        self._context, self._pending = both[-CONTEXT_TOKENS:], []
        return text


class StopChecker:
    """Ends a text at the first stop string to be completed, whatever the pieces it arrives in.

    Text that may be the beginning of a stop string is held back. `result` is the stop string met,
    or None. Each character of a text is looked at once, and what is kept takes a node for each of
    the stop strings' characters (Aho and Corasick 1975, "Efficient string matching").
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises OptionError for an empty stop string."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise OptionError(
                f"stop is {stops!r:.60}; expected a list of strings that are not empty"
            )
        # A node stands for a beginning of stop strings, of so many characters; the first for none.
        self._next: list[dict[str, int]] = [{}]
        self._lengths = [0]
        self._ended = [""]  # the longest stop string that a node's text ends with
        for stop in stops:
            self._add(stop)
        self._shorter = self._link()
        self._node = 0
        self._pending = ""
        self.result: str | None = None

    def _add(self, stop: str) -> None:
        node = 0
        for length, char in enumerate(stop, 1):
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._lengths.append(length)
                self._ended.append("")
            node = self._next[node][char]
        self._ended[node] = stop

    def _link(self) -> list[int]:
        """Link each node to the next longest one that its text ends with."""
        shorter = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:  # the short ones first
            node = waiting.popleft()
            self._ended[node] = self._ended[node] or self._ended[shorter[node]]
            for char, longer in self._next[node].items():
                other = shorter[node]
                while other and char not in self._next[other]:
                    other = shorter[other]
                shorter[longer] = self._next[other].get(char, 0)
                waiting.append(longer)
        return shorter

    def push(self, piece: str) -> str:
        """The text now certain to be before any stop string. After a stop string was found, always
        empty.
        """
        if self.result is not None:
            return ""
        text, node, before = self._pending + piece, self._node, len(self._pending)
        for at, char in enumerate(piece, 1):
            while node and char not in self._next[node]:
                node = self._shorter[node]
            node = self._next[node].get(char, 0)
            # The earliest end decides, so that the answer does not depend on where pieces end; then
            # the longest of those that end there.
            if stop := self._ended[node]:
                self.result, self._pending = stop, ""
                return text[: before + at - len(stop)]
        self._node = node
        certain = len(text) - self._lengths[node]
        self._pending = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return what was held back and turned out to be no stop string."""
        text, self._pending, self._node = self._pending, "", 0
        return text


def token_bytes(
    inner: tokenizers.Tokenizer, skipped: frozenset[int], repeated: Mapping[int, int]
) -> list[bytes]:
    """Return what each id adds to a text in UTF-8, which may be a part of a character; nothing for
    `skipped` ids and those without a token. `repeated` as for `TextStream`.
    """
    kinds, spelled = decoder_kinds(inner), inner.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max((*spelled.values(), *repeated), default=-1) + 1)
    for spelling, i in spelled.items():
        if i in skipped:
            continue
        if kinds == ["ByteLevel"]:
            pieces[i] = _byte_level(spelling)
        elif "ByteFallback" in kinds and _BYTE_TOKEN.fullmatch(spelling):
            pieces[i] = bytes([int(spelling[3:5], 16)])
        else:  # after another token: some decoders take a blank off the beginning of a text
            pieces[i] = (
                inner.decoder.decode(["a", spelling])[1:] if inner.decoder else spelling
            ).encode()
    for i, first in repeated.items():
        pieces[i] = pieces[first]
    return pieces


def decoder_kinds(inner: tokenizers.Tokenizer) -> list[str]:
    """The decoder's parts in order, such as ["Replace", "ByteFallback", "Fuse"]."""
    if inner.decoder is None:
        return []
    state = json.loads(inner.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_table() -> dict[str, int]:
    """GPT-2's table (openai/gpt-2, encoder.py, `bytes_to_unicode`): printable bytes stand for
    themselves, the others are moved up.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(moved)
    }


BYTES = _byte_table()


def _byte_level(spelling: str) -> bytes:
    """The bytes of one byte-level token. An added token with characters outside the table stands
    for its own UTF-8.
    """
    try:
        return bytes([BYTES[char] for char in spelling])
    except KeyError:
        return spelling.encode()
