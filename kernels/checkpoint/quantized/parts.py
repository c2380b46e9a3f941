"""Tensors that a file holds in several, as codes, scales and more: what they are, and how rows of
blocks are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.safetensors_file import SafetensorsWeights
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize
from mtmd.kernels.quantization.own_blocks import nibbles, rows
from mtmd.kernels.resources.threads import one_thread

# Values packed at a time, so that what lies between stays in a core's caches.
CHUNK_VALUES = 1 << 18
SCALES = (torch.float32, torch.bfloat16, torch.float16)

Part = Callable[[int, int], tuple[Tensor, Tensor]]
"""Codes, uint8 [n, K], and heads, uint8 [n, groups, bytes], of the rows from one to another."""


@dataclass(frozen=True)
class Layout:
    """Rows of `width` values as blocks of a type; `group` values next to each other have the same
    head, in the order of columns `order`, int32 [width], if that is not theirs.
    """

    kind: str
    width: int
    group: int
    order: Tensor | None = None

    @property
    def groups(self) -> int:
        """Groups in a row; the last may be shorter than the others."""
        return -(-self.width // self.group)

    @property
    def is_whole(self) -> bool:
        """True where a row, with its columns in order, is whole blocks, each within one group."""
        values = BLOCKS[self.kind].values
        return self.width % values == 0 and (self.group % values == 0 or self.groups == 1)

    def pack(self, codes: Tensor, heads: Tensor) -> Tensor:
        """Rows of whole blocks, uint8 [n, row_bytes], their values in order."""
        values = BLOCKS[self.kind].values
        at = torch.arange(0, self.width, values).div_(self.group, rounding_mode="floor")
        codes = codes if self.order is None else codes[:, self.order]
        return rows(heads if self.group == values else heads[:, at], self._codes(codes))

    def values(self, codes: Tensor, heads: Tensor) -> Tensor:
        """The values of rows, fp32 [n, K], their columns where they belong."""
        # Each group is filled up to whole blocks, and what was added cut off again.
        values = BLOCKS[self.kind].values
        groups, full = self.groups, -(-self.group // values) * values
        codes = codes if self.order is None else codes[:, self.order]
        codes = pad(codes, (0, groups * self.group - self.width)).unflatten(1, (groups, -1))
        codes = pad(codes, (0, full - self.group)).flatten(1)
        blocks = rows(heads.repeat_interleave(full // values, 1), self._codes(codes))
        padded = dequantize(blocks, self.kind).unflatten(1, (groups, full))
        result: Tensor = padded[..., : self.group].flatten(1)[:, : self.width]
        return result if self.order is None else result[:, self.order.argsort()]

    def _codes(self, codes: Tensor) -> Tensor:
        block = BLOCKS[self.kind]
        if block.bytes >= block.values:
            return codes
        return nibbles(codes, 8 if self.kind == "NV4_128" else 16)


@dataclass
class Rounding:
    """Describes what a tensor lost as its scales were rounded to the type that blocks have them in:
    sums of squares of the errors and of the values, 0 before it is read and where nothing is lost.
    """

    errors: float = 0.0
    values: float = 0.0

    def add(self, errors: Tensor, values: Tensor) -> None:
        self.errors += float(errors.square().sum(dtype=torch.float64))
        self.values += float(values.square().sum(dtype=torch.float64))


@dataclass(frozen=True)
class Packed:
    """A tensor of logical `shape` that the file holds as its `parts`. `form` names how, in a word
    that is no block type's; `label` in a few. `open` reads the parts; rows are then packed in
    multiples of `step`. `turned`: the same with rows and columns of its matrices exchanged, where
    those are whole blocks, too. `rounding` is filled in when it is read.
    """

    name: str
    shape: Shape
    layout: Layout
    form: str
    label: str
    parts: tuple[str, ...]
    open: Callable[[], Part]
    step: int = 1
    turned: Packed | None = None
    rounding: Rounding = field(default_factory=Rounding)

    @property
    def is_plain(self) -> bool:
        """True where its rows are whole blocks with the columns where they belong."""
        return self.layout.is_whole and self.layout.order is None

    def read(self) -> Tensor:
        """Rows of whole blocks, uint8 [*shape[:-1], row_bytes], their values in order."""
        return self._read(self.layout.pack)

    def read_values(self) -> Tensor:
        """Values, fp32 of `shape`."""
        return self._read(self.layout.values)

    def _read(self, pack: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with one_thread():  # steps are short: threads would wait for each other
            return self._packed(pack)

    def _packed(self, pack: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        part, count = self.open(), prod(self.shape[:-1])
        step = max(CHUNK_VALUES // self.layout.width // self.step, 1) * self.step
        out: Tensor | None = None
        for start in range(0, count, step):
            stop = min(start + step, count)
            packed = pack(*part(start, stop))
            if out is None:
                out = packed if stop == count else packed.new_empty((count, packed.shape[1]))
            if out is not packed:
                out[start:stop] = packed
        assert out is not None
        whole: Tensor = out.unflatten(0, self.shape[:-1])
        return whole


def is_matrix(shape: Shape) -> bool:
    """Return whether a tensor of that shape is a matrix, or several, with at least one number."""
    return len(shape) >= 2 and 0 not in shape


class Parts:
    """The tensors of a file by name, with errors that say what is wrong with them."""

    def __init__(self, file: SafetensorsWeights) -> None:
        self._file = file
        self.names = frozenset(file.names())
        self.where = str(file.files[0].parent) if file.files else "the checkpoint"

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def meta(self, name: str) -> tuple[Shape, torch.dtype]:
        return self._file.meta(name)

    def read(self, name: str) -> Tensor:
        return self._file.read(name)

    def finite(self, name: str) -> Tensor:
        """A tensor of scales, of bytes powers of two, as fp32. Raises ModelError where one is
        infinite or no number.
        """
        scales = self.read(name)
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float()
        if not scales.isfinite().all():
            raise ModelError(
                f"{self.where}: tensor {name} has scales that are no finite numbers; fetch the "
                "checkpoint again"
            )
        return scales

    def expect(
        self, name: str, of: str, dtypes: Sequence[torch.dtype], *shapes: Shape
    ) -> tuple[Shape, torch.dtype]:
        """Shape and dtype of a part of the quantized tensor `of`. Raises ModelError where it is
        missing, of another type or, if `shapes` are given, of none of them.
        """
        if name not in self.names:
            raise ModelError(
                f"{self.where}: tensor {of} is quantized, but {name} is "
                "missing; the checkpoint is incomplete, fetch it again"
            )
        shape, dtype = self.meta(name)
        if dtype not in dtypes:
            raise ModelError(
                f"{self.where}: tensor {name} is {name_of(dtype)}, expected "
                f"{' or '.join(map(name_of, dtypes))}"
            )
        if shapes and shape not in shapes:
            raise ModelError(
                f"{self.where}: tensor {name} has shape {list(shape)}, expected "
                f"{' or '.join(str(list(s)) for s in dict.fromkeys(shapes))}, to fit {of}"
            )
        return shape, dtype
