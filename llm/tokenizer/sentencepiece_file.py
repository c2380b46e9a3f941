"""A tokenizer from a sentencepiece model file (`spiece.model`, or `sentencepiece.bpe.model` as
fairseq's models have it), for repositories that have no other. Models of the kind "unigram" are
read.

The file is a protocol buffer: src/sentencepiece_model.proto of github.com/google/sentencepiece. Its
pieces become the `tokenizers` library's Unigram. Its table of characters is followed here, as
src/normalizer.cc does: the library's own takes a character with its accents as one, and loses some.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from mtmd.base.errors import ModelError
from mtmd.base.text import one_line
from mtmd.llm.tokenizer.file_limits import check_steps

BLANK = "▁"
FAIRSEQ_CLASSES = ("XLMRobertaTokenizer", "XLMRobertaTokenizerFast")
PIECES_MAX = 1 << 19
PIECE_CHARS_MAX = 2048
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM = 1
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# fields by their numbers
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE = 3
_CHARSMAP, _EXTRA_WHITESPACES = 2, 4

Fields = Mapping[int, list[Any]]


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


class CharacterTable:
    """Describes what characters become before a text is cut into pieces: a double array of the
    Darts library, and the texts that it leads to. `trims`: several blanks become one, and none ends
    a text.

    Raises ValueError and struct.error for bytes that are no table; of none, characters stay.
    """

    def __init__(self, data: bytes, trims: bool) -> None:
        (size,) = struct.unpack_from("<I", data) if data else (0,)
        if size % 4 or 4 + size > max(len(data), 4):
            raise ValueError("a table beyond the end")
        self._units = struct.unpack_from(f"<{size // 4}I", data, 4) if data else ()
        self._texts, self._trims = data[4 + size :], trims

    def normalize(self, text: tokenizers.NormalizedString) -> None:
        """Normalize, as the library calls it."""
        made = self.apply(text.normalized)
        if made != text.normalized:
            text.clear()
            text.append(made)

    def apply(self, text: str) -> str:
        """Blanks are written as "▁"; none is put before the text."""
        text = self._replaced(text)
        if self._trims:
            text = re.sub(" {2,}", " ", text)
        text = text.replace(" ", BLANK)
        return text.rstrip(BLANK) if self._trims else text

    def _replaced(self, text: str) -> str:
        data, at, parts = text.encode(), 0, list[bytes]()
        while at < len(data):
            length, value = self._longest(data, at)
            if length:
                end = self._texts.find(b"\0", value)
                parts.append(self._texts[value : end if end >= 0 else None])
            else:
                length = _LENGTHS[data[at] >> 4]
                parts.append(data[at : at + length])
            at += length
        return b"".join(parts).decode(errors="replace")

    def _longest(self, data: bytes, begin: int) -> tuple[int, int]:
        """Bytes of the longest beginning that is in the table, and where its text is; (0, 0) for
        none.
        """
        units, result = self._units, (0, 0)
        if not units:
            return result
        node = _offset(units[0])
        for at in range(begin, len(data)):
            node ^= data[at]
            if node >= len(units):
                break
            unit = units[node]
            if unit & 0x800000FF != data[at]:
                break
            node ^= _offset(unit)
            if unit >> 8 & 1 and node < len(units):
                result = at + 1 - begin, units[node] & 0x7FFFFFFF
        return result


_LENGTHS = (1,) * 12 + (2, 2, 3, 4)  # of a character in UTF-8, by the upper half of its first byte


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def check_class(kind: Any, where: str, file: str) -> None:
    """Raises ModelError for a tokenizer's class that gives special tokens other ids."""
    if kind not in FAIRSEQ_CLASSES:
        raise ModelError(
            f"{where} has a {file} and no tokenizer.json, and tokenizer_class is {kind!r:.60}, "
            f"expected one of {', '.join(FAIRSEQ_CLASSES)}; give the folder a tokenizer.json"
        )


def build(data: bytes, where: str, fairseq: bool = False) -> tokenizers.Tokenizer:
    """`data`: of the file `where`. Nothing is put around a text, and no blank before it; with
    `fairseq` a blank is, and special tokens have the ids that XLM-RoBERTa gives them.

    Raises ModelError for what is no such file, or a kind of model that is not read.
    """
    try:
        file = _fields(data)
        pieces = [_piece(_fields(one)) for one in file.get(_PIECES, [])]
        trainer, normalizer = (_fields(_last(file, n, b"")) for n in (_TRAINER, _NORMALIZER))
        kind = _last(trainer, _MODEL_TYPE, UNIGRAM)
        charsmap = _last(normalizer, _CHARSMAP, b"")
        table = CharacterTable(charsmap, bool(_last(normalizer, _EXTRA_WHITESPACES, True)))
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(
            f"{where} is no sentencepiece model; fetch it again, or a tokenizer.json"
        ) from error
    _check(pieces, kind, where)
    pieces = _as_fairseq(pieces) if fairseq else pieces
    encoded = base64.b64encode(charsmap).decode()
    check_steps({"type": "Precompiled", "precompiled_charsmap": encoded}, "normalizers", where)
    kinds = [piece.kind for piece in pieces]
    try:
        inner = tokenizers.Tokenizer(
            models.Unigram(
                [(piece.text, piece.score) for piece in pieces],
                unk_id=kinds.index(UNKNOWN),
                byte_fallback=BYTE in kinds,
            )
        )
        inner.normalizer = normalizers.Normalizer.custom(table)
        if fairseq:
            inner.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "always", split=False)
        inner.decoder = decoders.Metaspace(BLANK, "always")
        inner.add_tokens([_added(p) for p in pieces if p.kind in (CONTROL, UNKNOWN, USER_DEFINED)])
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's Rust panics do not derive from Exception
        raise ModelError(
            f"{where}: its pieces make no tokenizer: {one_line(error, 200)}; fetch it again"
        ) from error
    return inner


def _as_fairseq(pieces: list[Piece]) -> list[Piece]:
    """The pieces of text behind four special tokens, and a mask behind all."""
    unknown = next(piece for piece in pieces if piece.kind == UNKNOWN)
    special = [Piece(text, 0.0, CONTROL) for text in ("<s>", "<pad>", "</s>", "<mask>")]
    texts = [piece for piece in pieces if piece.kind not in (CONTROL, UNKNOWN)]
    return [*special[:3], unknown, *texts, special[3]]


def _check(pieces: list[Piece], kind: Any, where: str) -> None:
    """Raises ModelError."""
    if kind != UNIGRAM:
        raise ModelError(
            f"{where} is a model of the kind {_KINDS.get(kind, kind)!s:.20}, expected unigram; "
            "give the folder a tokenizer.json"
        )
    longest = max((len(piece.text) for piece in pieces), default=0)
    if not 0 < len(pieces) <= PIECES_MAX or longest > PIECE_CHARS_MAX:
        raise ModelError(
            f"{where} has {len(pieces):,} pieces, the longest of {longest:,} characters; expected "
            f"1 to {PIECES_MAX:,} of at most {PIECE_CHARS_MAX:,}; is the file broken? fetch it "
            "again"
        )
    unknown = sum(piece.kind == UNKNOWN for piece in pieces)
    if unknown != 1:
        raise ModelError(
            f"{where} has {unknown} pieces that stand for what is unknown, expected one; is the "
            "file broken? fetch it again"
        )


def _added(piece: Piece) -> AddedToken:
    """Found in a text before all else."""
    return AddedToken(piece.text, normalized=False, special=piece.kind != USER_DEFINED)


def _piece(fields: Fields) -> Piece:
    text = _last(fields, _TEXT, b"").decode()
    (score,) = struct.unpack("<f", _last(fields, _SCORE, bytes(4)))
    if score != score or abs(score) == float("inf"):
        raise ValueError("a score that is no number")
    return Piece(text, score, _last(fields, _TYPE, NORMAL))


def _last(fields: Fields, number: int, default: Any) -> Any:
    """Return the last of a field that stands once; of several the last counts. Raises ValueError
    for another type than the default's.
    """
    value = fields.get(number, [default])[-1]
    if isinstance(value, bytes) != isinstance(default, bytes):
        raise ValueError(f"field {number} is of another type")
    return value


def _fields(data: bytes) -> Fields:
    """Values by their fields' numbers. Raises ValueError and IndexError for what is no message."""
    result: dict[int, list[Any]] = {}
    for number, value in _read(data):
        result.setdefault(number, []).append(value)
    return result


def _read(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire}")
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError("a field beyond the end")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
