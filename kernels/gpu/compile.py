"""What a kernel takes on a GPU, found by compiling it ahead of time; no GPU is needed.

`python tools/kernel_table.py > docs/kernels.md` prints the tables of the documentation.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtmd.kernels.errors import PlacementError
from mtmd.kernels.gpu.architectures import ARCHITECTURES, architecture
from mtmd.kernels.gpu.triton_kernel import Program

# Of those that docs/kernels.md has a column for.
SHARED_LIMIT = {
    target: ARCHITECTURES[target].shared_per_program
    for target in ("cuda:80", "cuda:90", "hip:gfx942")
}
POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Resources:
    """Of one program. `spill_bytes` per thread: registers that did not fit and live in memory
    instead.
    """

    target: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    instruction: str


def parse_target(text: str) -> GPUTarget:
    """`cuda:90` (compute capability 9.0) or `hip:gfx942`. Raises OptionError."""
    known = architecture(text)
    kind, _, version = text.partition(":")
    return GPUTarget(kind, int(version) if kind == "cuda" else version, known.warp)


def compile_program(target: str, program: Program) -> Resources:
    """Compile what a kernel's `program` says, and read what one program of the grid takes.

    Raises OptionError for a target that cannot be meant, PlacementError where the compiler refuses.
    """
    gpu_target = parse_target(target)
    if not isinstance(program.function, triton.runtime.JITFunction):
        raise PlacementError(
            "ahead-of-time compilation: the kernel is being interpreted; unset TRITON_INTERPRET"
        )
    signature, constants, attributes = _specialised(program)
    source = ASTSource(
        program.function, signature=signature, constexprs=constants, attrs=attributes
    )
    options = {
        "num_warps": program.call.warps,
        "num_stages": program.call.stages,
        "enable_fp_fusion": True,
    }
    try:
        compiled = triton.compile(source, target=gpu_target, options=options)
    except Exception as error:  # the compiler's own errors share no base class
        raise PlacementError(f"ahead-of-time compilation for {target} failed: {error}") from error
    read = _read_cuda if gpu_target.backend == "cuda" else _read_hip
    return read(target, compiled)


def specialisation(program: Program) -> Hashable:
    """What tells one compiled program from another: nodes with equal ones share it."""
    signature, constants, attributes = _specialised(program)
    return (
        program.function,
        tuple(signature.items()),
        tuple(sorted(constants.items())),
        tuple(at for at, known in attributes.items() if known),
        program.call.warps,
        program.call.stages,
    )


def _specialised(
    program: Program,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """Types of arguments, values of constants, and what is known of other arguments, as the
    just-in-time compiler would have them: an integer of 1 is a constant, multiples of 16 and
    pointers are marked as such, and of other integers and constants it is noted that nothing is
    known, which is part of what it tells programs apart by.
    """
    kernel, call, pointers = program.function, program.call, program.operands
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(call.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    # A kernel in the interpreter has no parameters to look at: it can be compared, not compiled.
    fixed = {p.name for p in getattr(kernel, "params", ()) if p.do_not_specialize}
    for index, name in enumerate(kernel.arg_names):
        value = call.scalars.get(name)
        is_one = value == 1 and isinstance(value, int) and name not in fixed
        if name in call.constants or is_one:
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            attributes[(index,)] = []
            continue
        signature[name] = POINTER[pointers[name].dtype] if name in pointers else _scalar(value)
        if name in pointers:
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and name not in fixed:
            attributes[(index,)] = [["tt.divisibility", 16]] if value % 16 == 0 else []
    return signature, constants, attributes


def _scalar(value: int | float | None) -> str:
    assert value is not None
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _read_cuda(target: str, compiled: Any) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    ptx = compiled.asm["ptx"]
    instruction = next((name for name in ("wgmma", "tcgen05", "mma.sync") if name in ptx), "fma")
    return Resources(target, compiled.metadata.shared, int(match[1]), int(match[2]), instruction)


def _read_hip(target: str, compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", text)
        assert match, f"no {name} in the assembly"
        return int(match[1])

    # Spilled scalar registers move into lanes of vector registers; what reaches memory is the
    # private segment.
    return Resources(
        target,
        compiled.metadata.shared,
        field("vgpr_count"),
        field("private_segment_fixed_size"),
        "mfma" if "v_mfma" in text else "fma",
    )
