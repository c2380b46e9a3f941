"""The CPU: flash attention in bounded memory, torch's own operators for the rest."""

from __future__ import annotations

import functools

import torch

from mtmd.kernels.backends.backend import Kernel
from mtmd.kernels.backends.reference import lower_reference, reference_workspace
from mtmd.kernels.cpu import attention, matmul, moe, pages, quant_matmul, recurrent
from mtmd.kernels.graph import Node


class Cpu:
    name = "cpu"
    space = "cpu"
    device = torch.device("cpu")

    def __init__(self, native: bool = True):
        self.native = native

    def rejects(self, node: Node) -> str | None:
        if any(n.dtype == torch.float16 for n in (node, *node.operands)):
            return "fp16 runs at about 1 GFLOP/s on CPUs; use bf16 or fp32"
        return None

    def lower(self, node: Node, in_place: bool = False) -> Kernel:
        if node.op == "attention":
            return functools.partial(attention.flash_attention, **node.attrs)
        if node.op == "gather_pages":
            return functools.partial(pages.gather_pages, **node.attrs)
        if node.op == "moe":
            return functools.partial(moe.moe, **node.attrs)
        if node.op in recurrent.KERNELS:
            return functools.partial(recurrent.KERNELS[node.op], **node.attrs)
        if _quantized(node):
            return functools.partial(quant_matmul.quant_matmul, **node.attrs)
        return lower_reference(node, in_place)

    def workspace(self, node: Node) -> int:
        if node.op == "matmul":
            x, w = node.inputs[:2]
            assert x is not None and w is not None
            if node.attrs.get("quant") is not None:
                return (
                    quant_matmul.workspace(x.type, w.type, node.attrs["quant"])
                    if _quantized(node)
                    else reference_workspace(node)
                )
            return matmul.workspace(x.type, w.type)
        if node.op == "moe":
            attrs = {
                name: value
                for name, value in node.attrs.items()
                if name not in ("normalize", "act")
            }
            return moe.workspace(*[i.type for i in node.operands][:5], **attrs)
        if node.op in recurrent.WORKSPACES:
            return recurrent.WORKSPACES[node.op](*(i and i.type for i in node.inputs))
        if node.op != "attention":
            return reference_workspace(node)
        q, k, v, mask, bounds = (*(None if i is None else i.type for i in node.inputs), None, None)[
            :5
        ]
        assert q is not None and k is not None and v is not None
        return attention.workspace(
            q,
            k,
            v,
            mask,
            bounds,
            **{name: value for name, value in node.attrs.items() if name != "scale"},
        )

    def synchronize(self) -> None:
        """Nothing is pending: torch's CPU operators return when they are done."""


def _quantized(node: Node) -> bool:
    """A product with a weight of blocks that the kernel here takes."""
    quant, x = node.attrs.get("quant"), node.inputs[0] if node.op == "matmul" else None
    return quant is not None and x is not None and quant_matmul.takes(x.type, quant)
