"""The facts of a warm-up, read off plans and timelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mtmd.kernels.cpu.table import choose
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.flash_choice import FlashChoice
from mtmd.kernels.plan.scheduler import Plan, Refusal
from mtmd.kernels.report.facts import (
    CopyFact,
    FlashFacts,
    GraphFacts,
    OpTime,
    Placement,
    RefusedOp,
    TensorFact,
)

FLASH = ("attention", "paged_attention")
OPERANDS = {"attention": ("q", "k", "v", "mask", "bounds")}


def placement(
    graph: str, choice: FlashChoice, plans: tuple[Plan, ...], preferred: Sequence[str]
) -> Placement:
    """Return the placement from the plans of one graph at every size that was asked about, and that
    was used since. `preferred` are the names of the devices that it is meant for.
    """
    return Placement(
        flash_facts(graph, choice, plans, preferred),
        tuple(refused_ops(graph, choice, plans, preferred)),
    )


def flash_facts(
    graph: str, choice: FlashChoice, plans: tuple[Plan, ...], preferred: Sequence[str]
) -> FlashFacts:
    attention = [
        (s.node.name, s.backend.name)
        for p in plans
        for s in p.steps
        if s.node.op in (*FLASH, "attn_mix")
    ]
    names = {name for name, _ in attention}
    flash = {s.node.name for p in plans for s in p.steps if s.node.op in FLASH}
    elsewhere = tuple(
        sorted(
            {name for name, backend in attention if backend not in preferred and name in flash},
            key=_natural,
        )
    )
    state = (
        "mixed"
        if choice.state == "on" and elsewhere and len(elsewhere) < len(names)
        else choice.state
    )
    return FlashFacts(
        graph,
        choice.setting,
        state,
        len(names),
        tuple(sorted(choice.form.explicit, key=_natural)),
        elsewhere,
    )


def refused_ops(
    graph: str, choice: FlashChoice, plans: tuple[Plan, ...], preferred: Sequence[str]
) -> list[RefusedOp]:
    """Attention nodes that were rebuilt, then every other node that the preferred backend refused;
    alike ones counted together.

    A node that several plans have is listed once for each reason, with the shapes of the first.
    """
    groups: dict[tuple[Any, ...], list[tuple[Refusal, str]]] = {}
    seen: set[tuple[str, str]] = set()
    for refusal in (r for r in choice.refusals if r.node.name in choice.form.explicit):
        groups.setdefault(_kind(refusal), []).append(
            (refusal, f"{refusal.backend}, as explicit attention")
        )
    for plan in plans:
        for refusal in plan.refusals:
            if refusal.backend in preferred and (refusal.node.name, refusal.reason) not in seen:
                seen.add((refusal.node.name, refusal.reason))
                groups.setdefault(_kind(refusal), []).append(
                    (refusal, plan.backend_of[refusal.node.name].name)
                )
    rows = []
    for refusals in groups.values():
        refusal, runs_on = refusals[0]
        names = {r.node.name for r, _ in refusals}
        rows.append(
            RefusedOp(
                graph,
                refusal.node.op,
                refusal.node.name,
                len(names),
                refusal.backend,
                refusal.reason,
                runs_on,
                _tensors(refusal.node),
            )
        )
    return rows


def graph_facts(
    graph: str, label: str, size: str, plan: Plan, cache_bytes: dict[str, int] | None = None
) -> GraphFacts:
    counts: dict[str, int] = {}
    for step in plan.steps:
        if step.node.op != "copy":
            counts[step.backend.name] = counts.get(step.backend.name, 0) + 1
    copies = tuple(
        CopyFact(n.name, n.attrs["source"], n.attrs["destination"], n.type.bytes)
        for n in plan.copies
    )
    return GraphFacts(
        graph,
        label,
        size,
        plan.nodes,
        counts,
        len(plan.splits),
        copies,
        plan.weight_bytes,
        cache_bytes or {},
        plan.compute_bytes,
        plan.flops / 1e9,
        plan.native,
        () if plan.native is not None else _ways(plan),
        tuple((n, *sizes) for sizes, n in Counter((c.block, c.rows) for c in plan.chains).items()),
    )


def _ways(plan: Plan) -> tuple[tuple[str, str, int], ...]:
    result: Counter[tuple[str, str]] = Counter()
    for step in plan.steps:
        if step.node.op == "copy" or step.backend.space != "cpu" or not step.backend.native:
            continue
        kernel = choose(step.node)
        way = kernel and kernel.how(*types_of(step.node), **step.node.attrs)
        if way:
            result[step.node.op, way] += 1
    return tuple((op, way, count) for (op, way), count in result.items())


def _kind(refusal: Refusal) -> tuple[Any, ...]:
    return (
        refusal.node.op,
        refusal.reason,
        refusal.node.type,
        tuple(i and i.type for i in refusal.node.inputs),
    )


def _tensors(node: Node) -> tuple[TensorFact, ...]:
    roles = OPERANDS.get(node.op) or tuple(f"src{i}" for i in range(len(node.inputs)))
    values = [
        ("dst", node),
        *((r, i) for r, i in zip(roles, node.inputs, strict=False) if i is not None),
    ]
    return tuple(TensorFact(role, name_of(n.dtype), n.shape, n.type.strides) for role, n in values)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")]


def op_times(timeline: list[tuple[Node, float]]) -> tuple[OpTime, ...]:
    """Per op, most time first, from (node, seconds) of one run; copies are left out."""
    by_op: dict[str, list[tuple[Node, float]]] = {}
    for node, seconds in timeline:
        if node.op != "copy":
            by_op.setdefault(node.op, []).append((node, seconds))
    rows = []
    for op, runs in by_op.items():
        total = sum(s for _, s in runs) or 1e-9
        flops, traffic = (
            sum(OPS[op].flops(n) for n, _ in runs),
            sum(OPS[op].bytes(n) for n, _ in runs),
        )
        rows.append(OpTime(op, len(runs), total * 1e3, flops / total / 1e9, traffic / total / 1e9))
    return tuple(sorted(rows, key=lambda r: -r.ms))
