"""A graph rewritten for one rank of several: its part of every value, and collectives where a value
has to be whole.

Splits start at the weights (a projection's outputs are cut where its input is whole) and spread by
the rules of the ops; what cannot go on split makes its projection whole again, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mtmd.base.errors import PlacementError
from mtmd.kernels.graph import Node, Type, constant, toposort
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.collective import Group
from mtmd.kernels.parallel.cuts import Cuts, length
from mtmd.kernels.parallel.dims import Conflict, Dims, Key
from mtmd.kernels.parallel.rules import PARTIAL, RULES, WHOLE, Located, Split, State, all_whole
from mtmd.kernels.parallel.slices import Slices

PASSES = 64


@dataclass(frozen=True)
class SavedWhole:
    """A projection, or a part of one, that every rank has whole. `refused`: it was asked to be
    shared and could not; else it is too small a thing to share.
    """

    name: str
    reason: str
    refused: bool


class Sharding:
    """Distribution of one model, for the rank of `group`: the same for every graph of it. `shares`
    of the work by rank, equal ones where there are none.
    """

    def __init__(self, group: Group, shares: Sequence[float] | None = None):
        self.group = group
        self.shares = tuple(shares or (1.0,) * group.size)
        if len(self.shares) != group.size or min(self.shares) <= 0:
            raise PlacementError(
                f"{len(self.shares)} shares for {group.size} ranks; expected a positive number for "
                "each"
            )
        self._whole: dict[Key, tuple[str, bool]] = {}
        self._slices = Slices()
        self.states: dict[str, Type] = {}
        """The rank's part of each state (a cache), by the name of its graph input."""

    @property
    def kept_whole(self) -> list[SavedWhole]:
        seen = {(name, reason): refused for (name, *_), (reason, refused) in self._whole.items()}
        return [SavedWhole(name, reason, refused) for (name, reason), refused in seen.items()]

    def rewrite(self, outputs: Sequence[Node]) -> list[Node]:
        """The rank's outputs; values that are asked for are whole on every rank."""
        if self.group.size == 1:
            return list(outputs)
        nodes = toposort(*outputs)
        for _ in range(PASSES):
            analysis = _Analysis(nodes, outputs, self._whole)
            if not analysis.conflicts:
                cuts = Cuts(analysis.dims, self.shares)
                if not cuts.conflicts:
                    return _Rewriting(self, analysis, cuts, self._slices).run(nodes, outputs)
                for conflict in cuts.conflicts:
                    analysis.note(conflict)
            before = len(self._whole)
            self._whole.update(analysis.conflicts)
            if len(self._whole) == before:
                reasons = "; ".join(sorted({reason for reason, _ in analysis.conflicts.values()}))
                raise PlacementError(f"no way to share this graph among ranks: {reasons}")
        raise PlacementError(f"no way to share this graph among ranks in {PASSES} attempts")

    def keep_state(self, name: str, part: Type) -> None:
        """Every graph has to cut a state alike: it is one memory."""
        known = self.states.setdefault(name, part)
        if known != part:
            raise PlacementError(f"state {name} is {known} in one graph and {part} in another")


class _Analysis:
    """One attempt: the rules over all nodes. `conflicts` are parts of projections that have to be
    whole, by which it has to be repeated.
    """

    def __init__(
        self, nodes: Sequence[Node], outputs: Sequence[Node], saved: dict[Key, tuple[str, bool]]
    ):
        self.dims = Dims(saved)
        self.conflicts: dict[Key, tuple[str, bool]] = {}
        self.states: dict[Node, State] = {}
        self.located: dict[Node, Located] = {}
        self.reduced: set[Node] = set()
        for node in nodes:
            if node.is_leaf:
                self.states[node] = WHOLE
                continue
            try:
                located = self._location(node)
            except Conflict as conflict:
                self.note(conflict, node)
                located = all_whole(node)
            self.located[node], self.states[node] = located, located.result
        for node in outputs:
            state = self.states[node]
            if isinstance(state, Split) and not node.is_in_state:
                if len(self.dims.flat(state.segments)) > 1:
                    dims = [d for _, d in state.segments]
                    self.note(Conflict(dims, "several parts of it are asked for"), node)
                for _, dim in self.dims.flat(state.segments):
                    if dim is not None:
                        dim.exact = True

    def note(self, conflict: Conflict, node: Node | None = None) -> None:
        at = f" ({node.name})" if node is not None and node.name else ""
        for dim in conflict.dims:
            for key in dim.root.keys:
                self.conflicts.setdefault(key, (f"{conflict.reason}{at}", conflict.refused))

    def _location(self, node: Node) -> Located:
        states = [WHOLE if i is None else self._state(i) for i in node.inputs]
        rule = RULES.get(node.op)
        located = rule(self.dims, node, states) if rule else all_whole(node)
        for value, have, need in zip(node.inputs, states, located.operands, strict=True):
            if value is None:
                continue
            if isinstance(have, Split) and not isinstance(need, Split):
                what = f"{node.op} has no rule" if rule is None else f"{node.op} reads it whole"
                raise Conflict([d for _, d in have.segments], what, refused=rule is None)
            if isinstance(need, Split) and value.is_leaf and value.attrs.get("state"):
                self.states[value] = need
            if have is PARTIAL and need is not PARTIAL:
                self.reduced.add(value)
        return located

    def _state(self, node: Node) -> State:
        """Sums that somebody has asked for before are used by others too."""
        return WHOLE if node in self.reduced else self.states[node]


class _Rewriting:
    def __init__(self, sharding: Sharding, analysis: _Analysis, cuts: Cuts, slices: Slices):
        self.sharding, self.group = sharding, sharding.group
        self.analysis, self.cuts, self.slices = analysis, cuts, slices
        self.made: dict[Node, Node] = {}
        self.whole: dict[Node, Node] = {}
        self.parts: dict[tuple[Node, int, tuple[tuple[int, int], ...]], Node] = {}

    def run(self, nodes: Sequence[Node], outputs: Sequence[Node]) -> list[Node]:
        for node in nodes:
            if not node.is_leaf:
                self.made[node] = self._node(node)
        return [self._output(node) for node in outputs]

    def _ranges(self, state: Split, rank: int | None = None) -> tuple[tuple[int, int], ...]:
        rank = self.group.rank if rank is None else rank
        return self.cuts.ranges(state.segments, self.analysis.dims, rank)

    def _output(self, node: Node) -> Node:
        state = self.analysis.states[node]
        if isinstance(state, Split) and not node.is_in_state:
            return self._gathered(node, state)
        return self.made[node] if isinstance(state, Split) else self._whole(node)

    def _gathered(self, node: Node, state: Split) -> Node:
        """The parts of all ranks, one after another."""
        return OPS["all_gather"](
            self.made[node],
            group=self.group,
            axis=state.axis,
            sizes=tuple(length(self._ranges(state, rank)) for rank in range(self.group.size)),
            name=f"{node.name}.all_gather",
        )

    def _whole(self, node: Node) -> Node:
        if node.is_leaf:
            if node.attrs.get("state"):
                self.sharding.keep_state(node.name, node.type)
            return node
        if self.analysis.states[node] is not PARTIAL:
            return self.made[node]
        if node not in self.whole:
            self.whole[node] = OPS["all_reduce"](
                self.made[node], group=self.group, name=f"{node.name}.all_reduce"
            )
        return self.whole[node]

    def _part(self, node: Node, state: Split) -> Node:
        """A rank's part of a value."""
        ranges = self._ranges(state)
        if node.is_leaf and node.attrs.get("state"):
            return self._state(node, state.axis, length(ranges))
        if node.op == "weight":
            return self.slices.cut(node, state.axis, ranges, state.block)
        if isinstance(self.analysis.states[node], Split):
            return self.made[node]
        key = node, state.axis, ranges
        if key not in self.parts:
            self.parts[key] = OPS["part"](
                self._whole(node), axis=state.axis, ranges=ranges, name=f"{node.name}.part"
            )
        return self.parts[key]

    def _state(self, node: Node, axis: int, size: int) -> Node:
        if node not in self.made:
            shape = (*node.shape[:axis], size, *node.shape[axis + 1 :])
            part = replace(node, type=Type.contiguous(shape, node.dtype))
            self.sharding.keep_state(node.name, part.type)
            self.made[node] = part
        return self.made[node]

    def _every(self, name: str, first: int, step: int, count: int) -> Node:
        return constant(name, torch.arange(count) * step + first)

    def _node(self, node: Node) -> Node:
        located = self.analysis.located[node]
        inputs: list[Node | None] = []
        for index, (value, need) in enumerate(zip(node.inputs, located.operands, strict=True)):
            if value is None or (index in located.once and self.group.rank and node.op != "add"):
                inputs.append(None)
            elif isinstance(need, Split):
                inputs.append(self._part(value, need))
            else:
                inputs.append(self.made[value] if need is PARTIAL else self._whole(value))
        if located.once and node.op == "add":
            # The operands in one order on every rank: its collectives have to come in one, too.
            (added,) = located.once
            op = OPS["without" if self.group.rank else "add"]
            return op(inputs[1 - added], inputs[added], name=node.name)
        if "embed" in located.notes:
            ((first, _),) = self._ranges(Split(0, located.notes["embed"]))
            return OPS["embed_part"](*inputs, first=first, name=node.name, **node.attrs)
        attrs = dict(node.attrs)
        result = located.result
        if "gathered" in located.notes and isinstance(result, Split) and node.inputs[0]:
            inputs[0] = self._gathered(node.inputs[0], result)
            whole = OPS[node.op](*inputs, name=f"{node.name}.whole", **attrs)
            ranges = self._ranges(result)
            return OPS["part"](whole, axis=result.axis, ranges=ranges, name=node.name)
        if "every" in located.notes and isinstance(result, Split):
            first, step = located.notes["every"]
            count = length(self._ranges(result))
            inputs[1] = self._every(f"{node.name}.places", first, step, count)
        if isinstance(result, Split) and node.op == "reshape":
            size = length(self._ranges(result))
            attrs["shape"] = (*node.shape[: result.axis], size, *node.shape[result.axis + 1 :])
        if (
            isinstance(located.operands[0], Split)
            and node.op == "columns"
            and "before" in located.notes
        ):
            assert inputs[0] is not None
            before = length(self._ranges(Split(0, located.notes["before"])))
            size = length(self._ranges(result)) if isinstance(result, Split) else node.shape[-1]
            attrs["start"], attrs["stop"] = before, before + size
        return OPS[node.op](*inputs, name=node.name, **attrs)


@dataclass(frozen=True)
class Member:
    """The place of a rank, for who only plans: nothing can be run with it."""

    rank: int
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        raise PlacementError(f"rank {self.rank} of {self.size} is planned, not started")

    def gather(self, x: torch.Tensor, axis: int, sizes: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        return self.sum(x)


def collectives(nodes: Iterable[Node]) -> dict[str, tuple[int, int]]:
    """Return how many there are of each op, and the bytes of their values."""
    counts: dict[str, tuple[int, int]] = {}
    for node in nodes:
        if node.op in ("all_reduce", "all_gather"):
            count, size = counts.get(node.op, (0, 0))
            counts[node.op] = count + 1, size + node.type.bytes
    return counts
