"""Products with block-quantized weights on the CPU, in memory that does not grow with the weight.

Few rows of x (decoding): the native products, which read each block once. More of them, in bf16
where the CPU has AMX (several sequences, short prompts): tiles, which read each block once too.
Many rows (prefill): panels of the weight are decoded into the thread's second cache, and all rows
multiplied with each. Threads, as many as torch has, share the rows of the weight.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.quantization.blocks import BLOCKS

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Rows of x up to which the native products are faster than panels; measured on AVX-512
FEW = 24
LAID_OUT = 64  # tiles of x that a thread lays out at a time
# Values of a weight that a thread needs to have to be worth waking up, about 50 us
SHARE_VALUES = 1 << 18


def rejects(
    x: Type,
    w: Type,  # noqa: ARG001
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: str | None = None,
    int8: bool = False,  # noqa: ARG001
) -> str | None:
    """None if the kernel multiplies tensors of these types, else why not."""
    if quant not in BLOCKS:
        return f"weights are {quant or 'plain'}; the kernel supports {', '.join(sorted(BLOCKS))}"
    if x.dtype not in TYPES:
        return f"x is {name_of(x.dtype)}; the kernel supports {', '.join(map(name_of, TYPES))}"
    return None


def quant_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, quant: str, int8: bool = False
) -> Tensor:
    """The `matmul` op

    x [..., K] fp32 or bf16, w u8 [N, bytes of K values], bias [N] -> [..., N]
    """
    flat, w = x.reshape(-1, x.shape[-1]).contiguous(), w.contiguous()
    out = x.new_empty(len(flat), len(w))
    if out.numel():
        if _by_tiles(quant, len(flat), len(w), flat.shape[1], x.dtype):
            _tiled(flat, w, bias, quant, out)
        else:
            if _by_product(len(flat), x.shape[-1], quant):
                _few(flat, w, bias, quant, out)
            else:
                _many(flat, w, bias, quant, out, int8)
    return out.view(*x.shape[:-1], len(w))


def workspace(x: Type, w: Type, bias: Type | None = None, *, quant: str, int8: bool = False) -> int:
    """Bytes beyond the result."""
    width = x.shape[-1]
    rows, outer = x.count // max(width, 1), w.shape[0]
    copied = sum(t.bytes for t in (x, w, bias) if t is not None and not t.is_contiguous)
    if _by_tiles(quant, rows, outer, width, x.dtype):
        from mtmd.kernels.cpu.tiled import few_rows, team

        scratch, grain = few_rows.scratch_bytes(rows), few_rows.grain(quant, width, outer)
        prepared = few_rows.prepared_bytes(quant, rows, width) + team.ALIGN
        return copied + prepared + team.scratch_bytes(scratch, outer, grain)
    if _by_product(rows, width, quant):
        from mtmd.kernels.cpu.native.products import prepared_bytes, scratch_bytes

        scratch = _shares(outer * width) * scratch_bytes(quant, width)
        return copied + rows * prepared_bytes(quant, width, rows) + scratch
    from mtmd.kernels.cpu.tiled import many_rows, product

    if rows < product.HALF:
        copied += 4 * product.HALF * (width + outer)
        return copied + many_rows.workspace(quant, product.HALF, width, outer, torch.float32)
    return copied + many_rows.workspace(quant, rows, width, outer, x.dtype, int8)


def _by_product(rows: int, width: int, quant: str) -> bool:
    from mtmd.kernels.cpu.native.products import too_narrow  # loads LLVM

    return rows <= FEW and not too_narrow(quant, width)


def _by_tiles(quant: str, rows: int, outer: int, width: int, dtype: torch.dtype) -> bool:
    from mtmd.kernels.cpu.tiled import few_rows

    return few_rows.pays(quant, rows, outer, width, TYPES[dtype])


def _tiled(x: Tensor, w: Tensor, bias: Tensor | None, quant: str, out: Tensor) -> None:
    from mtmd.kernels.cpu.tiled import few_rows, team

    (rows, width), outer = x.shape, len(w)
    biased = None if bias is None else TYPES[bias.dtype]
    kernel = few_rows.product(quant, TYPES[x.dtype], biased)
    memory = torch.empty(kernel.bytes(rows, width) + team.ALIGN, dtype=torch.uint8)
    prepared = -(-memory.data_ptr() // team.ALIGN) * team.ALIGN
    first_args = [x.data_ptr(), width, prepared, width, rows]
    team.run(kernel.prepare, first_args, kernel.units(rows, width), LAID_OUT)
    stored = None if bias is None else bias.contiguous()
    args = [prepared, 0, w.data_ptr(), w.shape[1], out.data_ptr(), outer, width, rows]
    args += [0 if stored is None else stored.data_ptr(), 0, 0, outer]
    grain = few_rows.grain(quant, width, outer)
    team.run(kernel.address, args, outer, grain, few_rows.scratch_bytes(rows))


def _few(x: Tensor, w: Tensor, bias: Tensor | None, quant: str, out: Tensor) -> None:
    from mtmd.kernels.cpu.native import products  # compiles for models with such weights only

    (rows, width), outer, stored = x.shape, len(w), TYPES[x.dtype]
    kind = None if bias is None else TYPES[bias.dtype]
    kernel = products.product(quant, products.rows_for(rows), stored, stored, kind)
    assert kernel.prepare
    stride = kernel.prepare.bytes(width)
    prepared = torch.empty(rows * stride, dtype=torch.uint8)
    first_args = (x.data_ptr(), width, prepared.data_ptr(), width)
    _call(kernel.prepare.address, first_args, 0, rows, 0)
    shares, size = _shares(outer * width), kernel.scratch(width)
    scratch = torch.empty(shares * size, dtype=torch.uint8)
    added = None if bias is None else bias.contiguous()  # a copy has to outlive the calls
    args = (
        *(prepared.data_ptr(), stride, w.data_ptr(), w.shape[1], out.data_ptr(), outer, width),
        *(rows, 0 if added is None else added.data_ptr(), 0, 0, outer),
    )

    def share(index: int, first: int, last: int) -> None:
        _call(kernel.address, args, first, last, scratch.data_ptr() + index * size)

    _split(share, 0, outer, shares)


def _many(x: Tensor, w: Tensor, bias: Tensor | None, quant: str, out: Tensor, int8: bool) -> None:
    """Many rows of x; or a few of a weight whose rows are too short for the products, filled up, in
    fp32 as those are.
    """
    from mtmd.kernels.cpu.tiled import many_rows, product

    bias = None if bias is None else bias.contiguous()
    rows, filled = len(x), product.HALF
    if rows >= filled:
        many_rows.multiply(quant, x, w, bias, out, int8)
        return
    whole, result = torch.zeros(filled, x.shape[1]), torch.empty(filled, len(w))
    whole[:rows] = x
    many_rows.multiply(quant, whole, w, bias, result)
    out.copy_(result[:rows])


def _call(address: int, args: tuple[int, ...], first: int, last: int, scratch: int) -> None:
    """The interpreter lock is not held meanwhile."""
    _KERNEL(address)((ctypes.c_int64 * len(args))(*args), first, last, scratch)


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def _split(work: Callable[[int, int, int], None], first: int, last: int, shares: int) -> None:
    """`work(index, start, stop)` for each share, in as many threads."""
    parts = [
        (i, first + (last - first) * i // shares, first + (last - first) * (i + 1) // shares)
        for i in range(shares)
    ]
    others = [_threads(shares - 1).submit(work, *part) for part in parts[1:]]
    work(*parts[0])
    wait(others)
    for done in others:
        done.result()


def _shares(values: int) -> int:
    return max(1, min(torch.get_num_threads(), values // SHARE_VALUES))


@lru_cache(maxsize=4)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "quant_matmul")


if hasattr(os, "register_at_fork"):  # a child that was forked has none of these threads
    os.register_at_fork(after_in_child=_threads.cache_clear)


KERNEL = Kernel(quant_matmul, rejects, workspace)
