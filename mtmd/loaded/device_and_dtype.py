"""Describes what a model runs on: its type of numbers, its threads, and the names of things for
people.
"""

from __future__ import annotations

import platform

import torch

from mtmd.base.text import plural
from mtmd.kernels.backends import Backend
from mtmd.kernels.dtype import DTYPES, name_of
from mtmd.kernels.resources.threads import requested_threads

# Of weights as they are stored: below this, fp32 on the CPU costs little and is exact; above, it is
# twice the bytes a token, and prompts are read several times slower
SMALL_BYTES = 16 << 20
BF16_CAPABILITY = (8, 0)


def choose_dtype(requested: str, preferred: Backend, weight_bytes: int) -> torch.dtype:
    """auto: bf16 on a GPU that multiplies it; on a CPU fp32, unless the model is more than tiny and
    the CPU has bf16 instructions. `weight_bytes` as they are stored.
    """
    if requested != "auto":
        return DTYPES[requested]
    kind = preferred.device.type
    if kind == "cuda":
        old = (
            torch.version.hip is None
            and torch.cuda.get_device_capability(preferred.device) < BF16_CAPABILITY
        )
        return torch.float32 if old else torch.bfloat16
    if kind != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if weight_bytes > SMALL_BYTES and _multiplies_bf16() else torch.float32


def choose_kv_type(
    requested: str, requested_dtype: str, dtype: torch.dtype, preferred: Backend, weight_bytes: int
) -> str:
    """Return the type of keys and values. auto: that which is computed in (`dtype`), but bf16 where
    a CPU computes in fp32 for want of bf16 instructions alone: they take half of the memory, and
    are read faster. Where fp32 was requested, or the model is tiny, nothing is rounded.
    """
    if requested != "auto":
        return requested
    wide = requested_dtype == "auto" and keeps_halves(dtype, preferred, weight_bytes)
    return "bf16" if wide else name_of(dtype)


def keeps_halves(dtype: torch.dtype, preferred: Backend, weight_bytes: int) -> bool:
    """Return whether weights of 16 bits stay so in memory where fp32 is computed in."""
    wide = dtype == torch.float32 and preferred.device.type == "cpu"
    return wide and weight_bytes > SMALL_BYTES


def _multiplies_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def device_name(backend: Backend) -> str:
    """The card, or how the CPU is used."""
    if backend.device.type == "cuda":
        return torch.cuda.get_device_name(backend.device)
    if backend.device.type == "xpu":
        return torch.xpu.get_device_name(backend.device)
    if backend.device.type == "mps":
        return f"Metal, {platform.machine()}"
    threads = torch.get_num_threads()
    return f"{plural(threads, 'thread')}, {torch.backends.cpu.get_cpu_capability()}"


def own_threads(default: int) -> None:
    """Set, at the start of a thread that computes, as many of torch's threads as were requested.
    Else it would begin with as many as whoever set a number last, perhaps for a moment
    (`one_thread`).
    """
    torch.set_num_threads(requested_threads() or default)
