"""Products of few rows with quantized experts, beyond the cases, which test_table.py runs: which
kernel is chosen, how it is called, what is refused, and what is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels.gpu.moe import kernel as moe
from mtmd.kernels.gpu.moe.cases import problem
from mtmd.kernels.gpu.moe.few_rows import few_down_kernel, few_gated_kernel, rows_of_a_block
from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
from mtmd.kernels.gpu.triton_kernel import Case
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.quantization.blocks import row_bytes

INSTRUCTIONS = Path(__file__).parents[3] / "benchmarks" / "gpu_kernels" / "instructions.py"
bf16 = torch.bfloat16
ONE = problem(1, 8, 2, 64, 96, bf16, ("Q4_1", "Q4_1", "Q8_0"))


def types(case: Case) -> list[Type | None]:
    return [None if t is None else Type.of(t) for t in case.inputs()]


def chosen(case: Case) -> tuple[bool, bool]:
    """Whether products with gate and up, and those with down, are of packed codes."""
    made = [p.function for p in moe.KERNEL.launched(*types(case), **case.options)]
    return few_gated_kernel in made, few_down_kernel in made


def test_packed_codes_are_for_few_rows_of_quantized_tables_in_16_bits():
    assert chosen(ONE) == (True, True)
    assert chosen(ONE.but(tokens=128)) == (True, True)  # 32 an expert
    assert chosen(ONE.but(tokens=129)) == (False, False)
    assert chosen(ONE.but(dtype=torch.float32)) == (False, False)
    assert chosen(ONE.but(kinds=("Q4_1", "", "Q8_0"))) == (False, True)
    assert chosen(ONE.but(kinds=("Q4_1", "Q8_0", ""))) == (True, False)


def test_a_block_holds_what_an_expert_has_on_average_and_some_more():
    result = [rows_of_a_block(mean) for mean in (1, 6, 7, 12, 13, 32)]
    assert result == [8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q2_K"), ("Q8_0", "Q8_0")])
@pytest.mark.parametrize("values", [256, 768, 1408, 1536, 2048, 2880, 14336])
def test_tables_of_different_types_share_warps_that_have_something_to_do(kinds, values):
    """No more than a quarter of the units that either is taken for are past its end."""
    values -= values % 256
    gate, up = (Type.contiguous((4, 64, row_bytes(kind, values)), torch.uint8) for kind in kinds)
    down = Type.contiguous((4, values, 64), bf16)
    x, router = Type.contiguous((3, values), bf16), Type.contiguous((3, 4), bf16)
    options = {"gate_quant": kinds[0], "up_quant": kinds[1], "routing": Routing(2, True)}
    call = moe.gated_call(moe.Operands(x, router, gate, up, down, **options))
    for prefix, kind in zip(("", "up_"), kinds, strict=True):
        units = int(call.scalars[f"{prefix}units"])
        at_once = int(call.constants[f"{prefix}count".upper()])
        assert units * UNIT_VALUES[kind] == values and at_once % call.warps == 0
        assert call.warps == 1 or -(-units // at_once) * at_once <= 1.25 * units
        assert call.constants[f"{prefix}whole".upper()] == (units % at_once == 0)


def test_a_table_at_an_address_that_words_do_not_begin_at_is_refused():
    inputs = list(ONE.inputs())
    gate = inputs[2]
    moved = torch.empty(gate.numel() + 2, dtype=torch.uint8)[2:].view(gate.shape)
    inputs[2] = moved.copy_(gate)
    with pytest.raises(PlacementError, match=r"gate begins at .* aligned to 4 bytes"):
        moe.KERNEL.run(*inputs, **ONE.options)


def test_few_instructions_for_a_weight(compiler):
    """Value by value it was 14 for gate and up in Q4_K."""
    requested = ("--experts", "gate", "Q4_K", "--rows", "1", "16", "--json")
    one, many = map(json.loads, compiler.printed(INSTRUCTIONS, *requested))
    assert 3 < one["instructions"] / one["weights"] < 6
    assert 3 < many["instructions"] / many["weights"] < 9


MANY_ROWS = """
from dataclasses import asdict
import torch
from mtmd.kernels.gpu.compile import compile_program
from mtmd.kernels.gpu.moe.kernel import KERNEL
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.quantization.blocks import row_bytes
x, router = Type.contiguous((512, 2048), torch.bfloat16), Type.contiguous((512, 8), torch.bfloat16)
out = {}
for target, gate, up in (
    ("cuda:80", "Q2_K", "Q2_K"), ("cuda:80", "Q4_0", "Q4_0"), ("cuda:80", "Q5_K", "Q5_K"),
    ("cuda:80", "Q5_K", "Q2_K"), ("cuda:80", "Q5_K", "Q6_K"), ("hip:gfx1100", "Q4_0", "Q4_0"),
):
    tables = (Type.contiguous((8, 768, row_bytes(kind, 2048)), torch.uint8) for kind in (gate, up))
    down = Type.contiguous((8, 2048, row_bytes("Q4_0", 768)), torch.uint8)
    quants = {"gate_quant": gate, "up_quant": up, "down_quant": "Q4_0"}
    made = KERNEL.main(x, router, *tables, down, routing=Routing(2, normalize=True), **quants)
    assert made.function.__name__ == "gated_kernel"
    out[f"{target} {gate} {up}"] = asdict(compile_program(target, made))
"""


def test_gate_and_up_of_many_rows_do_not_spill(compiler):
    used = compiler(MANY_ROWS)
    assert len(used) == 6 and {name for name, u in used.items() if u["spill_bytes"]} == set()


ROUTERS = """
import torch
from mtmd.kernels.gpu.compile import compile_program
from mtmd.kernels.gpu.moe.kernel import KERNEL
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.moe import Routing
bf16, out = torch.bfloat16, {}
for count, routing in (
    (256, Routing(8, True, "sigmoid", 1e-20, 2.5, 8, 4)),
    (160, Routing(6, False, scale=16.0, groups=8, top_groups=3, group_best=1)),
    (16, Routing(1, False, "sigmoid", on_input=True)),
):
    shapes = (1, 512), (1, count), (count, 256, 512), (count, 256, 512), (count, 512, 256)
    types = [Type.contiguous(shape, bf16) for shape in shapes]
    bias = Type.contiguous((count,), torch.float32) if count == 256 else None
    route, gated, *_ = KERNEL.launched(*types, None, bias, routing=routing)
    for made in (route, gated) if routing.on_input else (route,):
        used = compile_program("cuda:90", made)
        out[f"{count} {made.function.__name__}"] = used.spill_bytes
"""


def test_every_way_of_choosing_experts_compiles(compiler):
    """The interpreter takes more than the compiler does."""
    spilled = compiler(ROUTERS)
    assert len(spilled) == 4 and not any(spilled.values()), spilled


FEW_ROWS = """
import sys
sys.path.insert(0, folder)
from instructions import of_experts
from mtmd.kernels.gpu.compile import compile_program
out = {}
for kind, rows, table in (
    ("IQ4_NL", 0, "gate"), ("IQ4_XS", 32, "gate"), ("Q2_K", 32, "gate"), ("Q2_K", 6, "down"),
):
    for target in ("cuda:80", "cuda:90"):
        used = compile_program(target, of_experts(kind, rows, table))
        out[f"{target} {kind} {rows} {table}"] = used.spill_bytes
"""


def test_few_rows_of_experts_do_not_spill(compiler):
    """Each of these did, by 8 to 40 bytes, on one of the two or on both."""
    spilled = compiler(FEW_ROWS, folder=str(INSTRUCTIONS.parent))
    assert len(spilled) == 8 and not any(spilled.values()), spilled


def test_what_spills_is_told_by_one_command():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, INSTRUCTIONS.with_name("spills.py"), "--target", "cuda:90"]
    command += ["--only", "short_conv", "silu_mul", "--groups", "short"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    heads, _, row = done.stdout.splitlines()[-3:]
    assert heads.startswith("| programs |")
    cells = row.strip("| ").split(" | ")
    assert cells[:3] == ["short_conv", "cuda:90", "2"] and cells[-1] == "0"
    assert cells[4] == "3 to 8", "programs of prefill and of decoding on a multiprocessor"
