"""Layers over several devices of one process: each has a run of neighbouring layers, with what they
keep of the past, and hands the hidden state on to the next.

A node goes with the cache that it writes or reads, else with the layer that its name or its weight
has, else with the last layer of those whose values it reads. So the token table lies with the first
layer and the logits with the last.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node

LAYER = re.compile(r"(?:^|\.)blk\.(\d{1,5})\.")
ALIGNED = 16  # bytes: by what operands of launches begin at multiples of
STATE = re.compile(r"\.(\d{1,5})$")  # of a graph input that is part of a cache, such as kv.3


@dataclass(frozen=True)
class LayerSplit:
    """`devices` in the order in which they follow one another; `device_of` is the number of that
    of each layer.
    """

    devices: tuple[Backend, ...]
    device_of: tuple[int, ...]

    def homes(self, nodes: Sequence[Node]) -> Mapping[Node, Backend]:
        """The device that each node is meant for; nodes in topological order."""
        maximum = len(self.device_of) - 1
        layers = layers_of(nodes)
        return {n: self.devices[self.device_of[min(layer, maximum)]] for n, layer in layers.items()}

    @property
    def runs(self) -> tuple[range, ...]:
        """The layers of each device, in its order."""
        starts = [self.device_of.index(d) for d in range(len(self.devices))]
        return tuple(range(a, b) for a, b in pairwise((*starts, len(self.device_of))))


def layers_of(nodes: Sequence[Node]) -> dict[Node, int]:
    """The layer of each node that is no leaf; nodes in topological order."""
    return _of_the_others(nodes, _stated_layers(nodes))


def _of_the_others(nodes: Sequence[Node], stated: Mapping[Node, int]) -> dict[Node, int]:
    result: dict[Node, int] = {}
    for node in nodes:
        if not node.is_leaf:
            own = stated.get(node)
            read = (result[i] for i in node.operands if i in result)
            result[node] = max(read, default=0) if own is None else own
    return result


def _stated_layers(nodes: Sequence[Node]) -> dict[Node, int]:
    """The layer of each node that a cache, its name or its weight gives one."""
    result: dict[Node, int] = {}
    cached: dict[Node, int] = {}  # what holds keys and values, or a recurrent state
    for node in nodes:
        if node.is_leaf:
            if node.attrs.get("state") and (match := STATE.search(node.name)):
                cached[node] = int(match[1])
            continue
        past = [cached[i] for i in node.operands if i in cached]
        names = (node.name, *(i.name for i in node.operands if i.op == "weight"))
        named = [int(match[1]) for name in names if (match := LAYER.search(name))]
        if past:
            result[node] = max(past)
            if node.alias or node.op == "gather_pages":
                cached[node] = result[node]
        elif named:
            result[node] = named[0]
    return result


def first_of_each_kind(nodes: Sequence[Node]) -> set[int]:
    """Return the layers whose nodes are other ones than those of every layer before: in operations,
    in types or in attributes; where all are alike the second, too, which follows a layer. What
    comes before the first layer and behind the last is no layer's. `nodes` in topological order.
    """
    kinds: dict[int, Counter[Hashable]] = defaultdict(Counter)
    stated, inside, behind = _stated_layers(nodes), set[Node](), set[Node]()
    for node in nodes:
        if node in stated or any(i in inside for i in node.operands):
            inside.add(node)
    for node in reversed(nodes):  # who reads a node was there before
        if node in stated or node in behind:
            behind.update(node.operands)
    last = max(stated.values(), default=0)
    for node, layer in _of_the_others(nodes, stated).items():
        if node in stated or (node in inside and (node in behind or layer < last)):
            types = tuple(i and i.type for i in node.inputs)
            kinds[layer][node.op, types, _what_counts(node)] += 1
    first = {frozenset(kinds[n].items()): n for n in sorted(kinds, reverse=True)}
    return set(first.values()) if len(first) > 1 else set(sorted(kinds)[:2]) or {0}


def _what_counts(node: Node) -> Hashable:
    """Attributes of a node, as far as what is launched depends on them: of columns, as each layer
    has its own of what comes before the first, how many there are, and where in 16 bytes they begin
    (`mtmd.kernels.gpu.ahead.operand_locations`).
    """
    if node.op != "columns":
        return tuple(node.attrs.items())
    start, stop = node.attrs["start"], node.attrs["stop"]
    return stop - start, start * node.dtype.itemsize % ALIGNED


def layer_weights(nodes: Sequence[Node], count: int) -> list[int]:
    """Bytes of weights that each of `count` layers reads; one that several read counts with each,
    as it lies on each of their devices. `nodes` in topological order.
    """
    read: dict[int, dict[tuple[int, str], int]] = defaultdict(dict)
    for node, layer in layers_of(nodes).items():
        for weight in (i for i in node.operands if i.op == "weight"):
            key = id(weight.attrs["source"]), weight.name
            read[min(layer, count - 1)][key] = weight.type.bytes
    return [sum(read[layer].values()) for layer in range(count)]


def spread(
    sizes: Sequence[int], room: Sequence[float], alongside: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The device of each layer, in contiguous runs of one layer at least, so that the part of its
    `room` that the fullest device uses is as small as can be. `sizes` are bytes of each layer,
    `alongside` what each device has to hold besides.

    Raises ValueError where there are fewer layers than devices.
    """
    devices, layers, taken = len(room), len(sizes), alongside or [0] * len(room)
    if layers < devices:
        raise ValueError(f"{layers} layers for {devices} devices")
    until = [0, *accumulate(sizes)]

    def part(device: int, start: int, stop: int) -> float:
        return (taken[device] + until[stop] - until[start]) / max(room[device], 1e-9)

    # By the number of layers on the devices so far: the fullest one's part, and where each begins.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        n: (part(0, 0, n), (0,)) for n in range(1, layers - devices + 2)
    }
    for device in range(1, devices):
        best = {
            n: min(
                (max(fullest, part(device, start, n)), (*starts, start))
                for start, (fullest, starts) in best.items()
                if start < n
            )
            for n in range(device + 1, layers - devices + device + 2)
        }
    starts = best[layers][1]
    return tuple(bisect_right(starts, layer) - 1 for layer in range(layers))
