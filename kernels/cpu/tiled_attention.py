"""Flash attention of many rows as machine code (`tiled.flash`); torch's kernel has the rest."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.resources.result_memory import new_result

if TYPE_CHECKING:
    from mtmd.kernels.cpu.tiled.flash import Form

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
MAX_SIZE = 512  # of a head: what a thread works on has to stay in its second cache
# Rows times keys times numbers of a head, from which on the machine code pays: about 0.1 ms
WORTH = 1 << 24
FEWEST_ROWS = 32  # of heads that share keys
MAX_ROWS = 512  # of a unit: more make the laying out of keys cheaper, fewer share better
UNITS = 8  # for each thread, at least, where rows suffice
ANYWHERE = 1 << 40  # a window that leaves nothing out


def unfit(q: Type, k: Type, v: Type, mask: Type | None = None) -> str | None:
    """None if the machine code supports tensors of these types, else why not."""
    if q.dtype not in TYPES or v.dtype != q.dtype or k.dtype != q.dtype:
        return f"q is {name_of(q.dtype)}, v {name_of(v.dtype)}; the kernel supports fp32 or bf16"
    if mask is not None and mask.dtype not in TYPES:
        return f"mask is {name_of(mask.dtype)}; the kernel supports fp32 or bf16"
    size = max(q.shape[3], v.shape[3])
    if size > MAX_SIZE or min(q.shape[3], v.shape[3]) == 0:
        return f"heads of {q.shape[3]} and {v.shape[3]}; the kernel supports 1 to {MAX_SIZE}"
    from mtmd.kernels.cpu.tiled.cpu import host_form

    if host_form(TYPES[q.dtype]) is None:
        return "the CPU has neither AVX2 nor AVX-512"
    return None


def rejects(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,  # noqa: ARG001
    **attrs: object,  # noqa: ARG001
) -> str | None:
    """None if the kernel is for tensors of these types, else why not."""
    if reason := unfit(q, k, v, mask):
        return reason
    (_, rows, heads, _), (keys, groups) = q.shape, k.shape[1:3]
    if rows * heads < FEWEST_ROWS * groups:
        return f"{rows * heads // groups} rows a head of keys; the kernel is for {FEWEST_ROWS} on"
    work = prod(q.shape) * keys
    if work < WORTH:
        return f"{work / 1e6:.1f} million products; the kernel is for {WORTH / 1e6:.0f} on"
    return None


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask_capped: bool = False,
) -> Tensor:
    """The `attention` op: q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]"""
    from mtmd.kernels.cpu.tiled import team

    q, k, v = (_dense(x) for x in (q, k, v))
    batch, tokens, heads, _ = q.shape
    keys, groups, value = k.shape[1], k.shape[2], v.shape[3]
    out = new_result(batch, tokens, heads, value, dtype=v.dtype)
    args = [n for x in (q, k, v, out) for n in (x.data_ptr(), *x.stride()[:3])]
    if mask is None:
        args += [0] * 4
    else:
        mask = _dense(mask[(None,) * (4 - mask.ndim)])
        strides = mask.expand(batch, heads, tokens, keys).stride()
        args += [mask.data_ptr(), *strides[:3]]
    if bounds is None:
        args += [0] * 2
    else:
        bounds = bounds.contiguous()
        args += [bounds.data_ptr(), tokens * 2 if bounds.ndim == 3 else 0]
    args.append(0)  # no pages
    form = _form(
        q.dtype,
        q.shape[3],
        value,
        None if mask is None else mask.dtype,
        softcap,
        scale,
        mask_capped,
    )
    made = call(form, batch, tokens, keys, heads, groups, scale, softcap, window, causal)
    team.run(made.address, [*args, *made.sizes], made.units, 1, made.scratch)
    return out


@dataclass(frozen=True)
class Call:
    """Attention as a kernel with its units: `sizes` are its arguments from TOKENS on."""

    address: int
    sizes: tuple[int, ...]
    units: int
    scratch: int


def call(
    form: Form,
    batch: int,
    tokens: int,
    keys: int,
    heads: int,
    groups: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    causal: bool = False,
) -> Call:
    """Attention of a form and of these sizes."""
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.tiled.flash import emit_flash

    each = _each(batch, tokens, heads, groups)
    blocks = -(-tokens // each)
    locations, bytes_ = form.locations(each * (heads // groups))
    sizes = (tokens, keys, groups, heads // groups, each, blocks, _bits(scale))
    limits = _bits(softcap or 0.0), ANYWHERE if window is None else window, int(causal)
    return Call(
        compile_kernel(emit_flash, form),
        (*sizes, *limits, *locations.values()),
        batch * groups * blocks,
        bytes_,
    )


def form_of(q: Type, v: Type, mask: Type | None, softcap: float | None, scale: float) -> Form:
    """The form of attention of tensors of these types."""
    added = None if mask is None else mask.dtype
    return _form(q.dtype, q.shape[3], v.shape[3], added, softcap, scale)


def workspace(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,
    *,
    scale: float,
    causal: bool = False,  # noqa: ARG001
    window: int | None = None,  # noqa: ARG001
    softcap: float | None = None,
    mask_capped: bool = False,
) -> int:
    """Bytes beyond the result: each thread's memory, and copies of what is not dense."""
    from mtmd.kernels.cpu.tiled import team

    batch, tokens, heads, size = q.shape
    groups = k.shape[2]
    copies = sum(t.bytes for t in (q, k, v, mask) if t is not None and t.strides[-1] != 1)
    copies += 0 if bounds is None or bounds.is_contiguous else bounds.bytes
    added = None if mask is None else mask.dtype
    form = _form(q.dtype, size, v.shape[3], added, softcap, scale, mask_capped)
    each = _each(batch, tokens, heads, groups)
    _, bytes_ = form.locations(each * (heads // groups))
    return copies + team.scratch_bytes(bytes_, batch * groups * -(-tokens // each))


def how(
    q: Type,
    k: Type,  # noqa: ARG001
    v: Type,
    mask: Type | None = None,  # noqa: ARG001
    bounds: Type | None = None,  # noqa: ARG001
    **attrs: object,  # noqa: ARG001
) -> str:
    """Return what multiplies."""
    from mtmd.kernels.cpu.tiled.cpu import named

    form = _form(q.dtype, q.shape[3], v.shape[3], None, None, 1.0)
    return f"machine code ({named(form.kind, form.lanes)})"


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def _form(
    dtype: torch.dtype,
    size: int,
    value: int,
    mask: torch.dtype | None,
    softcap: float | None,
    scale: float,
    mask_capped: bool = False,
) -> Form:
    from mtmd.kernels.cpu.tiled.cpu import host_form
    from mtmd.kernels.cpu.tiled.flash import Form

    result = host_form(TYPES[dtype])
    assert result is not None
    kind, lanes, rows, columns = result
    if kind != "single" and size % 2:  # pairs of numbers need an even one
        kind = "single"
    capped, masked = softcap is not None, None if mask is None else TYPES[mask]
    scaled = not capped and masked is None and scale > 0
    inside = mask_capped and capped and masked is not None
    return Form(
        kind, TYPES[dtype], size, value, masked, inside, capped, scaled, lanes, rows, columns
    )


def _each(batch: int, tokens: int, heads: int, groups: int) -> int:
    """Tokens of a unit."""
    shared, requested = heads // groups, UNITS * torch.get_num_threads()
    rows = MAX_ROWS
    while rows > 64 and batch * groups * -(-tokens * shared // rows) < requested:
        rows //= 2
    return max(1, min(tokens, rows // shared))


KERNEL = Kernel(tiled_attention, rejects, workspace, how=how)
