"""Layers of two kinds, which attend within a window or to everything, each with heads and rotary
embedding of its own; the last of them may have no keys and values and read those of earlier layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights
from mtmd.llm.blocks import KeysValues, normed_rope, split_heads
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import attention_tensors
from mtmd.llm.state import KV

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class LayerKinds:
    """`kinds` has each layer's; `sizes` the groups and head size of each kind, `heads` is that of
    both. The last `shared` layers read the keys and values of the last one before them of their
    kind. `keys_are_values`: full layers have one projection for both.
    """

    kinds: tuple[str, ...]
    heads: int
    sizes: Mapping[str, KV]
    ropes: Mapping[str, Rotary]
    window: int
    shared: int
    keys_are_values: bool

    def has_keys(self, layer: int) -> bool:
        return layer < len(self.kinds) - self.shared

    def has_values(self, layer: int) -> bool:
        """Return whether there is a projection to values alone."""
        return self.has_keys(layer) and not (self.keys_are_values and self.kinds[layer] == FULL)

    def tensors(self, layer: int, width: int) -> dict[str, tuple[str, Shape]]:
        """Names and shapes of the layer's projections, and of the norms of queries and keys."""
        size = self.sizes[self.kinds[layer]]
        all_ = attention_tensors(width, self.heads, size.groups, size.head)
        result: dict[str, tuple[str, Shape]] = {
            **{part: all_[part] for part in ("attn_q", "attn_output")},
            "attn_q_norm": ("self_attn.q_norm", (size.head,)),
        }
        if self.has_keys(layer):
            result["attn_k"] = all_["attn_k"]
            result["attn_k_norm"] = ("self_attn.k_norm", (size.head,))
        if self.has_values(layer):
            result["attn_v"] = all_["attn_v"]
        return result

    def queries_keys_values(
        self,
        x: Node,
        layer: int,
        inputs: TextInputs,
        w: Weights,
        *,
        eps: float,
        divisors: Node | None = None,
    ) -> tuple[Node, KeysValues | None]:
        """Queries [T, H, K], and keys and values [T, G, K], None in a layer that reads those of the
        last one before it of its kind that has some. `divisors` are those of its rotary
        frequencies.
        """
        at, kind = f"blk.{layer}", self.kinds[layer]
        groups = self.sizes[kind].groups
        angles = inputs.angles(self.ropes[kind], f"inp.angles.{kind}", divisors)

        def heads(part: str, count: int) -> Node:
            return split_heads(w.linear(x, f"{at}.{part}"), count, f"{at}.{part}")

        q = normed_rope(heads("attn_q", self.heads), f"{at}.attn_q", angles, w, eps=eps)
        if not self.has_keys(layer):
            return q, None
        k = heads("attn_k", groups)
        v = heads("attn_v", groups) if self.has_values(layer) else k
        v = ops.rms_norm(v, eps=eps, name=f"{at}.attn_v_norm")
        return q, (normed_rope(k, f"{at}.attn_k", angles, w, eps=eps), v)

    @property
    def states(self) -> list[tuple[KV, ...]]:
        return [
            (self.sizes[kind],) if self.has_keys(layer) else ()
            for layer, kind in enumerate(self.kinds)
        ]

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys and values that checkpoints hold for layers that read others'."""
        later = "|".join(str(layer) for layer in range(len(self.kinds)) if not self.has_keys(layer))
        names = (
            rf"(.*\.)?layers\.({later})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",
            rf"blk\.({later})\.attn_(k|v|k_norm)\..*",
        )
        return names if self.shared else ()


def read_shared(c: Settings, kinds: tuple[str, ...], default: int) -> int:
    """Return how many layers of a text_config, the last ones, read the keys and values of others.
    Raises ModelError where there is none to read for one of them.
    """
    depth, shared = len(kinds), c.get("num_kv_shared_layers", default)
    if (
        type(shared) is not int
        or not 0 <= shared < depth
        or not set(kinds[depth - shared :]) <= set(kinds[: depth - shared])
    ):
        raise ModelError(
            f"{c.where}: num_kv_shared_layers is {shared!r:.20}, expected so few of {depth} layers "
            "that each kind is among the others"
        )
    return shared


def read_ropes(c: Settings, head: int, context: int) -> dict[str, Rotary]:
    """Return the rotary embedding of each kind, by `rope_parameters` (transformers 5), or by
    `rope_theta`, `rope_local_base_freq` and a `rope_scaling` of full layers. Raises ModelError.
    """
    old = {FULL: ("rope_theta", 1e6, "rope_scaling"), SLIDING: ("rope_local_base_freq", 1e4, None)}
    ropes = {}
    for kind, (key, default, scaling) in old.items():
        new = c.part("rope_parameters").part(kind)
        part = new if new.values or scaling is None else c.part(scaling)
        base = new.number("rope_theta", c.number(key, default))
        ropes[kind] = read_rotary(part, head, base, context)
    return ropes


def of_each_layer(keys: Settings, key: str, depth: int) -> list[Any]:
    """Return what a GGUF says of each layer, in a list or once for all. Raises ModelError."""
    value = keys.get(key, None)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * depth
    if len(values) != depth:
        raise ModelError(
            f"{keys.where}: {key} has {len(values)} entries, expected one for each of the {depth} "
            "layers"
        )
    return values
