"""Runs that are recorded once and replayed: what an executor asks of a device that can, and CUDA's
graphs.

A recorded run is the launches alone, with the addresses they had: whatever the host decided on the
way is decided for good, and whatever it waited for cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """`replay` runs what was recorded, on what its inputs hold now, and `outputs` hold the results
    until the next replay of any recording of the same recorder in the same queue.
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


class Recorder(Protocol):
    """All its recordings of one queue share memory: no two of them run at once."""

    def staging(self, size: int) -> Staging: ...

    def record(self, run: Callable[[], list[Tensor]]) -> Recording:
        """What `run` launches; none of it has been run afterwards. Raises RuntimeError where it
        waits for the device, or asks for what cannot be recorded.
        """


class PinnedStaging:
    """Memory that the device copies from by itself."""

    def __init__(self, size: int, device: torch.device):
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
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
    is as large as the largest of its runs needs.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[int, Any] = {}  # torch's names of them, by stream

    def staging(self, size: int) -> Staging:
        return PinnedStaging(size, self._device)

    def record(self, run: Callable[[], list[Tensor]]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            own = torch.cuda.current_stream()
            if own.cuda_stream not in self._pools:
                self._pools[own.cuda_stream] = torch.cuda.graph_pool_handle()
            # What is recorded keeps the priority of the stream on which it was
            stream = torch.cuda.Stream(priority=own.priority)
            stream.wait_stream(own)
            # Other threads go on with what they do, allocations included.
            with torch.cuda.graph(
                graph,
                pool=self._pools[own.cuda_stream],
                stream=stream,
                capture_error_mode="thread_local",
            ):
                outputs = run()

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return Recording(outputs, replay)
