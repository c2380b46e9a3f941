"""Every program of every kernel's cases and uses, through the compiler's first stage, with the
Triton that is installed: `make floors` runs it with the lowest one that is allowed. Newer ones are
kinder to what functions are passed. Minutes.
"""

from __future__ import annotations

import pytest
from compiler_process import Compiler

from mtmd.kernels.gpu.table import KERNELS

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
