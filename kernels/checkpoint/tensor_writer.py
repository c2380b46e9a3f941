"""Files of tensors written: a header, and the tensors one after another, each read when its turn
comes.

A run that was cut off goes on where it was: what is written lies under a name of its own, with a
digest of all that the file is made from, until it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.base.file_lock import lock
from mtmd.kernels.checkpoint import gguf_file, safetensors_file
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes

Progress = Callable[[str, int, int], None]
"""The name of a tensor that is there, the bytes written and those of all."""
_PLAIN = {**safetensors_file.DTYPES, **gguf_file.DTYPES}


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
        return prod(self.shape) * _PLAIN[self.kind].itemsize


def write_tensors(
    path: Path,
    header: bytes,
    tensors: Sequence[Planned],
    *,
    alignment: int = 1,
    origin: Sequence[Path] = (),
    progress: Progress | None = None,
) -> None:
    """Write the file whole, and only then under its name. Memory of one tensor is taken.

    `origin`: files that the tensors are read from; a run that was cut off goes on where they are
    the same. Raises ModelError where another process writes the file, and OSError, for a disk
    without room before anything is written.
    """
    digest = hashlib.sha256(header)
    for source in origin:
        facts = source.stat()
        digest.update(f"{source.absolute()} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    part = path.with_name(f".{path.name}.{digest.hexdigest()[:12]}.part")
    starts, end = [], len(header)
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.bytes // alignment) * alignment
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
            stop = start + -(-tensor.bytes // alignment) * alignment
            if written < stop:  # the last one may be there in part
                file.seek(start)
                file.truncate()
                _write(file, tensor, part, alignment)
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


def _write(file: Any, tensor: Planned, path: Path, alignment: int) -> None:
    data = tensor.read().contiguous()
    if data.numel() * data.element_size() != tensor.bytes:
        raise ModelError(
            f"tensor {tensor.name} has {data.numel() * data.element_size()} bytes, expected "
            f"{tensor.bytes}; its file has changed while it was read"
        )
    try:
        file.write(data.view(-1).view(torch.uint8).numpy())
        file.write(bytes(-tensor.bytes % alignment))
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
