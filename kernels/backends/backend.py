"""Interface of a backend, on which nodes can run, to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from mtmd.kernels.backends.cuda_graphs import Recorder
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.graph import Node

Run = Callable[..., torch.Tensor]


class Backend(Protocol):
    """`space` names the memory its values live in; values cross spaces only through `copy`
    nodes.
    """

    name: str
    device: torch.device
    space: str
    fuses: bool  # graphs are rewritten for it, to have few launches (kernels/plan/fusion)
    blocks: bool  # multiplies block-quantized weights as they are
    side_streams: bool  # has queues beside that of the decoder, or would, were it here
    records: bool  # has a recorder, or would, were it here
    large_batches: bool  # thousands of rows at once keep it busy, hundreds do not
    native: bool  # steps of few rows become programs of machine code (kernels/cpu/native)

    @property
    def queue_bytes(self) -> int:
        """Return the bytes that its libraries keep for each queue in which it multiplies
        matrices.
        """

    @property
    def recorder(self) -> Recorder | None:
        """Return what records runs and replays them; None where each is launched."""

    def rejects(self, node: Node) -> str | None:
        """None to take the node, else why not, naming the numbers. It must hold for every shape
        that types alone can tell.
        """

    def lower(self, node: Node, in_place: bool = False) -> Run:
        """A function of the node's input tensors, resolved once per plan. `in_place`: it may
        overwrite input 0.
        """

    def workspace(self, node: Node, exact: bool = True) -> int:
        """Bytes held at the peak beyond the node's inputs and its result. Not `exact`: no less than
        that, and known at once.
        """

    def side_stream(self, use: str) -> SideStream | None:
        """Beside what it runs otherwise, the same for the same use; None where there is one queue
        for all.
        """

    def synchronize(self) -> None:
        """Wait until everything asked of the device is done."""
