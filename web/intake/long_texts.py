"""Long pictures in base64 are taken out of JSON before it is checked and read: who reads tens of
MiB at once keeps Python's interpreter from every other thread, and holds them several times.

In place of each stands a name that no client can know. A field that takes pictures
(`PictureText`) has what stood there, decoded already, in its place. Where anything else finds such
a name, the body is read once more, with those texts in it.
"""

from __future__ import annotations

import json
import secrets
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from mtmd.prompt.data_url import byte_count, decoded_pieces
from mtmd.web.intake.json_limits import PICTURES

LONG = 64 << 10  # bytes of a text from which on it is taken out
PIECE = 64 << 10  # bytes; what works on one keeps the interpreter to itself meanwhile
_LONGEST_BEGIN = 256  # of a data URL, up to its comma
_BASE64 = b";base64,"
Memory: TypeAlias = bytes | mmap  # looked at in slices
Result = TypeVar("Result")


class CutText:
    """A text that was taken out. `begin`: "data:image/png;base64,", or nothing where it is base64
    alone, of which `characters` follow.
    """

    def __init__(self, begin: str, characters: int, pieces: list[bytes]) -> None:
        self.begin, self.characters, self._pieces = begin, characters, pieces

    @property
    def byte_count(self) -> int:
        """Count the bytes by the characters, line breaks among them: at most two more than there
        are, and what these take.
        """
        return byte_count(self.characters)

    @property
    def data(self) -> bytes:
        """Return what its base64 says. In one piece from when it is first asked for: the body that
        it stood in is gone by then.
        """
        self._pieces[:] = [b"".join(self._pieces)]
        return self._pieces[0]

    def after(self, begin: str) -> CutText:
        """Return the after of the same bytes."""
        return CutText(begin, self.characters, self._pieces)


def beginning(text: str | CutText) -> str:
    """Return what it begins with: of one that was taken out, what stood before its base64."""
    return text if isinstance(text, str) else text.begin


def as_data_url(text: str | CutText, kind: str) -> str | CutText:
    """Base64 alone as a data URL of the media type `kind`."""
    begin = f"data:{kind};base64,"
    if isinstance(text, CutText) and not text.begin:
        return text.after(begin)
    return begin + beginning(text)  # of a data URL in another one the begin is wrong already


@dataclass(frozen=True)
class _Cut:
    """Text that was cut out of the body from `start` to `end`, with so many `escapes`, after what
    `begin` means, which is left there: by it a text counts as a picture.
    """

    begin: str
    start: int
    end: int
    escapes: int
    text: CutText


class CutBody:
    """JSON without its long pictures, and without a byte order mark before it. `data`: with names
    in their place; `escapes`: how many backslashes were taken out with them.
    """

    def __init__(self, whole: Memory) -> None:
        self._whole = whole
        self._begin = len(BOM_UTF8) if whole[: len(BOM_UTF8)] == BOM_UTF8 else 0
        self._cuts = {secrets.token_hex(16): cut for cut in _cuts(whole)}
        self._put_together()

    def read(self, read: Callable[[bytes], Result]) -> Result:
        """Return what `read` makes of `data`, where it `take`s all that was taken out; otherwise,
        and where it raises, what it makes of JSON in which only that is missing which it takes, or,
        if it then takes less, nothing. `read` is called three times at most.
        """
        for keeps_taken in (True, False):
            try:
                result = read(self.data)
            except Exception:
                if self._all_taken:
                    raise
            else:
                if self._all_taken:
                    return result
            self._put_back(keeps_taken)
        return read(self.data)

    def take(self, text: str) -> str | CutText:
        """Take, for a field of pictures, what stood where `text` stands."""
        name = self._names.get(text)
        if name is None:
            return text
        self._taken.add(name)
        return self._cuts[name].text

    def take_base64(self, text: str) -> str | bytes:
        """Take, for a picture that is base64 alone, its bytes, where it was taken out."""
        cut = self.take(text)
        return text if isinstance(cut, str) or cut.begin else cut.data

    def text(self, text: str) -> str:
        """Return what stood where `text` stands, as a text."""
        name = self._names.get(text)
        if name is None:
            return text
        cut = self._cuts[name]
        return cut.begin + str(json.loads(b'"%b"' % self._whole[cut.start : cut.end]))

    @property
    def _all_taken(self) -> bool:
        return len(self._taken) == len(self._cuts)

    def _put_back(self, keeps_taken: bool) -> None:
        saved = self._taken if keeps_taken else ()
        self._cuts = {name: cut for name, cut in self._cuts.items() if name in saved}
        self._put_together()

    def _put_together(self) -> None:
        parts, at = list[bytes](), self._begin
        for name, cut in self._cuts.items():
            parts += self._whole[at : cut.start], name.encode()
            at = cut.end
        self.data = b"".join([*parts, self._whole[at:]]) if parts else self._whole[at:]
        if not self._cuts:
            self._whole, self._begin = self.data, 0
        self.escapes = sum(cut.escapes for cut in self._cuts.values())
        self._names = {cut.begin + name: name for name, cut in self._cuts.items()}
        self._taken = set[str]()


class _Taken:
    """A text for pydantic, validated with a `CutBody` as the context."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(_take, handler(str))


def _take(text: str, info: ValidationInfo) -> str | CutText:
    body: CutBody | None = info.context
    return text if body is None else body.take(text)


PictureText: TypeAlias = Annotated[str | CutText, _Taken]


def _cuts(data: Memory) -> Iterator[_Cut]:
    for start, end in _stretches(data):
        try:
            cut = _cut(data, start, end)
        except ValueError:  # it is no base64, and whoever reads it will say so
            continue
        if cut is not None:
            yield cut


def _stretches(data: Memory) -> Iterator[tuple[int, int]]:
    """Yield where LONG bytes or more lie between two quotation marks, without these."""
    start = 0
    while start + LONG <= len(data):
        quote = data[start : start + LONG].rfind(b'"')
        if quote >= 0:
            start += quote + 1
            continue
        for piece in range(start + LONG, len(data), PIECE):
            quote = data[piece : piece + PIECE].find(b'"')
            if quote >= 0:
                break
        else:
            return
        yield start, piece + quote
        start = piece + quote + 1


def _cut(data: Memory, start: int, end: int) -> _Cut | None:
    """The text from `start` to `end`, None where no picture begins there. Raises ValueError where
    it is no base64.
    """
    if not start or data[start - 2 : start - 1] == b"\\":  # inside of a text
        return None
    head = data[start : min(start + _LONGEST_BEGIN, end)]
    begin = next((begin for begin in PICTURES if head.startswith(begin)), None)
    if begin is None:
        return None
    alone = begin != b"data:"
    if not alone:
        begin = head[: head.find(b",") + 1]
        if begin[-len(_BASE64) :].lower() != _BASE64:
            return None
    means = begin.replace(b"\\/", b"/").decode("ascii")
    if "\\" in means:
        return None
    after = start + len(begin)
    encoded = start if alone else after
    plain = _Plain(data, encoded, end)
    pieces = list(decoded_pieces(plain))
    text = CutText("" if alone else means, end - encoded - plain.escapes, pieces)
    return _Cut(means, after, end, plain.escapes - (begin.count(b"\\") if alone else 0), text)


class _Plain:
    """Base64 that stands in JSON, in pieces, without line breaks. `escapes`: how many were undone.
    A backslash that is left is for whoever decodes it to refuse.
    """

    def __init__(self, data: Memory, start: int, end: int) -> None:
        self._data, self._start, self._end, self.escapes = data, start, end, 0

    def __iter__(self) -> Iterator[bytes]:
        data, start, end = self._data, self._start, self._end
        while start < end:
            stop = min(start + PIECE, end)
            if data[stop - 1 : stop] == b"\\":  # begins an escape
                stop = min(stop + 1, end)
            piece, start = data[start:stop], stop
            if b"\\" in piece:
                if b"\\\\" in piece:  # what is left of it and "nr" would look like a line break
                    raise ValueError("found an escaped backslash in base64")
                self.escapes += piece.count(b"\\")
                piece = piece.replace(b"\\/", b"/").replace(b"\\n", b"").replace(b"\\r", b"")
            yield piece
