"""Products with block-quantized weights on the CPU, in memory that does not grow with the weight.

Few rows of x (decoding): each row of the weight is decoded into the first cache and multiplied
there, in fp32. Many rows (prefill): blocks of weight rows are decoded into a buffer, and torch
multiplies. Threads, as many as torch has, share the rows of the weight.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache

import torch
from torch import Tensor

from mtmd.kernels.cpu import matmul
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.quantization.blocks import NATIVE

TYPES = (torch.float32, torch.bfloat16)
# Rows of x up to which decoding a weight row costs more than multiplying it; measured on AVX-512,
# fp32 and bf16 alike
FEW = 8
# 4 MiB in fp32: large enough for torch's product to run at full speed, small enough for the second
# cache.
BUFFER_VALUES = 1 << 20
# What a thread has to have to decode to be worth waking up: about 50 us.
SHARE_VALUES = 1 << 18


def rejects(
    x: Type,
    w: Type,  # noqa: ARG001
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: str | None = None,
) -> str | None:
    """None if the kernel multiplies tensors of these types, else why not."""
    if quant not in NATIVE:
        return f"weights are {quant or 'plain'}; the kernel takes {', '.join(sorted(NATIVE))}"
    if x.dtype not in TYPES:
        return f"x is {name_of(x.dtype)}; the kernel takes {', '.join(map(name_of, TYPES))}"
    return None


def quant_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, *, quant: str) -> Tensor:
    """The `matmul` op

    x [..., K] fp32 or bf16, w u8 [N, bytes of K values], bias [N] -> [..., N]
    """
    flat = x.reshape(-1, x.shape[-1])
    product = _few if len(flat) <= FEW else _many
    return product(flat, w, bias, quant).view(*x.shape[:-1], len(w))


def workspace(
    x: Type,
    w: Type,
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: str,  # noqa: ARG001
) -> int:
    """Bytes beyond the result."""
    width = x.shape[-1]
    rows, outer, item = x.count // max(width, 1), w.shape[0], x.dtype.itemsize
    copied = 0 if x.is_contiguous else x.bytes
    if rows <= FEW:
        widened = 0 if item == 4 else 4 * (x.count + rows * outer)
        return copied + widened + 4 * width * _shares(outer * width)
    step = _step(outer, width)
    packed = matmul.packed_bytes(
        Type.contiguous((rows, width), x.dtype), Type.contiguous((step, width), x.dtype)
    )
    return copied + step * width * (4 if item == 4 else 4 + item) + packed


def _few(x: Tensor, w: Tensor, bias: Tensor | None, quant: str) -> Tensor:
    wide = x.float().contiguous()
    out = torch.empty(len(x), len(w))
    shares = _shares(len(w) * x.shape[1])
    _decode(quant, wide, w, torch.empty(shares, x.shape[1]), out, 0, len(w), shares)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _many(x: Tensor, w: Tensor, bias: Tensor | None, quant: str) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(len(x), len(w))
    step = _step(len(w), x.shape[1])
    buffer, none = torch.empty(step, x.shape[1]), torch.empty(0, x.shape[1])
    for first in range(0, len(w), step):
        last = min(first + step, len(w))
        rows = buffer[: last - first]
        _decode(quant, none, w, rows, none, first, last, _shares(rows.numel()))
        rows, result = rows.to(x.dtype), out[:, first:last]
        if bias is None:
            torch.mm(x, rows.T, out=result)
        else:
            torch.addmm(bias[first:last], x, rows.T, out=result)
    return out


def _decode(
    quant: str, x: Tensor, w: Tensor, rows: Tensor, out: Tensor, first: int, last: int, shares: int
) -> None:
    """Rows first..last of w into `rows`, split over threads. Where they are multiplied at once, a
    thread has one row of `rows`.
    """
    # Here and not above: numba is imported by models with such weights only.
    from mtmd.kernels.cpu.block_rows import HALF, KERNELS, LANES

    kernel = KERNELS[quant]
    arrays = x.numpy(), w.numpy(), rows.numpy(), out.numpy()

    def share(index: int) -> None:
        start, stop = (first + (last - first) * i // shares for i in (index, index + 1))
        own = arrays[2][index : index + 1] if len(x) else arrays[2][start - first : stop - first]
        kernel(arrays[0], arrays[1], HALF, own, arrays[3], start, stop, LANES)

    others = [_threads(shares - 1).submit(share, index) for index in range(1, shares)]
    share(0)
    wait(others)
    for done in others:
        done.result()


def _shares(values: int) -> int:
    return max(1, min(torch.get_num_threads(), values // SHARE_VALUES))


def _step(outer: int, width: int) -> int:
    """Weight rows of a buffer."""
    return max(1, min(outer, BUFFER_VALUES // width))


@lru_cache(maxsize=4)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "quant_matmul")


KERNEL = Kernel(quant_matmul, rejects, workspace)
