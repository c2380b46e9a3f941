"""Runs that are recorded once and replayed: what an executor asks of a device that can, and CUDA's
graphs.

A recorded run is the launches alone, with the addresses they had: whatever the host decided on the
way is decided for good, and whatever it waited for cannot be recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from mtmd.base.text import one_line
from mtmd.kernels.backends.side_stream import host_bytes, own_stream

MAX_FAILED = 3  # captures, before no other is tried


@dataclass(frozen=True)
class Recording:
    """`replay` runs what was recorded, on what its inputs hold now. `outputs` are what the run
    returned; those in memory that it took on the way hold nothing after the next replay of any
    recording of the same recorder in the same queue.
    """

    outputs: list[Tensor]
    replay: Callable[[], None]


class Staging(Protocol):
    """Bytes of the host, and as many of the device."""

    host: Tensor
    device: Tensor

    def wait(self) -> None:
        """Until what was uploaded has left the host's bytes, which may be written then."""

    def upload(self) -> None:
        """The host's bytes to the device's, before whatever it runs next."""


def results_bytes(size: int) -> int:
    """Return the bytes of memory for results of so many bytes. Those of earlier recordings, which
    outlive a larger one, take less than that together.
    """
    return 1 << (size - 1).bit_length() if size else 0


class Recorder(Protocol):
    """All its recordings of one queue share memory: no two of them run at once. given_up: why it
    records nothing any more; None while it does.
    """

    given_up: str | None

    def staging(self, size: int) -> Staging: ...

    def results(self, size: int) -> Tensor:
        """Return at least so many bytes of the device, for what recordings of this queue return:
        the same for all of them, as long as they suffice.
        """

    def record(self, run: Callable[[], list[Tensor]]) -> Recording:
        """Return what `run` launches; none of it has been run afterwards. Raises RuntimeError where
        it waits for the device, or asks for what cannot be recorded.
        """


class PinnedStaging:
    """Memory that the device copies from by itself."""

    def __init__(self, size: int, device: torch.device):
        self.host = host_bytes((size,))
        self.device = torch.empty(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event()

    def wait(self) -> None:
        self._copied.synchronize()

    def upload(self) -> None:
        with torch.cuda.device(self.device.device):
            self.device.copy_(self.host, non_blocking=True)
            self._copied.record()


class CudaGraphs:
    """CUDA's graphs, and HIP's. Values on the way lie in one pool of memory for each stream, which
    is as large as the largest of its runs needs: all of them are captured on one stream, as torch
    gives memory of a pool again only where it was allocated, and none returns memory of it. A graph
    that does next to nothing is kept with each pool: torch takes no other capture into a pool all
    of whose graphs are freed, as those of a plan that nobody needs any more.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # torch's names of them, each with the stream of its captures, by stream
        self._pools: dict[int, tuple[Any, torch.cuda.Stream]] = {}
        self._keepers: dict[int, Any] = {}  # a graph in each pool
        self._results: dict[int, Tensor] = {}  # by stream
        self._failed = 0
        self.given_up: str | None = None

    def staging(self, size: int) -> Staging:
        return PinnedStaging(size, self._device)

    def results(self, size: int) -> Tensor:
        own = torch.cuda.current_stream(self._device).cuda_stream
        stored = self._results.get(own)
        if stored is None or stored.nbytes < size:
            stored = torch.empty(results_bytes(size), dtype=torch.uint8, device=self._device)
            self._results[own] = stored
        return stored

    def record(self, run: Callable[[], list[Tensor]]) -> Recording:
        if self.given_up is not None:
            raise RuntimeError(self.given_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            own = torch.cuda.current_stream()
            number = own.cuda_stream
            if number not in self._pools:
                # What is recorded keeps the priority of the stream on which it was
                made = own_stream(self._device, own.priority)
                self._pools[number] = torch.cuda.graph_pool_handle(), made
            pool, stream = self._pools[number]
            stream.wait_stream(own)
            try:
                with _capturing, _uncollected(), torch.cuda.stream(stream):
                    if number not in self._keepers:
                        keeper, mark = torch.cuda.CUDAGraph(), self._mark()
                        self._captured(keeper, pool, lambda: [mark.zero_()])
                        self._keepers[number] = keeper
                    outputs = self._captured(graph, pool, run)
            except BaseException as error:
                self._failed += 1
                if self._failed >= MAX_FAILED:
                    why = one_line(error, 200)
                    self.given_up = f"{MAX_FAILED} runs could not be recorded; the last: {why}"
                self._keepers.pop(number, None)
                self._pools[number] = torch.cuda.graph_pool_handle(), stream
                raise

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return Recording(outputs, replay)

    def _mark(self) -> Tensor:
        """Return a number outside of any pool."""
        return torch.zeros(1, dtype=torch.uint8, device=self._device)

    def _captured(
        self, graph: Any, pool: tuple[int, int], run: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        """Capture on the current stream. This does not use `torch.cuda.graph`, which leaves a
        thread on the stream of the capture where that cannot begin or end, and tells of its end in
        place of the cause.
        """
        torch.cuda.empty_cache()  # what is free cannot be given back in a capture
        try:
            # Other threads go on with what they do, allocations included.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # until 2.12, torch goes on to allocate there
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
        return outputs


# Of all devices: what one thread waits for in a capture can end another's.
_capturing = Lock()


def wait_for_device(device: torch.device | None = None) -> None:
    """Wait until a device, the current one by default, has done everything. CUDA takes no such wait
    while a capture is under way on one of its streams, and ends the capture: so it comes after it.
    """
    with _capturing:
        torch.cuda.synchronize(device)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend garbage collection: a graph that is freed during a capture would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
