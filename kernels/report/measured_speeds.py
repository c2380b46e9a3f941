"""Ceilings of the machine, measured on the spot: reading memory, multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mtmd.base.cores import usable_cores
from mtmd.base.throttling import SustainedClock
from mtmd.kernels.dtype import DTYPES

READ_BYTES = {
    "cpu": 512 << 20,
    "cuda": 2 << 30,
    "mps": 1 << 30,
    "xpu": 1 << 30,
}  # far beyond any cache
SIDE = {"cpu": 2048, "cuda": 8192, "mps": 4096, "xpu": 4096}
PRODUCT_S = 1.0  # at most, of one
RUNS = 5
RUNS_AT_ONCE = 2  # where somebody waits for it


@dataclass(frozen=True)
class Ceilings:
    """Rates at best of several runs: bytes/s read with all threads, and flop/s of square matrix
    products in each type.
    """

    read_bytes_per_s: float
    bf16_flops_per_s: float
    fp32_flops_per_s: float

    def flops_per_s(self, dtype: torch.dtype) -> float:
        return self.fp32_flops_per_s if dtype == torch.float32 else self.bf16_flops_per_s

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each: another process can only take away."""
        return Ceilings(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.bf16_flops_per_s, other.bf16_flops_per_s),
            max(self.fp32_flops_per_s, other.fp32_flops_per_s),
        )

    def floor_ms(self, work: Iterable[tuple[int, int]], dtype: torch.dtype) -> float:
        """Return the least time of nodes given as (flops, bytes read): each at the matmul rate or
        at the read rate, whichever takes longer.
        """
        rate = self.flops_per_s(dtype)
        seconds = sum(max(flops / rate, read / self.read_bytes_per_s) for flops, read in work)
        return seconds * 1e3


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether torch multiplies bf16 with vector instructions; else a CPU takes so long that
    the rate says nothing.
    """
    return device.type != "cpu" or (
        torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def measure_ceilings(device: torch.device, runs: int) -> Ceilings:
    return Ceilings(
        _read_rate(device, runs),
        _matmul_rate(device, torch.bfloat16, runs),
        _matmul_rate(device, torch.float32, runs),
    )


def read_rate_of(device: str) -> float | None:
    """Bytes/s that a device's memory is read at, of "cpu", "cuda:N", "mps" or "xpu:N"; None for
    another one, or where there is no room to find out.
    """
    kind = device.partition(":")[0]
    if kind not in READ_BYTES:
        return None
    try:
        return _read_rate(torch.device(device), RUNS_AT_ONCE)
    except (MemoryError, RuntimeError):  # torch's word for it
        return None


def flops_rate_of(device: str, dtype: str) -> float | None:
    """The same of flop/s in square matrix products of one type ("fp32", "bf16")."""
    kind = device.partition(":")[0]
    if kind not in SIDE or dtype not in DTYPES:
        return None
    try:
        return _matmul_rate(torch.device(device), DTYPES[dtype], RUNS_AT_ONCE)
    except (MemoryError, RuntimeError):
        return None


def _read_rate(device: torch.device, runs: int) -> float:
    """The fastest of torch's reductions: none of them is at the memory's speed on every machine."""
    values = torch.ones(READ_BYTES[device.type] // 4, device=device)
    ways: tuple[Callable[[], torch.Tensor], ...] = (
        values.sum,
        values.amax,
        lambda: torch.dot(values, values),
    )
    return values.nbytes / min(_best(way, device, runs) for way in ways)


def _matmul_rate(device: torch.device, dtype: torch.dtype, runs: int) -> float:
    """Rate of the largest product that does not take long: CPUs without bf16 multiply it slowly."""
    side = SIDE[device.type] // 8
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        if side == SIDE[device.type] or 8 * _best(lambda: a @ b, device, 1) > PRODUCT_S:  # noqa: B023
            return 2 * side**3 / _best(lambda: a @ b, device, runs)  # noqa: B023
        side *= 2


def _best(work: Callable[[], torch.Tensor], device: torch.device, runs: int) -> float:
    """Seconds of the fastest run, after one that is not counted."""
    times, clock = [], SustainedClock(usable_cores().quota if device.type == "cpu" else None)
    with torch.inference_mode():
        for _ in range(runs + 1):
            _wait(device)
            begun = clock.now()
            work()
            _wait(device)
            times.append(clock.since(begun))
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
