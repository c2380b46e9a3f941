"""The CPU kernels: which file runs which op. This and that file are all that a kernel touches."""

from __future__ import annotations

from mtmd.kernels.cpu import (
    activation,
    attention,
    by_rows,
    conv2d,
    gather_pages,
    kv_store,
    linear_attention,
    matmul,
    moe,
    native_rows,
    quant_matmul,
    short_conv,
    tiled_attention,
    tiled_matmul,
)
from mtmd.kernels.graph import Node
from mtmd.kernels.kernel import Kernel, types_of

# By op, in order of preference: the first that does not reject runs the node; without one, the op's
# reference does.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "add": (native_rows.ADD,),
    "attention": (tiled_attention.KERNEL, attention.KERNEL),
    "conv2d": (conv2d.KERNEL,),
    "linear_attention": (linear_attention.KERNEL,),
    "gelu": (activation.GELU,),
    "gelu_mul": (activation.GELU_MUL,),
    "gather_pages": (gather_pages.KERNEL, gather_pages.DEQUANTIZED),
    "kv_store": (kv_store.KERNEL,),
    "layer_norm": (by_rows.LAYER_NORM,),
    "matmul": (quant_matmul.KERNEL, tiled_matmul.KERNEL, matmul.KERNEL),
    "moe": (moe.KERNEL,),
    "patch_embed": (by_rows.PATCH_EMBED,),
    "pool2d": (by_rows.POOL,),
    "rms_norm": (native_rows.RMS_NORM,),
    "rope": (native_rows.ROPE,),
    "silu": (activation.SILU,),
    "silu_mul": (activation.SILU_MUL,),
    "short_conv": (short_conv.KERNEL,),
}


def choose(node: Node) -> Kernel | None:
    """The first kernel in the table that takes the node."""
    types = types_of(node)
    return next(
        (k for k in KERNELS.get(node.op, ()) if k.rejects(*types, **node.attrs) is None), None
    )
