"""Every program of every kernel's cases and uses, through the compiler's first stage, with the
Triton that is installed: `make floors` runs it with the lowest one that is allowed. Newer ones are
kinder to what functions are passed. Minutes. And what that one once spilled, or made too large.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiler_process import Compiler

from mtmd.kernels.gpu.compile import SHARED_LIMIT
from mtmd.kernels.gpu.table import KERNELS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "gpu_kernels"
FIRST_STAGE = """
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from mtmd.kernels.gpu.compile import parse_target, specialised
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import node_of
from mtmd.kernels.kernel import types_of
target, out = parse_target(name), []
backend = make_backend(target)
for kernel in (entry.load() for entry in KERNELS[op]):
    for case in (*kernel.cases, *kernel.uses.values()):
        node = node_of(op, case)
        for program in kernel.launched(*types_of(node), **node.attrs):
            source, options = specialised(name, program)
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            functions = backend.get_codegen_implementation(options)
            try:
                source.make_ir(target, options, functions, backend.get_module_map(), context)
            except Exception as error:
                out.append(f"{case}, {program.function.__name__}: {error}")
"""


@pytest.mark.parametrize("op", KERNELS)
def test_the_compiler_reads_every_program(compiler: Compiler, op: str) -> None:
    refused = compiler(FIRST_STAGE, op=op, name="cuda:90")
    assert not refused, f"{len(refused)}: {refused[0]}"


FEW_ROWS = """
from instructions import of_rows
from mtmd.kernels.gpu.compile import compile_program
out = {}
for kind in ("Q6_K", "Q3_K", "Q2_K", "IQ4_XS"):
    for rows in (1, 16, 32):
        used = compile_program("cuda:80", of_rows(kind, rows, 4096, 4096))
        out[f"{kind}, {rows} rows"] = used.spill_bytes
"""


def test_few_rows_of_quantized_products_stay_in_registers(compiler: Compiler) -> None:
    """They spilled 16 to 200 bytes a thread with Triton 3.6, which torch 2.11 brings."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{FEW_ROWS}"
    spilled = compiler(code)
    assert len(spilled) == 12 and not any(spilled.values()), spilled


def test_tiles_of_attention_fit(tried_tiles: list[tuple[str, dict[str, Any]]]) -> None:
    for name, used in tried_tiles:
        assert used["shared_bytes"] <= SHARED_LIMIT[used["target"]], (name, used)
        assert used["spill_bytes"] == 0, (name, used)
