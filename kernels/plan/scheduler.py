"""Scheduling of a graph as a plan: which backend runs each node, in which order, what is copied
between memories, and what it takes.

Assign (overrides by name first, then the first backend that takes the node), make the copies at the
seams explicit nodes, cut into splits of one backend, and free each value after its last use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mtmd.base.errors import OptionError, PlacementError
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.fusion.rewrite import rewritten
from mtmd.kernels.plan.fusion.rules import RULES
from mtmd.kernels.plan.layer_split import LayerSplit
from mtmd.kernels.plan.row_blocks import Chain, chains
from mtmd.kernels.plan.steps import NativeFacts, Split, Step

# Of the values of a plan that is recorded: they keep their memory as long as there are recordings,
# beside what other runs take. A step of decoding takes a few MiB; where values are larger, the
# device takes several times as long as the host takes to launch them (docs/gpu.md).
MAX_RECORDED = 128 << 20
FALLBACK = ("cpu",)  # memories of the backends that take what a device of several refuses


@dataclass(frozen=True)
class Override:
    """Nodes (or the weights they use) whose name matches `pattern` run on the backend of that
    name.
    """

    pattern: re.Pattern[str]
    target: str

    @staticmethod
    def parse(text: str) -> Override:
        expression, equals, target = text.rpartition("=")
        if not equals or not expression or not target:
            raise OptionError(
                f"override {text!r}: expected REGEX=DEVICE, for example 'v\\.blk\\.3\\..*=cpu'"
            )
        try:
            return Override(re.compile(expression), target)
        except (re.error, OverflowError, RecursionError) as error:
            raise OptionError(
                f"override {text!r}: {expression!r} is not a regular expression ({error})"
            ) from error

    def matches(self, node: Node) -> bool:
        return any(
            self.pattern.search(n.name)
            for n in (node, *(i for i in node.operands if i.op == "weight"))
        )


@dataclass(frozen=True)
class Refusal:
    """A backend that was asked first and did not take a node, with its reason."""

    node: Node
    backend: str
    reason: str


@dataclass(frozen=True)
class Plan:
    outputs: tuple[Node, ...]
    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...]

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Steps grouped by backend; a copy belongs to the split that reads it."""
        groups: list[list[Step]] = []
        pending: list[Step] = []
        for step in self.steps:
            if step.node.op == "copy":
                pending.append(step)
            elif groups and groups[-1][-1].backend is step.backend:
                groups[-1] += [*pending, step]
                pending = []
            else:
                groups.append([*pending, step])
                pending = []
        return tuple(
            Split(
                g[-1].backend,
                tuple(s.node for s in g if s.node.op == "copy"),
                tuple(s for s in g if s.node.op != "copy"),
            )
            for g in groups
        )

    @cached_property
    def intact(self) -> Plan:
        """The same, without a step that overwrites its input: every value can be looked at."""
        return replace(self, steps=tuple(replace(s, in_place=False) for s in self.steps))

    @property
    def copies(self) -> tuple[Node, ...]:
        return tuple(s.node for s in self.steps if s.node.op == "copy")

    @property
    def nodes(self) -> int:
        """Nodes that are run, copies not counted."""
        return sum(s.node.op != "copy" for s in self.steps)

    @cached_property
    def backend_of(self) -> dict[str, Backend]:
        """Return the backend of each node, by name."""
        return {s.node.name: s.backend for s in self.steps}

    @cached_property
    def leaves(self) -> dict[tuple[Node, str], Backend]:
        """Inputs and weights by the memory space they are read in."""
        return {
            (i, s.backend.space): s.backend
            for s in self.steps
            for i in s.inputs
            if i is not None and i.is_leaf
        }

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Resident weights per memory space."""
        spaces: Counter[str] = Counter()
        weights = {
            (id(n.attrs["source"]), n.name, n.type, space): n
            for n, space in self.leaves
            if n.op == "weight"
        }  # tied ones once
        for (*_, space), node in weights.items():
            spaces[space] += node.type.bytes
        return dict(spaces)

    @cached_property
    def compute_bytes(self) -> dict[str, int]:
        """Predicted peak of everything but weights and caches, per memory space, with the copies
        of a replayed run's outputs; nothing is allocated to find it.
        """
        return self._with_copies(self.run_bytes, self.copied_out)

    @cached_property
    def run_bytes(self) -> dict[str, int]:
        """The same of a run that is launched node by node, or recorded."""
        return self._peak(lambda: self._exact_needs)

    @cached_property
    def _exact_needs(self) -> list[tuple[int, str, int]]:
        return self._needs(
            lambda step: step.backend.workspace(step.node), lambda plan: plan.run_bytes
        )

    @property
    def room(self) -> Mapping[int, int]:
        """Return by how many bytes each step on the host, by its number, needs less than the peak;
        empty where that has not been predicted.
        """
        return self._room if "run_bytes" in vars(self) else {}

    @cached_property
    def _room(self) -> dict[int, int]:
        needs = ((i, size) for i, space, size in self._exact_needs if i >= 0 and space == "cpu")
        return {i: self.run_bytes["cpu"] - size for i, size in needs}

    @property
    def may_be_recorded(self) -> bool:
        """Return whether its device records runs, and their values are few enough to be kept."""
        return self.is_where_runs_are_recorded and sum(self.run_bytes.values()) <= MAX_RECORDED

    @property
    def is_where_runs_are_recorded(self) -> bool:
        """Return whether it runs on one device, which records runs, and without other ranks."""
        records = all(s.backend.records and "group" not in s.node.attrs for s in self.steps)
        return records and len({s.backend.space for s in self.steps}) == 1 and not self.copies

    @cached_property
    def copied_out(self) -> tuple[Node, ...]:
        """The outputs that a replayed run hands over as copies, as the next one overwrites them:
        all that lie in no state.
        """
        return self.outside_states if self.may_be_recorded else ()

    @property
    def outside_states(self) -> tuple[Node, ...]:
        """The outputs that have memory of their own."""
        return tuple(o for o in self.outputs if not o.is_in_state)

    def _with_copies(self, peak: dict[str, int], copies: Iterable[Node]) -> dict[str, int]:
        more = sum(copy.type.bytes for copy in copies)
        return {space: size + more for space, size in peak.items()} if more else peak

    @cached_property
    def rough_bytes(self) -> dict[str, int]:
        """Return an upper bound of `compute_bytes`, usually several times as much. It is known at
        once: what ops take on the way is found by running them on meta tensors, for which torch
        loads its compiler.
        """
        rough = self._peak(
            lambda: self._needs(
                lambda step: step.backend.workspace(step.node, exact=False),
                lambda plan: plan.rough_bytes,
            )
        )
        records = any(step.backend.records for step in self.steps)
        return self._with_copies(rough, self.outside_states if records else ())

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """Steps that are run over a block of rows at a time, unless somebody looks on."""
        return chains(self.steps, self.outputs)

    @cached_property
    def blocks(self) -> tuple[dict[int, Plan], ...]:
        """Return for each chain the plans of its blocks by their rows."""
        return tuple(
            {
                rows: make_plan([chain.graph(rows)], [chain.steps[0].backend])
                for rows in {stop - start for start, stop in chain.parts}
            }
            for chain in self.chains
        )

    @cached_property
    def native(self) -> NativeFacts | None:
        """Return how much of it runs as programs of machine code; None where it runs node by
        node.
        """
        return self._native[0] if self._native is not None else None

    @cached_property
    def _native(self) -> tuple[NativeFacts, int | None] | None:
        if not any(s.backend.native for s in self.steps):
            return None
        from mtmd.kernels.plan.lower import foresee

        return foresee(self.steps, self.outputs)

    def note_programs(self, facts: tuple[NativeFacts, int | None]) -> None:
        """Take from whoever has lowered the plan what `native` would lower it for once more."""
        vars(self)["_native"] = facts

    def _peak(self, needs: Callable[[], Iterable[tuple[int, str, int]]]) -> dict[str, int]:
        if self._native is not None and (taken := self._native[1]) is not None:
            return {self.steps[0].backend.space: taken}
        peak: dict[str, int] = {}
        for _, space, size in needs():
            peak[space] = max(peak.get(space, 0), size)
        return peak

    def _needs(
        self, workspace: Callable[[Step], int], block_bytes: Callable[[Plan], dict[str, int]]
    ) -> list[tuple[int, str, int]]:
        """Return the number of a step, its memory space, and the bytes that are in use there while
        it runs; -1 stands for the inputs before the first.
        """
        live: Counter[str] = Counter()
        # Inputs are live from the start. Caches (`state`) outlive the run and are counted by
        # whoever keeps them.
        for node, space in self.leaves:
            if node.op == "input" and not node.attrs.get("state"):
                live[space] += node.type.bytes
        needs = [(-1, space, size) for space, size in live.items()]
        stored = _Storages(self)
        first = {chain.first: number for number, chain in enumerate(self.chains)}
        for index, step in enumerate(self.steps):
            space = step.backend.space
            if index in first:
                chain, plans = self.chains[first[index]], self.blocks[first[index]]
                live[space] += chain.result.type.bytes
                extra = max(block_bytes(plan).get(space, 0) for plan in plans.values())
                needs.append((index, space, live[space] + extra))
            elif index not in stored.inside:
                # A view, or a step that overwrites its input, takes no memory of its own.
                if stored.owner[step.node] is step.node:
                    live[space] += step.node.type.bytes
                extra = 0 if step.node.op == "copy" else workspace(step)
                needs.append((index, space, live[space] + extra))
            for owner in stored.ends.get(index, ()):
                live[stored.space[owner]] -= owner.type.bytes
        return needs

    @property
    def flops(self) -> int:
        return sum(OPS[s.node.op].flops(s.node) for s in self.steps if s.node.op != "copy")


class _Storages:
    """Storage of values: which node's memory each lies in, and after which step that memory is
    free. What is `inside` chains lies in the memory of their blocks, and their results have memory
    of their own.
    """

    def __init__(self, plan: Plan):
        self.owner: dict[Node, Node] = {}
        self.space: dict[Node, str] = {}
        self.inside = {i for chain in plan.chains for i in range(chain.first, chain.stop)}
        internal = {s.node for chain in plan.chains for s in chain.steps[:-1]}
        last: dict[Node, int] = {}
        for index, step in enumerate(plan.steps):
            first = step.inputs[0] if step.inputs else None
            shares = (step.node.alias or step.in_place) and index not in self.inside
            self.owner[step.node] = (
                self.owner.get(first, first) if shares and first is not None else step.node
            )
            self.space[step.node] = step.backend.space
            for node in (step.node, *(i for i in step.inputs if i is not None)):
                last[self.owner.get(node, node)] = index
        saved = {self.owner.get(o, o) for o in plan.outputs}
        self.ends: dict[int, list[Node]] = {}
        for node, index in last.items():
            if node not in saved and not node.is_leaf and node not in internal:
                self.ends.setdefault(index, []).append(node)


def make_plan(
    outputs: Sequence[Node],
    backends: Sequence[Backend],
    overrides: Iterable[Override] = (),
    overwrite: bool = True,
    split: LayerSplit | None = None,
) -> Plan:
    """Place every node the outputs need, after rules have made fewer of them for a preferred
    backend that fuses. `overwrite=False` leaves the graph as it is and keeps every step from
    reusing its input's memory, for looking on. `split`: each layer prefers a device of its own, and
    the backends that are none of these devices come after that.

    Raises OptionError for an override whose target is not among the backends, PlacementError where
    an override names a backend that rejects the node, or no backend takes it.
    """
    overrides = tuple(overrides)
    if overwrite and any(b.fuses for b in (split.devices if split else backends[:1])):
        graph = rewritten(outputs, RULES, backends[0], overrides, split)
        outputs, every = graph.outputs, graph.nodes
    else:
        every = toposort(*outputs)
    nodes = [n for n in every if not n.is_leaf]
    homes = split.homes(every) if split else {}
    where, refusals = _assign(nodes, backends, overrides, homes)
    ordered, reads = _with_copies(nodes, where)
    steps = _steps(ordered, reads, where, outputs)
    return Plan(
        tuple(outputs),
        tuple(steps if overwrite else (replace(s, in_place=False) for s in steps)),
        tuple(refusals),
    )


def _assign(
    nodes: Sequence[Node],
    backends: Sequence[Backend],
    overrides: tuple[Override, ...],
    homes: Mapping[Node, Backend],
) -> tuple[dict[Node, Backend], list[Refusal]]:
    """`homes`: the device that each node prefers, where it is not the first backend."""
    by_name = {
        name: b for b in reversed(backends) for name in (b.space.partition(":")[0], b.space, b.name)
    }
    for override in overrides:
        if override.target not in by_name:
            raise OptionError(
                f"override target {override.target!r}: expected one of "
                f"{', '.join(dict.fromkeys(b.name for b in backends))}"
            )
    where: dict[Node, Backend] = {}
    refusals: list[Refusal] = []
    # In topological order: a view finds its source placed.
    for node in nodes:
        forced = next((by_name[o.target] for o in overrides if o.matches(node)), None)
        source = node.inputs[0] if OPS[node.op].is_view else None
        if source is not None and source in where and forced is None:
            where[node] = where[source]  # a view lies where its source lies
            continue
        for backend in [forced] if forced else _in_order(backends, homes.get(node)):
            reason = backend.rejects(node)
            if reason is None:
                where[node] = backend
                break
            refusals.append(Refusal(node, backend.name, reason))
        else:
            who = f"{forced.name}, as the override asks, does not" if forced else "no backend does"
            reasons = "; ".join(f"{r.backend}: {r.reason}" for r in refusals if r.node is node)
            raise PlacementError(f"{who} take {node} ({reasons or 'there is none'})")
    return where, refusals


def _in_order(backends: Sequence[Backend], home: Backend | None) -> Sequence[Backend]:
    """Put the device that is `home` first, then the CPU."""
    if home is None:
        return backends
    return [home, *(b for b in backends if b is not home and b.space in FALLBACK)]


def _with_copies(
    nodes: Sequence[Node], where: dict[Node, Backend]
) -> tuple[list[Node], dict[Node, tuple[Node | None, ...]]]:
    """The nodes with a `copy` before the first use of a value in another memory space, and what
    each node then reads.
    """
    ordered: list[Node] = []
    reads: dict[Node, tuple[Node | None, ...]] = {}
    brought: dict[tuple[Node, str], Node] = {}

    # Leaves need no copy: the executor puts weights and inputs into each memory they are read in.
    def bring(value: Node, backend: Backend) -> Node:
        if value.is_leaf or where[value].space == backend.space:
            return value
        key = value, backend.space
        if key not in brought:
            attrs = {"source": where[value].space, "destination": backend.space}
            copy = Node("copy", (value,), value.type, attrs, f"{value.name}@{backend.space}")
            brought[key], where[copy], reads[copy] = copy, backend, (value,)
            ordered.append(copy)
        return brought[key]

    for node in nodes:
        reads[node] = tuple(i and bring(i, where[node]) for i in node.inputs)
        ordered.append(node)
    return ordered, reads


def _steps(
    ordered: Sequence[Node],
    reads: Mapping[Node, tuple[Node | None, ...]],
    where: Mapping[Node, Backend],
    outputs: Sequence[Node],
) -> Iterable[Step]:
    last: dict[Node, int] = {}
    for index, node in enumerate(ordered):
        for value in (node, *(i for i in reads[node] if i is not None)):
            last[value] = index
    # A value's memory is also read through its views: it may be overwritten only after the last of
    # them.
    memory: dict[Node, Node] = {}
    read_until: dict[Node, int] = dict(last)
    for node in ordered:
        first = reads[node][0] if reads[node] else None
        memory[node] = memory.get(first, first) if node.alias and first is not None else node
        read_until[memory[node]] = max(read_until.get(memory[node], 0), last[node])
    saved = set(outputs) | {memory.get(o, o) for o in outputs}
    for index, node in enumerate(ordered):
        present = [i for i in reads[node] if i is not None]
        in_place = (
            _may_overwrite(node, present, memory, saved) and read_until[memory[present[0]]] == index
        )
        ends = [v for v in (node, *present) if last[v] == index and v not in saved]
        frees = tuple(dict.fromkeys(v for v in ends if not v.is_leaf)) if ends else ()
        yield Step(node, where[node], reads[node], in_place, frees)


def _may_overwrite(
    node: Node, present: Sequence[Node], memory: Mapping[Node, Node], saved: set[Node]
) -> bool:
    if node.op == "copy" or OPS[node.op].in_place is None or not present or present[0].is_leaf:
        return False
    source = memory[present[0]]
    shared = any(memory.get(i, i) is source for i in present[1:])
    return (
        not (source.is_leaf or source in saved or shared)
        and present[0].type == node.type
        and node.type.is_contiguous
    )
