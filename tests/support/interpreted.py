"""A GPU that is not there, whose Triton kernels run in Triton's interpreter, on the CPU: plans are
placed, rewritten and lowered as for one. Attention of encoders is not measured.
"""

from __future__ import annotations

import functools

import torch

from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.reference import lower_reference
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.graph import Node


class Interpreted(Gpu):
    records = side_streams = False

    def __init__(self) -> None:
        super().__init__()
        self.name = self.space = "interpreted"
        self.device, self.recorder = torch.device("cpu"), None  # type: ignore[assignment]

    def rejects(self, node: Node) -> str | None:
        return self.choose(node).reason

    def lower(self, node: Node, in_place: bool = False) -> Run:
        kernel = self.choose(node).kernel
        if kernel is None:
            return lower_reference(node, in_place)
        return functools.partial(kernel.run, **node.attrs)

    def side_stream(self, use: str) -> SideStream | None:  # noqa: ARG002
        return None

    def synchronize(self) -> None:
        """Nothing is pending."""
