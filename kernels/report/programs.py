"""The GPU programs that plans launch, each once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from mtmd.kernels.backends import Backend, Limited
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.target import Target
from mtmd.kernels.gpu.ahead.operand_locations import located_types
from mtmd.kernels.gpu.table import Choice
from mtmd.kernels.gpu.triton_kernel import Program
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.plan.scheduler import Plan


def launches_of(plan: Plan) -> Iterator[tuple[Node, Choice, list[Program]]]:
    """The nodes of a plan that Triton kernels run on a GPU, here or not, and what each launches."""
    for node, types, device in _on_gpus(plan):
        choice = device.choose(node)
        if choice.kernel is not None:
            yield node, choice, choice.kernel.launched(*types, **node.attrs)


def _on_gpus(plan: Plan) -> Iterator[tuple[Node, tuple[Type | None, ...], Gpu | Target]]:
    for step in plan.steps:
        device = device_of(step.backend)
        if step.node.op != "copy" and device is not None:
            yield step.node, located_types(step.inputs), device


def device_of(backend: Backend) -> Gpu | Target | None:
    """The GPU that nodes of a backend run on; None of another device."""
    inner = backend.inner if isinstance(backend, Limited) else backend
    return inner if isinstance(inner, (Gpu, Target)) else None


@dataclass
class Programs:
    """Programs of several plans, each once; of attention that is measured those of all kernels that
    may turn out to be the fastest, too.
    """

    result: dict[Hashable, Program] = field(default_factory=dict)
    _seen: set[Hashable] = field(default_factory=set)

    def add(self, plan: Plan) -> None:
        from mtmd.kernels.gpu.compile import specialisation

        for node, types, device in _on_gpus(plan):
            key = (node.op, types, tuple(node.attrs.items()))
            if key in self._seen:
                continue  # another layer's
            self._seen.add(key)
            kernel = device.choose(node).kernel
            if kernel is None:
                continue
            programs = kernel.launched(*types, **node.attrs)
            if node.op == "attention":
                programs += device.attention.programs(node, types)
            for program in programs:
                self.result.setdefault(specialisation(program), program)

    def add_all(self, plans: Iterable[Plan]) -> Programs:
        for plan in plans:
            self.add(plan)
        return self
