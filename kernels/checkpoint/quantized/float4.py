"""4-bit floats with a scale for a few values: NVFP4 (16 values, an 8-bit float, and one fp32
number for the tensor) and MXFP4 (32 values, a power of two).

compressed-tensors names them `x.weight_packed`, `x.weight_scale` and `x.weight_global_scale`, by
which is divided; ModelOpt `x.weight`, `x.weight_scale` and `x.weight_scale_2`, by which is
multiplied. A byte has two codes, the first in the lower bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized import integers
from mtmd.kernels.checkpoint.quantized.parts import Layout, Packed, Part, Parts, is_matrix
from mtmd.kernels.checkpoint.quantized.scheme import Scheme
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.own_blocks import floats

NV_GROUP, MX_GROUP = 16, 32
_NAN = 0x7F  # of an 8-bit float, and 0xFF with a sign
_POWERS = (torch.uint8, torch.float8_e8m0fnu)


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:  # noqa: ARG001
    """Yield the tensors of 4-bit floats. Raises ModelError for one whose parts do not fit."""
    for codes in sorted(parts.names):
        shape, dtype = parts.meta(codes)
        name = codes.removesuffix("_packed")
        if dtype != torch.uint8 or not is_matrix(shape) or f"{name}_scale" not in parts:
            continue
        kinds = (torch.float8_e4m3fn, *_POWERS)
        _, dtype = parts.expect(f"{name}_scale", name, kinds)
        pack = _nvfp4 if dtype == torch.float8_e4m3fn else _mxfp4
        yield pack(parts, name, codes, (*shape[:-1], 2 * shape[-1]))


def _nvfp4(parts: Parts, name: str, codes: str, shape: Shape) -> Packed:
    divides = codes != name
    whole = f"{name}_global_scale" if divides else f"{name}_scale_2"
    outer = shape[:-2]
    groups = -(-shape[-1] // NV_GROUP)
    parts.expect(f"{name}_scale", name, (torch.float8_e4m3fn,), (*shape[:-1], groups))
    parts.expect(whole, name, (torch.float32,), (), (1,), outer, (*outer, 1), (*outer, 1, 1))
    layout = Layout("NV4_128", shape[-1], 128)

    def open() -> Part:
        packed = parts.read(codes).view(-1, shape[-1] // 2)
        scales = parts.read(f"{name}_scale").view(torch.uint8).view(-1, groups)
        if ((scales & _NAN == _NAN) | (scales > 128)).any():
            raise _no_scales(parts, f"{name}_scale")
        scales = pad(scales, (0, 8 * layout.groups - groups)).view(-1, layout.groups, 8)
        one = parts.finite(whole).reshape(-1)
        if divides and not one.all():
            raise _no_scales(parts, whole)
        one = (1 / one if divides else one).repeat_interleave(len(packed) // len(one))

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            first = floats(one[start:stop, None].expand(-1, layout.groups))
            heads = torch.cat((first, scales[start:stop]), -1)
            return integers.unpack(packed[start:stop], 4), heads

        return part

    names = (codes, f"{name}_scale", whole)
    return Packed(name, shape, layout, "nvfp4", "NVFP4", names, open)


def _mxfp4(parts: Parts, name: str, codes: str, shape: Shape) -> Packed:
    groups = -(-shape[-1] // MX_GROUP)
    parts.expect(f"{name}_scale", name, _POWERS, (*shape[:-1], groups))

    def open() -> Part:
        packed = parts.read(codes).view(-1, shape[-1] // 2)
        powers = parts.read(f"{name}_scale").view(torch.uint8).view(-1, groups, 1)
        if (powers == 0xFF).any():
            raise _no_scales(parts, f"{name}_scale")
        assert len(packed) == prod(shape[:-1])

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return integers.unpack(packed[start:stop], 4), powers[start:stop]

        return part

    layout = Layout("MXFP4", shape[-1], MX_GROUP)
    return Packed(name, shape, layout, "mxfp4", "MXFP4", (codes, f"{name}_scale"), open)


def _no_scales(parts: Parts, name: str) -> ModelError:
    return ModelError(
        f"{parts.where}: tensor {name} has scales that are negative or no finite numbers; fetch "
        "the checkpoint again"
    )
