"""A queue of work on a device, beside the one in which its other work goes on: what is asked there
keeps nobody waiting, and memory that the host and the device share brings it its inputs.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from mtmd.base.text import one_line

POLL_S = 0.0002
STREAMS = 32  # of each priority, which torch gives out in turn, one to several
log = logging.getLogger("mtmd.kernels")
_holding = threading.Lock()
_stored: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()


class Mark(Protocol):
    """A place in the queue."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Until it is reached, from any thread."""


class SideStream(Protocol):
    """A second queue of a device. A thread that has `entered` it launches its work there. Inputs
    are uploaded, and results handed over, from there.
    """

    device: torch.device

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def let_first(self) -> None:
        """Give priority to the work that this thread launches outside of it from now on."""

    def follow(self) -> None:
        """Run what is launched on it from now on after what the caller's own queue has. Called
        before it is entered.
        """

    def upload(self, shape: tuple[int, ...], fill: Callable[[Tensor], None]) -> Tensor:
        """uint8 of a shape, which `fill` writes to memory of the host, on the device. Entered."""

    def mark(self) -> Mark:
        """Behind all that has been asked of it. Entered."""

    def hand_over(self, value: Tensor) -> None:
        """Hand a tensor that was made in another queue over to the caller's, once a mark behind it
        is reached, or all has been waited for.
        """

    def wait_for_caller(self) -> None:
        """Until what this thread has asked of the device outside of it is done."""


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """One that nobody else holds who has asked here. torch's may be somebody's already: what is
    launched on a stream while another thread captures there becomes part of the graph. Raises
    RuntimeError where all are held.
    """
    with _holding:
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(device, priority=priority)
            if all(stream.cuda_stream != stored.cuda_stream for stored in list(_stored)):
                _stored.add(stream)
                return stream
    raise RuntimeError(
        f"all {STREAMS} streams of priority {priority} of {device} are in use; load fewer models "
        "in this process"
    )


def host_bytes(shape: tuple[int, ...]) -> Tensor:
    """uint8, page-locked where there is such memory left: a lack of it is no fault of the device,
    which copies from other memory more slowly.
    """
    try:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    except torch.AcceleratorError as error:
        log.warning(
            "no page-locked memory (%s); the device copies from other memory", one_line(error, 200)
        )
        return torch.empty(shape, dtype=torch.uint8)


class CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        # torch's own waiting keeps a core busy
        while not self._event.query():
            time.sleep(POLL_S)


class CudaSideStream:
    """A stream of CUDA or HIP. Of two streams with work, the device begins blocks of that with the
    higher priority first, which a lower number means; 0 is the lowest.
    """

    def __init__(self, device: torch.device, priority: int = 0):
        self.device = device
        self._stream = own_stream(device, priority)
        self._first = own_stream(device, priority - 1)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def let_first(self) -> None:
        here = torch.cuda.current_device()
        self._first.wait_stream(torch.cuda.current_stream(self.device))
        torch.cuda.set_stream(self._first)  # which makes its device the current one
        torch.cuda.set_device(here)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def upload(self, shape: tuple[int, ...], fill: Callable[[Tensor], None]) -> Tensor:
        # torch keeps such memory, and gives it out again once it has been copied from
        host = host_bytes(shape)
        fill(host)
        return host.to(self.device, non_blocking=True)

    def mark(self) -> Mark:
        return CudaMark()

    def hand_over(self, value: Tensor) -> None:
        # Its memory is not given to others before what uses it now has been done
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(self.device))

    def wait_for_caller(self) -> None:
        # Not for the whole device, which may not be asked while another thread captures
        torch.cuda.current_stream(self.device).synchronize()
