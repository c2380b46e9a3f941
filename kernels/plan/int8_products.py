"""Products of many rows whose activations may be rounded to 8 bits, marked in a graph where a user
asked for it, on a CPU where that is faster (`kernels/cpu/tiled/octets.py`); and the plain weights
of towers that are quantized for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mtmd.base.errors import OptionError
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.cpu.native.compile import compiler, host
from mtmd.kernels.cpu.tiled import octets
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.cpu.tiled.many_rows import TYPES, form_of
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.quantization.blocks import BLOCKS, shown

TOWER = "Q8_0"  # of weights that are quantized here
# Embeddings bear it; the next token's divergence from fp32 is nine times that of Q8_0 alone
TOWER_BITS = octets.FEWER
WORTH = 64  # numbers of a row for each that fills it up to whole blocks
NOT_HERE = "activations int8: found {actual}, expected {expected}; leave the option out"


def check_device(backends: Sequence[Backend], dtype: torch.dtype) -> None:
    """Raises OptionError where no product would be faster; `dtype` is what is computed in."""
    if (device := backends[0]).space != "cpu":
        raise OptionError(NOT_HERE.format(actual=f"the device {device.name}", expected="a CPU"))
    if reason := octets.why_not(host_form(TYPES[dtype]), host()):
        expected = "one with AVX2 or AVX-512 BW, and without AMX"
        raise OptionError(NOT_HERE.format(actual=f"this CPU, but {reason}", expected=expected))


def check_weights(outputs: Sequence[Node]) -> None:
    """Raises OptionError where no product of these graphs but the last has a weight of small
    integers.
    """
    last = _last(outputs)
    products = [n for n in toposort(*outputs) if n.op == "matmul" and n not in last]
    kinds = sorted({shown(node.attrs.get("quant") or "plain numbers") for node in products})
    if octets.CENTERS.keys() & kinds:
        return
    raise OptionError(
        f"activations int8: found weights in {', '.join(kinds)}, expected some in "
        f"{', '.join(octets.CENTERS)}; load with --weights Q4_K_M, or leave the option out"
    )


def weights_to_quantize(outputs: Sequence[Node]) -> dict[str, str]:
    """Return the plain weights [N, K] of a tower that its products would be faster with in blocks,
    and the type of those. What anything else reads, and what the first and the last products read,
    stays as it is: pixels and embeddings.
    """
    nodes, last = toposort(*outputs), _last(outputs)
    behind, chosen, others = set[Node](), dict[str, Node](), set[str]()
    for node in nodes:
        weights = [n for n in node.operands if n.op == "weight"]
        for one in weights:
            x, w = (*node.inputs, None)[:2]
            if node.op == "matmul" and w is one and x in behind and node not in last:
                chosen[one.name] = one
            else:
                others.add(one.name)
        if behind.intersection(node.operands) or any(len(w.shape) > 1 for w in weights):
            behind.add(node)  # the first product, or what is made of it
    values = BLOCKS[TOWER].values
    return {
        name: TOWER
        for name, node in chosen.items()
        if name not in others
        and node.dtype in TYPES
        and len(node.shape) == 2
        and -node.shape[1] % values * WORTH <= node.shape[1]
    }


def marked(outputs: Sequence[Node], bits: int = octets.EXACT) -> list[Node]:
    """The graph with `int8` set on every product of which that is faster, but the last of all,
    whose results are logits or embeddings. `bits`: as few as activations may be rounded to.
    """
    nodes, made = toposort(*outputs), dict[Node, Node]()
    last = _last(outputs)
    for node in nodes:
        inputs = tuple(i and made[i] for i in node.inputs)
        changed = replace(node, inputs=inputs) if inputs != node.inputs else node
        x = node.inputs[0] if node.inputs else None
        if node.op == "matmul" and node not in last and x is not None and x.dtype in TYPES:
            quant = node.attrs.get("quant")
            if quant and _rounds(quant, TYPES[x.dtype], bits):
                changed = replace(changed, attrs={**changed.attrs, "int8": True})
        made[node] = changed
    return [made[node] for node in outputs]


def count(outputs: Sequence[Node]) -> int:
    """Return how many products are marked."""
    return sum(1 for node in toposort(*outputs) if node.attrs.get("int8"))


def would_round(backends: Sequence[Backend], dtype: torch.dtype, outputs: Sequence[Node]) -> int:
    """Return how many products of a graph `marked` would mark, 0 where `check_device` raises."""
    if backends[0].space != "cpu" or dtype not in TYPES:
        return 0
    if octets.why_not(host_form(TYPES[dtype]), host()):
        return 0
    return count(marked(outputs))


def count_in_7_bits(outputs: Sequence[Node]) -> int:
    """Return how many of them round to 7 bits: where weights have 8, and the CPU does not add four
    products at a time.
    """
    return sum(
        1
        for node in toposort(*outputs)
        if node.attrs.get("int8") and _bits(node.attrs["quant"]) == octets.FEWER
    )


def count_in_16_bits(outputs: Sequence[Node]) -> int:
    """Return how many products are not marked because they would round to 7 bits."""
    last = _last(outputs)
    return sum(
        1
        for node in toposort(*outputs)
        if node.op == "matmul"
        and node not in last
        and node.attrs.get("quant") in octets.CENTERS
        and not node.attrs.get("int8")
    )


def _rounds(kind: str, x: str, bits: int) -> bool:
    return form_of(kind, x, int8=True)[0] == "octets" and _bits(kind) >= bits


def _bits(kind: str) -> int:
    return octets.bits_of(kind, compiler().cpu.has)


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
