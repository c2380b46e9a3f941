"""Header of a GGUF file: metadata and the list of tensors, all of it checked before it is used.

The format (ggml, docs/gguf.md): "GGUF", version u32, tensor count u64, key count u64; for each key
its name, a type and a value; for each tensor its name, number of dimensions, dimensions (innermost
first), type and offset; padding; then the data. Little endian throughout. A string is its length in
bytes, u64, and UTF-8; an array is the type of its elements, their number, u64, and the elements.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.magic import HEAD_BYTES, stand_in
from mtmd.kernels.quantization.blocks import BLOCKS, OWN_IDS

# Real headers have some MB, most of it the vocabulary; the limits keep a hostile one from taking
# long.
HEADER_BYTES_MAX = 128 << 20
ARRAY_MAX = 1 << 22
KEYS_MAX = TENSORS_MAX = 1 << 16
NAME_BYTES_MAX = (1 << 16) - 1
ALIGNMENT_MAX = 1 << 16
DIMENSIONS_MAX = 4

# Values per block and bytes per block of the types that are stored as plain numbers.
PLAIN = {
    "F32": (0, 4),
    "F16": (1, 2),
    "I8": (24, 1),
    "I16": (25, 2),
    "I32": (26, 4),
    "I64": (27, 8),
    "F64": (28, 8),
    "BF16": (30, 2),
}
_KINDS: dict[int, tuple[str, int, int]] = {
    **{id: (name, 1, size) for name, (id, size) in PLAIN.items()},
    **{b.id: (b.name, b.values, b.bytes) for b in BLOCKS.values() if b.id < OWN_IDS},
}

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U64 = struct.Struct("<Q")
SEPARATOR, SEPARATED = 0xFF, "\udcff"  # a byte between strings, and how it is decoded


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape in torch order; `start` and `bytes` say where in the file it lies."""

    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True)
class _Elements:
    """An array that has been checked and not read: where it lies in the file, and each of its
    strings.
    """

    type: int
    count: int
    start: int
    end: int
    strings: array[int]


class Metadata(Mapping[str, Any]):
    """The keys of a file. Numbers, truth values and strings are there; an array is parsed, to a
    list, whenever it is asked for.

    Strings in arrays may be tokens that are parts of characters: bytes that are not UTF-8 become
    lone surrogates, and `text.encode("utf-8", "surrogateescape")` gives the bytes back. All other
    text is UTF-8, checked on opening.
    """

    def __init__(
        self, data: mmap, values: dict[str, Any], spans: Mapping[str, tuple[int, int]]
    ) -> None:
        """`spans`: where in the file the type and value of each key begin and end."""
        self._data, self._values, self._spans = data, values, spans

    def raw(self, key: str) -> bytes:
        """Return the type and value of a key as the file has them."""
        start, end = self._spans[key]
        return self._data[start:end]

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, _Elements):
            return value
        if value.type != _STRING:
            return np.frombuffer(
                self._data, _NUMBERS[value.type], value.count, value.start
            ).tolist()
        starts = np.array(value.strings, np.int64) - value.start
        return _texts(self._data[value.start : value.end], starts)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _texts(data: bytes, starts: np.ndarray) -> list[str]:
    """Return the strings of an array that was checked, all decoded at once: a byte that no UTF-8
    has is put in the place of each length.
    """
    joined, lengths = np.frombuffer(data, np.uint8).copy(), starts.copy()
    stays = np.ones(len(joined), bool)
    for _ in range(7):
        stays[lengths] = False
        lengths += 1
    joined[lengths] = SEPARATOR
    whole = joined[stays].tobytes()
    if whole.count(SEPARATOR) == len(starts):
        text: str = whole.decode("utf-8", "surrogateescape")
        return text.split(SEPARATED)[1:]
    ends = [*starts[1:], len(data)]  # a string has that byte, too
    return [
        data[start + 8 : end].decode("utf-8", "surrogateescape")
        for start, end in zip(starts, ends, strict=True)
    ]


def parse_header(data: mmap, path: Path) -> tuple[Metadata, dict[str, Entry]]:
    """Metadata and tensors of a mapped file. Raises ModelError in one line: the file, what was
    found, expected, what to do.
    """
    reader = _Reader(data, path)
    tensors, keys = reader.counts()
    values: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(keys):
        name = reader.name("a key")
        if name in values:
            raise reader.error(f"has the key {name!r:.80} twice", "every key once")
        start = reader.position
        values[name] = reader.value(name)
        spans[name] = start, reader.position
    alignment = values.get("general.alignment", 32)
    if (
        type(alignment) is not int
        or not 0 < alignment <= ALIGNMENT_MAX
        or alignment & (alignment - 1)
    ):
        raise reader.error(
            f"has general.alignment {alignment!r:.40}", f"a power of two up to {ALIGNMENT_MAX}"
        )
    entries: dict[str, Entry] = {}
    for _ in range(tensors):
        name = reader.name("a tensor")
        if name in entries:
            raise reader.error(f"has the tensor {name!r:.80} twice", "every tensor once")
        entries[name] = reader.entry(name, alignment)
    start = -(-reader.position // alignment) * alignment
    entries = {
        name: Entry(e.kind, e.shape, start + e.start, e.bytes) for name, e in entries.items()
    }
    _check_layout(reader, entries)
    return Metadata(data, values, spans), entries


def _check_layout(reader: _Reader, entries: Mapping[str, Entry]) -> None:
    """Every tensor lies within the file, and none over another."""
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise reader.error(
                f"has tensor {name!r:.80} at byte {entry.start}, over {before!r:.80}",
                f"byte {end} or later",
            )
        end, before = entry.start + entry.bytes, name
        if end > len(reader.data):
            raise reader.error(
                f"is cut off: tensor {name!r:.80} ends at byte {end}",
                f"at most {len(reader.data)}, the file's size",
            )


class _Reader:
    """A cursor over the header that never looks past its end."""

    def __init__(self, data: mmap, path: Path) -> None:
        self.data, self._path, self.position = data, path, 0
        self._end = min(len(data), HEADER_BYTES_MAX)

    def error(self, result: str, expected: str, advice: str = "download it again") -> ModelError:
        return ModelError(f"{self._path} {result}; expected {expected}; {advice}")

    def counts(self) -> tuple[int, int]:
        """The numbers of tensors and of keys, after the magic bytes and the version."""
        result = stand_in(self.data[:HEAD_BYTES])
        if result:
            raise self.error(f"is {result[0]}", "a GGUF file", result[1])
        if self._take(4, "the magic bytes") != b"GGUF":
            raise self.error(f"begins with {self.data[:4]!r}", "b'GGUF'", "it is not a GGUF file")
        version = self._integer(4, "the version")
        if version and version & 0xFFFF == 0:
            raise self.error(
                f"is a big-endian GGUF file (version {version:#010x})",
                "a little-endian one",
                "convert it again",
            )
        if version not in (2, 3):
            raise self.error(
                f"is GGUF version {version}", "2 or 3", "convert it again, or update this program"
            )
        tensors, keys = (
            self._integer(8, "the number of tensors"),
            self._integer(8, "the number of keys"),
        )
        # The shortest tensor takes 25 bytes and the shortest key 14.
        room = self._end - self.position
        for what, count, limit in (
            ("tensors", tensors, min(TENSORS_MAX, room // 25)),
            ("keys", keys, min(KEYS_MAX, room // 14)),
        ):
            if count > limit:
                raise self.error(
                    f"says it has {count} {what}",
                    f"at most {limit} in a file of {len(self.data)} bytes",
                )
        return tensors, keys

    def name(self, what: str) -> str:
        text = self._text(f"the name of {what}", NAME_BYTES_MAX)
        if not text:
            raise self.error(f"has {what} without a name before byte {self.position}", "a name")
        return text

    def value(self, key: str) -> Any:
        """The value of a key; of an array only where it is."""
        kind = self._integer(4, f"the type of {key!r:.80}")
        if kind == _STRING:
            return self._text(f"the value of {key!r:.80}", self._end)
        if kind != _ARRAY:
            dtype = self._number(kind, f"the key {key!r:.80}")
            return np.frombuffer(self._take(dtype.itemsize, f"the value of {key!r:.80}"), dtype)[
                0
            ].item()
        kind = self._integer(4, f"the element type of {key!r:.80}")
        if kind == _ARRAY:
            raise self.error(
                f"has arrays within the array {key!r:.80}",
                "an array of numbers or strings",
                "they are not read",
            )
        count = self._integer(8, f"the length of {key!r:.80}")
        size = 8 if kind == _STRING else self._number(kind, f"the array {key!r:.80}").itemsize
        limit = min(ARRAY_MAX, (self._end - self.position) // size)
        if count > limit:
            raise self.error(
                f"says that the array {key!r:.80} has {count} elements",
                f"at most {limit} from byte {self.position} on",
            )
        start, strings = self.position, array("q")
        if kind == _STRING:
            strings = self._strings(key, count)
        else:
            self.position += count * size
        return _Elements(kind, count, start, self.position, strings)

    def entry(self, name: str, alignment: int) -> Entry:
        """One tensor, its `start` counted from the beginning of the data."""
        dims = self._integer(4, f"the dimensions of {name!r:.80}")
        if dims > DIMENSIONS_MAX:  # none is a single number
            raise self.error(
                f"has tensor {name!r:.80} with {dims} dimensions", f"at most {DIMENSIONS_MAX}"
            )
        shape = tuple(self._integer(8, f"the shape of {name!r:.80}") for _ in range(dims))[::-1]
        id, offset = (
            self._integer(4, f"the type of {name!r:.80}"),
            self._integer(8, f"the offset of {name!r:.80}"),
        )
        if id not in _KINDS:
            known = ", ".join(kind for kind, _, _ in _KINDS.values())
            raise self.error(
                f"has tensor {name!r:.80} of type {id}",
                f"one of {known}",
                "use a file of one of these types",
            )
        kind, values, size = _KINDS[id]
        if not all(shape):
            raise self.error(
                f"has tensor {name!r:.80} of shape {list(shape)}", "dimensions greater than 0"
            )
        if (shape or (1,))[-1] % values:
            raise self.error(
                f"has tensor {name!r:.80} of shape {list(shape)} as {kind}",
                f"rows of a multiple of {values}",
            )
        if offset % alignment:
            raise self.error(
                f"has tensor {name!r:.80} at offset {offset}",
                f"a multiple of {alignment}, the alignment",
            )
        return Entry(kind, shape, offset, math.prod(shape) // values * size)

    def _number(self, kind: int, what: str) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self.error(f"has {what} of type {kind}", "a type from 0 to 12")
        return np.dtype(_NUMBERS[kind])

    def _strings(self, key: str, count: int) -> array[int]:
        """Go over `count` strings. Returns where each begins, with its length."""
        position, data, end, length_at = self.position, self.data, self._end, _U64.unpack_from
        starts = array("q")
        try:
            for _ in range(count):
                starts.append(position)
                position += 8 + length_at(data, position)[0]
        except (struct.error, OverflowError):  # a length has led past the end of the file
            position = end + 1
        if position > end:
            raise self._cut_off(f"the strings of {key!r:.80}")
        self.position = position
        return starts

    def _text(self, what: str, limit: int) -> str:
        length = self._integer(8, what)
        if length > limit:
            raise self.error(
                f"says that {what} has {length} bytes before byte {self.position}",
                f"at most {limit}",
            )
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                f"has {what} that is not UTF-8 before byte {self.position}: {raw[:20]!r}", "UTF-8"
            ) from error

    def _integer(self, size: int, what: str) -> int:
        return int.from_bytes(self._take(size, what), "little")

    def _take(self, size: int, what: str) -> bytes:
        if size > self._end - self.position:
            raise self._cut_off(what)
        self.position += size
        return self.data[self.position - size : self.position]

    def _cut_off(self, what: str) -> ModelError:
        return self.error(
            f"is cut off in {what} from byte {self.position} on",
            f"the header within {self._end} bytes",
        )
