"""Ranks that are threads of one process, and ranks whose nodes are evaluated in turn: what several
processes compute, quickly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.ops import OPS

T = TypeVar("T")


class Meeting:
    """Where the ranks' tensors meet."""

    def __init__(self, size: int):
        self.size = size
        self.values: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadGroup:
    def __init__(self, meeting: Meeting, rank: int):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.handed: list[int] = []
        """Bytes, by collective."""

    def _all(self, x: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.values[self.rank] = x
        meeting.barrier.wait()
        result = [v for v in meeting.values if v is not None]
        meeting.barrier.wait()
        return result

    def sum(self, x: Tensor) -> Tensor:
        self.handed.append(x.nbytes)
        first, *others = self._all(x.clone())
        result = sum(others, first)
        assert isinstance(result, Tensor)
        return result

    def gather(self, x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        self.handed.append(x.nbytes)
        parts = self._all(x.clone())
        assert tuple(p.shape[axis] for p in parts) == sizes
        return torch.cat(parts, axis)


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """`work(group)` of every rank, at once; the ranks' results."""
    meeting = Meeting(size)

    def one(rank: int) -> T:
        try:
            return work(ThreadGroup(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
        if first or errors:
            raise first or errors[0]
        return [f.result() for f in futures]


class Member:
    """A rank whose collectives `lockstep` does."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def lockstep(
    graphs: Sequence[Sequence[Node]], batch: dict[str, Tensor], states: Sequence[dict[str, Tensor]]
) -> list[list[Tensor]]:
    """Every rank's outputs, by references, a node of each in turn: they have to have the same nodes
    in the same order. `states` are each rank's, written in place, zeros where there are none yet.
    """
    orders = [[n for n in toposort(*outputs) if not n.is_leaf] for outputs in graphs]
    values: list[dict[Node, Tensor]] = [{} for _ in graphs]

    def value(rank: int, node: Node) -> Tensor:
        if node not in values[rank]:
            assert node.is_leaf
            values[rank][node] = leaf(rank, node)
        return values[rank][node]

    def leaf(rank: int, node: Node) -> Tensor:
        if node.op == "weight":
            read: Tensor = node.attrs["source"].read(node.name, node.dtype)
            return read
        if node.attrs.get("state"):
            return states[rank].setdefault(node.name, torch.zeros(node.shape, dtype=node.dtype))
        given: Tensor = node.attrs["fill"](batch)
        return given

    for nodes in zip(*orders, strict=True):
        ops = {"add" if n.op == "without" else n.op for n in nodes}
        assert len(ops) == len({n.name for n in nodes}) == 1, nodes
        inputs = [
            [None if i is None else value(rank, i) for i in node.inputs]
            for rank, node in enumerate(nodes)
        ]
        firsts = [i[0] for i in inputs if i[0] is not None]
        for rank, node in enumerate(nodes):
            if node.op == "all_reduce":
                result = torch.stack(firsts).sum(0)
            elif node.op == "all_gather":
                assert tuple(p.shape[node.attrs["axis"]] for p in firsts) == node.attrs["sizes"]
                result = torch.cat(firsts, node.attrs["axis"])
            else:
                result = OPS[node.op].reference(*inputs[rank], **node.attrs)
            assert tuple(result.shape) == node.shape, node
            values[rank][node] = result
    return [[value(r, o) for o in outputs] for r, outputs in enumerate(graphs)]
