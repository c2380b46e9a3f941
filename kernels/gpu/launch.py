"""Describes how Triton kernels are called. Plain arithmetic and torch, no Triton."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

MAX_REGISTERS = 255  # that a thread can have on NVIDIA
WIDEST_WARP = 64  # threads, on AMD


@dataclass(frozen=True)
class Call:
    """Describes how a kernel is called on tensors of given types: everything but the tensors.

    scalars: arguments by name whose values only the run has; constants: `tl.constexpr` arguments,
    for each set of which a program of its own is compiled; programs: the size of the grid, along
    whose second dimension there are `across`.
    most_threads: of a program, above which some would only do what others do; None: any number.
    registers: the most of a thread, on NVIDIA. None leaves it to the compiler, which may keep
    values in memory so that a multiprocessor holds more programs; with a number it takes what it
    needs up to there.
    """

    scalars: dict[str, int | float]
    constants: dict[str, int | bool | str]
    programs: int
    warps: int
    stages: int
    max_threads: int | None = None
    registers: int | None = None
    across: int = 1

    def warps_of(self, threads: int) -> int:
        """Return how many of a program, on a device whose warps have so many threads."""
        if self.max_threads is None:
            return self.warps
        return min(self.warps, max(1, self.max_threads // threads))

    def options(self, threads: int, nvidia: bool) -> dict[str, int | bool]:
        """Return what the compiler is told beside arguments, for a device whose warps have so many
        threads.
        """
        reported: dict[str, int | bool] = {
            "num_warps": self.warps_of(threads),
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }
        if nvidia and self.registers is not None:  # AMD's has no such option, and refuses it
            reported["maxnreg"] = self.registers
        return reported


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below size."""
    return 1 << (size - 1).bit_length()


def columns_of_row(width: int, limit: int) -> int:
    """Return how many columns of a row a program overwrites, which has at most as many threads
    (`max_threads`). With more threads than columns two would have the same one, and one might read
    what the other has overwritten.
    """
    return max(WIDEST_WARP, min(limit, power_of_two(max(width, 1))))


def on_device_of(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@cache
def threads_of_a_warp(device: torch.device) -> int:
    """64 on some of AMD's devices."""
    if device.type != "cuda":
        return 32
    return int(torch.cuda.get_device_properties(device).warp_size)


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def options_on(device: torch.device, call: Call) -> dict[str, int | bool]:
    return call.options(threads_of_a_warp(device), is_nvidia(device))


def arguments(kernel: Any, pointers: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Return a kernel's arguments by name. Those that it does not name itself are the fields of
    three named tuples: `p` has pointers, `s` scalars and `C` constants.
    """
    names = kernel.arg_names
    result: dict[str, Any] = {}
    for group, values in (("p", pointers), ("s", call.scalars), ("C", call.constants)):
        rest = tuple(name for name in values if name not in names)
        result |= {name: value for name, value in values.items() if name in names}
        if rest:
            chosen = (values[name] for name in rest)
            if group == "C" and hasattr(kernel, "params"):  # which none has in the interpreter
                result[group] = _constants(rest, *chosen)
            else:
                result[group] = _record(group, rest)(*chosen)
    return result


@cache
def _record(name: str, fields: Sequence[str]) -> Any:
    return namedtuple(name, fields)


@lru_cache(maxsize=4096, typed=True)
def _constants(fields: Sequence[str], *values: float | str) -> Any:
    """Return `C` for the compiler. Each field is a constant by itself: of a tuple of plain numbers
    Triton before 3.8 makes no constants where they go on to another function.
    """
    from mtmd.kernels.gpu.jit import tl  # it is there: a kernel is

    return _record("C", fields)(*map(tl.constexpr, values))


def run_call(kernel: Any, call: Call, pointers: Mapping[str, Tensor]) -> None:
    """Launch a kernel; `pointers` are tensors by the names of its arguments."""
    device = next(iter(pointers.values())).device
    with on_device_of(device):
        kernel[(call.programs, call.across)](
            **arguments(kernel, pointers, call), **options_on(device, call)
        )
