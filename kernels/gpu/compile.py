"""Describes what a kernel takes on a GPU, found by compiling it ahead of time; no GPU is needed.

`python tools/kernel_table.py > docs/kernels.md` prints the tables of the documentation.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import create_function_from_signature

from mtmd.base.errors import PlacementError
from mtmd.kernels.gpu.ahead.compilations import ahead
from mtmd.kernels.gpu.architectures import ARCHITECTURES, architecture
from mtmd.kernels.gpu.launch import arguments
from mtmd.kernels.gpu.triton_kernel import Located, Program
from mtmd.kernels.graph import Type

# Of those that docs/kernels.md has a column for.
SHARED_LIMIT = {
    target: ARCHITECTURES[target].shared_per_program
    for target in ("cuda:80", "cuda:90", "hip:gfx942")
}
ADDED = ("instrumentation_mode", "fpsan_homomorphic_casts")  # by a launch, as its version knows


@dataclass(frozen=True)
class Resources:
    """Resources of one program. `spill_bytes` per thread: registers that did not fit and live in
    memory instead. at_once: programs that a multiprocessor holds.
    """

    target: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    instruction: str
    at_once: int


def parse_target(text: str) -> GPUTarget:
    """`cuda:90` (compute capability 9.0) or `hip:gfx942`. Raises OptionError."""
    known = architecture(text)
    kind, _, version = text.partition(":")
    return GPUTarget(kind, int(version) if kind == "cuda" else version, known.warp)


def compile_program(target: str, program: Program) -> Resources:
    """Compile what a kernel's `program` says, and read what one program of the grid takes.

    Raises OptionError for a target that cannot be meant, PlacementError where the compiler refuses.
    """
    shared, registers, spilled, instruction = compiled_sizes(target, program)
    limits = architecture(target)
    warps = program.call.warps_of(limits.warp)
    at_once = limits.programs_at_once(warps, registers, shared)
    return Resources(target, shared, registers, spilled, instruction, at_once)


def compiled_sizes(target: str, program: Program) -> tuple[int, int, int, str]:
    """Return bytes of shared memory, registers and spilled bytes per thread, and the matrix
    instruction, as the compiler leaves a program.

    Raises as `compile_program`.
    """
    gpu_target = parse_target(target)
    compiled = compiled_for(target, program)
    read = _read_cuda if gpu_target.backend == "cuda" else _read_hip
    return (compiled.metadata.shared, *read(compiled))


def compiled_for(target: str, program: Program) -> Any:
    """Triton's compiled kernel, from its cache on disk where it is there. A launch of the program
    on such a device finds it: what is asked for is made by the code that a launch runs.

    Raises as `compile_program`.
    """
    gpu_target = parse_target(target)
    source, options = specialised(target, program)
    try:
        with ahead():
            return triton.compile(source, target=gpu_target, options=options.__dict__)
    except Exception as error:  # the compiler's own errors share no base class
        raise PlacementError(f"ahead-of-time compilation for {target} failed: {error}") from error


def cache_key(target: str, program: Program) -> tuple[str, str]:
    """Return the cache key of source and of options: what a compiled program is found by on disk,
    beside the versions of compiler, target and its tools.
    """
    source, options = specialised(target, program)
    return source.hash(), options.hash()


def disk_key(target: str, program: Program) -> str:
    """The folder of Triton's cache that a launch of the program looks into, with the tools and
    variables that are here.
    """
    source, options = specialised(target, program)
    backend, variables = make_backend(parse_target(target)), get_cache_invalidating_env_vars()
    return hashlib.sha256(get_cache_key(source, backend, options, variables).encode()).hexdigest()


@dataclass(frozen=True)
class _Pointer:
    """Describes what a launch looks at of a tensor."""

    dtype: torch.dtype
    address: int
    range: int

    @staticmethod
    def of(kind: Type) -> _Pointer:
        steps = zip(kind.shape, kind.strides, strict=True)
        extent = sum((size - 1) * step for size, step in steps) + 1 if kind.count else 0
        aligned, storage = True, extent * kind.dtype.itemsize
        if isinstance(kind, Located):
            aligned, storage = kind.aligned, kind.storage
        return _Pointer(kind.dtype, 0 if aligned else 1, storage)

    @property
    def distinguished(self) -> Hashable:
        return self.dtype, self.address, self.range < 2**31

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """Return what AMD's compiler tells pointers apart by: whether 32 bits reach all that is
        there.
        """
        return self.range


def specialised(target: str, program: Program) -> tuple[ASTSource, Any]:
    """Source and options as `kernel[grid](...)` makes them of its arguments on a device: types,
    what is a constant, an integer of 1 among them, and what is known of other arguments, such as
    multiples of 16. By Triton's own functions.
    """
    kernel, call = program.function, program.call
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise PlacementError(
            "ahead-of-time compilation: the kernel is being interpreted; unset TRITON_INTERPRET"
        )
    backend, bind = _binder(target, kernel)
    gpu_target = parse_target(target)
    given = {name: _Pointer.of(kind) for name, kind in program.operands.items()}
    options = {
        **arguments(kernel, given, call),
        **call.options(gpu_target.warp_size, gpu_target.backend == "cuda"),
        "debug": kernel.debug or knobs.runtime.debug,
        **{name: getattr(knobs.compilation, name) for name in ADDED if _has(name)},
    }
    bound, known, rest = bind(**options)
    options, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, known, rest
    )
    return ASTSource(kernel, signature, constants, attributes), options


def _has(name: str) -> bool:
    return hasattr(knobs.compilation, name)


@cache
def _binder(target: str, kernel: Any) -> tuple[Any, Any]:
    backend = make_backend(parse_target(target))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def specialisation(program: Program) -> Hashable:
    """Return what tells one compiled program from another, as far as can be seen without a target:
    nodes with equal ones share it.
    """
    kernel, call = program.function, program.call
    # A kernel in the interpreter has no parameters to look at: it can be compared, not compiled.
    fixed = {p.name for p in getattr(kernel, "params", ()) if p.do_not_specialize}
    return (
        kernel,
        tuple((name, _Pointer.of(t).distinguished) for name, t in program.operands.items()),
        tuple((name, _distinguished(value, name in fixed)) for name, value in call.scalars.items()),
        tuple(sorted(call.constants.items())),
        call.warps,
        call.stages,
        call.registers,
    )


def _distinguished(value: float, fixed: bool) -> Hashable:
    if not isinstance(value, int):
        return "fp"
    wide = not -(2**31) <= value < 2**31
    return wide if fixed else (wide, value == 1, value % 16 == 0)


def _read_cuda(compiled: Any) -> tuple[int, int, str]:
    """Registers of a thread, spilled bytes, matrix instruction."""
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
    return int(match[1]), int(match[2]), instruction


def _read_hip(compiled: Any) -> tuple[int, int, str]:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", text)
        assert match, f"no {name} in the assembly"
        return int(match[1])

    # Spilled scalar registers move into lanes of vector registers; what reaches memory is the
    # private segment.
    instruction = "mfma" if "v_mfma" in text else "fma"
    return field("vgpr_count"), field("private_segment_fixed_size"), instruction
