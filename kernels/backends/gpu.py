"""A GPU: attention, products with quantized weights and recurrent ops by Triton kernels, every
other op by torch's own on that device.

Triton is imported only when a node asks for it, so that a machine without it gets a reason and not
an ImportError.
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

    native = False

    def __init__(self, name: str = "cuda:0"):
        self.name = self.space = name
        self.device = torch.device(name)

    def rejects(self, node: Node) -> str | None:
        if not torch.cuda.is_available():
            return (
                "torch finds no CUDA device; install a CUDA or ROCm build of torch with its "
                "driver, or use --device cpu"
            )
        kernel = triton_kernel(node)
        return None if kernel is None else self._lacks(kernel) or rejects_triton(node)

    def _lacks(self, kernel: str) -> str | None:
        """What a Triton kernel would need and does not find."""
        if find_spec("triton") is None:
            return (
                f"the {kernel} kernel needs Triton, which is not installed; pip install 'mtmd[gpu]'"
            )
        if torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability(self.device)
            if major < 8:
                card = torch.cuda.get_device_name(self.device)
                return (
                    f"the {kernel} kernel needs compute capability 8.0, found {major}.{minor} "
                    f"({card})"
                )
        return None

    def lower(self, node: Node, in_place: bool = False) -> Kernel:
        if node.op == "attention":
            from mtmd.kernels.gpu.flash_attention import flash_attention

            return functools.partial(flash_attention, **node.attrs)
        if is_quantized(node):
            from mtmd.kernels.gpu.quant_matmul import quant_matmul

            return functools.partial(quant_matmul, **node.attrs)
        if node.op == "gated_delta":
            from mtmd.kernels.gpu.gated_delta import gated_delta

            return functools.partial(gated_delta, **node.attrs)
        if node.op == "short_conv":
            from mtmd.kernels.gpu.short_conv import short_conv

            return functools.partial(short_conv, **node.attrs)
        return lower_reference(node, in_place)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def workspace(self, node: Node) -> int:
        return triton_workspace(node) if triton_kernel(node) else reference_workspace(node)


def triton_kernel(node: Node) -> str | None:
    """What the Triton kernel for a node is called; None where torch's own kernels run it."""
    if is_quantized(node):
        return "quantized matmul"
    return {
        "attention": "attention",
        "gated_delta": "gated delta rule",
        "short_conv": "short convolution",
    }.get(node.op)


def triton_workspace(node: Node) -> int:
    """Bytes that the Triton kernel for a node takes. All keep everything in registers and shared
    memory, but attention of few tokens to many keys.
    """
    if node.op != "attention":
        return 0
    from mtmd.kernels.gpu.launch import workspace

    return workspace(*(i and i.type for i in node.inputs), **node.attrs)  # type: ignore[arg-type]


def rejects_triton(node: Node) -> str | None:
    """Why the Triton kernel for a node does not take it, on any GPU; None if it does. Needs
    Triton.
    """
    if node.op == "attention":
        return rejects_attention(node)
    return rejects_quantized(node) if is_quantized(node) else rejects_recurrent(node)


def rejects_recurrent(node: Node) -> str | None:
    from mtmd.kernels.gpu import gated_delta, short_conv

    rejects = gated_delta.rejects if node.op == "gated_delta" else short_conv.rejects
    return rejects(*(i and i.type for i in node.inputs), **node.attrs)  # type: ignore[arg-type]


def rejects_attention(node: Node) -> str | None:
    """Why the Triton kernel does not take an attention node, on any GPU; None if it does. Needs
    Triton.
    """
    from mtmd.kernels.gpu.flash_attention import rejects

    q, k, v, mask, bounds = (None if i is None else i.type for i in (*node.inputs, None, None)[:5])
    assert q is not None and k is not None and v is not None
    return rejects(q, k, v, mask, bounds, **node.attrs)


def is_quantized(node: Node) -> bool:
    """Whether the node is a product with a block-quantized weight."""
    return node.op == "matmul" and node.attrs.get("quant") is not None


def rejects_quantized(node: Node) -> str | None:
    """Why the Triton kernels do not take a product with a quantized weight, on any GPU; None if
    they do. Needs Triton.
    """
    from mtmd.kernels.gpu.quant_matmul import rejects

    x, w, bias = (None if i is None else i.type for i in (*node.inputs, None)[:3])
    assert x is not None and w is not None
    return rejects(x, w, bias, **node.attrs)
