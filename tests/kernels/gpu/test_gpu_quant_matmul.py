"""Products with block-quantized weights by Triton kernels: in its interpreter against exact
dequantization, and compiled ahead of time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from op_cases import node_of

from mtmd.base.errors import PlacementError
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.target import Target
from mtmd.kernels.gpu import compile as compile_module
from mtmd.kernels.gpu import jit
from mtmd.kernels.gpu.compile import SHARED_LIMIT, Resources
from mtmd.kernels.gpu.launch import Call, run_call
from mtmd.kernels.gpu.quant_matmul import blocks as quant_blocks
from mtmd.kernels.gpu.quant_matmul.cases import (
    IN_DETAIL,
    KINDS,
    NMSE,
    OTHERS,
    problem,
    product_error,
    random_blocks,
)
from mtmd.kernels.gpu.quant_matmul.grids import grids_of
from mtmd.kernels.gpu.quant_matmul.kernel import (
    GROUP,
    KERNEL,
    operand_kernel,
    row_kernel,
    tile_kernel,
    word_kernel,
)
from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
from mtmd.kernels.gpu.quant_matmul.words import UNIT_VALUES as WORD_UNITS
from mtmd.kernels.gpu.triton_kernel import Case, Program
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, dequantize, row_bytes
from mtmd.kernels.report.compiled import compiled_kernels

pytestmark = pytest.mark.usefixtures("exact_bf16", "poisoned")


INSTRUCTIONS = Path(__file__).parents[3] / "benchmarks" / "gpu_kernels" / "instructions.py"


def types(case: Case) -> list[Type | None]:
    return [None if t is None else Type.of(t) for t in case.inputs()]


def plan_call(x, w, *bias, **options):
    return KERNEL.main(x, w, *bias, **options).call


quant_matmul = KERNEL.run


@triton.jit
def copy_kernel(p, row_bytes, K, QUANT: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr):
    n, start = tl.arange(0, ROWS), tl.program_id(0) * 128
    k = start + tl.arange(0, 128)
    row = n.to(tl.int64) * row_bytes
    value = quant_blocks.decode(p.w, row, start, K, QUANT, False, 128, TYPE, p)
    # What is past the end is written beside a row, where there is room for it
    tl.store(p.out + n[:, None] * (K + 128) + k[None, :], value, mask=(k < K + 128)[None, :])


def decoded(w, kind, width, dtype):
    """The values, behind which 128 zeros are asked for and checked."""
    out = torch.full((len(w), width + 128), torch.nan)
    programs, as_type = -(-(width + 128) // 128), {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    pointers = {"w": w, "out": out}
    pointers |= {name: constant.on(w.device) for name, constant in grids_of(kind).items()}
    scalars = {"row_bytes": w.shape[1], "K": width}
    call = Call(scalars, {"QUANT": kind, "ROWS": len(w), "TYPE": as_type}, programs, 1, 1)
    run_call(copy_kernel, call, pointers)
    assert not out[:, width:].any()
    return out[:, :width]


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_values_are_bit_for_bit_the_dequantized_ones(kind):
    width = (7 if BLOCKS[kind].values == 32 else 2) * BLOCKS[kind].values
    w = random_blocks(kind, 8, width)
    assert torch.equal(decoded(w, kind, width, "fp32"), dequantize(w, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_values_in_bf16_are_off_by_little_more_than_that_rounds(kind):
    """By a tenth more, in the mean of squares; 4-bit floats by nothing."""
    width = 2 * BLOCKS[kind].values
    w = random_blocks(kind, 8, width)
    exact = dequantize(w, kind)
    off = (decoded(w, kind, width, "bf16") - exact).square().mean()
    assert off <= 1.1 * (exact.bfloat16() - exact).square().mean()
    assert bool(off) == (kind not in ("MXFP4", "NVFP4"))


def test_blocks_are_whole_groups():
    assert all(BLOCKS[kind].values % GROUP == 0 for kind in KINDS)
    assert set(KINDS) == set(UNIT_VALUES) == {*IN_DETAIL, *OTHERS} >= NATIVE


def test_the_kernel_is_chosen_by_rows_and_type():
    def chosen(kind, rows, dtype):
        case = problem(kind, rows, 9, dtype=dtype)
        program = KERNEL.main(*types(case), quant=kind)
        call = program.call
        sizes = [call.constants.get(name) for name in ("EIGHTS", "FEW", "ROWS")]
        return program.function, next((size for size in sizes if size), None)

    for kind in KINDS:
        few = [chosen(kind, rows, torch.bfloat16) for rows in (1, 8, 9, 16, 17, 32)]
        assert few == [(operand_kernel, eights) for eights in (1, 1, 2, 2, 4, 4)]
        assert chosen(kind, 33, torch.float16) == (tile_kernel, 64)
    assert chosen("Q4_K", 65, torch.bfloat16) == (tile_kernel, 128)
    wide = [chosen("Q6_K", rows, torch.float32) for rows in (1, 4, 5)]
    assert wide == [(word_kernel, 1), (word_kernel, 4), (tile_kernel, 16)]
    assert chosen("IQ4_XS", 1, torch.float32) == (row_kernel, None)
    assert chosen("IQ4_XS", 2, torch.float32) == (tile_kernel, 16)


def test_more_rows_of_a_weight_go_to_a_program_where_x_is_large_or_they_are_many():
    def columns(rows, outer):
        call = plan_call(*types(problem("Q4_0", rows, outer, dtype=torch.bfloat16)), quant="Q4_0")
        assert call.programs == -(-outer // int(call.constants["COLUMNS"]))
        return call.constants["COLUMNS"]

    assert [columns(8, 4096), columns(9, 4096), columns(8, 8192)] == [16, 32, 32]


def test_programs_that_are_too_few_for_a_gpu_have_more_warps():
    """Of whole rows of w each, as without: no sum of parts, and no launch for it."""

    def warps(rows, outer, values=4096, kind="Q4_0"):
        case = problem(kind, rows, outer, values // BLOCKS[kind].values, torch.bfloat16)
        call = plan_call(*types(case), quant=kind)
        return call.warps, call.constants["COUNT"], call.constants["COLUMNS"]

    assert warps(1, 1024) == warps(8, 2048) == (16, 64, 16)
    assert warps(1, 2049) == (8, 32, 16) and warps(9, 4096) == (16, 32, 32)
    assert warps(9, 4097) == warps(17, 1024) == (8, 16, 32)
    assert warps(1, 1024, 512) == (16, 16, 16) and warps(1, 1024, 256) == (8, 8, 16)
    # Types of which more would not stay in registers
    assert warps(1, 4096, kind="IQ4_XS") == warps(1, 1024, kind="IQ4_XS") == (16, 16, 16)
    assert warps(9, 1024, kind="Q6_K") == (8, 8, 32)


def test_much_of_a_row_is_read_before_any_of_it_is_used():
    """A warp's units at once: as many as registers are for."""

    def each(kind, rows, outer):
        case = problem(kind, rows, outer, 4096 // BLOCKS[kind].values, torch.bfloat16)
        call = plan_call(*types(case), quant=kind)
        return int(call.constants["COUNT"]) // call.warps

    assert {kind: each(kind, 1, 4096) for kind in ("Q4_0", "Q4_K", "Q6_K", "IQ4_XS")} == {
        "Q4_0": 4,
        "Q4_K": 2,
        "Q6_K": 2,
        "IQ4_XS": 1,
    }
    for rows, outer in ((1, 8192), (9, 4096), (32, 4096)):
        assert [each(kind, rows, outer) for kind in ("Q4_0", "Q4_K", "Q6_K")] == [2, 1, 1]


def test_no_more_than_a_quarter_of_the_work_of_few_rows_is_for_nothing():
    cases = [(kind, torch.bfloat16, UNIT_VALUES[kind]) for kind in KINDS]
    cases += [(kind, torch.float32, of_unit) for kind, of_unit in WORD_UNITS.items()]
    for kind, dtype, of_unit in cases:
        for values in (256, 512, 2560, 4096, 6912, 9728, 14336):
            case = problem(kind, 1, 9, values // BLOCKS[kind].values, dtype)
            call = plan_call(*types(case), quant=kind)
            units, at_once = int(call.scalars["units"]), int(call.constants["COUNT"])
            assert units * of_unit == values, (kind, dtype)
            idle = -(-units // at_once) * at_once - units
            assert call.warps == 1 or idle <= 0.25 * units, (kind, dtype, values)


def test_codes_that_have_no_rounding_in_16_bits_lose_nothing_to_a_large_mean_of_x():
    """What is added to codes on the way is subtracted: of x far from zero, most of the sum."""
    cases = [(kind, torch.float16) for kind in KINDS]
    cases += [(kind, torch.bfloat16) for kind in ("Q8_0", "U8_64", "A8_32")]  # in two parts
    for kind, dtype in cases:
        x, w, _ = problem(kind, 2, 16, 256 // BLOCKS[kind].values, dtype).inputs()
        x = x + 8
        error = product_error("matmul", quant_matmul(x, w, quant=kind), (x, w), {"quant": kind})
        assert error < NMSE[dtype], kind


@pytest.mark.parametrize("rows", [3, 16, 29])
def test_the_order_of_operands_of_older_compilers_gives_the_same_products(rows, monkeypatch):
    """Triton before 3.8 has another order in a lane, of x and of w alike."""
    for kind in (*IN_DETAIL, *OTHERS[rows % 5 :: 5]):
        x, w, _ = problem(kind, rows, 24, 512 // BLOCKS[kind].values, torch.bfloat16).inputs()
        newer = quant_matmul(x, w, quant=kind)
        with monkeypatch.context() as patch:
            patch.setattr(jit, "BEFORE_3_8", True)
            older = quant_matmul(x, w, quant=kind)
        for result in (newer, older):
            error = product_error("matmul", result, (x, w), {"quant": kind})
            assert error < NMSE[torch.bfloat16], kind


def test_what_is_not_finite_in_x_makes_the_whole_row_so():
    """NaN, and infinities of types from whose codes nothing is subtracted; other rows are as they
    were.
    """
    for kind in KINDS:
        x, w, _ = problem(kind, 2, 16, 256 // BLOCKS[kind].values, torch.float16).inputs()
        alone = quant_matmul(x, w, quant=kind)[1]
        x[0, 5] = float("inf")
        with np.errstate(invalid="ignore"):
            result = quant_matmul(x, w, quant=kind)
        assert torch.equal(result[1], alone)
        assert not result[0].isfinite().any(), kind
        subtracts_nothing = kind.startswith(("IQ4", "NF4", "FP4", "F8", "MXFP4", "NV"))
        assert result[0].isinf().any() == subtracts_nothing, kind  # NaN by a scale of zero


def test_leading_dimensions_and_no_rows():
    x, w, _ = problem("Q4_0", 6, 5, 2).inputs()
    assert torch.equal(
        quant_matmul(x.view(2, 3, 64), w, quant="Q4_0"),
        quant_matmul(x, w, quant="Q4_0").view(2, 3, 5),
    )
    assert quant_matmul(x[:0], w, quant="Q4_0").shape == (0, 5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"quant": "Q8_K"}, "Q8_K"),
        ({"x": Type.contiguous((3, 64), torch.float64)}, "fp64"),
        ({"x": Type((3, 64), torch.float32, (128, 2))}, "[128, 2]"),
        ({"x": Type.contiguous((2**30, 64), torch.float32)}, "2^30"),
    ],
)
def test_rejects_says_why(changes, words):
    x, w, bias = types(problem("Q8_0", 3, 5, 2))
    reason = KERNEL.rejects(**{"x": x, "w": w, "bias": bias, "quant": "Q8_0"} | changes)
    assert reason is not None and words in reason


def test_launcher_refuses_what_rejects_names_and_odd_addresses():
    x, w, _ = problem("Q8_0", 3, 5, 2).inputs()
    with pytest.raises(PlacementError, match="contiguous"):
        quant_matmul(x.t().contiguous().t(), w, quant="Q8_0")
    odd = torch.empty(w.numel() + 1, dtype=torch.uint8)[1:].view(w.shape)
    with pytest.raises(PlacementError, match="aligned to 2 bytes"):
        quant_matmul(x, odd, quant="Q8_0")


def node(quant: str = "Q4_K", rows: int = 3, **x: Any) -> Node:
    return node_of("matmul", list(problem(quant, rows, 5, 2, **x).inputs()), {"quant": quant})


def test_the_gpu_backend_runs_it_and_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    x, w, _ = problem("Q4_K", 3, 5, 2).inputs()
    assert torch.equal(Gpu().lower(node())(x, w, None), quant_matmul(x, w, quant="Q4_K"))
    wrong = node(dtype=torch.float64)
    assert "fp64" in (Gpu().rejects(wrong) or "")
    with pytest.raises(PlacementError, match="fp64"):
        Gpu().lower(wrong)


def test_a_target_says_the_same_and_compiles_each_kernel_once(monkeypatch):
    assert Target("cuda:90").rejects(node()) is None and Target("cuda:90").workspace(node()) == 0
    assert (
        Target("cuda:75").rejects(node())
        == "the quantized matmul kernel needs compute capability 8.0, found 7.5"
    )
    assert "fp64" in (Target("hip:gfx942").rejects(node(dtype=torch.float64)) or "")
    plans = [node("Q4_K"), node("Q4_K"), node("Q6_K", 7), node("Q4_K", 1)]
    requested = []

    def compile_program(target: str, program: Program) -> Resources:
        requested.append((program.title, program.call.constants.get("ROWS")))
        return Resources(target, 1024, 64, 0, "wgmma", 4)

    monkeypatch.setattr(compile_module, "compile_program", compile_program)
    target = Target("cuda:90")
    result = compiled_kernels("decoder", make_plan(plans, [target]), target)
    assert requested == [("Q4_K matmul", 16), ("Q6_K matmul", 16), ("Q4_K matmul", None)]
    assert [(kernel.kernel, kernel.nodes, kernel.head) for kernel in result] == [
        ("Q4_K matmul", 2, None),
        ("Q6_K matmul", 1, None),
        ("Q4_K matmul", 1, None),
    ]


def test_a_tile_has_no_more_threads_than_have_something_to_decode():
    """Of 64 rows of w and 128 values of each 256 threads have 32 values."""
    x = Type.contiguous((512, 4096), torch.bfloat16)
    call = plan_call(x, Type.contiguous((4096, row_bytes("Q4_0", 4096)), torch.uint8), quant="Q4_0")
    assert (call.constants["COLUMNS"], call.constants["COUNT"], call.warps) == (64, 4, 8)
    assert (call.warps_of(32), call.warps_of(64)) == (8, 4)
    few = plan_call(
        Type.contiguous((1, 4096), torch.bfloat16),
        Type.contiguous((4096, row_bytes("Q4_0", 4096)), torch.uint8),
        quant="Q4_0",
    )
    assert few.warps_of(32) == few.warps_of(64) == few.warps


def test_nvidia_alone_is_told_how_many_registers_a_thread_may_have():
    """AMD's compiler refuses the option."""
    x = Type.contiguous((64, 4096), torch.float32)
    call = plan_call(x, Type.contiguous((4096, row_bytes("Q4_0", 4096)), torch.uint8), quant="Q4_0")
    reported = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert call.options(32, nvidia=True) == {**reported, "maxnreg": 255}
    assert call.options(32, nvidia=False) == reported
    assert "maxnreg" not in replace(call, registers=None).options(32, nvidia=True)


RARE = """
import torch
from mtmd.kernels.gpu.compile import compile_program
from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.blocks import row_bytes
out = {}
half, exact = torch.bfloat16, torch.float32
for target, kind, rows, width, dtype in (
    ("cuda:80", "IQ4_XS", 32, 4096, half), ("cuda:80", "IQ4_XS", 32, 1536, half),
    ("cuda:80", "Q4_1", 32, 768, half), ("hip:gfx1100", "Q4_0", 512, 4096, half),
    ("cuda:90", "Q5_1", 4, 4096, exact), ("cuda:80", "IQ4_NL", 64, 4096, exact),
    ("cuda:90", "IQ4_NL", 64, 4096, exact), ("cuda:90", "Q4_K", 64, 4096, exact),
):
    x = Type.contiguous((rows, width), dtype)
    w = Type.contiguous((4096, row_bytes(kind, width)), torch.uint8)
    used = compile_program(target, KERNEL.main(x, w, quant=kind))
    out[f"{target} {kind} {rows} {width}"] = used.spill_bytes
"""


def test_nothing_spills_where_few_units_or_few_registers_are(compiler):
    spilled = compiler(RARE)
    assert len(spilled) == 8 and not any(spilled.values()), spilled


ORDERS = """
import re, tempfile
import torch
from triton import knobs
from mtmd.kernels.gpu import jit
from mtmd.kernels.gpu.compile import compiled_for
from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.blocks import row_bytes
out = {}
with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
    knobs.cache.dir = folder  # where nothing lies that was made with the other order
    was, jit.BEFORE_3_8 = jit.BEFORE_3_8, True
    try:
        for kind, rows in (("Q4_0", 8), ("Q5_K", 16), ("Q6_K", 32), ("IQ4_XS", 16), ("Q2_K", 8), ("IQ1_M", 8)):
            x = Type.contiguous((rows, 2048), torch.bfloat16)
            w = Type.contiguous((2048, row_bytes(kind, 2048)), torch.uint8)
            text = compiled_for("cuda:80", KERNEL.main(x, w, quant=kind)).asm["ttgir"]
            sizes = dict(re.findall(r"(#blocked\\d*) = #ttg.blocked<{sizePerThread = \\[([^]]*)]", text))
            loads = re.findall(r"= tt.load .*: tensor<[^#]*, (#\\w+)>", text)
            out[f"{kind} {rows}"] = text.count("tt.contiguity"), [sizes.get(n) for n in loads]
    finally:
        jit.BEFORE_3_8 = was
"""


def test_a_thread_has_neighbours_only_of_what_follows_each_other(compiler):
    """As `last_first` needs it, which says of other dimensions what does not hold there."""
    for form, (reported, sizes) in compiler(ORDERS).items():
        assert reported and sizes, form
        for size in sizes:
            assert size is not None and set(size.split(", ")[:-1]) == {"1"}, (form, size)


SCRIPT = """
from dataclasses import asdict
import torch
from mtmd.kernels.gpu.compile import compile_program
from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL
from mtmd.kernels.graph import Type
from mtmd.kernels.gpu.quant_matmul.cases import IN_DETAIL
from mtmd.kernels.quantization.blocks import row_bytes
forms = [(t, kind, rows) for kind in ("Q8_0", "Q4_K", "Q6_K") for t in ("cuda:80", "cuda:90", "hip:gfx942") for rows in (1, 512)]
forms += [("cuda:80", "Q4_0", 32), ("cuda:90", "Q6_K", 32), ("hip:gfx942", "IQ4_NL", 16), ("cuda:80", "Q2_K", 9)]
forms += [("cuda:90", kind, rows) for at, kind in enumerate(IN_DETAIL) for rows in (16, 512)[at % 2:]]
# Of the others those that are read and decoded in different ways; spills.py compiles all.
forms += [("cuda:80", kind, 16) for kind in ("IQ3_XXS", "NVFP4", "U8_64", "F8_64")]
forms += [("cuda:90", kind, 16) for kind in ("IQ3_XXS", "U8_64")]
forms += [("cuda:80", kind, 512) for kind in ("IQ2_S", "MXFP4")]
forms += [("hip:gfx942", "U4_64", 1), ("hip:gfx942", "TQ1_0", 512)]
out = {}
for target, kind, rows in dict.fromkeys(forms):
    x = Type.contiguous((rows, 2048), torch.bfloat16)
    w = Type.contiguous((2048, row_bytes(kind, 2048)), torch.uint8)
    out[f"{target} {kind} {rows}"] = asdict(compile_program(target, KERNEL.main(x, w, quant=kind)))
"""


@pytest.fixture(scope="module")
def compiled(compiler):
    return compiler(SCRIPT)


def test_types_of_each_kind_compile_and_fit(compiled):
    assert len(compiled) >= 3 * 3 * 2 + 4 + 12 + 10
    assert {name.split()[1] for name in compiled} > set(IN_DETAIL)
    matrix = {"cuda:80": "mma.sync", "cuda:90": "wgmma", "hip:gfx942": "mfma"}
    for name, used in compiled.items():
        target = used["target"]
        assert used["shared_bytes"] <= SHARED_LIMIT[target] and used["spill_bytes"] == 0, name
        few = "mfma" if target.startswith("hip") else "mma.sync"
        assert used["instruction"] == (matrix[target] if name.endswith("512") else few), name


def test_few_instructions_for_a_weight(compiler):
    """As a GPU has seven for one of four bits at the speed of its memory, for one row of x as for
    sixteen. Of more rows 128 share a weight, whose products take as long as eight; decoded one by
    one these took 11 to 27.
    """
    requested = ("Q4_K", "Q6_K", "Q8_0", "--rows", "1", "16", "512", "--json")
    counted = [json.loads(line) for line in compiler.printed(INSTRUCTIONS, *requested)]
    taken = {(f["kind"], f["rows"]): f["instructions"] / f["weights"] for f in counted}
    assert len(taken) == 9
    limits = {1: 7, 16: 7, 512: 10}
    assert {of: value for of, value in taken.items() if value > limits[of[1]]} == {}
    assert all(f["instructions"] > 100 and f["cycles"] >= f["instructions"] for f in counted)
