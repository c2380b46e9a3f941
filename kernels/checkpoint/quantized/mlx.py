"""MLX: `x.weight` has codes of few bits in 32-bit words, without gaps; `x.scales` and `x.biases`
have a scale and a bias for each group of a row: scale q + bias. In mode "mxfp4" codes are 4-bit
floats and scales powers of two, without biases. Blocks have both in fp16, as exact as bf16 down to
7.6e-6; what smaller ones and those of fp32 lose is counted.

How many values make a group is said in config.json, for all layers and for single ones by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized import integers
from mtmd.kernels.checkpoint.quantized.parts import (
    SCALES,
    Layout,
    Packed,
    Part,
    Parts,
    Rounding,
    is_matrix,
)
from mtmd.kernels.checkpoint.quantized.scheme import GROUP_MAX, Scheme
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.quantization.own_blocks import floats

BITS = (2, 3, 4, 5, 6, 8)


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:
    """Yield the tensors of MLX. Raises ModelError for one whose parts do not fit."""
    for name in sorted(parts.names):
        shape, dtype = parts.meta(name)
        if name.endswith(".weight") and dtype == torch.uint32 and is_matrix(shape):
            base = name.removesuffix(".weight")
            of_layer = scheme.settings.values.get(base)
            one = of_layer if isinstance(of_layer, dict) else {}
            settings = Settings({**scheme.settings.values, **one}, scheme.settings.where)
            yield _packed(parts, base, settings)


def _packed(parts: Parts, base: str, settings: Settings) -> Packed:
    mode = settings.choice("mode", ("affine", "mxfp4"), "affine")
    name, size = f"{base}.weight", settings.count("group_size", 64, maximum=GROUP_MAX)
    (*outer, columns), _ = parts.meta(name)
    kinds = SCALES if mode == "affine" else (torch.uint8,)
    (*_, groups), _ = parts.expect(f"{base}.scales", name, kinds)
    parts.expect(f"{base}.scales", name, kinds, (*outer, groups))
    width = groups * size
    bits = columns * 32 // width if width else 0
    if bits not in BITS or bits * width != columns * 32 or (mode == "mxfp4" and bits != 4):
        raise ModelError(
            f"{parts.where}: tensor {name} has rows of {columns} words and {groups} scales for "
            f"{size} values each, expected {', '.join(map(str, BITS))} bits a value"
        )
    if mode == "affine":
        parts.expect(f"{base}.biases", name, SCALES, (*outer, groups))
    if mode == "mxfp4":
        layout = Layout("MXFP4", width, size)
    elif bits <= 4:
        layout = Layout("A4_64" if size % 64 == 0 else "Q4_1", width, size)
    else:
        layout = Layout("A8_32", width, size)

    rounding = Rounding()

    def numbers() -> tuple[Tensor, Tensor]:
        """Scales and biases as they are stored and in fp16, [2, rows, groups] each."""
        stored = torch.stack(
            [parts.finite(f"{base}.{part}").view(-1, groups) for part in ("scales", "biases")]
        )
        halves = stored.half()
        for part, half in zip(("scales", "biases"), halves, strict=True):
            if not half.isfinite().all():
                raise ModelError(
                    f"{parts.where}: tensor {base}.{part} has numbers beyond fp16, in which they "
                    "are kept; use the original checkpoint, or a GGUF of it"
                )
        return stored, halves

    def open() -> Part:
        words = parts.read(name).view(-1, columns)
        lost: Tensor | None = None
        if mode == "mxfp4":
            heads = parts.read(f"{base}.scales").view(-1, groups, 1)
        else:
            stored, halves = numbers()
            heads, difference = floats(*halves), stored - halves.float()
            lost = difference if difference.any() else None
            rounding.errors = rounding.values = 0.0

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            codes = integers.unpack(words[start:stop], bits)
            if lost is not None:
                each = codes.float().unflatten(1, (groups, size))
                errors, values = (
                    each * scale[start:stop, :, None] + bias[start:stop, :, None]
                    for scale, bias in (lost, stored)
                )
                rounding.add(errors, values)
            return codes, heads[start:stop]

        return part

    there = (name, f"{base}.scales", *((f"{base}.biases",) if mode == "affine" else ()))
    form = "MXFP4" if mode == "mxfp4" else f"{bits} bits"
    label = f"MLX {form}, groups of {size}"
    return Packed(name, (*outer, width), layout, "MLX", label, there, open, rounding=rounding)
