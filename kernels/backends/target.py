"""A GPU that is not here: what it would take and what it would need. Nothing runs on it.

Support and memory are what `Gpu` says of the same nodes, and need no Triton. `report/compiled.py`
compiles each Triton kernel for it ahead of time, which tells whether it fits and what it uses.
"""

from __future__ import annotations

import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.cuda_device import queue_bytes
from mtmd.kernels.backends.gpu import chosen_workspace
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.backends.vision_attention.candidates import tiled
from mtmd.kernels.backends.vision_attention.measured_kernel import AttentionChoice
from mtmd.kernels.gpu.architectures import architecture
from mtmd.kernels.gpu.table import Choice, choose
from mtmd.kernels.graph import Node

MIN_CAPABILITY = 80


class Target:
    """`target`: cuda:90 for compute capability 9.0, hip:gfx942 for an AMD architecture. Raises
    OptionError for anything else. `name` tells several of them apart.
    """

    native = False
    fuses = blocks = side_streams = records = large_batches = True
    recorder = None

    def __init__(self, target: str, name: str | None = None):
        self.architecture = architecture(target)
        self.target = target
        self.name = self.space = name or target
        self.device = torch.device("meta")
        self.queue_bytes = queue_bytes(target)
        self.attention = AttentionChoice(candidates=tiled(target))
        """Of encoders: nothing is measured, so all that could win is foreseen."""

    def rejects(self, node: Node) -> str | None:
        return self.choose(node).reason

    def lower(self, node: Node, in_place: bool = False) -> Run:  # noqa: ARG002
        raise PlacementError(
            f"{node.name}: {self.name} is a target to predict for, not a device; use --device to "
            "run"
        )

    def workspace(self, node: Node, exact: bool = True) -> int:
        return chosen_workspace(self.choose(node), node, exact)

    def side_stream(self, use: str) -> SideStream | None:  # noqa: ARG002
        return None

    def synchronize(self) -> None:
        """Nothing runs."""

    def choose(self, node: Node) -> Choice:
        """The Triton kernel that would run a node."""
        return choose(node, self._lacks)

    def _lacks(self, kernel: str) -> str | None:
        kind, _, version = self.target.partition(":")
        if kind == "cuda" and int(version) < MIN_CAPABILITY:
            return f"the {kernel} kernel needs compute capability 8.0, found {int(version) / 10}"
        return None
