"""Describes which form of products the CPU at hand has."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from mtmd.kernels.cpu.native.compile import Cpu, host

SECOND_CACHE = 1 << 20  # bytes, where the system does not say
GENERIC = "single", 8, 4, 2  # a form of products for every CPU
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def form_of(cpu: Cpu, dtype: str, tiles: bool) -> tuple[str, int, int, int] | None:
    """Kind of products with operands of a type, lanes, and rows x columns of results at a time;
    None where torch's own kernels are the better ones. `tiles`: whether AMX may be used.
    """
    if dtype == "bf16" and tiles and cpu.has("amx-bf16") and cpu.has("avx512bf16"):
        return "tiles", 16, 8, 2
    # Intel's dot products of two are no faster than its float32, which is more exact
    if dtype == "bf16" and cpu.has("avx512bf16") and cpu.name.startswith("znver"):
        return "pairs", 16, 8, 2
    if cpu.has("avx512f"):
        return "single", 16, 8, 2
    if cpu.has("avx2") and cpu.has("fma"):
        return "single", 8, 4, 2
    return None


@lru_cache(maxsize=2)
def host_form(dtype: str) -> tuple[str, int, int, int] | None:
    """Do what `form_of` does, for this machine."""
    return form_of(host(), dtype, tiles_allowed())


def named(kind: str, lanes: int) -> str:
    """A form in the words of processors' makers."""
    if kind == "single":
        return "AVX-512" if lanes == 16 else "AVX2"
    return {"tiles": "AMX", "pairs": "AVX-512 BF16"}[kind]


@lru_cache(maxsize=1)
def tiles_allowed() -> bool:
    """Return whether the system lets this process use the registers of AMX, which it has to be
    asked for; threads that are there already are allowed to with it. Linux alone does so by this
    call.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not host().has("amx-bf16"):
        return False
    call = ctypes.CDLL(None).syscall
    return int(call(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)) == 0


@lru_cache(maxsize=1)
def second_cache() -> int:
    """Return the bytes of a core's second cache."""
    for level in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError, ValueError):
            if (level / "level").read_text().strip() == "2":
                return int((level / "size").read_text().strip().removesuffix("K")) << 10
    return SECOND_CACHE
