"""FP8: 8-bit floats (e4m3) with a scale for a tensor, a row or a block of rows and columns.

`x.weight` has codes; `x.weight_scale_inv` (transformers, after DeepSeek-V3, arXiv:2412.19437,
section 3.3) or `x.weight_scale` (compressed-tensors, ModelOpt) scales that they are multiplied by.
Stacked experts are named without `.weight`, and have scales for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.quantized.integers import group_size
from mtmd.kernels.checkpoint.quantized.parts import SCALES, Layout, Packed, Part, Parts, is_matrix
from mtmd.kernels.checkpoint.quantized.scheme import Scheme, sizes
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Shape
from mtmd.kernels.quantization.own_blocks import header

BLOCK = (128, 128)  # where the settings do not say
SUFFIXES = ("_scale_inv", "_scale")
DTYPES = (*SCALES, torch.float8_e8m0fnu, torch.uint8)


def find(parts: Parts, scheme: Scheme) -> Iterator[Packed]:
    """Yield the tensors of FP8. Raises ModelError for one whose scales are missing or misshapen."""
    blocks = _blocks(scheme.settings)
    for name in sorted(parts.names):
        shape, dtype = parts.meta(name)
        if dtype != torch.float8_e4m3fn or not is_matrix(shape) or name.endswith(SUFFIXES):
            continue
        scale = next((name + s for s in SUFFIXES if name + s in parts), f"{name}_scale")
        forms = _forms(shape, blocks)
        form, _ = parts.expect(scale, name, DTYPES)
        if form not in forms and len(form) == len(shape) and form[:-1] == shape[:-1]:
            group = group_size(parts, scale, shape[-1], form[-1], None)
            forms[form] = 1, group, f"groups of {group}"
        parts.expect(scale, name, DTYPES, *forms)
        per, group, label = forms[form]
        (*outer, n, k), names, label = shape, (name, scale), f"FP8, {label}"
        layout, other = Layout("F8_64", k, group), Layout("F8_64", n, per)
        turned = None
        if other.is_whole and len(shape) > 2:  # stacked experts
            open = _opener(parts, name, scale, (*outer, k, n), group, other.groups, turned=True)
            turned = Packed(name, (*outer, k, n), other, "FP8", label, names, open)
        open = _opener(parts, name, scale, shape, per, layout.groups)
        yield Packed(name, shape, layout, "FP8", label, names, open, turned=turned)


def _forms(shape: Shape, blocks: list[tuple[int, ...]]) -> dict[Shape, tuple[int, int, str]]:
    """Shapes that scales may have: how many rows and columns share one, and what that is called."""
    *outer, n, k = shape
    forms: dict[Shape, tuple[int, int, str]] = {}
    for rows, columns in blocks:
        form = (*outer, -(-n // rows), -(-k // columns))
        forms[form] = rows, min(columns, k), f"blocks of {rows} x {columns}"
    for form in ((*outer, n, 1), (*outer, n)):
        forms.setdefault(form, (1, k, "a scale for each row"))
    for form in ((*outer, 1, 1), tuple(outer) or (1,), tuple(outer)):
        forms.setdefault(form, (n, k, "a scale for each matrix"))
    return forms


def _blocks(settings: Settings) -> list[tuple[int, ...]]:
    """Sizes of blocks, [rows, columns], that the settings name. Raises ModelError."""
    groups = settings.part("config_groups")
    stated = [sizes(settings, "weight_block_size", 2)]
    stated += [
        sizes(groups.part(key).part("weights"), "block_structure", 2) for key in groups.values
    ]
    return [block for block in stated if block] or [BLOCK]


def _opener(
    parts: Parts,
    name: str,
    scale: str,
    shape: Shape,
    per: int,
    groups: int,
    *,
    turned: bool = False,
) -> Callable[[], Part]:
    """Open a tensor of logical `shape`, of which `per` rows of each matrix share a row of scales;
    with `turned`, rows and columns are exchanged in codes and scales.
    """
    n, k = shape[-2:]
    each = -(-n // per)

    def open() -> Part:
        codes = parts.read(name).view(torch.uint8)
        scales = parts.finite(scale).reshape(-1, *((groups, each) if turned else (each, groups)))
        codes = codes.reshape(-1, *((k, n) if turned else (n, k)))
        if turned:
            codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
        heads = header(scales)
        assert len(heads) == len(codes) == prod(shape[:-2])

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            pieces = []
            while start < stop:  # rows of one matrix at a time
                at, row = divmod(start, n)
                last = min(row + stop - start, n)
                index = torch.arange(row, last).div_(per, rounding_mode="floor")
                pieces.append((codes[at, row:last], heads[at, index]))
                start += last - row
            both = pieces[0]
            if len(pieces) > 1:
                both = torch.cat([c for c, _ in pieces]), torch.cat([h for _, h in pieces])
            if bool(((both[0] & 0x7F) == 0x7F).any()):
                raise ModelError(
                    f"{parts.where}: tensor {name} has codes that are no numbers; fetch the "
                    "checkpoint again"
                )
            return both

        return part

    return open
