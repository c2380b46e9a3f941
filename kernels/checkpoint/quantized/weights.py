"""A quantized checkpoint as a `WeightFile`: its weights are rows of blocks, made of what is stored
when they are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.canonical import Rearranged
from mtmd.kernels.checkpoint.quantized import bitsandbytes, compressed, float4, float8, gptq, mlx
from mtmd.kernels.checkpoint.quantized.parts import Packed, Parts
from mtmd.kernels.checkpoint.quantized.scheme import Scheme
from mtmd.kernels.checkpoint.safetensors_file import SafetensorsWeights
from mtmd.kernels.graph import Shape
from mtmd.kernels.resources.mapped_pages import release_pages

_FORMATS = (gptq, compressed, float4, float8, bitsandbytes, mlx)
_SMOOTHED = (".pre_quant_scale", ".smooth_scale")
# Scales of activations and of keys and values, which are not quantized here.
_UNUSED = re.compile(
    r".+\.(activation_scale|(input|output)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point))"
)


class QuantizedWeights:
    """The tensors of `file`, with those that it holds as codes and scales under one name each."""

    canonical = False

    def __init__(self, file: SafetensorsWeights, scheme: Scheme) -> None:
        """Raises ModelError naming the first tensor that does not fit those beside it. No weight is
        read.
        """
        self._file, parts = file, Parts(file)
        if smoothed := next((n for n in sorted(parts.names) if n.endswith(_SMOOTHED)), None):
            raise ModelError(
                f"{parts.where}: tensor {smoothed} scales activations before their product, which "
                "is not read; use a checkpoint without it, the original one, or a GGUF"
            )
        self._packed: dict[str, Packed] = {}
        for format in _FORMATS:
            self._packed |= {packed.name: packed for packed in format.find(parts, scheme)}
        hidden = {part for packed in self._packed.values() for part in packed.parts}
        hidden |= {name for name in parts.names if _UNUSED.fullmatch(name)}
        self._names = sorted((parts.names - hidden) | self._packed.keys())

    @property
    def files(self) -> Sequence[Path]:
        return self._file.files

    @property
    def bytes(self) -> int:
        """Size of all tensors together, as they are stored."""
        return self._file.bytes

    @property
    def quantized(self) -> str:
        """The forms in which they are quantized, the most frequent first, such as "FP8, blocks of
        128 x 128"; "" where none is.
        """
        labels: Counter[str] = Counter()
        for packed in self._packed.values():
            labels[packed.label] += prod(packed.shape)
        return " and ".join(label for label, _ in labels.most_common())

    @property
    def rounded(self) -> float:
        """Return what rounding the scales has cost of the tensor that lost most, of those that have
        been read: the mean square of the errors against that of the values.
        """
        made = (packed.rounding for packed in self._packed.values())
        return max((r.errors / r.values for r in made if r.values), default=0.0)

    def names(self) -> list[str]:
        """All names, sorted: parts of a tensor are not among them."""
        return self._names

    def meta(self, name: str) -> tuple[Shape, torch.dtype]:
        """The logical shape, and the dtype that `read` gives: uint8 for rows of blocks."""
        if name in self._packed:
            packed = self._packed[name]
            return packed.shape, torch.uint8 if packed.is_plain else torch.float32
        return self._file.meta(name)

    def kind(self, name: str) -> str:
        """The block type; where rows are no whole blocks the form in which they are stored."""
        if name in self._packed:
            packed = self._packed[name]
            return packed.layout.kind if packed.is_plain else packed.form
        return self._file.kind(name)

    def form(self, name: str) -> str:
        """The format in a word, such as "AWQ"; for plain numbers the type."""
        return self._packed[name].form.upper() if name in self._packed else self._file.kind(name)

    def stored_bytes(self, name: str) -> int:
        """Size of a tensor with all its parts."""
        parts = self._packed[name].parts if name in self._packed else (name,)
        return sum(self._file.stored_bytes(part) for part in parts)

    def read(self, name: str) -> torch.Tensor:
        """Rows of blocks, uint8 [*shape[:-1], row_bytes], or values. Raises ModelError for scales
        that are no numbers.
        """
        if name not in self._packed:
            return self._file.read(name)
        packed = self._packed[name]
        return self._read(packed, packed.read if packed.is_plain else packed.read_values)

    def rearranged(self, name: str, turned: bool) -> Rearranged | None:
        packed = self._packed.get(name)
        if packed is None or not packed.layout.is_whole:
            return None
        if turned:
            if packed.turned is None:
                return None
            packed = packed.turned
        read = partial(self._read, packed, packed.read)
        return Rearranged(packed.layout.kind, read, packed.layout.order)

    def _read(self, packed: Packed, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        rows = read()
        for part in packed.parts:  # which would stay in memory beside the rows
            release_pages(self._file.read(part))
        return rows
