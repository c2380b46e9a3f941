"""What a kernel takes on a GPU, found by compiling it ahead of time; no GPU is needed.

`python -m mtmd.kernels.gpu.resources > docs/kernels.md` prints the tables of the documentation.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtmd.kernels.errors import OptionError, PlacementError
from mtmd.kernels.gpu import gated_delta, quant_matmul, short_conv
from mtmd.kernels.gpu.flash_attention import attention_kernel, combine_kernel
from mtmd.kernels.gpu.launch import Call, Tile, plan_combine, plan_launch
from mtmd.kernels.graph import Node, Type

# What one program may use: CUDA C++ Programming Guide, "Compute Capabilities"; AMD CDNA 3 ISA
# guide, local data share of a workgroup.
SHARED_LIMIT = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}
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
    match = re.fullmatch(r"cuda:(\d{2,3})|hip:(gfx\w+)", text)
    if not match:
        raise OptionError(
            f"target {text!r}: expected cuda:CAPABILITY such as cuda:90, or hip:ARCH such as "
            "hip:gfx942"
        )
    return GPUTarget("cuda", int(match[1]), 32) if match[1] else GPUTarget("hip", match[2], 64)


def compile_for(
    target: str,
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    tile: Tile | None = None,
    split: bool = True,
) -> Resources:
    """Compile the kernel that a run on these types would use, and read what it takes.

    Raises OptionError for a target that cannot be meant, PlacementError where the compiler refuses.
    """
    launch = plan_launch(
        q,
        k,
        v,
        mask,
        bounds,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        tile=tile,
        split=split,
    )
    call = Call(
        launch.scalars,
        dict(launch.constants),
        launch.programs,
        launch.tile.warps,
        launch.tile.stages,
    )
    out = v if launch.splits == 1 else Type.contiguous((1,), torch.float32)
    return compile_call(
        target,
        attention_kernel,
        call,
        {"q": q, "k": k, "v": v, "mask": mask or q, "bounds": bounds or q, "out": out, "sums": out},
    )


def compile_combine(target: str, q: Type, k: Type, v: Type, *, scale: float) -> Resources:
    """Compile the kernel that adds the parts of attention over shared-out keys. Raises as
    `compile_for` does.
    """
    part = Type.contiguous((1,), torch.float32)
    call = plan_combine(plan_launch(q, k, v, scale=scale))
    return compile_call(target, combine_kernel, call, {"parts": part, "sums": part, "out": v})


def compile_node(target: str, node: Node) -> Resources:
    """Compile the kernel of a node that a Triton kernel runs. Raises as `compile_for` does."""
    types = [i and i.type for i in node.inputs]
    if node.op == "attention":
        return compile_for(target, *types, **node.attrs)  # type: ignore[arg-type]
    if node.op == "matmul":
        call = quant_matmul.plan_call(*types, **node.attrs)  # type: ignore[arg-type]
        product, names = quant_matmul.kernel_of(call)
        x, w, bias = (*types, None)[:3]
        operands = dict(zip(names, (x, w, bias or x, node.type), strict=True))
        return compile_call(target, product, call, operands)  # type: ignore[arg-type]
    kernel, plan_call = {
        "gated_delta": (gated_delta.gated_delta_kernel, gated_delta.plan_call),
        "short_conv": (short_conv.short_conv_kernel, short_conv.plan_call),
    }[node.op]
    present = [*types, types[0]] if node.op == "short_conv" and len(types) == 5 else types
    pointers = {
        name: t or types[0]
        for name, t in zip(kernel.arg_names, [*present, node.type], strict=False)
    }
    return compile_call(target, kernel, plan_call(*types, **node.attrs), pointers)  # type: ignore[operator,arg-type]


def compile_call(target: str, kernel: Any, call: Call, pointers: Mapping[str, Type]) -> Resources:
    """Compile a kernel for a call on tensors of these types, by the names of its arguments. Raises
    as `compile_for` does.
    """
    wanted = parse_target(target)
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise PlacementError(
            "ahead-of-time compilation: the kernel is being interpreted; unset TRITON_INTERPRET"
        )
    source = _source(kernel, call, pointers)
    options = {"num_warps": call.warps, "num_stages": call.stages, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source, target=wanted, options=options)
    except Exception as error:  # the compiler's own errors share no base class
        raise PlacementError(f"ahead-of-time compilation for {target} failed: {error}") from error
    read = _read_cuda if wanted.backend == "cuda" else _read_hip
    return read(target, compiled)


def _source(kernel: Any, call: Call, pointers: Mapping[str, Type]) -> ASTSource:
    """The specialisation the just-in-time compiler would make: 1 is a constant, multiples of 16 and
    pointers are marked as such.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(call.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    fixed = {p.name for p in kernel.params if p.do_not_specialize}
    for index, name in enumerate(kernel.arg_names):
        value = call.scalars.get(name)
        if name in call.constants or (value == 1 and isinstance(value, int) and name not in fixed):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            continue
        signature[name] = POINTER[pointers[name].dtype] if name in pointers else _scalar(value)
        if name in pointers or (isinstance(value, int) and value % 16 == 0 and name not in fixed):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)


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
        told = subprocess.run(
            [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert match, told
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
