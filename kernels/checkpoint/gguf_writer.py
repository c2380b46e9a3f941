"""GGUF files written: header, padding and tensors one after another, each read when its turn comes.

The format is described in `gguf_header.py`. A run that was cut off goes on where it was: what is
written first lies under a name of its own, with a digest of all that the file is made from.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.base.file_lock import lock
from mtmd.kernels.checkpoint.gguf_header import PLAIN
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes

ALIGNMENT = 32
VERSION = 3
_STRING, _ARRAY, _BOOL, _FLOAT, _UINT32, _INT32, _INT64 = 8, 9, 7, 6, 4, 5, 11
Progress = Callable[[str, int, int], None]
"""The name of a tensor that is there, the bytes written and those of all."""


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its logical shape, its type, and what reads it, in that type: blocks
    as rows of bytes.
    """

    name: str
    shape: Shape
    kind: str
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        if self.kind in BLOCKS:
            return prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1])
        return prod(self.shape) * PLAIN[self.kind][1]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[Planned],
    progress: Progress | None = None,
    origin: Sequence[Path] = (),
) -> None:
    """Write the file whole, and only then under its name. Memory of one tensor is taken.

    Values of `metadata` are texts, numbers, truth values, lists of one of these, or bytes: the type
    and value as another file has them. `origin`: files that the tensors are read from; a run that
    was cut off goes on where they are the same. Raises ModelError for a disk without room, and
    OSError.
    """
    header = _header(metadata, tensors)
    digest = hashlib.sha256(header)
    for file in origin:
        facts = file.stat()
        digest.update(f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    part = path.with_name(f".{path.name}.{digest.hexdigest()[:12]}.part")
    starts, end = [], len(header)
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.bytes // ALIGNMENT) * ALIGNMENT
    with part.open("r+b" if part.exists() else "w+b") as file:
        if lock(file) is False:
            raise ModelError(f"{path} is being written by another process; wait for it")
        _remove_others(path, part)
        written = file.seek(0, 2)
        _check_room(path, end - written)
        if written < len(header):
            file.seek(0)
            file.write(header)
        for tensor, start in zip(tensors, starts, strict=True):
            stop = start + -(-tensor.bytes // ALIGNMENT) * ALIGNMENT
            if written < stop:  # the last one may be there in part
                file.seek(start)
                file.truncate()
                _write(file, tensor, part)
            if progress:
                progress(tensor.name, stop, end)
    part.replace(path)


def _remove_others(path: Path, part: Path) -> None:
    """Remove what runs that were cut off have left and this one cannot go on with."""
    for other in path.parent.glob(f".{_escaped(path.name)}.*.part"):
        if other != part:
            with suppress(OSError), other.open("r+b") as file:
                if lock(file) is not False:
                    other.unlink()


def _write(file: Any, tensor: Planned, path: Path) -> None:
    data = tensor.read().contiguous()
    if data.numel() * data.element_size() != tensor.bytes:
        raise ModelError(
            f"tensor {tensor.name} has {data.numel() * data.element_size()} bytes, expected "
            f"{tensor.bytes}; its file has changed while it was read"
        )
    try:
        file.write(data.view(-1).view(torch.uint8).numpy())
        file.write(bytes(-tensor.bytes % ALIGNMENT))
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"{needed >> 20} MiB are needed and {free >> 20} MiB are free", str(path)
        )


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _header(metadata: Mapping[str, Any], tensors: Sequence[Planned]) -> bytes:
    parts = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), value if isinstance(value, bytes) else _typed(key, value)]
    offset = 0
    for tensor in tensors:
        id = BLOCKS[tensor.kind].id if tensor.kind in BLOCKS else PLAIN[tensor.kind][0]
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, id, offset))
        offset += -(-tensor.bytes // ALIGNMENT) * ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _typed(key: str, value: Any) -> bytes:
    """A type and a value of it; whole numbers take 4 bytes where that is enough, reals always."""
    if isinstance(value, (list, tuple)):
        kinds = {_type_of(key, item) for item in value}
        kind = max(kinds - {_UINT32}, default=_INT32)
        items = [_plain(kind, item) for item in value]
        return struct.pack("<IIQ", _ARRAY, kind, len(items)) + b"".join(items)
    kind = _type_of(key, value)
    return struct.pack("<I", kind) + _plain(kind, value)


def _type_of(key: str, value: Any) -> int:
    if isinstance(value, str):
        return _STRING
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, float):
        return _FLOAT
    assert isinstance(value, int), key
    if 0 <= value < 1 << 31:
        return _UINT32
    return _INT32 if -(1 << 31) <= value < 0 else _INT64


def _plain(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    form = {_BOOL: "?", _FLOAT: "f", _UINT32: "I", _INT32: "i", _INT64: "q"}[kind]
    return struct.pack(f"<{form}", value)
