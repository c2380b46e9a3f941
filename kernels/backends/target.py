"""A GPU that is not here: what it would take and what it would need. Nothing runs on it.

Support and memory are what `Gpu` says of the same nodes; each Triton kernel is compiled for it
ahead of time, which tells whether it fits and what it uses.
"""

from __future__ import annotations

from collections.abc import Hashable
from importlib.util import find_spec

import torch

from mtmd.kernels.backends.backend import Kernel
from mtmd.kernels.backends.gpu import is_quantized, rejects_triton, triton_kernel, triton_workspace
from mtmd.kernels.backends.reference import reference_workspace
from mtmd.kernels.errors import OptionError, PlacementError
from mtmd.kernels.graph import Node
from mtmd.kernels.report import CompiledKernel
from mtmd.kernels.scheduler import Plan

MIN_CAPABILITY = 80


class Target:
    """`name`: cuda:90 for compute capability 9.0, hip:gfx942 for an AMD architecture. Raises
    OptionError for anything else.
    """

    native = False

    def __init__(self, name: str):
        if find_spec("triton") is None:
            raise OptionError(
                f"target {name!r}: kernels are compiled by Triton, which is not installed; pip "
                "install 'mtmd[gpu]'"
            )
        from mtmd.kernels.gpu.compile import parse_target

        parse_target(name)
        self.name = self.space = name
        self.device = torch.device("meta")

    def rejects(self, node: Node) -> str | None:
        kernel = triton_kernel(node)
        if kernel is None:
            return None
        kind, _, version = self.name.partition(":")
        if kind == "cuda" and int(version) < MIN_CAPABILITY:
            return f"the {kernel} kernel needs compute capability 8.0, found {int(version) / 10}"
        return rejects_triton(node)

    def lower(self, node: Node, in_place: bool = False) -> Kernel:  # noqa: ARG002
        raise PlacementError(
            f"{node.name}: {self.name} is a target to predict for, not a device; use --device to "
            "run"
        )

    def workspace(self, node: Node) -> int:
        return triton_workspace(node) if triton_kernel(node) else reference_workspace(node)

    def synchronize(self) -> None:
        """Nothing runs."""

    def compile(self, graph: str, plan: Plan) -> list[CompiledKernel]:
        """The kernel of each different node of a plan that a Triton kernel runs, compiled, and what
        it uses.
        """
        from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_node

        kinds: dict[Hashable, list[Node]] = {}
        for step in plan.steps:
            if triton_kernel(step.node) and step.backend is self:
                kinds.setdefault(_kernel_key(step.node), []).append(step.node)
        found = []
        for nodes in kinds.values():
            used, quant = compile_node(self.name, nodes[0]), nodes[0].attrs.get("quant")
            head = nodes[0].type.shape[-1] if nodes[0].op in ("attention", "gated_delta") else None
            found.append(
                CompiledKernel(
                    graph,
                    f"{quant} matmul" if quant else triton_kernel(nodes[0]) or "",
                    nodes[0].name,
                    len(nodes),
                    head,
                    self.name,
                    used.shared_bytes,
                    SHARED_LIMIT.get(self.name),
                    used.registers,
                    used.spill_bytes,
                    used.instruction,
                )
            )
        return found


def _kernel_key(node: Node) -> Hashable:
    """Nodes with the same key run the same kernel; products of any width do, if they are whole
    numbers of its steps.
    """
    types = tuple(None if i is None else i.type for i in node.inputs)
    if not is_quantized(node):
        return types, tuple(node.attrs.items())
    from mtmd.kernels.gpu.quant_matmul import plan_call

    call = plan_call(*types, **node.attrs)  # type: ignore[arg-type]
    return (
        node.dtype,
        tuple(call.constants.items()),
        tuple((value == 1, value % 16 == 0) for value in call.scalars.values()),
    )
