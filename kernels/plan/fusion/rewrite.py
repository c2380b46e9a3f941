"""A graph with some of its nodes replaced by nodes that do the work of several.

On a device that waits for the host between two launches, a node costs its launch. So before a plan
is made for a backend that asks for it (`Backend.fuses`), rules (`rules.py`) look for nodes that one
kernel can do together. A rule proposes; here it is decided whether the backend takes what is
proposed and would have run what it replaces, and whether an override names any of it. What computes
the same before and after keeps its name, so that reports and overrides speak of the same things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.ops import OPS


class Graph:
    """Nodes that some outputs need, and who reads each. `nodes`: in `toposort`'s order, where that
    is known.
    """

    def __init__(self, outputs: Sequence[Node], nodes: Sequence[Node] | None = None):
        self.outputs = tuple(outputs)
        self.nodes = toposort(*outputs) if nodes is None else nodes

    @cached_property
    def users(self) -> Mapping[Node, tuple[Node, ...]]:
        result: dict[Node, list[Node]] = {}
        for node in self.nodes:
            for i in node.inputs:
                if i is None:
                    continue
                if (users := result.get(i)) is None:
                    result[i] = [node]
                elif users[-1] is not node:  # it may read a value twice
                    users.append(node)
        return {node: tuple(users) for node, users in result.items()}

    def of(self, op: str) -> Iterator[Node]:
        return (n for n in self.nodes if n.op == op)

    def only_for(self, node: Node, user: Node) -> bool:
        """Return whether nobody but `user` reads a value, so that it need not be there."""
        return self.users.get(node) == (user,) and node not in self.outputs


@dataclass(frozen=True)
class Match:
    """`made`, which stands for `nodes`, and what becomes of those that others read. It does what
    the nodes of `shared` do, too, which several matches may have: they go when nobody reads them.
    """

    nodes: tuple[Node, ...]
    made: Node
    instead: Mapping[Node, Node]
    shared: tuple[Node, ...] = ()


class Named(Protocol):
    """An override: which nodes somebody has placed by name."""

    def matches(self, node: Node) -> bool: ...


Rule = Callable[[Graph], Iterable[Match]]


class Homes(Protocol):
    """Function that names the device, of several, that each node is meant for."""

    def homes(self, nodes: Sequence[Node]) -> Mapping[Node, Backend]: ...


def rewritten(
    outputs: Sequence[Node],
    rules: Sequence[Rule],
    backend: Backend,
    overrides: Sequence[Named],
    split: Homes | None = None,
) -> Graph:
    """The graph after all rules, each in turn, where `backend` takes what they make, or, of
    several devices, the one that has all the nodes replaced.
    """
    graph = Graph(outputs)
    for rule in rules:
        instead: dict[Node, Node] = {}
        taken: set[Node] = set()
        homes = split.homes(graph.nodes) if split else {}
        for match in rule(graph):
            all_nodes = (*match.nodes, *match.shared)
            locations = {homes.get(n, backend) for n in all_nodes if not n.is_leaf}
            if (
                taken.isdisjoint(match.nodes)
                and len(locations) == 1
                and (location := locations.pop()).fuses
                and _may(match, location, overrides)
            ):
                taken.update(match.nodes)
                instead.update(match.instead)
        if instead:
            graph = substituted(graph.outputs, instead)
    return graph


def _may(match: Match, backend: Backend, overrides: Sequence[Named]) -> bool:
    nodes = (*match.nodes, *match.shared, match.made)
    return not any(o.matches(n) for o in overrides for n in nodes) and not any(
        backend.rejects(n) for n in nodes if not OPS[n.op].is_view
    )


def substituted(outputs: Iterable[Node], instead: Mapping[Node, Node]) -> Graph:
    """The graph with nodes replaced, and all who read them made anew. What stands `instead` may
    read nodes that are replaced themselves.
    """
    outputs = tuple(outputs)
    new: dict[Node | None, Node | None] = {None: None}  # an input that is absent stays so
    stack = list(reversed(outputs))
    while stack:
        node = stack[-1]
        target = instead.get(node, node)
        for i in target.inputs:
            if i not in new:
                assert i is not None
                if i.inputs or i in instead:
                    stack.append(i)
                    break
                new[i] = i
        else:
            stack.pop()
            if node not in new:
                new[node] = _reading(target, new)
    # Made in the order in which `toposort` would find them.
    made = dict.fromkeys(node for node in new.values() if node is not None)
    return Graph([o for o in map(new.get, outputs) if o is not None], list(made))


def _reading(node: Node, new: Mapping[Node | None, Node | None]) -> Node:
    """The same with other inputs; of values of the same types, its own type is the same."""
    inputs = tuple(map(new.__getitem__, node.inputs))
    if inputs == node.inputs:
        return node
    for a, b in zip(inputs, node.inputs, strict=True):
        if a is not b and (a is None or b is None or a.type != b.type):
            return OPS[node.op](*inputs, name=node.name, **node.attrs)
    return Node(node.op, inputs, node.type, node.attrs, node.name, node.alias)
