"""A GPU that is not here: what it would take and what it would need. Nothing runs on it.

Support and memory are what `Gpu` says of the same nodes; each attention kernel is compiled for it ahead of time, which tells whether it
fits and what it uses.
"""
from __future__ import annotations

from importlib.util import find_spec

import torch

from mtmd.kernels.backends.backend import Kernel
from mtmd.kernels.backends.gpu import rejects_attention
from mtmd.kernels.backends.reference import reference_workspace
from mtmd.kernels.errors import OptionError, PlacementError
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.report import CompiledKernel
from mtmd.kernels.scheduler import Plan

MIN_CAPABILITY = 80


class Target:
    """`name`: cuda:90 for compute capability 9.0, hip:gfx942 for an AMD architecture. Raises OptionError for anything else."""

    def __init__(self, name: str):
        if find_spec("triton") is None:
            raise OptionError(f"target {name!r}: kernels are compiled by Triton, which is not installed; pip install 'mtmd[gpu]'")
        from mtmd.kernels.gpu.compile import parse_target
        parse_target(name)
        self.name = self.space = name
        self.device = torch.device("meta")

    def rejects(self, node: Node) -> str | None:
        kind, _, version = self.name.partition(":")
        if node.op == "attention" and kind == "cuda" and int(version) < MIN_CAPABILITY:
            return f"the attention kernel needs compute capability 8.0, found {int(version) / 10}"
        return rejects_attention(node) if node.op == "attention" else None

    def lower(self, node: Node, in_place: bool = False) -> Kernel:  # noqa: ARG002
        raise PlacementError(f"{node.name}: {self.name} is a target to predict for, not a device; use --device to run")

    def workspace(self, node: Node) -> int:
        return 0 if node.op == "attention" else reference_workspace(node)

    def synchronize(self) -> None:
        """Nothing runs."""

    def compile(self, graph: str, plan: Plan) -> list[CompiledKernel]:
        """The kernel of each different attention node of a plan, compiled, and what it uses."""
        from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_for
        kinds: dict[tuple[tuple[Type | None, ...], tuple[tuple[str, object], ...]], list[Node]] = {}
        for step in plan.steps:
            if step.node.op == "attention" and step.backend is self:
                types = tuple(None if i is None else i.type for i in step.node.inputs)
                kinds.setdefault((types, tuple(step.node.attrs.items())), []).append(step.node)
        found = []
        for (types, _), nodes in kinds.items():
            used = compile_for(self.name, *types, **nodes[0].attrs)  # type: ignore[arg-type]
            found.append(CompiledKernel(graph, nodes[0].name, len(nodes), nodes[0].type.shape[-1], self.name, used.shared_bytes,
                                        SHARED_LIMIT.get(self.name), used.registers, used.spill_bytes, used.instruction))
        return found
