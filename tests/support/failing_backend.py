"""A CPU that hangs or breaks when it is told to, as a stand-in for a device that does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from mtmd.kernels.backends import Cpu
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.graph import Node


class FailingDevice(Cpu):
    """`gate`: closed, every node waits for it, and `entered` says that one does. `error`: what
    every node raises; `broken`: and whoever waits for the device, from then on.
    """

    def __init__(self) -> None:
        super().__init__(native=False)  # node by node
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.broken = False

    def hang(self) -> None:
        self.gate.clear()

    def lower(self, node: Node, in_place: bool = False) -> Run:
        run: Callable[..., torch.Tensor] = super().lower(node, in_place)

        def failing(*inputs: torch.Tensor) -> torch.Tensor:
            self._fail()
            return run(*inputs)

        return failing

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _fail(self) -> None:
        if not self.gate.is_set():
            self.entered.set()
            self.gate.wait(60)
        if self.error is not None:
            raise self.error
