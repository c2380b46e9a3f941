"""The resource tables of docs/kernels.md, by compiling every Triton kernel for GPUs that are not here.

python tools/kernel_table.py > docs/kernels.md     all of it (one to a few minutes)
python tools/kernel_table.py OP                    the kernels of one op, to see that they compile and fit
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.compile import SHARED_LIMIT, Resources, compile_program
from mtmd.kernels.gpu.flash_attention.cases import HEAD_SIZES
from mtmd.kernels.gpu.flash_attention.kernel import kernel as attention
from mtmd.kernels.gpu.flash_attention.tiles import MAX_HEAD
from mtmd.kernels.gpu.quant_matmul.cases import USES as PRODUCTS
from mtmd.kernels.gpu.quant_matmul.kernel import GROUP
from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL as PRODUCT
from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import Case, Program, TritonKernel
from mtmd.kernels.graph import Type

HEAD = """# GPU kernels

Written by `python tools/kernel_table.py > docs/kernels.md` with triton {triton}. Do not edit by hand.

**Not run on a GPU.** Every figure here is the compiler's: the kernels are compiled ahead of time for NVIDIA A100 (`cuda:80`), H100/H200
(`cuda:90`) and AMD MI300 (`hip:gfx942`), which needs no GPU. The figures say that it compiles, what it takes and where a few
registers spill; they say nothing about speed. `python benchmarks/gpu.py` checks and measures the kernels where there is a GPU. Their
results are checked on the CPU in Triton's interpreter (`tests/kernels`).

What attention takes: head sizes 16 to {maximum} (keys and values may differ), bf16, fp16 and fp32 with fp32 sums, grouped heads, causal,
window, bounds, soft cap, an additive mask of any floating-point type that broadcasts, behind the cap or before it, any strides but in the last dimension. Anything
else is refused with a reason (`rejects` in `kernels/gpu/flash_attention/kernel.py`).

Each cell: shared memory in KiB / registers per thread / spilled bytes per thread / programs that a multiprocessor holds at once, by the
former, its warps and its own limit (`kernels/gpu/architectures.py`) / matrix instruction. Limits of shared memory:
{limits}. `tile` is rows x keys, warps, stages, and how many programs share out
the keys, if several.
"""

WHY = """
## Splitting the head instead of padding it

The same tile with the head padded to the next power of two (128), which is what a kernel without the split must do. For 72 and 80 the
split covers the head with 64 + 16 columns: 11 % and 0 % padding, not 78 % and 60 %. It takes less shared memory and fewer registers
everywhere, so that loads can run further ahead.
"""

OTHERS = """
## The other kernels

Each at the sizes of its `USES`. The gated delta rule (`kernels/gpu/gated_delta.py`) takes bf16,
fp16 or fp32, keys of 1 to 256 and values of any size: decoding and inputs that are not bf16 go token by token, others by chunks; `tile`
is tokens of a chunk x columns of a state, and warps. The short convolution (`kernels/gpu/short_conv.py`) is over 2 to 8 tokens; `tile`
is rows x channels, and warps. The RMS norm and the L2 norm (`kernels/gpu/norms/rms_norm.py`) take rows of any width under any strides; `tile` is rows x
values of a row at a time, and warps.

Attention to a cache (`kernels/gpu/paged_attention/`) reads the table of pages, for head sizes 16 to {maximum}, of a cache in numbers or in q8_0, q4_0 or fp8; `tile` is rows x keys, and warps.
Experts (`kernels/gpu/moe/`) are plain or quantized; `tile` is choices x values x groups of 32, of the products with gate and up; of quantized tables and
at most 32 rows an expert x units, whose operands are made of packed codes (`kernels/gpu/moe/few_rows.py`). A residual and
its norm (`kernels/gpu/norms/add_norm.py`, `kernels/gpu/norms/add_layer_norm.py`) take rows of up to 16,384 values, rotary turning and cache writes
(`kernels/gpu/rotary/`) heads of up to 1,024, gated units and the quick GELU (`kernels/gpu/gated.py`), what a sigmoid lets through
(`kernels/gpu/sigmoid_gate.py`) and the gates of the delta rule (`kernels/gpu/delta_gates.py`) rows of any width, gated norms (`kernels/gpu/norms/gated_norm.py`)
heads of up to 1,024. Rows of quantized tables (`kernels/gpu/embed.py`) have any width. Convolutions of grids and rows (`kernels/gpu/conv2d.py`) have any
kernel, stride and padding, in one group or depthwise; `tile` is cells x outputs, and warps.

GELU and gated units in products (`matmul_gelu`, `matmul_gated`) are those of `kernels/gpu/quant_matmul/kernel.py`, with quantized weights and x in 16 bits: an
activation of what is summed takes a register or two more, if any; `tile` is rows of x, where there are more than 32, x rows of w x groups of 32, or units, at a time. Plain weights' products are cuBLAS's (hipBLASLt's), which ends a product in a bias and GELU by its tanh
approximation, and in no other form, no SiLU and no gate: those stay launches of their own. A layer norm that follows no sum is torch's, in one launch.
"""
# These have sections of their own, with what their tiles were chosen against.
WITH_SECTIONS = ("attention", "matmul")

COMBINE = """
## Adding the parts of attention over shared-out keys

`combine_kernel` of `kernels/gpu/flash_attention/limited.py`, for the results of text decoding above. `tile` is parts x columns.
"""

QUANTIZED = """
## Products with quantized weights

`kernels/gpu/quant_matmul/kernel.py`, x in bf16, 4096 x 4096 weights of the types that are tried in detail (the others share their tiles; `python benchmarks/gpu_kernels/spills.py` compiles all). `tile` is rows of x x rows of w x
values of a row at a time, and warps of 32 threads: of tiles `hip:gfx942`, whose warps have 64, has half as many. Up to 32 rows of x take a kernel that makes operands of packed
codes, more take tiles of decoded ones; `python benchmarks/gpu_kernels/instructions.py` counts what each takes for a weight.
With Triton 3.9 that is 3 to 8 instructions for up to 16 rows, 6 to 10 for 512; Triton 3.6 takes up to 31 % more cycles of few rows
(counted of [few rows](../benchmarks/results/2026-11-23-quantized-reads.md) and of [many](../benchmarks/results/2026-11-23-quantized-tiles.md)). `waits.py` beside it counts how often a warp waits for weights. An infinity in x makes its row NaN in those of few rows, but for IQ4 weights, where the other kernels give infinities.
"""

TARGETS = [f"`{target}`" for target in SHARED_LIMIT]


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

    def types(self, width: int) -> list[Type | None]:
        def of(rows: int, heads: int) -> Type:
            return Type.contiguous((1, rows, heads, width), self.dtype)

        bounds = Type.contiguous((self.rows, 2), torch.int32) if self.bounds else None
        mask = Type.contiguous((self.rows, self.keys), torch.float32) if self.mask else None
        key = of(self.keys, self.groups)
        return [of(self.rows, self.heads), key, key, mask, bounds]

    def programs(self, width: int, split: bool = True) -> list[Program]:
        """What it launches: attention, and what adds its parts, if any."""
        return attention(split=split).launched(*self.types(width), scale=width**-0.5)


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


def resources(form: Form, width: int, target: str, split: bool = True) -> Resources:
    return compile_program(target, form.programs(width, split)[0])


def cell(r: Resources) -> str:
    taken = f"{r.shared_bytes / 1024:.0f} / {r.registers} / {r.spill_bytes}"
    return f"{taken} / {r.at_once} / {r.instruction}"


def row(form: Form, width: int, split: bool = True) -> str:
    """One line of a table."""
    call = form.programs(width, split)[0].call
    sizes, shared = call.constants, f", {call.across}" if call.across > 1 else ""
    cells = [
        f"{width}",
        " + ".join(str(n) for n in (sizes["K1"], sizes["K2"]) if n),
        f"{sizes['ROWS']} x {sizes['KEYS']}, {call.warps}, {call.stages}{shared}",
    ]
    cells += (cell(resources(form, width, target, split)) for target in SHARED_LIMIT)
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterable[str]) -> str:
    heads = ["head size", "computed as", "tile", *TARGETS]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *rows])


def markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tile_of(compiled: Program) -> str:
    """Sizes of a program's work, and its warps."""
    return f"{' x '.join(str(compiled.call.constants[s]) for s in compiled.tile)}, {compiled.call.warps}"


def cells_of(compiled: Program) -> list[str]:
    """What it takes on each target."""
    return [cell(compile_program(target, compiled)) for target in SHARED_LIMIT]


def combine_row(width: int) -> list[str]:
    _, added = DECODE.programs(width)
    return [str(width), tile_of(added).partition(",")[0], *cells_of(added)]


def combine_table() -> str:
    return markdown(["head size", "tile", *TARGETS], map(combine_row, DECODE.sizes))


def types_of(case: Case) -> list[Type | None]:
    return [None if t is None else Type.of(t) for t in case.inputs()]


def product_row(case: Case) -> list[str]:
    compiled = PRODUCT.main(*types_of(case), **case.options)
    sizes = compiled.call.constants
    rows = sizes["ROWS"] if "ROWS" in sizes else 8 * int(sizes["EIGHTS"])
    values = UNIT_VALUES[case["quant"]] if "EIGHTS" in sizes else GROUP
    tile = f"{rows} x {sizes['COLUMNS']} x {values * int(sizes['COUNT'])}, {compiled.call.warps}"
    return [case["quant"], str(case["rows"]), tile, *cells_of(compiled)]


def product_table() -> str:
    return markdown(["weight", "rows of x", "tile", *TARGETS], map(product_row, PRODUCTS.values()))


def use_rows(kernel: TritonKernel) -> Iterator[list[str]]:
    """A line for each of a kernel's uses."""
    for title, case in kernel.uses.items():
        compiled = kernel.main(*types_of(case), **case.options)
        yield [title, tile_of(compiled), *cells_of(compiled)]


def use_table(ops: Iterable[str]) -> str:
    rows = (row for op in ops for entry in KERNELS[op] for row in use_rows(entry.load()))
    return markdown(["kernel", "tile", *TARGETS], rows)


def main(arguments: list[str]) -> None:
    if arguments:
        print(use_table(arguments))
        return
    limits = ", ".join(f"{size // 1024} KiB on `{target}`" for target, size in SHARED_LIMIT.items())
    print(HEAD.format(triton=triton.__version__, limits=limits, maximum=MAX_HEAD))
    for form in FORMS:
        print(f"## {form.title}\n\n{name_of(form.dtype)}.\n")
        print(f"{table(row(form, width) for width in form.sizes)}\n")
    padded = (row(VISION, width, split) for width in (72, 80) for split in (True, False))
    print(f"{WHY.lstrip()}\n{table(padded)}")
    print(f"{COMBINE}\n{combine_table()}")
    print(f"{QUANTIZED}\n{product_table()}")
    print(
        f"{OTHERS.format(maximum=MAX_HEAD)}\n{use_table(op for op in KERNELS if op not in WITH_SECTIONS)}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
