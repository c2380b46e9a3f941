"""PTX of our kernels, in a process where they are compiled (`compiler_process.py`): as far as that
stage, NVIDIA's assembler is not called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from mtmd.kernels.gpu.compile import parse_target, specialised
from mtmd.kernels.gpu.launch import Call, arguments
from mtmd.kernels.gpu.triton_kernel import Located, Program


def read(description: dict[str, Any]) -> Program:
    module, name = description["function"]
    operands = {
        name: Located(
            tuple(kind["shape"]),
            getattr(torch, kind["dtype"]),
            tuple(kind["strides"]),
            kind["aligned"],
            kind["storage"],
        )
        for name, kind in description["operands"].items()
    }
    return Program(getattr(import_module(module), name), Call(**description["call"]), operands)


def ptx_of(target: str, description: dict[str, Any]) -> dict[str, Any]:
    """`text`; `arguments`: names of pointers and scalars in the order of parameters, behind which are
    two pointers to memory of the compiler's own; `shared`: bytes.
    """
    program, gpu_target = read(description), parse_target(target)
    source, options = specialised(target, program)
    backend, stages = make_backend(gpu_target), dict[str, Any]()
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(gpu_target, options, functions, backend.get_module_map(), context)
    metadata = {"target": gpu_target, **options.__dict__}
    for stage, make in stages.items():
        module = make(module, metadata)
        if stage == "ptx":
            break
    return {"text": module, "arguments": _passed(program, source), "shared": metadata["shared"]}


def _passed(program: Program, source: Any) -> list[str]:
    """Names of the arguments that are no constants."""
    kernel = program.function
    names = {name: name for name in program.operands}
    given = arguments(kernel, names, program.call)
    result = []
    for name in kernel.arg_names:
        kinds = source.signature[name]
        if isinstance(kinds, tuple):
            fields = given[name]._fields
            result += [f for f, kind in zip(fields, kinds, strict=True) if kind != "constexpr"]
        elif kinds != "constexpr":
            result.append(name)
    return result
