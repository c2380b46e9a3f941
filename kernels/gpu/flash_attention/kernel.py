"""Flash attention, forward, for NVIDIA and AMD GPUs: the `attention` op without ever holding its
scores (`softmax.py` has the mathematics). Rows that see every key take `whole_kernel`, those that
see some `limited_kernel`.

**Grouped heads.** The H / G query heads that share a key head are rows of the same block (row =
token * H / G + head in the group): keys and values are loaded once for all of them, and decoding
one token fills a matrix instruction with its query heads.
"""

from __future__ import annotations

from math import e, isfinite, log2
from typing import Any

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.flash_attention.cases import CASES, TOLERANCE, USES, largest_error
from mtmd.kernels.gpu.flash_attention.limited import combine_kernel, limited_kernel
from mtmd.kernels.gpu.flash_attention.tiles import MAX_HEAD, Operands, attention_call
from mtmd.kernels.gpu.flash_attention.whole import whole_kernel
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, TritonKernel, declared, same
from mtmd.kernels.graph import Type


def rejects(o: Operands) -> str | None:
    """None if the kernel computes attention on tensors of these types, else why not. Sizes of B, T,
    S and H never matter short of the limits of a grid and of 32-bit row numbers, which are named.
    """
    for name, type_ in (("q", o.q), ("k", o.k), ("v", o.v)):
        if (
            type_.dtype not in (torch.bfloat16, torch.float16, torch.float32)
            or type_.dtype != o.q.dtype
        ):
            return (
                f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or "
                "fp32, the same "
                "for q, k and v"
            )
        if not 16 <= type_.shape[3] <= MAX_HEAD:
            return f"{name} has head size {type_.shape[3]}; the kernel supports 16 to {MAX_HEAD}"
        if type_.strides[3] != 1:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel needs stride 1 in the last "
                "dimension"
            )
        if min(type_.strides) < 0:
            return f"{name} has strides {list(type_.strides)}; the kernel supports none below 0"
    if o.mask is not None and not o.mask.dtype.is_floating_point:
        return f"mask is {name_of(o.mask.dtype)}; the kernel adds a floating-point mask"
    if o.bounds is not None and o.bounds.dtype not in (torch.int32, torch.int64):
        return f"bounds are {name_of(o.bounds.dtype)}; the kernel supports i32 or i64"
    scale, softcap = o.scale, o.softcap
    if not (scale > 0 and isfinite(scale)) or (
        softcap is not None and not (softcap > 0 and isfinite(softcap))
    ):
        return f"scale {scale}, softcap {softcap}; the kernel needs positive finite numbers"
    (batch, rows, heads, _), (keys, groups) = o.q.shape, o.k.shape[1:3]
    if rows + keys >= 2**30 or rows * (heads // groups) >= 2**30:
        return (
            f"{rows} rows x {heads // groups} heads of a group, {keys} keys; the kernel "
            "numbers rows and keys below 2^30"
        )
    if batch * heads * rows >= 2**31:
        return f"{batch} x {heads} x {rows} rows; a grid has fewer than 2^31 programs"
    return None


def plan(o: Operands, **how: Any) -> Plan:
    """`how` is for measurements, as `attention_call` has it."""
    value, shape = o.v.shape[3], o.q.shape[:3]
    out = Type.contiguous((*shape, value), o.v.dtype)
    if not out.count:
        return Plan(out, [])
    call = attention_call(o, **how)
    attend = limited_kernel if o.limited else whole_kernel
    pointers = same("q k v mask bounds out" if o.limited else "q k v mask out")
    tile = "ROWS", "KEYS"
    if call.across == 1:
        return Plan(out, [Launch(attend, call, pointers | {"sums": "out"}, tile, head=value)])
    pointers |= {"out": "parts", "sums": "sums"}
    added = Launch(
        combine_kernel,
        combine_call(o, call),
        same("parts sums out"),
        ("SPLITS", "COLUMNS"),
        "attention parts",
        value,
    )
    splits = *shape, call.across
    return Plan(
        out,
        [Launch(attend, call, pointers, tile, head=value), added],
        {
            "parts": Type.contiguous((*splits, value), torch.float32),
            "sums": Type.contiguous((*splits, 2), torch.float32),
        },
    )


def combine_call(o: Operands, call: Call) -> Call:
    """Return how the parts that a launch over shared-out keys leaves are added."""
    # With a cap or a mask the kernel's scores are what the softmax takes, else they are not scaled.
    scaled = call.constants["CAP"] or call.constants["MASK"]
    value = o.v.shape[3]
    columns = min(128, power_of_two(value), max(16, 8192 // call.across))
    return Call(
        {"to_log2": (1.0 if scaled else call.scalars["scale"]) * log2(e)},
        {"V": value, "SPLITS": call.across, "COLUMNS": columns},
        o.q.count // o.q.shape[3],
        4,
        1,
        across=-(-value // columns),
    )


def kernel(**how: Any) -> TritonKernel:
    """The kernel, launched as measurements would have it."""
    return declared(
        Operands,
        lambda o: plan(o, **how),
        rejects,
        what="flash attention",
        cases=CASES,
        uses=USES,
        error=largest_error,
        limits=TOLERANCE,
    )


KERNEL = kernel()
