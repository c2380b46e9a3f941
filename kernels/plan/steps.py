"""Parts of a plan: steps, splits of one backend, and how much of them is machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reports have `NativeFacts`, and load without torch
    from mtmd.kernels.backends.backend import Backend
    from mtmd.kernels.graph import Node

SLOWEST = 1e9  # FLOP/s: a node or a program that takes longer hangs
LONG_S = 10.0  # nodes that may take longer at this rate say so
STORES = ("kv_store", "state_store")  # ops of steps that decode or read prompts


@dataclass(frozen=True)
class Step:
    """One node in the order of the run. `inputs` are the node's, with copies put in; `frees` have
    no use after it.
    """

    node: Node
    backend: Backend
    inputs: tuple[Node | None, ...]
    in_place: bool
    frees: tuple[Node, ...]


@dataclass(frozen=True)
class Split:
    """A run of steps on one backend, led by the copies it needs."""

    backend: Backend
    copies: tuple[Node, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class NativeFacts:
    """Share of a graph that runs as programs of machine code on the CPU: `nodes` of all, in so many
    `programs`; `refused` are (op, reason, count) of the others.
    """

    nodes: int
    programs: int
    instructions: int
    threads: int
    refused: tuple[tuple[str, str, int], ...]
