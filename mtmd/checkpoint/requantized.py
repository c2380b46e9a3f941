"""Weights that are quantized when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch

from mtmd.kernels.checkpoint.canonical import PLAIN_KINDS, CanonicalWeights, Rearranged
from mtmd.kernels.checkpoint.gguf_file import DTYPES
from mtmd.kernels.cpu.quantize import quantize
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize, row_bytes


class Requantized:
    """A `WeightFile` of the parameters of another, under their canonical names and shapes, some of
    them in other types. One tensor at a time is in memory.

    What the source has in blocks of the requested type already is passed on as it is. Rows that
    are no whole blocks are filled up with zeros.
    """

    canonical = True

    def __init__(
        self,
        source: CanonicalWeights,
        types: Mapping[str, str],
        importance: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`types`: those of the tensors that change, by canonical name. `importance`: how much the
        errors of each column count.
        """
        self._source, self._plain = source, source.without_blocks()
        self._types, self._importance = types, importance or {}
        self._errors: dict[str, tuple[float, float]] = {}

    @property
    def files(self) -> Sequence[Path]:
        return self._source.file.files

    @property
    def types(self) -> Mapping[str, str]:
        """Return those of the tensors that change, by canonical name."""
        return self._types

    @property
    def source(self) -> CanonicalWeights:
        return self._source

    @property
    def nmse(self) -> float | None:
        """Return the mean square of what was lost of weights that were quantized before, against
        that of the weights, over those that have been read; None where there were none.
        """
        if not self._errors:
            return None
        errors, squares = (sum(column) for column in zip(*self._errors.values(), strict=True))
        return errors / squares if squares else 0.0

    @property
    def requantized(self) -> bool:
        """Return whether some of the weights were quantized in another way before."""
        return any(
            self._was_quantized(name) and self._source.quant(name) != kind
            for name, kind in self._types.items()
            if kind in BLOCKS
        )

    def names(self) -> Iterable[str]:
        return self._source.shapes

    def meta(self, name: str) -> tuple[Shape, torch.dtype]:
        shape, kind = self._source.shapes[name], self.kind(name)
        if kind in BLOCKS:
            shape = (*shape[:-1], shape[-1] + -shape[-1] % BLOCKS[kind].values)
        return shape, DTYPES.get(kind, torch.uint8)

    def kind(self, name: str) -> str:
        if name in self._types:
            return self._types[name]
        if len(self._source.shapes[name]) < 2:
            return "F32"  # norms may be computed from what is stored
        file, stored = self._source.file, self._source.stored[name]
        kind = self._quant(name) or file.kind(stored.names[0])
        return kind if kind in DTYPES or self._quant(name) else "F32"

    def _quant(self, name: str) -> str | None:
        """The block type of a parameter that the source has as it is."""
        return None if self._source.order(name) else self._source.quant(name)

    def stored_bytes(self, name: str) -> int:
        """Size of one tensor in the type in which it is read."""
        (shape, dtype), kind = self.meta(name), self.kind(name)
        if kind in BLOCKS:
            return prod(shape[:-1]) * row_bytes(kind, shape[-1])
        return prod(shape) * dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        kind = self.kind(name)
        if self._quant(name) == kind:
            return self._source.read(name, torch.uint8)
        if kind not in BLOCKS:
            return self._plain.read(name, DTYPES[kind])
        values = self._plain.read(name, torch.float32)
        values = torch.nn.functional.pad(values, (0, self.meta(name)[0][-1] - values.shape[-1]))
        rows = quantize(values, kind, self._importance.get(name))
        if self._was_quantized(name):
            lost = dequantize(rows, kind).sub_(values)
            self._errors[name] = _square(lost), _square(values)
        return rows

    def rearranged(self, name: str, turned: bool) -> Rearranged | None:  # noqa: ARG002
        """Return what the source has in another order of columns, if it is not to change."""
        order, kind = self._source.order(name), self._source.quant(name)
        if order is None or kind is None or name in self._types:
            return None
        read = partial(self._source.read, name, torch.uint8)
        return Rearranged(kind, read, self._source.read(order, torch.int64))

    def _was_quantized(self, name: str) -> bool:
        return any(
            self._source.file.kind(s) not in PLAIN_KINDS for s in self._source.stored[name].names
        )


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
