"""The CPU: flash attention in bounded memory, torch's own operators for the rest."""
from __future__ import annotations

import functools

import torch

from mtmd.kernels.backends.backend import Kernel
from mtmd.kernels.backends.reference import lower_reference, reference_workspace
from mtmd.kernels.cpu import attention, matmul
from mtmd.kernels.graph import Node


class Cpu:
    name = "cpu"
    space = "cpu"
    device = torch.device("cpu")

    def rejects(self, node: Node) -> str | None:
        if any(n.dtype == torch.float16 for n in (node, *node.operands)):
            return "fp16 runs at about 1 GFLOP/s on CPUs; use bf16 or fp32"
        return None

    def lower(self, node: Node, in_place: bool = False) -> Kernel:
        if node.op == "attention":
            return functools.partial(attention.flash_attention, **node.attrs)
        return lower_reference(node, in_place)

    def workspace(self, node: Node) -> int:
        if node.op == "matmul":
            x, w = node.inputs[:2]
            assert x is not None and w is not None
            return matmul.workspace(x.type, w.type)
        if node.op != "attention":
            return reference_workspace(node)
        q, k, v, mask, bounds = (*(None if i is None else i.type for i in node.inputs), None, None)[:5]
        assert q is not None and k is not None and v is not None
        return attention.workspace(q, k, v, mask, bounds, **{name: value for name, value in node.attrs.items() if name != "scale"})

    def synchronize(self) -> None:
        """Nothing is pending: torch's CPU operators return when they are done."""
