"""The kernels of a plan compiled for a GPU that is not here, as the warm-up report lists them."""

from __future__ import annotations

from collections.abc import Hashable

from mtmd.kernels.backends.target import Target
from mtmd.kernels.gpu.triton_kernel import Program
from mtmd.kernels.graph import Node
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.facts import CompiledKernel
from mtmd.kernels.report.programs import launches_of


def compiled_kernels(graph: str, plan: Plan, target: Target) -> list[CompiledKernel]:
    """Each different program that the plan launches on the target, compiled, and what it uses.

    Raises PlacementError where the compiler refuses.
    """
    from mtmd.kernels.gpu.compile import compile_program, specialisation

    limits = target.architecture

    alike: dict[Hashable, list[tuple[Node, str, Program]]] = {}
    for node, choice, programs in launches_of(plan):
        for program in programs:
            row = node, program.title or choice.name, program
            alike.setdefault(specialisation(program), []).append(row)
    kernels = []
    for rows in alike.values():
        node, name, program = rows[0]
        used = compile_program(target.target, program)
        kernels.append(
            CompiledKernel(
                graph,
                name,
                node.name,
                len(rows),
                program.head,
                target.name,
                used.shared_bytes,
                limits.shared_per_program,
                used.registers,
                used.spill_bytes,
                used.instruction,
                used.at_once,
            )
        )
    return kernels
