"""GGUF files written. The format is described in `gguf_header.py`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtmd.kernels.checkpoint.gguf_header import PLAIN
from mtmd.kernels.checkpoint.tensor_writer import Planned, Progress, write_tensors
from mtmd.kernels.quantization.blocks import BLOCKS

ALIGNMENT = 32
VERSION = 3
_STRING, _ARRAY, _BOOL, _FLOAT, _UINT32, _INT32, _INT64 = 8, 9, 7, 6, 4, 5, 11


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[Planned],
    origin: Sequence[Path] = (),
    progress: Progress | None = None,
) -> None:
    """Write a file as `write_tensors` does.

    Values of `metadata` are texts, numbers, truth values, lists of one of these, or bytes: the type
    and value as another file has them. Raises ModelError and OSError.
    """
    header = _header(metadata, tensors)
    write_tensors(path, header, tensors, alignment=ALIGNMENT, origin=origin, progress=progress)


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
