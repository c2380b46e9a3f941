"""One attention node run by each kernel that takes it: whether the result is right, how long it
takes, and what memory. No clock is read here: a `Probe` does that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from mtmd.base.errors import DeviceError
from mtmd.base.text import mib, one_line, printable
from mtmd.kernels.backends.cuda_graphs import wait_for_device
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.kernel import Kernel, types_of
from mtmd.kernels.trials import Measured, Trial

ROWS = 256  # that are compared with the reference, whose scores are rows x keys
BEFORE, RUNS, MAX_S = 3, 20, 0.2  # runs without a clock, with it at most, and for so long
ROUNDED_BYTES = 4 << 20  # by which torch may give more memory than was asked for
FLUSHED_BYTES = 256 << 20  # more than the caches of any card
# of the device's clock, for which it is kept busy while a run is launched: some 0.1 ms, and 50
STORED_CYCLES, MAX_CYCLES = 1 << 18, 1 << 26
Error = Callable[[Tensor, tuple[Tensor, ...], Mapping[str, Any]], float]


class Probe(Protocol):
    """A device with a clock."""

    device: torch.device

    def seconds(self, run: Callable[[], Tensor]) -> float:
        """Return the seconds of one run, of which several may be made."""

    def extra_bytes(self, run: Callable[[], Tensor]) -> int:
        """Return the device memory that one run takes at its peak beyond the result."""


class CudaProbe:
    """A card, by its events, when it has done all that it was asked for: medians, with what lies in
    its caches overwritten before each run. The host's time to launch a run is not in them, as
    recorded runs do not have it.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def seconds(self, run: Callable[[], Tensor]) -> float:
        with torch.cuda.device(self.device):
            wait_for_device()
            flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=self.device)
            for _ in range(BEFORE):
                run()
            result: list[float] = []
            cycles = STORED_CYCLES
            while len(result) < RUNS and sum(result) < MAX_S:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flushed.zero_()
                torch.cuda._sleep(cycles)
                start.record()
                run()
                end.record()
                waited_for_host = start.query()
                end.synchronize()
                if waited_for_host and cycles < MAX_CYCLES:  # beyond, the run itself waits
                    cycles *= 4
                    continue
                result.append(start.elapsed_time(end) / 1e3)
        return statistics.median(result)

    def extra_bytes(self, run: Callable[[], Tensor]) -> int:
        wait_for_device(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = run()
        wait_for_device(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before - result.nbytes


def measure(
    node: Node, kernels: Mapping[str, Kernel], probe: Probe, error: Error, limit: float
) -> Measured:
    """`error` and `limit`: how far a result is from the reference's, and the most that is right.

    Raises DeviceError where a kernel takes the device down.
    """
    types = types_of(node)
    trials = []
    inputs: tuple[Tensor, ...] | None = None
    for name, kernel in kernels.items():
        trial = Trial(name, None, kernel.rejects(*types, **node.attrs))
        try:
            if trial.refused is None:
                inputs = inputs or operands(node, probe.device)
                trial = _tried(name, node, kernel, inputs, probe, error, limit)
        except torch.OutOfMemoryError:
            trial = Trial(name, None, "there is not enough memory to try it", lasting=False)
        except torch.AcceleratorError as fault:
            raise DeviceError(
                f"the device has failed while {name} attention was tried ({_words(fault)}); start "
                "the process again with --vision-attention triton"
            ) from fault
        except Exception as fault:  # whatever a library says of what it does not take
            trial = Trial(name, None, f"{type(fault).__name__}: {_words(fault)}", lasting=False)
        trials.append(trial)
    return Measured(shapes_of(node), tuple(trials))


def _tried(
    name: str,
    node: Node,
    kernel: Kernel,
    inputs: tuple[Tensor, ...],
    probe: Probe,
    error: Error,
    limit: float,
) -> Trial:
    def run() -> Tensor:
        return kernel.run(*inputs, **node.attrs)

    result = run()
    if Type.of(result) != node.type:
        return Trial(name, None, f"it gives {Type.of(result)}, expected {node.type}")
    separate = error(*some_rows(result, inputs, node.attrs))
    if not separate <= limit:  # NaN, too
        wrong = f"its result is wrong: error {separate:.1e}, expected at most {limit:.1e}"
        return Trial(name, None, wrong)
    del result
    allowed = kernel.workspace(*types_of(node), **node.attrs)
    extra = probe.extra_bytes(run)
    if extra > allowed + ROUNDED_BYTES:  # another model of the process may have taken it
        extra = min(extra, probe.extra_bytes(run))
    if extra > allowed + ROUNDED_BYTES:
        much = f"it uses {mib(extra)} in addition to its result, expected at most {mib(allowed)}"
        return Trial(name, None, much, lasting=False)
    return Trial(name, probe.seconds(run) * 1e3)


def operands(node: Node, device: torch.device) -> tuple[Tensor, ...]:
    """Random queries, keys and values, laid out as the node's are."""
    generator = torch.Generator(device).manual_seed(0)
    result = []
    for kind in (i.type for i in node.operands):
        size = 1 + sum((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True))
        values = torch.randn(size, generator=generator, device=device).to(kind.dtype)
        result.append(values.as_strided(kind.shape, kind.strides))
    return tuple(result)


def some_rows(
    result: Tensor, inputs: tuple[Tensor, ...], options: Mapping[str, Any]
) -> tuple[Tensor, tuple[Tensor, ...], Mapping[str, Any]]:
    """A result, the inputs and the attributes it is of, for fewer rows, spread over all."""
    q, k, v = inputs
    step = -(-q.shape[1] // ROWS)
    if not options.get("causal"):
        return result[:, ::step], (q[:, ::step], k, v), options
    last = torch.arange(0, q.shape[1], step, dtype=torch.int32, device=q.device)
    bounds = torch.stack((torch.zeros_like(last), last + (k.shape[1] - q.shape[1])), 1)
    mask = torch.zeros(len(last), k.shape[1], device=q.device)
    return result[:, ::step], (q[:, ::step], k, v, mask, bounds), {**options, "causal": False}


def shapes_of(node: Node) -> str:
    """Return the shapes of a node's queries and keys, for people."""
    q, k = tuple(node.operands)[:2]
    return f"q {q.type}, k {k.type}"


def _words(error: Exception) -> str:
    return printable(one_line(error, 200))
