"""The pieces that vision families are made of."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtmd.kernels import ops
from mtmd.kernels.flash import AttentionForm
from mtmd.kernels.graph import Node, WeightSource, weight
from mtmd.kernels.weights.canonical import Parameter


@dataclass(frozen=True)
class VitParams:
    """A plain vision transformer: layers L, width C, FFN width F, heads H."""
    layers: int
    width: int
    ffn: int
    heads: int
    eps: float
    gelu: str  # "tanh" or "none", the exact one

    @property
    def head(self) -> int:
        return self.width // self.heads


def vit_block(x: Node, index: int, p: VitParams, weights: WeightSource, attention: AttentionForm) -> Node:
    """Pre-norm attention and MLP          x [B, P, C] -> [B, P, C]; arXiv:2010.11929"""
    at = f"v.blk.{index}"

    def linear(y: Node, part: str) -> Node:
        w, bias = (weight(f"{at}.{part}.{kind}", weights, x.dtype) for kind in ("weight", "bias"))
        return ops.matmul(y, w, bias, name=f"{at}.{part}")

    def norm(y: Node, part: str) -> Node:
        return layer_norm(y, f"{at}.{part}", p.eps, weights)

    batch, patches = x.shape[:2]
    y = norm(x, "ln1")
    q, k, v = (ops.reshape(linear(y, part), shape=(batch, patches, p.heads, p.head), name=f"{at}.{part}.heads")
               for part in ("attn_q", "attn_k", "attn_v"))
    mixed = attention(q, k, v, scale=p.head ** -0.5, name=f"{at}.attn")
    mixed = ops.reshape(mixed, shape=(batch, patches, p.width), name=f"{at}.attn.flat")
    x = ops.add(linear(mixed, "attn_out"), x, name=f"{at}.attn_residual")
    y = ops.gelu(linear(norm(x, "ln2"), "ffn_up"), approximate=p.gelu, name=f"{at}.ffn_gelu")
    return ops.add(linear(y, "ffn_down"), x, name=f"{at}.ffn_residual")


def layer_norm(x: Node, name: str, eps: float, weights: WeightSource) -> Node:
    return ops.layer_norm(x, weight(f"{name}.weight", weights, x.dtype), weight(f"{name}.bias", weights, x.dtype), eps=eps, name=name)


def vit_parameters(p: VitParams, source: Callable[[str], tuple[str, ...]]) -> dict[str, Parameter]:
    """The blocks' parameters; `source("encoder.layers.0.mlp.fc1.weight")` lists the names it may have in a checkpoint."""
    names = {"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    shapes = {"ln1": (p.width,), "ln2": (p.width,), "ffn_up": (p.ffn, p.width), "ffn_down": (p.width, p.ffn)}
    found: dict[str, Parameter] = {}
    for index in range(p.layers):
        for part, name in names.items():
            shape = shapes.get(part, (p.width, p.width))
            found[f"v.blk.{index}.{part}.weight"] = Parameter(shape, source(f"encoder.layers.{index}.{name}.weight"))
            found[f"v.blk.{index}.{part}.bias"] = Parameter(shape[:1], source(f"encoder.layers.{index}.{name}.bias"))
    return found

