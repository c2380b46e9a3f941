"""A GPU: the Triton kernels of `kernels/gpu/table.py`, and torch's own for every other op; for
attention of encoders, whichever of the two is faster (`vision_attention/`).
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from mtmd.base.errors import DeviceError, PlacementError
from mtmd.base.extras import install_command
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.cuda_device import queue_bytes, target_of
from mtmd.kernels.backends.cuda_graphs import CudaGraphs, wait_for_device
from mtmd.kernels.backends.reference import lower_reference, reference_workspace
from mtmd.kernels.backends.side_stream import CudaSideStream, SideStream
from mtmd.kernels.backends.vision_attention.measured_kernel import AttentionChoice
from mtmd.kernels.backends.vision_attention.saved_measurements import Saved, machine
from mtmd.kernels.gpu.table import Choice, choose
from mtmd.kernels.graph import Node
from mtmd.kernels.kernel import types_of

MIN_CAPABILITY = (8, 0)  # bf16 in matrix instructions, and asynchronous copies


class Gpu:
    """`name`: cuda:N, also for AMD cards, which torch calls so too. records: whether runs are
    recorded and replayed.
    """

    native = False
    fuses = blocks = side_streams = large_batches = True

    def __init__(self, name: str = "cuda:0", records: bool = True):
        self.name = self.space = name
        self.device = torch.device(name)
        self.records = records
        self.recorder = CudaGraphs(self.device) if records else None
        self._sides: dict[str, CudaSideStream] = {}
        self.attention = AttentionChoice(Saved(functools.partial(machine, self.device)))

    def rejects(self, node: Node) -> str | None:
        if not torch.cuda.is_available():
            return (
                "torch finds no CUDA device; install a CUDA or ROCm build of torch with its "
                "driver, or use device='cpu' (--device cpu)"
            )
        return self.choose(node).reason

    def lower(self, node: Node, in_place: bool = False) -> Run:
        choice = self.choose(node)
        if choice.reason is not None:
            raise PlacementError(f"{node.name} on {self.name}: {choice.reason}")
        if choice.kernel is None:
            return lower_reference(node, in_place)
        kernel = choice.kernel
        function = kernel.in_place if in_place and kernel.in_place else kernel.run
        run = functools.partial(function, **node.attrs)
        return self.attention.lower(node, run) if node.op == "attention" else run

    def workspace(self, node: Node, exact: bool = True) -> int:
        choice = self.choose(node)
        result = chosen_workspace(choice, node, exact)
        if node.op == "attention" and choice.kernel is not None:
            return self.attention.workspace(node, result)
        return result

    def side_stream(self, use: str) -> SideStream | None:
        if not torch.cuda.is_available():
            return None
        if use not in self._sides:
            try:
                self._sides[use] = CudaSideStream(self.device)
            except RuntimeError as error:  # of too many models, or the driver's
                raise DeviceError(f"{self.name} has no stream for pictures: {error}") from error
        return self._sides[use]

    def synchronize(self) -> None:
        wait_for_device(self.device)

    @property
    def compiles(self) -> bool:
        """Return whether kernels are compiled for it: there is Triton, and a device."""
        return find_spec("triton") is not None and torch.cuda.is_available()

    @property
    def target(self) -> str:
        """Return its architecture, as the compiler names it: cuda:90, hip:gfx942."""
        return target_of(self.device)

    @property
    def queue_bytes(self) -> int:
        return queue_bytes(self.target)

    def choose(self, node: Node) -> Choice:
        """The Triton kernel that runs a node; one of attention, also where torch's is chosen."""
        return choose(node, self._lacks)

    def _lacks(self, kernel: str) -> str | None:
        """Return what a Triton kernel would need and does not find."""
        if find_spec("triton") is None:
            command = install_command("gpu")
            return f"the {kernel} kernel needs Triton, which is not installed; {command}"
        # Without a device there is nothing to ask: kernels then run in Triton's interpreter.
        if torch.version.hip is None and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(self.device)
            if (major, minor) < MIN_CAPABILITY:
                card = torch.cuda.get_device_name(self.device)
                return (
                    f"the {kernel} kernel needs compute capability 8.0, found {major}.{minor} "
                    f"({card})"
                )
        return None


def chosen_workspace(choice: Choice, node: Node, exact: bool) -> int:
    """Bytes beyond inputs and result that a node takes with this choice of kernel."""
    if choice.kernel is None:
        return reference_workspace(node, exact)
    return choice.kernel.workspace(*types_of(node), **node.attrs)
