"""The op set. Importing this registers every op in `OPS`."""

from mtmd.kernels.ops.attention import (
    attention,
    attn_mix,
    attn_scores,
    attn_softmax,
    paged_attention,
)
from mtmd.kernels.ops.collective import all_gather, all_reduce, embed_part, part, without
from mtmd.kernels.ops.elementwise import (
    add,
    cast,
    clamp,
    gelu,
    gelu_mul,
    mul,
    relu,
    scale,
    sigmoid,
    silu,
    silu_mul,
    softcap,
    softplus,
)
from mtmd.kernels.ops.gather import (
    add_rows,
    concat,
    embed,
    gather_pages,
    kv_store,
    place_rows,
    prepend,
    take_rows,
)
from mtmd.kernels.ops.image import patch_embed, pool2d, resize2d, unshuffle
from mtmd.kernels.ops.matmul import matmul, matmul_gated, matmul_gelu
from mtmd.kernels.ops.moe import moe
from mtmd.kernels.ops.norm import add_layer_norm, add_norm, l2_norm, layer_norm, rms_norm
from mtmd.kernels.ops.op import OPS, Op
from mtmd.kernels.ops.recurrent import gated_delta, short_conv, state_store
from mtmd.kernels.ops.rope import rope, rope_store, rope_table
from mtmd.kernels.ops.view import columns, half, kv_half, reshape, rows

__all__ = [
    "OPS",
    "Op",
    "add",
    "add_layer_norm",
    "add_norm",
    "add_rows",
    "all_gather",
    "all_reduce",
    "attention",
    "attn_mix",
    "attn_scores",
    "attn_softmax",
    "cast",
    "clamp",
    "columns",
    "concat",
    "embed",
    "embed_part",
    "gated_delta",
    "gather_pages",
    "gelu",
    "gelu_mul",
    "half",
    "kv_half",
    "kv_store",
    "l2_norm",
    "layer_norm",
    "matmul",
    "matmul_gated",
    "matmul_gelu",
    "moe",
    "mul",
    "paged_attention",
    "part",
    "patch_embed",
    "place_rows",
    "pool2d",
    "prepend",
    "relu",
    "reshape",
    "resize2d",
    "rms_norm",
    "rope",
    "rope_store",
    "rope_table",
    "rows",
    "scale",
    "short_conv",
    "sigmoid",
    "silu",
    "silu_mul",
    "softcap",
    "softplus",
    "state_store",
    "take_rows",
    "unshuffle",
    "without",
]
