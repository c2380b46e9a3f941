"""bitsandbytes: 4-bit codes that are looked up in a table (nf4, fp4; arXiv:2305.14314), with a
scale for some values that follow each other through all rows, itself quantized or not; and bytes
with a scale for a row (arXiv:2208.07339).

4 bits: `x.weight` has two codes in a byte, the first in the upper bits;
`x.weight.quant_state.bitsandbytes__nf4` is JSON. 8 bits: `x.weight` and `x.SCB`, whose 127th part
is the scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import gcd, prod

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized import integers
from mtmd.kernels.checkpoint.quantized.parts import Layout, Packed, Part, Parts, is_matrix
from mtmd.kernels.checkpoint.quantized.scheme import GROUP_MAX, Scheme
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.own_blocks import BNB_FP4_VALUES, NF4_VALUES, header

KINDS = {"nf4": ("NF4_64", NF4_VALUES), "fp4": ("FP4_64", BNB_FP4_VALUES)}
STATE = ".quant_state.bitsandbytes__"
STATE_BYTES_MAX = 1 << 14
WIDTH_MAX = 1 << 24


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:
    """Yield the tensors of bitsandbytes. Raises ModelError for one whose parts do not fit."""
    for name in sorted(parts.names):
        base, state, kind = name.partition(STATE)
        shape, dtype = parts.meta(name)
        if state:
            yield _four_bits(parts, base, name, kind)
        elif dtype == torch.uint8 and shape[1:] == (1,) and scheme.method == "bitsandbytes":
            if not any(f"{name}{STATE}{kind}" in parts for kind in KINDS):
                parts.expect(f"{name}{STATE}nf4", name, (torch.uint8,))
        elif (
            dtype == torch.int8
            and is_matrix(shape)
            and name.endswith(".weight")
            and f"{name.removesuffix('weight')}SCB" in parts
        ):
            yield _bytes(parts, name, shape)


def _bytes(parts: Parts, name: str, shape: Shape) -> Packed:
    base = name.removesuffix("weight")
    rows = prod(shape[:-1])
    parts.expect(f"{base}SCB", name, (torch.float32,), (rows,), (rows, 1))

    def open() -> Part:
        codes = parts.read(name).view(torch.uint8).view(rows, shape[-1])
        heads = integers.heads(parts.finite(f"{base}SCB").view(rows, 1) / 127, 128)

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return codes[start:stop] ^ 128, heads[start:stop]

        return part

    names = (name, f"{base}SCB", f"{base}weight_format")
    layout = Layout("U8_64", shape[-1], shape[-1])
    label = integers.label("bitsandbytes", 8, layout)
    there = tuple(part for part in names if part in parts)
    return Packed(name, shape, layout, "INT8", label, there, open)


def _four_bits(parts: Parts, name: str, state: str, kind: str) -> Packed:
    if kind not in KINDS:
        raise ModelError(
            f"{parts.where}: tensor {state:.200} names no type of codes, expected "
            f"{' or '.join(KINDS)}"
        )
    values = _state(parts, state)
    (n, k), size = _shape(values), values.count("blocksize", maximum=GROUP_MAX)
    codes, _ = parts.meta(name) if name in parts else ((), None)
    dtypes = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
    _, dtype = parts.expect(name, state, dtypes)
    if prod(codes) * dtype.itemsize * 2 != n * k or k % 2:
        raise ModelError(
            f"{parts.where}: tensor {name} has shape {list(codes)}, expected two values of "
            f"{[n, k]} in each byte"
        )
    scales = -(-n * k // size)
    _, absmax = parts.expect(
        f"{name}.absmax", name, (torch.float32, torch.uint8), (scales,), (scales, 1)
    )
    nested = absmax == torch.uint8
    names = [name, state, f"{name}.absmax", f"{name}.quant_map"]
    parts.expect(f"{name}.quant_map", name, (torch.float32,), (16,))
    blocks = 1
    if nested:
        blocks = values.count("nested_blocksize", maximum=GROUP_MAX)
        of_blocks = (-(-scales // blocks),)
        parts.expect(f"{name}.nested_absmax", name, (torch.float32,), of_blocks)
        parts.expect(f"{name}.nested_quant_map", name, (torch.float32,), (256,))
        _offset(values)
        names += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    block, table = KINDS[kind]
    layout = Layout(block, k, gcd(k, size))

    def open() -> Part:
        packed = parts.read(name).reshape(-1).view(torch.uint8).view(n, k // 2)
        if not torch.allclose(parts.read(f"{name}.quant_map"), torch.tensor(table), atol=1e-6):
            raise ModelError(
                f"{parts.where}: tensor {name}.quant_map differs from the values of {kind}; use "
                "the original checkpoint, or a GGUF of it"
            )
        if nested:
            index = parts.read(f"{name}.absmax").view(-1).to(torch.int32)
            outer = parts.finite(f"{name}.nested_absmax").repeat_interleave(blocks)[:scales]
            maxima = parts.finite(f"{name}.nested_quant_map")[index] * outer + _offset(values)
        else:
            maxima = parts.finite(f"{name}.absmax").view(-1)
        heads = header(maxima)
        columns = torch.arange(0, k, layout.group)

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            at = torch.arange(start, stop)[:, None] * k + columns
            pairs = packed[start:stop]
            both = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1)
            return both, heads[at.div_(size, rounding_mode="floor")]

        return part

    label = f"bitsandbytes {kind}, blocks of {size}"
    return Packed(name, (n, k), layout, kind.upper(), label, tuple(names), open)


def _state(parts: Parts, name: str) -> Settings:
    shape, _ = parts.expect(name, name, (torch.uint8,))
    if len(shape) != 1 or shape[0] > STATE_BYTES_MAX:
        raise ModelError(
            f"{parts.where}: tensor {name} has shape {list(shape)}, expected at most "
            f"{STATE_BYTES_MAX} bytes of JSON"
        )
    try:
        return Settings(json.loads(bytes(parts.read(name).tolist())), f"{parts.where}: {name}")
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{parts.where}: tensor {name} is not JSON; fetch the checkpoint again"
        ) from error


def _shape(values: Settings) -> tuple[int, int]:
    shape = values.get("shape", None)
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(n) is int and 0 < n <= WIDTH_MAX for n in shape)
    ):
        raise ModelError(f"{values.where}: shape is {shape!r:.40}, expected two sizes of a matrix")
    return shape[0], shape[1]


def _offset(values: Settings) -> float:
    value = values.get("nested_offset", 0.0)
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise ModelError(f"{values.where}: nested_offset is {value!r:.40}, expected a number")
    return float(value)
