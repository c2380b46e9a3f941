"""Watching the nodes of a run: dumps and comparisons see and number them alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from mtmd.kernels.graph import Node
from mtmd.kernels.plan.executor import Observer

Key: TypeAlias = "tuple[str, str, int]"
See: TypeAlias = Callable[[Key, Node, Tensor], None]


class Occurrences:
    """Batches repeat names: a node is known by its graph, its name, and how many of that name came
    before in the run.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def key(self, graph: str, name: str) -> Key:
        occurrence = self._counts[graph, name]
        self._counts[graph, name] += 1
        return graph, name, occurrence


def observer(graph: str, see: See) -> Observer:
    """Shows `see` every node of one graph's run."""
    occurrences = Occurrences()

    def observe(node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:  # noqa: ARG001
        see(occurrences.key(graph, node.name), node, value)

    return observe
