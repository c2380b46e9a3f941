"""Describes where a node's operands lie in memory, as far as kernels are compiled for it. No
Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mtmd.kernels.gpu.triton_kernel import Located, fresh
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS

ALIGNED = 16  # bytes: what memory of a tensor's own begins at, and what loads are made wide by


def located_types(operands: Sequence[Node | None]) -> tuple[Type | None, ...]:
    """The types of a node's inputs, and what parts of others are parts of: a launch has its
    program compiled for addresses that are no multiples of 16, and tensors of many bytes.
    """
    return tuple(None if node is None else _located(node) for node in operands)


def _located(node: Node) -> Type:
    offset, root = 0, node
    while root.alias and root.inputs[0] is not None:
        (first, *_), attrs = root.inputs, tuple(root.attrs.items())
        assert first is not None
        if root.op in OPS and OPS[root.op].is_view:
            offset += _offset(root.op, fresh(first.type), attrs)
        root = first
    if root is node:
        return fresh(node.type)
    kind = node.type
    return Located(
        kind.shape, kind.dtype, kind.strides, offset % ALIGNED == 0, max(root.type.bytes, 1)
    )


@functools.lru_cache(maxsize=4096)
def _offset(op: str, first: Type, attrs: tuple[tuple[str, Any], ...]) -> int:
    """Bytes from where a view's operand begins to where the view does."""
    with torch.inference_mode(False), torch.no_grad():
        result = OPS[op].reference(first.meta(), **dict(attrs))
    return int(result.storage_offset()) * first.dtype.itemsize
