"""The op set. Importing this registers every op in `OPS`."""
from mtmd.kernels.ops.attention import attention, attn_mix, attn_scores, attn_softmax
from mtmd.kernels.ops.elementwise import add, gelu, gelu_mul, softcap
from mtmd.kernels.ops.gather import embed, kv_store, place_rows, take_rows
from mtmd.kernels.ops.image import patch_embed, pool2d
from mtmd.kernels.ops.matmul import matmul
from mtmd.kernels.ops.norm import layer_norm, rms_norm
from mtmd.kernels.ops.op import OPS, Op
from mtmd.kernels.ops.rope import rope
from mtmd.kernels.ops.view import kv_half, reshape

__all__ = [
    "OPS", "Op", "add", "attention", "attn_mix", "attn_scores", "attn_softmax", "embed", "gelu", "gelu_mul", "kv_half", "kv_store",
    "layer_norm", "matmul", "patch_embed", "place_rows", "pool2d", "reshape", "rms_norm", "rope", "softcap", "take_rows",
]
