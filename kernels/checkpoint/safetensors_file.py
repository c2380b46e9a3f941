"""Weights in the safetensors format: one file, or shards with an index. Nothing is read from the
files beyond their headers until asked.

The format (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the data, without holes or overlaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.kernels.checkpoint.magic import ADAPTER, ADD_ADAPTER, CONVERT, HEAD_BYTES, stand_in

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 64 << 20  # the largest known headers have a few MB
INDEX_BYTES_MAX = 64 << 20
NAME_BYTES_MAX = 255  # of a file, on the usual file systems

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file: `start` and `end` are bytes from the beginning of the data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


class SafetensorsWeights:
    """The tensors of a checkpoint folder, or of one file.

    Tensors are read through the safetensors library as views of the mapped file; they must not be
    written to.
    """

    canonical = False

    def __init__(self, path: Path) -> None:
        """Check every header. Raises ModelError naming the file, and the tensor, that is wrong."""
        self._where: dict[str, tuple[Path, _Entry]] = {}
        self._open: dict[Path, Any] = {}
        if path.is_dir():
            weight_map = {} if (path / SINGLE).exists() else _read_index(path)
            files = sorted({path / name for name in weight_map.values()}) or [path / SINGLE]
        else:
            weight_map, files = {}, [path]
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._where:
                    raise ModelError(
                        f"tensor {name!r} is in both {self._where[name][0].name} and {file}; "
                        "expected it once"
                    )
                self._where[name] = (file, entry)
        for name, shard in weight_map.items():
            if name not in self._where or self._where[name][0].name != shard:
                raise ModelError(
                    f"{path / shard} has no tensor {name!r}, but {INDEX} says so; download the "
                    "checkpoint again"
                )

    @property
    def files(self) -> list[Path]:
        """The files that tensors are read from."""
        return sorted({path for path, _ in self._where.values()})

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._where)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype, without reading data. Raises ModelError for an unknown name."""
        entry = self._find(name)[1]
        return entry.shape, entry.dtype

    def kind(self, name: str) -> str:
        """The type's name in the file."""
        return _NAMES[self._find(name)[1].dtype]

    @property
    def bytes(self) -> int:
        """Size of all tensors together."""
        return sum(entry.end - entry.start for _, entry in self._where.values())

    def stored_bytes(self, name: str) -> int:
        """Size of one tensor."""
        entry = self._find(name)[1]
        return entry.end - entry.start

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, a view of the mapped file where its alignment allows it. Raises
        ModelError.
        """
        path, entry = self._find(name)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(
                f"{path}: tensor {name!r} cannot be read: {error}; download the file again"
            ) from error
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise ModelError(
                f"{path}: tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, its header said "
                f"{entry.dtype} "
                f"{entry.shape}; the file changed while it was open"
            )
        # The format does not promise alignment, kernels need it.
        return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()

    def rearranged(self, name: str, turned: bool) -> None:
        """Return None: every tensor is stored as it is read."""

    def _find(self, name: str) -> tuple[Path, _Entry]:
        if name not in self._where:
            raise ModelError(
                f"the checkpoint has no tensor {name!r}; it has {len(self._where)} others"
            )
        return self._where[name]


def _checkpoint_in(folder: Path) -> Path | None:
    """The first checkpoint in a folder that is none, as hubs' caches and downloads have them."""
    files = (file for depth in ("*", "*/*") for file in sorted(folder.glob(f"{depth}/config.json")))
    return next((file.parent for file in files if any(file.parent.glob("*.safetensors"))), None)


def _read_index(folder: Path) -> dict[str, str]:
    """The index's {tensor: shard file}, with every shard checked to be a plain file name of this
    folder.
    """
    path = folder / INDEX
    if not path.exists():
        if any((folder / name).exists() for name in ADAPTER):
            raise ModelError(f"{folder} is a LoRA adapter and no model; {ADD_ADAPTER}")
        others = sorted(
            file.name
            for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf")
            for file in folder.glob(pattern)
        )
        note = (
            f"; it has {', '.join(others[:3])}, which this version does not load" if others else ""
        )
        advice = f"; {CONVERT}" if any(name.endswith(".bin") for name in others) else ""
        if not others and (inner := _checkpoint_in(folder)):
            advice = f"; did you mean '{inner}'?"
        raise ModelError(f"{folder} has no weights: expected {SINGLE} or {INDEX}{note}{advice}")
    try:
        with open_regular(path) as file:
            data = file.read(INDEX_BYTES_MAX + 1)
        index = _parse_json(data, INDEX_BYTES_MAX)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a readable index: {error}; expected JSON with a 'weight_map'"
        ) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no 'weight_map'; expected an object {{tensor: shard file}}")
    for name, shard in weight_map.items():
        # Only the name is checked: the Hugging Face cache stores snapshots as links that lead out
        # of the folder.
        if (
            not isinstance(shard, str)
            or shard in ("", ".", "..")
            or set(shard) & set("/\\\0:")
            or len(shard.encode("utf-8", "replace")) > NAME_BYTES_MAX
        ):
            raise ModelError(
                f"{path} puts tensor {name!r} into {shard!r:.80}; expected the name of a file in "
                "the same folder"
            )
        if not (folder / shard).is_file():
            raise ModelError(
                f"{folder} lacks the shard {shard}, which {INDEX} names; download the checkpoint "
                "again"
            )
    return weight_map


def _read_header(path: Path) -> dict[str, _Entry]:
    """A file's tensors, each checked to lie in it. Raises ModelError."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            result = stand_in(file.read(HEAD_BYTES))
            if result:
                raise ModelError(f"{path} is {result[0]}, expected a safetensors file; {result[1]}")
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
                raise ModelError(
                    f"{path} is not a safetensors file or is cut off: {size} bytes, header of "
                    f"{length} bytes; "
                    f"expected a header within the file and at most {HEADER_BYTES_MAX >> 20} MiB"
                )
            header = _parse_json(file.read(length), HEADER_BYTES_MAX)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a safetensors file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} has a header that is not JSON: {error}; expected a safetensors file"
        ) from error
    if not isinstance(header, dict):
        raise ModelError(
            f"{path} has a header that is a JSON {type(header).__name__}; expected an object"
        )
    entries = {
        name: _parse_entry(path, name, field)
        for name, field in header.items()
        if name != "__metadata__"
    }
    _check_layout(path, entries, size - 8 - length)
    return entries


def _parse_entry(path: Path, name: str, field: object) -> _Entry:
    if not isinstance(field, Mapping):
        raise ModelError(
            f"{path}: tensor {name!r:.80} is described by a {type(field).__name__}; expected "
            "dtype, shape and data_offsets"
        )
    dtype, shape, offsets = field.get("dtype"), field.get("shape"), field.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModelError(
            f"{path}: tensor {name!r:.80} has dtype {dtype!r:.40}; expected one of "
            f"{', '.join(DTYPES)}"
        )
    if (
        not _is_sizes(shape)
        or not _is_sizes(offsets)
        or len(offsets) != 2
        or offsets[1] < offsets[0]
    ):
        raise ModelError(
            f"{path}: tensor {name!r:.80} has shape {shape!r:.80} and offsets {offsets!r:.80}; "
            "expected lists of sizes"
        )
    need = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != need:
        raise ModelError(
            f"{path}: tensor {name!r:.80} takes {offsets[1] - offsets[0]} bytes; expected {need} "
            f"for {dtype} {shape!r:.80}"
        )
    return _Entry(tuple(shape), DTYPES[dtype], offsets[0], offsets[1])


def _check_layout(path: Path, entries: Mapping[str, _Entry], size: int) -> None:
    """The tensors must fill the `size` bytes of data one after another."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            kind = (
                "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            )
            raise ModelError(
                f"{path}: tensor {name!r:.80} starts at byte {entry.start} and "
                f"{kind}; expected byte {end}"
            )
        end = entry.end
        if end > size:
            raise ModelError(
                f"{path} is cut off: tensor {name!r:.80} ends at byte {end}, the data has {size}; "
                "download the file again"
            )
    if end != size:
        raise ModelError(
            f"{path} has {size} bytes of data, its tensors take {end}; download the file again"
        )


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        and len(value) <= 64
    )


def _parse_json(data: bytes, limit: int) -> Any:
    """JSON in which no key appears twice. Raises ValueError."""
    if len(data) > limit:
        raise ValueError(f"larger than {limit >> 20} MiB")
    return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name appears twice")
    return values
