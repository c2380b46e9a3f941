"""The Triton kernels: which file runs which op. This and that file are all that a kernel touches.

Triton is imported when a node asks for a kernel, and not before: it takes a second, and a machine
without it gets a reason in place of an ImportError. So a line says what has to be known without
it; the rest is the file's `KERNEL`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from mtmd.kernels.gpu.triton_kernel import TritonKernel
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.kernel import types_of

REFUSALS_SAVED = (
    4096  # a node is asked about when rules replace it, when it is placed, and compiled
)


@dataclass(frozen=True)
class Entry:
    """name: what reports call the kernel. module: the file in this folder that has its `KERNEL`,
    or, where it has several, the one that `constant` names.
    applies: the nodes of the op that it is for. optional: torch's own kernels run what it rejects;
    else the node is refused, as the op's reference would take memory or time that nobody expects
    (all scores of an attention, a launch for each token).
    """

    name: str
    module: str
    applies: Callable[[Node], bool] = lambda node: True  # noqa: ARG005
    optional: bool = False
    constant: str = "KERNEL"

    @cache  # noqa: B019 - entries are as many as stand here; a plan asks for them a thousand times
    def load(self) -> TritonKernel:
        """Imports Triton."""
        module = import_module(f"mtmd.kernels.gpu.{self.module}")
        kernel: TritonKernel = getattr(module, self.constant)
        return kernel


def has_quantized_weight(node: Node) -> bool:
    return node.attrs.get("quant") is not None


def is_quick(node: Node) -> bool:
    """GELU in the form that torch has no kernel for, and takes three: the others are one launch."""
    return bool(node.attrs["approximate"] == "quick")


# By op, in order of preference: the first that applies and does not reject runs the node.
KERNELS: dict[str, tuple[Entry, ...]] = {
    "add_layer_norm": (Entry("sum and layer norm", "norms.add_layer_norm"),),
    "add_norm": (Entry("residual and norm", "norms.add_norm"),),
    "altup": (Entry("alternating updates", "altup"),),
    "attention": (Entry("attention", "flash_attention.kernel"),),
    "conv2d": (Entry("convolution", "conv2d", optional=True),),
    "delta_gates": (Entry("delta gates", "delta_gates"),),
    "embed": (Entry("quantized rows", "embed", applies=has_quantized_weight, optional=True),),
    "laurel": (Entry("residuals and norm", "norms.laurel"),),
    "linear_attention": (Entry("linear attention", "linear_attention"),),
    "gated_norm": (Entry("gated norm", "norms.gated_norm"),),
    "gaussian_topk": (Entry("largest values", "norms.largest", optional=True),),
    "gelu": (Entry("GELU", "gated", applies=is_quick, optional=True, constant="GELU_KERNEL"),),
    "gelu_mul": (Entry("GELU gate", "gated", optional=True, constant="GELU_MUL"),),
    "kv_store": (Entry("kv store", "rotary.kv_store", optional=True, constant="KV_STORE"),),
    "l2_norm": (Entry("L2 norm", "norms.rms_norm", optional=True, constant="L2_NORM"),),
    "match_magnitude": (Entry("rows of a size", "norms.match_magnitude", optional=True),),
    "matmul": (Entry("quantized matmul", "quant_matmul.kernel", applies=has_quantized_weight),),
    "matmul_gated": (
        Entry(
            "quantized gate",
            "quant_matmul.kernel",
            applies=has_quantized_weight,
            constant="GATED_KERNEL",
        ),
    ),
    "matmul_gelu": (
        Entry(
            "quantized GELU",
            "quant_matmul.kernel",
            applies=has_quantized_weight,
            constant="GELU_KERNEL",
        ),
    ),
    "moe": (Entry("experts", "moe.kernel"),),
    "paged_attention": (Entry("paged attention", "paged_attention.kernel"),),
    "rms_norm": (Entry("RMS norm", "norms.rms_norm", optional=True),),
    "rope": (Entry("rope", "rotary.rope", optional=True),),
    "rope_columns": (Entry("rope of columns", "rotary.rope", constant="ROPE_COLUMNS"),),
    "rope_store": (Entry("rope and kv store", "rotary.kv_store", constant="ROPE_STORE"),),
    "short_conv": (Entry("short convolution", "short_conv"),),
    "sigmoid_gate": (Entry("sigmoid gate", "sigmoid_gate", optional=True),),
    "silu_mul": (Entry("SwiGLU gate", "gated", optional=True, constant="SILU_MUL"),),
}


class Choice(NamedTuple):
    """Describes which kernel runs a node. Without one, and without a reason, torch's own run it."""

    name: str = ""
    kernel: TritonKernel | None = None
    reason: str | None = None


@lru_cache(maxsize=REFUSALS_SAVED)
def _refusal(
    entry: Entry, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...]
) -> str | None:
    return entry.load().rejects(*types, **dict(attrs))


def choose(node: Node, lacks: Callable[[str], str | None]) -> Choice:
    """The first kernel in the table that takes the node. `lacks(name)`: what a kernel of that name
    would need, and the device does not have; it is asked before Triton is imported.
    """
    reason = None
    for entry in KERNELS.get(node.op, ()):
        if not entry.applies(node):
            continue
        refusal = lacks(entry.name) or _refusal(entry, types_of(node), tuple(node.attrs.items()))
        if refusal is None:
            return Choice(entry.name, entry.load())
        if not entry.optional:
            reason = reason or refusal
    return Choice(reason=reason)
