"""Importance matrices of llama.cpp's llama-imatrix: for each column of a weight the mean square of
what it is multiplied by.

As GGUF, general.type is "imatrix", and a tensor has its sums, NAME.in_sum2, and their number,
NAME.counts; experts have a row each. The format of before: the number of entries, i32; for each the
length of its name, i32, the name, the number of calls, i32, the number of values, i32, and the
values, fp32, sums over the calls; little endian.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.magic import is_gguf

ENTRIES_MAX, NAME_MAX, BYTES_MAX = 1 << 16, 1 << 10, 1 << 31
SUMS, COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of errors by the names of tensors: [K], of experts [E, 1, K]. Raises
    ModelError for a file that is none.
    """
    try:
        path.stat()
        entries = _of_gguf(path) if is_gguf(path) else _of_dat(path)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected an importance matrix"
        ) from error
    if not entries:
        raise ModelError(f"{path} has no entries; expected an importance matrix of llama-imatrix")
    for name, values in entries.items():
        if not bool(values.isfinite().all()) or bool((values < 0).any()):
            raise ModelError(
                f"{path}: {name!r:.80} has values below 0 or not finite; make it again"
            )
    return entries


def _of_gguf(path: Path) -> dict[str, torch.Tensor]:
    file = GgufFile(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelError(f"{path} is a GGUF of another kind; expected an importance matrix")
    entries: dict[str, torch.Tensor] = {}
    names = set(file.names())
    for name in names:
        weight = name.removesuffix(SUMS)
        if weight == name or weight + COUNTS not in names:
            continue
        sums, counts = file.read(name).float(), file.read(weight + COUNTS).float()
        is_table = sums.dim() in (1, 2) and sums.numel() > 0
        if not is_table or counts.numel() != sums.numel() // sums.shape[-1]:
            raise ModelError(
                f"{path}: {weight!r:.80} has {counts.numel()} counts for {list(sums.shape)} sums; "
                "expected one for each row"
            )
        rows = sums.reshape(counts.numel(), -1)
        # What was never multiplied, as an expert that was not chosen, counts the same everywhere.
        means = torch.where(counts.view(-1, 1) > 0, rows / counts.view(-1, 1).clamp(min=1), 1.0)
        entries[weight] = means[0] if len(means) == 1 else means[:, None]
    return entries


def _of_dat(path: Path) -> dict[str, torch.Tensor]:
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if size > BYTES_MAX:
            raise ModelError(f"{path} has {size} bytes; expected an importance matrix")
        file.seek(0)
        data = file.read(size)  # a buffer is made of as many bytes as are asked for
    entries: dict[str, torch.Tensor] = {}
    position = 4
    try:
        (count,) = struct.unpack_from("<i", data)
        if not 0 < count <= ENTRIES_MAX:
            raise ValueError
        for _ in range(count):
            (length,) = struct.unpack_from("<i", data, position)
            if not 0 < length <= NAME_MAX:
                raise ValueError
            name = data[position + 4 : position + 4 + length].decode("utf-8")
            position += 4 + length
            calls, width = struct.unpack_from("<ii", data, position)
            position += 8
            if width <= 0 or position + 4 * width > len(data):
                raise ValueError
            values = torch.frombuffer(
                bytearray(data[position : position + 4 * width]), dtype=torch.float32
            )
            entries[name] = values / max(calls, 1)
            position += 4 * width
    except (struct.error, ValueError) as error:
        raise ModelError(
            f"{path} is no importance matrix, or cut off at byte {position}; expected a file of "
            "llama-imatrix"
        ) from error
    return entries
