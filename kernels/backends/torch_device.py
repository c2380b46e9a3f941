"""A device that torch knows and that has no kernels here: Apple's GPUs (mps), Intel's (xpu), and
NVIDIA's and AMD's (cuda) where Triton is not installed, as on Windows. Every op by its reference,
attention by torch's own.

Which operators such a device has, and whether it computes them rightly, differs between versions of
torch and of its system. So it is asked: each op, on operands of the types at hand, against the
reference on the CPU. What it refuses or gets wrong is rejected with its own words, and runs on the
CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.base.errors import DeviceError
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.cuda_device import queue_bytes, target_of
from mtmd.kernels.backends.cuda_graphs import wait_for_device
from mtmd.kernels.backends.operands import fewer_rows, operands, smaller
from mtmd.kernels.backends.reference import lower_reference, reference_workspace
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.attention import visible
from mtmd.kernels.ops.gather import as_numbers

REQUESTED_BYTES = (
    64 << 20
)  # of an op's operands; with larger ones, such as experts, it is not tried
MAX_KNOWN = 4096
QUANTIZED = 1e-2  # NMSE of rows of a cache: a rounding before may make a code the next one
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}  # NMSE, see `_distance`


class TorchDevice:
    """`name`: mps, xpu:N or cuda:N. `device`: where it is, if not there. `lacks`: what kernels
    would need, and is not installed, and how to have it.
    """

    fuses = native = blocks = side_streams = records = large_batches = False
    recorder = None

    def __init__(self, name: str, device: torch.device | None = None, lacks: str | None = None):
        self.name = self.space = name
        self.lacks = lacks
        self.device = device or torch.device(name)
        self._known: dict[Any, str | None] = {}
        self.untried: dict[str, int] = {}
        """Ops that were taken without being tried, with the bytes of the largest operands."""

    def rejects(self, node: Node) -> str | None:
        if OPS[node.op].is_view or "group" in node.attrs:
            return None  # a collective cannot be tried by one rank alone
        key = node.op, types_of(node), tuple(node.attrs.items())
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:  # pictures of ever new sizes
                self._known.clear()
            with suppress(_NoRoomError):
                self._known[key] = self._ask(*key)
        return self._known.get(key)

    def lower(self, node: Node, in_place: bool = False) -> Run:
        if _by_torch(node.op, node.attrs):
            return functools.partial(attention, **node.attrs)
        return lower_reference(node, in_place)

    def workspace(self, node: Node, exact: bool = True) -> int:
        return reference_workspace(node, exact)

    @property
    def queue_bytes(self) -> int:
        return queue_bytes(target_of(self.device)) if self.device.type == "cuda" else 0

    def side_stream(self, use: str) -> SideStream | None:  # noqa: ARG002
        return None

    def synchronize(self) -> None:
        if self.device.type == "mps":
            torch.mps.synchronize()
        elif self.device.type == "xpu":
            torch.xpu.synchronize(self.device)
        elif self.device.type == "cuda":
            wait_for_device(self.device)

    def _ask(
        self, op: str, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...]
    ) -> str | None:
        """None where the device runs the op and the result is right, and where operands are too
        large for it to be tried. Raises _NoRoomError.
        """
        options = dict(attrs)
        named = smaller(op, dict(zip(OPS[op].operands, types, strict=False)), options)
        if _bytes(named) > REQUESTED_BYTES:
            named = fewer_rows(op, named)
        if (size := _bytes(named)) > REQUESTED_BYTES:
            self.untried[op] = max(size, self.untried.get(op, 0))
            return None
        run: Run = attention if _by_torch(op, options) else OPS[op].reference
        inputs = operands(op, named, options)
        with torch.inference_mode():
            exact = [i if i is None or not i.is_floating_point() else i.float() for i in inputs]
            expected = OPS[op].reference(*(i if i is None else i.clone() for i in exact), **options)
            try:
                theirs = (i if i is None else i.to(self.device, copy=True) for i in inputs)
                actual = run(*theirs, **options).cpu()
            except (RuntimeError, TypeError) as error:  # NotImplementedError among them
                words = " ".join(str(error).split())
                if isinstance(error, torch.AcceleratorError) and self.name.startswith("cuda"):
                    # Nothing runs on it any more
                    raise DeviceError(
                        f"{self.name} has failed while {op} was tried ({words:.200}); start the "
                        "process again with --device cpu"
                    ) from error
                if "out of memory" in words:
                    raise _NoRoomError from error
                return f"torch on {self.name}: {words:.200}"
        limit = QUANTIZED if actual.dtype == torch.uint8 else LIMITS.get(actual.dtype, 0.0)
        distance = _distance(*(as_numbers(op, t, inputs, options) for t in (actual, expected)))
        if distance <= limit:
            return None
        return (
            f"torch on {self.name} gives a wrong result in {name_of(actual.dtype)}: NMSE "
            f"{distance:.1e} from the reference, expected at most {limit:.0e}"
        )


def _bytes(named: Mapping[str, Type | None]) -> int:
    return sum(kind.bytes for kind in named.values() if kind is not None)


class _NoRoomError(Exception):
    """There is no memory to try an op with, now."""


def _by_torch(op: str, options: Mapping[str, Any]) -> bool:
    return op == "attention" and options.get("softcap") is None


def _distance(result: Tensor, expected: Tensor) -> float:
    """NMSE, of the numbers that the reference has."""
    there = expected.isfinite()
    ours, theirs = result.double()[there], expected.double()[there]
    if bool(ours.isnan().any()):
        return float("inf")
    power = float(theirs.square().sum())
    separate = float((ours - theirs).square().sum())
    return separate / power if power else separate


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: None = None,  # noqa: ARG001 - of the op; torch's has none
    mask_capped: bool = False,  # noqa: ARG001 - which differs under a cap only
) -> Tensor:
    """The op by torch's scaled_dot_product_attention."""
    seen = visible(q.shape[1], k.shape[1], bounds, causal, window, q.device)
    added = seen
    if mask is not None:
        added = mask.to(q.dtype)
        added = added.view(*(1,) * (4 - added.ndim), *added.shape)
        if seen is not None:
            added = added.masked_fill(~seen, -torch.inf)
    result = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=added,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    if added is not None:  # rows that see nothing give zeros
        some = added if added.dtype == torch.bool else added != -torch.inf
        result = result.masked_fill(~some.any(-1, keepdim=True), 0)
    return result.transpose(1, 2).contiguous()
