"""Weights in the GGUF format: one file, or all the parts of a split one, mapped into memory.
Nothing but headers is read until asked.
"""

from __future__ import annotations

import mmap
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.kernels.checkpoint.gguf_header import Entry, Metadata, parse_header
from mtmd.kernels.quantization.blocks import row_bytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}
# What reads blocks word by word wants them at least so aligned. Files promise more unless they set
# an alignment of their own.
VIEW_ALIGNMENT = 8

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


@dataclass(frozen=True)
class _Part:
    """A mapped file: all its bytes as one tensor, uint8."""

    path: Path
    data: torch.Tensor
    metadata: Metadata
    entries: dict[str, Entry]


class GgufFile:
    """The tensors and metadata of a GGUF file of version 2 or 3, little endian; opening one part of
    a split file opens all.

    Tensors are views of the mapped file, which is read-only memory: writing to one ends the
    process.
    """

    canonical = True

    def __init__(self, path: Path) -> None:
        """Check every header. Raises ModelError naming the file, and what in it is wrong."""
        self._parts = _open_parts(path)
        self._where: dict[str, tuple[_Part, Entry]] = {}
        for part in self._parts:
            for name, entry in part.entries.items():
                if name in self._where:
                    raise ModelError(
                        f"tensor {name!r:.80} is in both {self._where[name][0].path.name} and "
                        f"{part.path}; expected it once"
                    )
                self._where[name] = (part, entry)
        expected = _split_key(self._parts[0], "split.tensors.count", len(self._where))
        if len(self._parts) > 1 and expected != len(self._where):
            raise ModelError(
                f"{path} has {len(self._where)} tensors in its {len(self._parts)} parts; expected "
                f"{expected}; "
                "download all parts again"
            )

    @property
    def metadata(self) -> Metadata:
        """All keys, of the first part where there are several. Arrays are parsed each time they are
        looked up.
        """
        return self._parts[0].metadata

    @property
    def files(self) -> list[Path]:
        """The file, or all parts of a split one, in order."""
        return [part.path for part in self._parts]

    @property
    def bytes(self) -> int:
        """Size of all tensors together, as they are stored."""
        return sum(entry.bytes for _, entry in self._where.values())

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, in torch order. This and the others raise ModelError for an unknown
        name.
        """
        return self._find(name)[1].shape

    def kind(self, name: str) -> str:
        """GGUF's name of the type: "F32", "BF16", "Q4_K" and so on."""
        return self._find(name)[1].kind

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The logical shape, and the dtype that `read` gives: uint8 for block types."""
        entry = self._find(name)[1]
        return entry.shape, DTYPES.get(entry.kind, torch.uint8)

    def stored_bytes(self, name: str) -> int:
        """Size of one tensor."""
        return self._find(name)[1].bytes

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, a view of the mapped file where its alignment allows it: blocks as
        uint8 [*shape[:-1], row_bytes].
        """
        part, entry = self._find(name)
        data = part.data[entry.start : entry.start + entry.bytes]
        if entry.start % VIEW_ALIGNMENT:
            data = data.clone()
        if entry.kind in DTYPES:
            return data.view(DTYPES[entry.kind]).view(entry.shape)
        return data.view(*entry.shape[:-1], row_bytes(entry.kind, entry.shape[-1]))

    def rearranged(self, name: str, turned: bool) -> None:
        """Return None: every tensor is stored as it is read."""

    def _find(self, name: str) -> tuple[_Part, Entry]:
        if name not in self._where:
            raise ModelError(
                f"{self._parts[0].path} has no tensor {name!r:.80}; it has {len(self._where)} "
                "others"
            )
        return self._where[name]


def header_bytes(path: Path) -> int:
    """Return where the data of one file begins. Raises ModelError for a header that is not
    whole.
    """
    part = _open(path)
    return min((entry.start for entry in part.entries.values()), default=len(part.data))


def _open_parts(path: Path) -> list[_Part]:
    """The file, or all parts of the split file that it is one of, in order."""
    part = _open(path)
    count = _split_key(part, "split.count", 1)
    if count <= 1:
        return [part]
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelError(
            f"{path} is one of {count} parts by its split.count, not by its name; "
            f"expected NAME-00001-of-{count:05}.gguf; rename it"
        )
    parts = []
    for number in range(1, count + 1):
        other = path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        if not other.is_file():
            raise ModelError(
                f"{path.parent} lacks {other.name}, part {number} of {count}; expected all parts "
                "in one folder; download it"
            )
        parts.append(part if other.name == path.name else _open(other))
        part_of = _split_key(parts[-1], "split.no", -1), _split_key(parts[-1], "split.count", 1)
        if part_of != (number - 1, count):
            raise ModelError(
                f"{other} says it is part {part_of[0] + 1} of {part_of[1]}; expected {number} of "
                f"{count}; download it again"
            )
    return parts


def _split_key(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int:
        raise ModelError(
            f"{part.path} has {key} {value!r:.40}; expected a whole number; download it again"
        )
    return value


def _open(path: Path) -> _Part:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); expected a GGUF "
            "file"
        ) from error
    if mapped is None:
        raise ModelError(f"{path} is empty; expected a GGUF file; download it again")
    metadata, entries = parse_header(mapped, path)
    with warnings.catch_warnings():
        # A read-only mapping cannot be written to by mistake and never counts against the memory
        # that may be promised.
        warnings.filterwarnings("ignore", message=".*buffer is not writable")
        return _Part(path, torch.frombuffer(mapped, dtype=torch.uint8), metadata, entries)
