"""Random weights in the shape of a model: made tensor by tensor as they are asked for, in plain
types or as valid blocks of a quantized type. Nothing is written.

Values are drawn once for each type and repeated: the speed of an op does not depend on them, and a
model of eight billion parameters is there in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from mtmd.base.errors import OptionError
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.mixtures import MIXTURES, tensor_types
from mtmd.kernels.cpu.quantize import quantize
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes

PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NOISE = (1 << 20) + 7  # values drawn; a row's length does not divide it, so that rows differ
BANK = (1 << 12) - 1  # blocks drawn
BIAS = 0.02


class RandomFile:
    """A `WeightFile` that holds what `parameters` ask for, under GGUF's names."""

    canonical = True
    files: Sequence[Path] = ()

    def __init__(
        self, parameters: Mapping[str, Parameter], kind_of: Callable[[str, Shape], str]
    ) -> None:
        """`kind_of(name, shape)` is one of `PLAIN` or a block type."""
        self._tensors: dict[str, tuple[Shape, str]] = {}
        for name, parameter in parameters.items():
            stored = next(parameter.ways(name, canonical=True))
            for source, shape in stored.each():
                self._tensors[source] = shape, kind_of(source, shape)

    @property
    def bytes(self) -> int:
        return sum(_bytes(shape, kind) for shape, kind in self._tensors.values())

    @property
    def count(self) -> int:
        """Parameters of the model."""
        return sum(prod(shape) for shape, _ in self._tensors.values())

    def names(self) -> Iterable[str]:
        return self._tensors

    def meta(self, name: str) -> tuple[Shape, torch.dtype]:
        shape, kind = self._tensors[name]
        return shape, PLAIN.get(kind, torch.uint8)

    def kind(self, name: str) -> str:
        return self._tensors[name][1]

    def stored_bytes(self, name: str) -> int:
        return _bytes(*self._tensors[name])

    def read(self, name: str) -> Tensor:
        shape, kind = self._tensors[name]
        start = crc32(name.encode())
        if kind in PLAIN:
            return _values(name, shape, start).to(PLAIN[kind])
        rows = prod(shape[:-1])
        blocks = _repeat(
            _blocks(kind, _spread(shape)), rows * shape[-1] // BLOCKS[kind].values, start
        )
        return blocks.view(*shape[:-1], row_bytes(kind, shape[-1]))

    def rearranged(self, name: str, turned: bool) -> None:
        """Return None: every tensor is stored as it is read."""


def text_kinds(weights: str, parameters: Mapping[str, Parameter]) -> Callable[[str, Shape], str]:
    """Return which type each tensor of a decoder has in this mixture. Raises OptionError for one
    that is not known.
    """
    if weights not in MIXTURES:
        raise OptionError(f"weights {weights!r:.40}: expected one of {', '.join(MIXTURES)}")
    plain = plain_kinds(weights)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    kinds = tensor_types(weights, shapes)
    return lambda name, shape: kinds.get(name) or plain(name, shape)


def plain_kinds(weights: str) -> Callable[[str, Shape], str]:
    """Return the kinds for an encoder, which is not quantized."""
    wide = "F32" if weights == "F32" else "BF16"
    return lambda name, shape: wide if len(shape) > 1 else "F32"  # noqa: ARG005


def _bytes(shape: Shape, kind: str) -> int:
    if kind in PLAIN:
        return prod(shape) * PLAIN[kind].itemsize
    return prod(shape[:-1]) * row_bytes(kind, shape[-1])


def _spread(shape: Shape) -> float:
    """The standard deviation with which a product keeps the size of its input."""
    inputs = prod(shape[1:]) if len(shape) == 4 else shape[-1]
    return float(inputs**-0.5)


def _values(name: str, shape: Shape, start: int) -> Tensor:
    """fp32, of a size that keeps activations near one through any number of layers."""
    noise = _repeat(_noise(), prod(shape), start).view(shape)
    if name.endswith(".ssm_a"):  # a decay, the logarithm of which is stored
        return -0.1 - noise.abs()
    if name.endswith(".bias"):
        return noise * BIAS
    if len(shape) == 1:
        return 1 + 0.1 * noise
    return noise * _spread(shape)


def _repeat(bank: Tensor, count: int, start: int) -> Tensor:
    """`count` rows of the bank, from `start` on, round and round."""
    turned = torch.roll(bank, -(start % len(bank)), 0)
    out = turned.new_empty((count, *bank.shape[1:]))
    for begin in range(0, count, len(bank)):
        part = out[begin : begin + len(bank)]
        part.copy_(turned[: len(part)])
    return out


@lru_cache(maxsize=1)
def _noise() -> Tensor:
    return torch.randn(NOISE, generator=torch.Generator().manual_seed(0))


@lru_cache(maxsize=32)
def _blocks(kind: str, spread: float) -> Tensor:
    """Random blocks [n, bytes] whose values have a mean of about 0 and the deviation `spread`."""
    values = BLOCKS[kind].values
    return quantize(_noise()[: BANK * values].view(BANK, values) * spread, kind)
