"""The CPU: the kernels of `kernels/cpu/table.py`, and torch's own operators for every other op."""

from __future__ import annotations

import functools

import torch

from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.reference import lower_reference, reference_workspace
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.cpu.table import choose
from mtmd.kernels.graph import Node
from mtmd.kernels.kernel import types_of


class Cpu:
    name = "cpu"
    space = "cpu"
    device = torch.device("cpu")
    blocks, fuses, side_streams, records, large_batches = True, False, False, False, False
    recorder, queue_bytes = None, 0

    def __init__(self, native: bool = True):
        self.native = native

    def rejects(self, node: Node) -> str | None:
        if any(n.dtype == torch.float16 for n in (node, *node.operands)):
            return "fp16 runs at about 1 GFLOP/s on CPUs; use bf16 or fp32"
        return None

    def lower(self, node: Node, in_place: bool = False) -> Run:
        kernel = choose(node)
        if kernel is None:
            return lower_reference(node, in_place)
        run = kernel.in_place if in_place and kernel.in_place else kernel.run
        return functools.partial(run, **node.attrs) if node.attrs else run

    def workspace(self, node: Node, exact: bool = True) -> int:
        kernel = choose(node)
        if kernel is None:
            return reference_workspace(node, exact)
        return kernel.workspace(*types_of(node), **node.attrs)

    def side_stream(self, use: str) -> SideStream | None:  # noqa: ARG002
        return None

    def synchronize(self) -> None:
        """Nothing is pending: torch's CPU operators return when they are done."""
