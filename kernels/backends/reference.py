"""Every op, on any torch device, by its reference function. What it computes is what the op
means.
"""

from __future__ import annotations

import functools
import weakref
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.cuda_graphs import wait_for_device
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.op import CALLS_SAVED
from mtmd.kernels.quantization.kv_rows import BLOCK, CACHE_TYPES, blocks_of

# Times what a node reads and makes: no op's own tensors take more than half of that
# (tests/kernels/plan/test_free_memory.py).
ROUGH = 8


class Reference:
    fuses = native = side_streams = records = large_batches = False
    blocks = True
    recorder, queue_bytes = None, 0

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = torch.device(device)
        self.name = "reference"
        self.space = str(self.device)

    def rejects(self, node: Node) -> str | None:  # noqa: ARG002
        return None

    def lower(self, node: Node, in_place: bool = False) -> Run:
        return lower_reference(node, in_place)

    def workspace(self, node: Node, exact: bool = True) -> int:
        return reference_workspace(node, exact)

    def side_stream(self, use: str) -> SideStream | None:  # noqa: ARG002
        return None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            wait_for_device(self.device)


def lower_reference(node: Node, in_place: bool = False) -> Run:
    """The op's own function, or its overwriting form."""
    op = OPS[node.op]
    function = op.in_place if in_place else op.reference
    assert function is not None
    return functools.partial(function, **node.attrs) if node.attrs else function


def reference_workspace(node: Node, exact: bool = True) -> int:
    """Peak bytes of the tensors the reference makes on the way, its result not counted; found by
    running it on meta tensors, unless the op counts them itself. Not `exact`: a bound in place of
    that run, for which torch loads its compiler.
    """
    count = OPS[node.op].workspace
    if count is not None:
        return count(node)
    if not exact:
        return ROUGH * plain_bytes(node)
    return _workspace(
        node.op,
        tuple(i and i.type for i in node.inputs),
        tuple(node.attrs.items()),
        0 if node.alias else node.type.bytes,
    )


def plain_bytes(node: Node) -> int:
    """Bytes of a node's operands and result, and of the heads that it reads from a quantized cache
    or writes there, filled up to whole blocks, as codes and as numbers of 32 bits: what is stored
    is a quarter of either or less, and of a short head nearly all is filling. The matrix they are
    rotated by is made by whoever comes first.
    """
    size = node.type.bytes + sum(i.type.bytes for i in node.operands)
    if node.attrs.get("quant") in CACHE_TYPES:
        written = node.inputs[1] if OPS[node.op].writes_first else None
        heads = written.type if written is not None else node.type
        filled = BLOCK * blocks_of(heads.shape[-1]) * prod(heads.shape[:-1])
        size += 4 * (2 * filled + BLOCK**2)
    return size


@functools.lru_cache(maxsize=CALLS_SAVED)
def _workspace(
    op: str, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...], result_bytes: int
) -> int:
    with torch.inference_mode(False), torch.no_grad():
        values = [t and t.meta() for t in types]
        seen = _Allocations()
        with seen:
            result = OPS[op].reference(*values, **dict(attrs))
    del result
    peak: int = seen.peak
    return max(0, peak - result_bytes)


class _Allocations(TorchDispatchMode):
    """Counts live bytes of the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given and key not in self._users:
                continue  # a view of something made outside
            if key not in self._users:
                self._users[key] = 0
                self.live += size
                self.peak = max(self.peak, self.live)
            self._users[key] += 1
            weakref.finalize(tensor, self._release, key, size)
        return result

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.live -= size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []
