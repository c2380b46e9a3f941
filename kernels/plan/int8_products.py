"""Products of many rows whose activations may be rounded to 8 bits, marked in a graph: those of a
decoder that were asked for, on a CPU where that is faster (`kernels/cpu/tiled/octets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mtmd.base.errors import OptionError
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.cpu.native.compile import host
from mtmd.kernels.cpu.tiled import octets
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.cpu.tiled.many_rows import TYPES, form_of
from mtmd.kernels.graph import Node, toposort

NOT_HERE = "activations int8: found {actual}, expected {expected}; leave the option out"


def check_device(backends: Sequence[Backend], dtype: torch.dtype) -> None:
    """Raises OptionError where no product would be faster; `dtype` is what is computed in."""
    if (device := backends[0]).space != "cpu":
        raise OptionError(NOT_HERE.format(actual=f"the device {device.name}", expected="a CPU"))
    if reason := octets.why_not(host_form(TYPES[dtype]), host()):
        expected = "one with AVX2 or AVX-512 BW, and without AMX"
        raise OptionError(NOT_HERE.format(actual=f"this CPU, but {reason}", expected=expected))


def check_weights(outputs: Sequence[Node]) -> None:
    """Raises OptionError where no product but the last has a weight of small integers."""
    last = _last(outputs)
    products = [n for n in toposort(*outputs) if n.op == "matmul" and n not in last]
    kinds = sorted({str(node.attrs.get("quant") or "plain numbers") for node in products})
    if octets.CENTERS.keys() & kinds:
        return
    raise OptionError(
        f"activations int8: found weights in {', '.join(kinds)}, expected some in "
        f"{', '.join(octets.CENTERS)}; load with --weights Q4_K_M, or leave the option out"
    )


def marked(outputs: Sequence[Node]) -> list[Node]:
    """The graph with `int8` set on every product of which that is faster, but the last of all,
    whose results are logits.
    """
    nodes, made = toposort(*outputs), dict[Node, Node]()
    last = _last(outputs)
    for node in nodes:
        inputs = tuple(i and made[i] for i in node.inputs)
        changed = replace(node, inputs=inputs) if inputs != node.inputs else node
        x = node.inputs[0] if node.inputs else None
        if node.op == "matmul" and node not in last and x is not None and x.dtype in TYPES:
            quant = node.attrs.get("quant")
            if quant and _rounded_in(quant, TYPES[x.dtype]):
                changed = replace(changed, attrs={**changed.attrs, "int8": True})
        made[node] = changed
    return [made[node] for node in outputs]


def count(outputs: Sequence[Node]) -> int:
    """Return how many products are marked."""
    return sum(1 for node in toposort(*outputs) if node.attrs.get("int8"))


def count_as_fast(outputs: Sequence[Node]) -> int:
    """Return how many products are not marked because this CPU multiplies their weights as fast
    with activations in 16 bits: those of 8 bits where it adds no four products at a time.
    """
    last = _last(outputs)
    return sum(
        1
        for node in toposort(*outputs)
        if node.op == "matmul"
        and node not in last
        and node.attrs.get("quant") in octets.CENTERS
        and not node.attrs.get("int8")
    )


def _rounded_in(kind: str, x: str) -> bool:
    return form_of(kind, x, int8=True)[0] == "octets"


def _last(outputs: Sequence[Node]) -> set[Node]:
    """The products behind which no other stands."""
    result, seen, waiting = set[Node](), set[Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "matmul":
            result.add(node)
        else:
            waiting += node.operands
    return result
