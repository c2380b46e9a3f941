"""The resource tables of docs/kernels.md: `python -m mtmd.kernels.gpu.resources > docs/kernels.md`
(one to a few minutes).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from mtmd.kernels import ops
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu import gated_delta, quant_matmul, short_conv
from mtmd.kernels.gpu.cases import HEAD_SIZES
from mtmd.kernels.gpu.compile import (
    SHARED_LIMIT,
    Resources,
    compile_combine,
    compile_for,
    compile_node,
)
from mtmd.kernels.gpu.launch import MAX_HEAD, parts, plan_combine, plan_launch
from mtmd.kernels.gpu.quant_cases import KINDS
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.quantization.blocks import row_bytes

HEAD = """# GPU kernels

Written by `python -m mtmd.kernels.gpu.resources > docs/kernels.md` with triton {triton}. Do not edit by hand.

**Not run on a GPU.** Every figure here is the compiler's: the kernels are compiled ahead of time for NVIDIA A100 (`cuda:80`), H100/H200
(`cuda:90`) and AMD MI300 (`hip:gfx942`), which needs no GPU. The figures say that it compiles, what it takes and where a few
registers spill; they say nothing about speed. `python benchmarks/gpu.py` checks and measures the kernels where there is a GPU. Their
results are checked on the CPU in Triton's interpreter (`tests/kernels`).

What attention takes: head sizes 16 to {most} (keys and values may differ), bf16, fp16 and fp32 with fp32 sums, grouped heads, causal,
window, bounds, soft cap, an additive mask of any floating-point type that broadcasts, any strides but in the last dimension. Anything
else is refused with a reason (`rejects` in `kernels/gpu/flash_attention.py`).

Each cell: shared memory in KiB / registers per thread / spilled bytes per thread / matrix instruction. Limits of shared memory:
{limits}. `tile` is rows x keys, warps, stages, and how many programs share out
the keys, if several.
"""

WHY = """
## Splitting the head instead of padding it

The same tile with the head padded to the next power of two (128), which is what a kernel without the split must do. For 72 and 80 the
split covers the head with 64 + 16 columns: 11 % and 0 % padding, not 78 % and 60 %. It takes less shared memory and fewer registers
everywhere, so that loads can run further ahead.
"""

RECURRENT = """
## Recurrent ops

The gated delta rule (`kernels/gpu/gated_delta.py`: bf16, fp16 or fp32, keys of 1 to 256, values of any size; decoding and inputs that
are not bf16 go token by token, others by chunks) and the short convolution (`kernels/gpu/short_conv.py`: over 2 to 8 tokens). `tile` is
tokens of a chunk x columns of a state, or rows x channels, and warps.
"""

COMBINE = """
## Adding the parts of attention over shared-out keys

`combine_kernel` of `kernels/gpu/flash_attention.py`, for the results of text decoding above. `tile` is parts x columns.
"""

QUANTIZED = """
## Products with quantized weights

`kernels/gpu/quant_matmul.py`, x in bf16, 4096 x 4096 weights of each type that stays quantized in memory. `tile` is rows of x x rows of w x
values of a row at a time, and warps. One row of x takes a kernel without matrix instructions.
"""


@dataclass(frozen=True)
class Form:
    """A use of the kernel: its shape and its limits."""

    title: str
    rows: int
    heads: int
    groups: int
    keys: int = 4096
    dtype: torch.dtype = torch.bfloat16
    bounds: bool = False
    mask: bool = False
    sizes: tuple[int, ...] = HEAD_SIZES

    def types(self, width: int) -> dict[str, Type | None]:
        def of(rows: int, heads: int) -> Type:
            return Type.contiguous((1, rows, heads, width), self.dtype)

        bounds = Type.contiguous((self.rows, 2), torch.int32) if self.bounds else None
        mask = Type.contiguous((self.rows, self.keys), torch.float32) if self.mask else None
        key = of(self.keys, self.groups)
        return {"q": of(self.rows, self.heads), "k": key, "v": key, "mask": mask, "bounds": bounds}


VISION = Form("Vision encoder: 4096 patches, 16 heads, every patch sees every patch", 4096, 16, 16)
PREFILL = Form(
    "Text prefill: 2048 tokens, 8 query heads over 4, bounds (causal rows, windows and image "
    "blocks)",
    2048,
    8,
    4,
    2048,
    bounds=True,
    sizes=(64, 72, 128, 256, 512),
)
DECODE = Form(
    "Text decoding: 1 token, 8 query heads over 4, 4096 keys, bounds",
    1,
    8,
    4,
    bounds=True,
    sizes=(64, 128, 256, 512),
)
FORMS = (
    VISION,
    Form("Vision encoder with an additive fp32 mask", 4096, 16, 16, mask=True, sizes=(64, 72, 80)),
    PREFILL,
    DECODE,
    Form(
        "Vision encoder in fp32 (exact products: multiply-adds on NVIDIA)",
        4096,
        16,
        16,
        dtype=torch.float32,
        sizes=(64, 72, 128, 512),
    ),
)


def resources(form: Form, width: int, target: str, **options: Any) -> Resources:
    return compile_for(target, **form.types(width), scale=width**-0.5, **options)  # type: ignore[arg-type]


def cell(r: Resources) -> str:
    return f"{r.shared_bytes / 1024:.0f} / {r.registers} / {r.spill_bytes} / {r.instruction}"


def row(form: Form, width: int, split: bool = True) -> str:
    """One line of a table."""
    launch = plan_launch(**form.types(width), scale=1.0)  # type: ignore[arg-type]
    tile, shared = launch.tile, f", {launch.splits}" if launch.splits > 1 else ""
    used = parts(width) if split else (128, 0)
    cells = [
        f"{width}",
        " + ".join(str(n) for n in used if n),
        f"{tile.rows} x {tile.keys}, {tile.warps}, {tile.stages}{shared}",
    ]
    cells += (cell(resources(form, width, target, split=split)) for target in SHARED_LIMIT)
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterable[str]) -> str:
    heads = ["head size", "computed as", "tile", *(f"`{t}`" for t in SHARED_LIMIT)]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *rows])


def combine_table() -> str:
    rows = [
        ["head size", "tile", *(f"`{t}`" for t in SHARED_LIMIT)],
        ["---"] * (2 + len(SHARED_LIMIT)),
    ]
    for width in DECODE.sizes:
        types = {name: t for name, t in DECODE.types(width).items() if name in ("q", "k", "v")}
        launch = plan_launch(**types, scale=1.0)  # type: ignore[arg-type]
        used = (compile_combine(target, **types, scale=width**-0.5) for target in SHARED_LIMIT)  # type: ignore[arg-type]
        rows.append(
            [
                str(width),
                f"{launch.splits} x {plan_combine(launch).constants['COLUMNS']}",
                *map(cell, used),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def quantized_node(kind: str, count: int) -> Node:
    """A product of `count` rows with a quantized weight."""
    x = Node("input", (), Type.contiguous((count, 4096), torch.bfloat16), {}, "x")
    w = Node("input", (), Type.contiguous((4096, row_bytes(kind, 4096)), torch.uint8), {}, "w")
    return ops.matmul(x, w, quant=kind)


def quantized_row(kind: str, count: int) -> str:
    node = quantized_node(kind, count)
    call = quant_matmul.plan_call(*(i.type for i in node.operands), quant=kind)
    tile = f"{call.constants.get('ROWS', 1)} x {call.constants['COLUMNS']} x {32 * int(call.constants['COUNT'])}, {call.warps}"
    return f"| {' | '.join([kind, str(count), tile, *(cell(compile_node(target, node)) for target in SHARED_LIMIT)])} |"


def quantized_table() -> str:
    heads = ["weight", "rows of x", "tile", *(f"`{t}`" for t in SHARED_LIMIT)]
    rows = (quantized_row(kind, count) for kind in KINDS for count in (1, 8, 512))
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows])


def recurrent_table() -> str:
    rows = [
        ["kernel", "tile", *(f"`{t}`" for t in SHARED_LIMIT)],
        ["---"] * (2 + len(SHARED_LIMIT)),
    ]
    for title, node in recurrent_nodes().items():
        plan = gated_delta.plan_call if node.op == "gated_delta" else short_conv.plan_call
        call = plan(*(i.type for i in node.operands), **node.attrs)
        sizes = ("TOKENS", "COLUMNS") if node.op == "gated_delta" else ("ROWS", "CHANNELS")
        cells = [cell(compile_node(target, node)) for target in SHARED_LIMIT]
        rows.append(
            [title, f"{' x '.join(str(call.constants[s]) for s in sizes)}, {call.warps}", *cells]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def recurrent_nodes() -> dict[str, Node]:
    """Uses of the recurrent kernels, with 16 heads of keys and 32 of values."""

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
        return Node("input", (), Type.contiguous(shape, dtype), {}, "input")

    def sequences(count: int) -> tuple[Node, Node]:
        return leaf(count + 1, dtype=torch.int64), leaf(count, dtype=torch.int64)

    def delta(tokens: int, count: int, size: int, dtype: torch.dtype) -> Node:
        keys, rates = leaf(tokens, 16, size, dtype=dtype), leaf(tokens, 32, dtype=torch.float32)
        state = leaf(count, size, 32, size, dtype=torch.float32)
        return ops.gated_delta(
            keys,
            keys,
            leaf(tokens, 32, size, dtype=dtype),
            rates,
            rates,
            state,
            *sequences(count),
            scale=size**-0.5,
        )

    def conv(tokens: int, count: int) -> Node:
        return ops.short_conv(
            leaf(tokens, 8192),
            leaf(8192, 4),
            leaf(count, 3, 8192),
            *sequences(count),
            activation="silu",
        )

    found = {
        f"delta rule, decoding, K = V = {size}, bf16": delta(8, 8, size, torch.bfloat16)
        for size in (64, 128, 256)
    }
    found |= {
        f"delta rule, prefill, K = V = {size}, bf16": delta(1000, 3, size, torch.bfloat16)
        for size in (64, 128, 256)
    }
    return found | {
        "delta rule, prefill, K = V = 128, fp32": delta(1000, 3, 128, torch.float32),
        "short convolution, decoding": conv(8, 8),
        "short convolution, prefill": conv(1000, 3),
    }


def main() -> None:
    limits = ", ".join(f"{size // 1024} KiB on `{target}`" for target, size in SHARED_LIMIT.items())
    print(HEAD.format(triton=triton.__version__, limits=limits, most=MAX_HEAD))
    for form in FORMS:
        print(
            f"## {form.title}\n\n{name_of(form.dtype)}.\n\n{table(row(form, width) for width in form.sizes)}\n"
        )
    print(
        f"{WHY.lstrip()}\n{table(row(VISION, width, split) for width in (72, 80) for split in (True, False))}"
    )
    print(f"{COMBINE}\n{combine_table()}")
    print(f"{QUANTIZED}\n{quantized_table()}")
    print(f"{RECURRENT}\n{recurrent_table()}")


if __name__ == "__main__":
    main()
