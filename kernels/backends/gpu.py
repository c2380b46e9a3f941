"""A GPU: attention by the Triton kernel, every other op by torch's own kernels on that device.

Triton is imported only when a node asks for it, so that a machine without it gets a reason and not an ImportError.
"""
from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from mtmd.kernels.backends.backend import Kernel
from mtmd.kernels.backends.reference import lower_reference, reference_workspace
from mtmd.kernels.graph import Node


class Gpu:
    """`name`: cuda:N, also for AMD cards, which torch calls so too."""

    def __init__(self, name: str = "cuda:0"):
        self.name = self.space = name
        self.device = torch.device(name)

    def rejects(self, node: Node) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no CUDA device; install a CUDA or ROCm build of torch with its driver, or use --device cpu"
        if node.op == "attention":
            return self._lacks() or rejects_attention(node)
        return None

    def _lacks(self) -> str | None:
        """What the attention kernel would need and does not find."""
        if find_spec("triton") is None:
            return "the attention kernel needs Triton, which is not installed; pip install 'mtmd[gpu]'"
        if torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability(self.device)
            if major < 8:
                card = torch.cuda.get_device_name(self.device)
                return f"the attention kernel needs compute capability 8.0, found {major}.{minor} ({card})"
        return None

    def lower(self, node: Node, in_place: bool = False) -> Kernel:
        if node.op == "attention":
            from mtmd.kernels.gpu.flash_attention import flash_attention
            return functools.partial(flash_attention, **node.attrs)
        return lower_reference(node, in_place)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def workspace(self, node: Node) -> int:
        """The attention kernel keeps everything in registers and shared memory."""
        return 0 if node.op == "attention" else reference_workspace(node)


def rejects_attention(node: Node) -> str | None:
    """Why the Triton kernel does not take an attention node, on any GPU; None if it does. Needs Triton."""
    from mtmd.kernels.gpu.flash_attention import rejects
    q, k, v, mask, bounds = (None if i is None else i.type for i in (*node.inputs, None, None)[:5])
    assert q is not None and k is not None and v is not None
    return rejects(q, k, v, mask, bounds, **node.attrs)

