"""Checkpoint tensors under one set of names and one layout, GGUF's, whatever file they come
from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Shape, Type
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, OF_16_BITS, dequantize, row_bytes

# Types whose values mean what they say, as those of block types do not; and what files call them.
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN_KINDS = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True)
class Rearranged:
    """Rows of blocks, uint8 [..., row_bytes], of a tensor that is stored in another arrangement:
    `read` gives them in the block type `kind`. `order`, int32 [K]: the columns of the tensor in
    the order of the blocks' values, None where that is theirs.
    """

    kind: str
    read: Callable[[], torch.Tensor]
    order: torch.Tensor | None = None


class WeightFile(Protocol):
    """A file of named tensors whose shapes can be read without their values. A tensor of a block
    type has its logical shape and torch.uint8 as `meta`, the type's name as `kind`, and rows of
    bytes as values; the `kind` of others is no block type's name. One that is stored in another
    quantized form is read as values, with the form's name as `kind`; `rearranged` gives it as
    blocks, where it can be had so: with its columns in another order, or, if `turned`, with the
    rows and columns of its matrices exchanged.
    """

    canonical: bool
    """Whether tensors have our names and layout, as they have in GGUF."""

    @property
    def files(self) -> Sequence[Path]: ...
    def names(self) -> Iterable[str]: ...
    def meta(self, name: str) -> tuple[Shape, torch.dtype]: ...
    def kind(self, name: str) -> str: ...
    def stored_bytes(self, name: str) -> int: ...
    def read(self, name: str) -> torch.Tensor: ...
    def rearranged(self, name: str, turned: bool) -> Rearranged | None: ...


@dataclass(frozen=True)
class Stored:
    """One way in which a file may hold a parameter: tensors that belong together, each of `shape`,
    or of their own `shapes`, and what makes the parameter of them.

    `picks_rows`: `convert` takes whole rows of its tensors as they are, which it can do where they
    are rows of blocks, too; and, if `runs` is not 0, moves runs of so many values within rows.
    `invert` makes the tensors out of the parameter, for files that are written so. Where `convert`
    exchanges rows and columns of matrices, `turned` does the rest of it with whole rows of those
    that are exchanged already, rows of blocks among them.
    """

    names: tuple[str, ...]
    shape: Shape
    convert: Callable[..., torch.Tensor] | None = None
    picks_rows: bool = False
    runs: int = 0
    invert: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None
    turned: Callable[..., torch.Tensor] | None = None
    shapes: tuple[Shape, ...] = ()

    def each(self) -> Iterator[tuple[str, Shape]]:
        """Yield the name and the shape of each tensor."""
        yield from zip(self.names, self.shapes or (self.shape,) * len(self.names), strict=True)


@dataclass(frozen=True)
class Parameter:
    """A canonical tensor: its shape, the names it may have in a checkpoint, and how it is stored
    there if not as it is (`convert`, `picks_rows` and `runs` as those of `Stored`).

    `others` are further ways a checkpoint may hold it, tried when no name in `sources` is there;
    `gguf` those of GGUF files, where they do not simply have it under its canonical name, as it is.
    """

    shape: Shape
    sources: tuple[str, ...]
    stored: Shape | None = None
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    others: tuple[Stored, ...] = ()
    gguf: tuple[Stored, ...] = ()
    picks_rows: bool = False
    runs: int = 0

    def ways(self, name: str, canonical: bool) -> Iterator[Stored]:
        """Yield how a file may hold it under `name` (GGUF), or under any of its sources."""
        if canonical:
            yield from self.gguf or (Stored((name,), self.shape),)
            return
        shape = self.shape if self.stored is None else self.stored
        for source in self.sources:
            way = Stored((source,), shape, self.convert, self.picks_rows, self.runs)
            yield way
            if len(shape) > 3 and shape[0] > 1:  # of one there is no kernel, but a table's axis
                yield channels_last(way)
        yield from self.others


def channels_last(way: Stored) -> Stored:
    """The same kernel of a convolution with its channels [N, C, ...] behind all else, as MLX has
    them.
    """
    count, channels, *others = way.shape
    return Stored(way.names, (count, *others, channels), partial(_channels_first, way.convert))


def _is_channels_last(way: Stored) -> bool:
    return isinstance(way.convert, partial) and way.convert.func is _channels_first


def _channels_first(
    convert: Callable[..., torch.Tensor] | None, kernel: torch.Tensor
) -> torch.Tensor:
    kernel = kernel.movedim(-1, 1)
    return convert(kernel) if convert else kernel


@dataclass(frozen=True)
class Dequantized:
    """A quantized tensor that no kernel takes as it is: its values are kept instead, and take more
    memory.
    """

    name: str
    kind: str
    stored_bytes: int
    values: int


class CanonicalWeights:
    """A `WeightSource` over a file: every parameter found and of the right shape before anything is
    read.
    """

    def __init__(self, file: WeightFile, parameters: Mapping[str, Parameter], where: str):
        """Raises ModelError naming the first tensor that is missing, misshapen or of a type that
        would need scales.

        `where` names the checkpoint in errors.
        """
        self._file, self._parameters, self._where = file, dict(parameters), where
        self._stored: dict[str, Stored] = {}
        self._keeps_blocks = True
        self._changes: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {}
        present = set(file.names())
        both: dict[str, list[Stored]] = {}
        turned: set[bool] = set()
        for name, parameter in parameters.items():
            ways = list(parameter.ways(name, file.canonical))
            present_ways = [w for w in ways if present.issuperset(w.names)]
            if not present_ways:
                raise ModelError(
                    f"{where}: tensor {ways[0].names[0]} is missing; the checkpoint is incomplete, "
                    "fetch it again"
                )
            # Files of one kind may hold a tensor turned round under the same name: then its shape
            # tells.
            fitting = [
                w
                for w in present_ways
                if all(tuple(file.meta(source)[0]) == shape for source, shape in w.each())
            ]
            if len(fitting) > 1 and fitting[0].names == fitting[1].names:
                both[name] = fitting
            elif len(fitting) == 1 and any(map(_is_channels_last, present_ways)):
                turned.add(_is_channels_last(fitting[0]))
            self._stored[name] = (fitting or present_ways)[0]
            for source, shape in self._stored[name].each():
                self._check(source, shape)
        for name, fitting in both.items():  # as the other kernels of the file lie
            if len(turned) != 1:
                raise ModelError(
                    f"{where}: tensor {fitting[0].names[0]} of shape {list(fitting[0].shape)} can "
                    "be read in two ways; "
                    "use a GGUF of this model, which has one"
                )
            self._stored[name] = next(w for w in fitting if {_is_channels_last(w)} == turned)
        self._blocks = {
            name: blocks
            for name, stored in self._stored.items()
            if (blocks := self._as_blocks(stored, len(parameters[name].shape), self._rows))
        }
        self._orders, self._columns = self._find_orders()

    def _check(self, source: str, expected: Shape) -> None:
        shape, dtype = self._file.meta(source)
        if tuple(shape) != expected:
            raise ModelError(
                f"{self._where}: tensor {source} has shape {list(shape)}, expected "
                f"{list(expected)} from the configuration"
            )
        if dtype not in PLAIN and self._file.kind(source) not in BLOCKS:
            raise ModelError(
                f"{self._where}: tensor {source} is {name_of(dtype)}, expected "
                f"{', '.join(map(name_of, PLAIN))}; "
                "checkpoints quantized in this way are not read, use the original one or a GGUF"
            )

    @property
    def file(self) -> WeightFile:
        return self._file

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Return how the file holds each parameter, by its canonical name."""
        return self._stored

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of each parameter, by its canonical name."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    @property
    def bytes(self) -> int:
        """Size of all parameters together, as they are stored."""
        return sum(self._file.stored_bytes(source) for source in self.sources)

    @property
    def sources(self) -> set[str]:
        """The names in the file that are used."""
        return {source for stored in self._stored.values() for source in stored.names}

    @property
    def dequantized(self) -> list[Dequantized]:
        """Quantized tensors that are not used as they are, each once, whatever the number of
        parameters it holds.
        """
        tensors = {
            source: Dequantized(source, kind, self._file.stored_bytes(source), prod(shape))
            for name, stored in self._stored.items()
            if self.quant(name) is None
            for source, shape in stored.each()
            if (kind := self._file.kind(source)) not in PLAIN_KINDS
        }
        return list(tensors.values())

    def quant(self, name: str) -> str | None:
        return self._blocks[name][0].kind if self._keeps_blocks and name in self._blocks else None

    def order(self, name: str) -> str | None:
        """The name by which `read` gives the order of columns, int64 [K], in which the blocks of a
        parameter have their values; None where it is the parameter's own. Parameters of one layer
        share it.
        """
        return self._orders.get(name) if self._keeps_blocks else None

    def _as_blocks(
        self, stored: Stored, dims: int, rows_of: Callable[[str, bool], Rearranged | None]
    ) -> list[Rearranged] | None:
        """The rows of blocks that a parameter of so many dimensions is made of, where the kernels
        take it as it is stored; `rows_of` those of a tensor of the file, by its name and whether
        its rows and columns are exchanged.
        """
        if len(stored.shape) < 2:
            return None
        if stored.convert and not stored.picks_rows and not stored.turned:
            return None
        blocks = [rows_of(source, stored.turned is not None) for source in stored.names]
        rows = [one for one in blocks if one is not None]
        if len(rows) < len(blocks) or len({one.kind for one in rows}) > 1:
            return None
        order = rows[0].order
        if order is None:
            alike = all(one.order is None for one in rows)
        else:
            # Products gather their inputs in that order; experts share theirs with each other.
            alike = dims == 2 and not stored.runs
            alike = alike and all(
                one.order is not None and torch.equal(one.order, order) for one in rows
            )
        return rows if alike and stored.runs % BLOCKS[rows[0].kind].values == 0 else None

    def _rows(self, source: str, turned: bool) -> Rearranged | None:
        kind = self._file.kind(source)
        if kind in PLAIN_KINDS:
            return None
        if kind in NATIVE and not turned:
            return Rearranged(kind, partial(self._file.read, source))
        rows = self._file.rearranged(source, turned)
        return rows if rows and rows.kind in NATIVE else None

    def _halves(self, source: str, turned: bool) -> Rearranged | None:
        shape, dtype = self._file.meta(source)
        kind = OF_16_BITS.get(dtype)
        if kind is None or turned or shape[-1] % BLOCKS[kind].values:
            return None
        return Rearranged(kind, lambda: self._file.read(source).view(torch.uint8))

    def _find_orders(self) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """Names of orders by parameter, and the orders: one for those in a layer that are equal."""
        names, orders = dict[str, str](), dict[str, torch.Tensor]()
        for name, (rows, *_) in self._blocks.items():
            if rows.order is None:
                continue
            layer = name.rpartition(".")[0].rpartition(".")[0]
            for known, order in orders.items():
                if known.startswith(f"{layer}.") and torch.equal(order, rows.order):
                    names[name] = known
                    break
            else:
                names[name] = f"{name}.order"
                orders[names[name]] = rows.order
        return names, orders

    def as_gguf(self) -> CanonicalWeights:
        """The same in the names and layouts in which a GGUF is written: the first of each
        parameter's ways. Raises ModelError for a tensor that nothing here says how to make.
        """
        parameters, needed = dict[str, Parameter](), set[str]()
        for name, parameter in self._parameters.items():
            way, stored = next(parameter.ways(name, canonical=True)), self._stored[name]
            needed.update(way.names)
            if way.convert is None:
                (theirs,) = way.names
                parameters[theirs] = Parameter(way.shape, (), others=(stored,))
            elif way.convert == stored.convert and len(way.names) == 1:
                # files of either format hold the same tensor
                (theirs,) = way.names
                parameters[theirs] = Parameter(way.shape, stored.names)
            elif way.invert is not None:  # else another parameter gives these tensors
                for index, theirs in enumerate(way.names):
                    convert = partial(_inverted, stored.convert, way.invert, index)
                    other = Stored(stored.names, stored.shape, convert, shapes=stored.shapes)
                    parameters.setdefault(theirs, Parameter(way.shape, (), others=(other,)))
        if missing := sorted(needed - parameters.keys()):
            raise ModelError(
                f"{self._where}: tensor {missing[0]} of a GGUF cannot be made of this checkpoint; "
                "use the model in safetensors"
            )
        return CanonicalWeights(self._file, parameters, self._where)

    @property
    def turned_in_gguf(self) -> list[str]:
        """Names in a GGUF of tensors that lie otherwise there than here."""
        ways = (next(p.ways(n, canonical=True)) for n, p in self._parameters.items())
        return [name for way in ways if way.convert not in (None, pointwise) for name in way.names]

    def without_blocks(self) -> CanonicalWeights:
        """The same, all of it dequantized when it is read."""
        other = copy(self)
        other._keeps_blocks = False
        return other

    def with_halves(self, names: Collection[str]) -> CanonicalWeights:
        """The same with those of the parameters that are stored in 16 bits, plain, as blocks of
        such numbers: for a CPU that multiplies in fp32, and widens them as it reads them.
        """
        other = copy(self)
        other._blocks = dict(self._blocks)
        for name in set(names) - self._blocks.keys() - self._changes.keys():
            stored, dims = self._stored[name], len(self._parameters[name].shape)
            blocks = self._as_blocks(stored, dims, self._halves)
            if blocks:
                other._blocks[name] = blocks
        return other

    def without(self, names: Collection[str]) -> CanonicalWeights:
        """The same less some of the parameters."""
        others = {name: one for name, one in self._parameters.items() if name not in names}
        return CanonicalWeights(self._file, others, self._where)

    def changed(
        self, changes: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    ) -> CanonicalWeights:
        """The same with parameters that are changed when they are read: `changes` are called with
        their values in fp32, and may be of those alone that are not used as blocks.
        """
        other = copy(self)
        other._changes = dict(self._changes)
        for name, change in changes.items():
            other._changes[name] = (*other._changes.get(name, ()), change)
        return other

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        if name in self._columns:
            return Type.contiguous(self._columns[name].shape, torch.int64)
        shape, kind = self._parameters[name].shape, self.quant(name)
        if kind:
            return Type.contiguous((*shape[:-1], row_bytes(kind, shape[-1])), torch.uint8)
        return Type.contiguous(shape, dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in self._columns:
            return self._columns[name].long()
        stored = self._stored[name]
        if self.quant(name):
            rows = [one.read() for one in self._blocks[name]]
            convert = stored.turned or stored.convert
            return (convert(*rows) if convert else rows[0]).contiguous()
        tensors = [self._values(source) for source in stored.names]
        tensor = stored.convert(*tensors) if stored.convert else tensors[0]
        for change in self._changes.get(name, ()):
            tensor = change(tensor.float())
        return tensor.to(dtype).contiguous()

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Some rows of a parameter, fp32 [N, K]; of one that is stored as it is, no others are
        read.
        """
        stored, changes = self._stored[name], self._changes.get(name, ())
        if stored.convert or changes or len(stored.names) > 1:
            return self.without_blocks().read(name, torch.float32)[list(indices)]
        (source,) = stored.names
        tensor, kind = self._file.read(source)[list(indices)], self._file.kind(source)
        return (dequantize(tensor, kind) if kind in BLOCKS else tensor).float()

    def _values(self, source: str) -> torch.Tensor:
        tensor, kind = self._file.read(source), self._file.kind(source)
        return dequantize(tensor, kind) if kind in BLOCKS else tensor


def _inverted(
    convert: Callable[..., torch.Tensor] | None,
    invert: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    index: int,
    *stored: torch.Tensor,
) -> torch.Tensor:
    return invert(convert(*stored) if convert else stored[0])[index]


def _stored_bytes(file: WeightFile, name: str) -> int:
    (shape, dtype), kind = file.meta(name), file.kind(name)
    if kind in BLOCKS:
        return prod(shape[:-1]) * row_bytes(kind, shape[-1])
    return prod(shape) * dtype.itemsize


def check_no_extra(
    file: WeightFile, used: Iterable[str], ignored: Iterable[str], where: str
) -> None:
    """Raises ModelError naming tensors that no part of the model uses, less those matching the
    `ignored` patterns.
    """
    patterns = [re.compile(p) for p in ignored]
    extra = sorted(
        n for n in set(file.names()) - set(used) if not any(p.fullmatch(n) for p in patterns)
    )
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ModelError(
            f"{where}: tensor {extra[0]}{more} is not part of the model that its configuration "
            "describes; "
            "wrong configuration or wrong weights"
        )


def pointwise(kernel: torch.Tensor) -> torch.Tensor:
    """The matrix [N, C] of a convolution whose kernels [N, C, 1, 1] are of one cell."""
    return kernel.flatten(1)


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """Gemma stores norm weights as w and applies 1 + w; we store what is applied, as GGUF does."""
    return tensor.float() + 1


def adjacent_pairs(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of a q or k projection (or its bias) so that rotary pairs lie side by side, as GGUF has
    them for Llama: within each of `heads` heads, rows (0, K/2, 1, K/2 + 1, ...) of a checkpoint
    that pairs row i with row i + K/2.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        pairs: torch.Tensor = tensor.unflatten(0, (heads, 2, -1))
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return convert
