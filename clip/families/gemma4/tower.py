"""A vision transformer with norms before and after its layers, normed queries, keys and values, a
gated FFN, and positions on two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import AXIAL, attend, split_heads
from mtmd.clip.clipped_linear import clipped_linear, linear_parameters
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm


@dataclass(frozen=True)
class GatedTower:
    """Layers L, width C, FFN width F, heads H of size K that share G keys. `clipped`: what goes
    into a linear layer and what comes out stays within limits that the checkpoint holds. `rotary`
    turns half of a head by the first position, half by the second.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    eps: float
    clipped: bool
    rotary: Rotary

    def parameters(self, source: Callable[[str], tuple[str, ...]]) -> Mapping[str, Parameter]:
        """`source("encoder.layers.0.input_layernorm.weight")` lists the names it may have in a
        checkpoint.
        """
        width, q, kv = self.width, self.heads * self.head, self.groups * self.head
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "ln1": ("input_layernorm", (width,)),
            "attn_post_norm": ("post_attention_layernorm", (width,)),
            "ln2": ("pre_feedforward_layernorm", (width,)),
            "ffn_post_norm": ("post_feedforward_layernorm", (width,)),
            "attn_q_norm": ("self_attn.q_norm", (self.head,)),
            "attn_k_norm": ("self_attn.k_norm", (self.head,)),
            "attn_q": ("self_attn.q_proj", (q, width)),
            "attn_k": ("self_attn.k_proj", (kv, width)),
            "attn_v": ("self_attn.v_proj", (kv, width)),
            "attn_out": ("self_attn.o_proj", (width, q)),
            "ffn_gate": ("mlp.gate_proj", (self.ffn, width)),
            "ffn_up": ("mlp.up_proj", (self.ffn, width)),
            "ffn_down": ("mlp.down_proj", (width, self.ffn)),
        }
        parameters: dict[str, Parameter] = {}
        for layer in range(self.layers):
            for part, (name, shape) in tensors.items():
                at, theirs, linear = (
                    f"v.blk.{layer}.{part}",
                    f"encoder.layers.{layer}.{name}",
                    len(shape) == 2,
                )
                if linear:
                    parameters |= linear_parameters(
                        at, shape, source(f"{theirs}.linear"), clipped=self.clipped
                    )
                else:
                    parameters[f"{at}.weight"] = Parameter(shape, source(f"{theirs}.weight"))
        return parameters

    def block(
        self,
        x: Node,
        layer: int,
        angles: Node,
        w: Weights,
        *,
        attention: AttentionForm,
        bounds: Node | None = None,
    ) -> Node:
        """x [B, P, C], angles [P, 2, K / 2] -> [B, P, C]"""
        at = f"v.blk.{layer}"
        y = w.rms_norm(x, f"{at}.ln1", self.eps)
        q, k, v = (
            split_heads(self._linear(y, f"{at}.{part}", w), count, f"{at}.{part}")
            for part, count in (
                ("attn_q", self.heads),
                ("attn_k", self.groups),
                ("attn_v", self.groups),
            )
        )
        q, k = (
            ops.rope(
                w.rms_norm(y, f"{at}.{part}_norm", self.eps),
                angles,
                parts=2,
                name=f"{at}.{part}.rope",
            )
            for y, part in ((q, "attn_q"), (k, "attn_k"))
        )
        v = ops.rms_norm(v, eps=self.eps, name=f"{at}.attn_v_norm")
        y = attend(q, k, v, attention, at=at, bounds=bounds, scale=1.0)
        y = self._linear(y, f"{at}.attn_out", w)
        x = ops.add(w.rms_norm(y, f"{at}.attn_post_norm", self.eps), x, name=f"{at}.attn_residual")
        y = w.rms_norm(x, f"{at}.ln2", self.eps)
        gate, up = (self._linear(y, f"{at}.ffn_{part}", w) for part in ("gate", "up"))
        y = self._linear(
            ops.gelu_mul(gate, up, approximate="tanh", name=f"{at}.ffn_gated"), f"{at}.ffn_down", w
        )
        return ops.add(w.rms_norm(y, f"{at}.ffn_post_norm", self.eps), x, name=f"{at}.ffn_residual")

    def _linear(self, x: Node, at: str, w: Weights) -> Node:
        return clipped_linear(x, at, w) if self.clipped else w.linear(x, at)


def read_gated_tower(c: Settings) -> GatedTower:
    """Read it from a vision_config. Raises ModelError where a value cannot be followed."""
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    heads, groups = (
        c.count(f"num_{kind}_heads", 12, maximum=MAX_HEADS) for kind in ("attention", "key_value")
    )
    width, head = (
        c.count("hidden_size", 768, maximum=MAX_WIDTH),
        c.count("head_dim", 64, maximum=MAX_HEADS),
    )
    if heads % groups or head % 4:
        raise ModelError(
            f"{c.where}: {heads} heads of size {head} in {groups} groups; expected groups that "
            "divide the heads, "
            "a head size that is a multiple of 4"
        )
    rope = c.part("rope_parameters")
    rope.choice("rope_type", AXIAL, "axial")
    half = rotary(rope.number("rope_theta", 100.0), head // 2).frequencies
    return GatedTower(
        layers=c.count("num_hidden_layers", 16, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 3072, maximum=MAX_WIDTH),
        heads=heads,
        groups=groups,
        head=head,
        eps=c.number("rms_norm_eps", 1e-6),
        clipped=c.flag("use_clipped_linears", False),
        rotary=Rotary(half * 2, (0,) * len(half) + (1,) * len(half)),
    )
