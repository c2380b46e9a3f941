"""MLX: `x.weight` has codes of few bits in 32-bit words, without gaps; `x.scales` and `x.biases`
have a scale and a bias for each group of a row: scale q + bias. In mode "mxfp4" codes are 4-bit
floats and scales powers of two, without biases.

How many values make a group is said in config.json, for all layers and for single ones by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized import integers
from mtmd.kernels.checkpoint.quantized.parts import SCALES, Layout, Packed, Part, Parts, is_matrix
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

    def heads() -> Tensor:
        if mode == "mxfp4":
            return parts.read(f"{base}.scales").view(-1, groups, 1)
        both = []
        for part in ("scales", "biases"):
            half = parts.finite(f"{base}.{part}").half().view(-1, groups)
            if not half.isfinite().all():
                raise ModelError(
                    f"{parts.where}: tensor {base}.{part} has numbers beyond fp16, in which they "
                    "are kept; use the original checkpoint, or a GGUF of it"
                )
            both.append(half)
        return floats(*both)

    def open() -> Part:
        words, all_heads = parts.read(name).view(-1, columns), heads()

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return integers.unpack(words[start:stop], bits), all_heads[start:stop]

        return part

    there = (name, f"{base}.scales", *((f"{base}.biases",) if mode == "affine" else ()))
    form = "MXFP4" if mode == "mxfp4" else f"{bits} bits"
    label = f"MLX {form}, groups of {size}"
    return Packed(name, (*outer, width), layout, "MLX", label, there, open)
