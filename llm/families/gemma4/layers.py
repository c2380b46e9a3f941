"""Layers of two kinds as Gemma 4's settings and GGUF files describe them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.rotary import gguf_scaling, read_rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, Settings
from mtmd.llm.blocks import read_layer_types
from mtmd.llm.layer_kinds import FULL, SLIDING, LayerKinds, of_each_layer, read_shared
from mtmd.llm.state import KV

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_layer_kinds(c: Settings) -> LayerKinds:
    """Read it from a text_config with transformers' keys. Raises ModelError where they do not fit
    together.
    """
    depth, heads = (
        c.count("num_hidden_layers", 30, maximum=MAX_LAYERS),
        c.count("num_attention_heads", 8, maximum=MAX_HEADS),
    )
    kinds, same = _kinds(c, depth), c.flag("attention_k_eq_v", False)
    sizes = _sizes(c, kinds, same)
    for kind, size in sizes.items():
        if heads % size.groups or size.head % 2:
            raise ModelError(
                f"{c.where}: {heads} heads of size {size.head} in {size.groups} groups in layers "
                f"of {kind}; expected groups "
                "that divide the heads, an even head size"
            )
    ropes, context = c.part("rope_parameters"), c.count("max_position_embeddings", 131072)
    parts = {
        kind: Settings(ropes.get(kind, ROPES[kind]), f"{ropes.where}: {kind}") for kind in sizes
    }
    return LayerKinds(
        kinds=kinds,
        heads=heads,
        sizes=sizes,
        ropes={
            kind: read_rotary(part, sizes[kind].head, 1e4, context) for kind, part in parts.items()
        },
        window=c.count("sliding_window", 512),
        shared=read_shared(c, kinds, 0),
        keys_are_values=same,
    )


def _kinds(c: Settings, depth: int) -> tuple[str, ...]:
    """Every sixth is full unless `layer_types` says otherwise, and the last one is whatever it
    says, as in the reference.
    """
    default = [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(depth)]
    kinds = read_layer_types(c, depth, (SLIDING, FULL), default)
    return *kinds[:-1], FULL


def _sizes(c: Settings, kinds: Collection[str], same: bool) -> dict[str, KV]:
    """Heads of full layers: one by one in `per_layer_config`, as transformers 5 saves them, or once
    for all, as they are published.
    """
    groups, head, each = (
        c.count("num_key_value_heads", 4, maximum=MAX_HEADS),
        c.count("head_dim", 256, maximum=MAX_HEADS),
        "per_layer_config",
    )
    full = {
        "head_dim": c.get("global_head_dim", 512),
        "num_key_value_heads": c.get("num_global_key_value_heads", None) if same else None,
    }
    sizes: dict[str, KV] = {}
    for layer, kind in enumerate(kinds):
        own = (
            c.part(each).part(str(layer))
            if c.get(each, None)
            else Settings(full if kind == FULL else {}, c.where)
        )
        size = KV(
            own.count("num_key_value_heads", groups, maximum=MAX_HEADS),
            own.count("head_dim", head, maximum=MAX_HEADS),
        )
        if sizes.setdefault(kind, size) != size:
            raise ModelError(
                f"{own.where}: {size.groups} groups of size {size.head}, expected "
                f"{sizes[kind].groups} of {sizes[kind].head} "
                f"as in other layers of {kind}"
            )
    return sizes


def layer_kind_keys(stack: LayerKinds) -> dict[str, Any]:
    """Return the keys of a GGUF that say the same."""
    full, sliding = stack.sizes[FULL], stack.sizes.get(SLIDING, stack.sizes[FULL])
    theta = {kind: made.settings["rope_theta"] for kind, made in stack.ropes.items()}
    return {
        "block_count": len(stack.kinds),
        "attention.head_count": stack.heads,
        "attention.head_count_kv": [stack.sizes[kind].groups for kind in stack.kinds]
        if full.groups != sliding.groups
        else full.groups,
        "attention.key_length": full.head,
        "attention.value_length": full.head,
        "attention.key_length_swa": sliding.head,
        "attention.value_length_swa": sliding.head,
        "attention.sliding_window": stack.window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in stack.kinds],
        "attention.shared_kv_layers": stack.shared,
        "rope.freq_base_swa": theta.get(SLIDING, 1e4),
        "rope.dimension_count": full.head,
        "rope.dimension_count_swa": sliding.head,
    }


def gguf_layer_kinds(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what a text_config would say of them, from the keys of a GGUF; lists have a number for
    each layer.
    """
    depth = keys.count("block_count", maximum=MAX_LAYERS)
    sliding = of_each_layer(keys, "attention.sliding_window_pattern", depth)
    kinds, groups = (
        [SLIDING if slides else FULL for slides in sliding],
        of_each_layer(keys, "attention.head_count_kv", depth),
    )
    of_kind = {kind: groups[kinds.index(kind)] for kind in set(kinds)}
    full = kinds.index(FULL) if FULL in kinds else 0
    ropes = {
        SLIDING: {**ROPES[SLIDING], "rope_theta": keys.number("rope.freq_base_swa", 1e4)},
        FULL: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 1e6)},
    }
    if gguf_scaling(keys) is not None:
        raise ModelError(
            f"{keys.where}: rope.scaling keys are not read in this architecture; found a factor or "
            "type, expected none; convert the file again"
        )
    if "rope_freqs.weight" not in names:  # which makes the frequencies proportional
        ropes[FULL] = {**ROPES[FULL], **ropes[FULL], "rope_type": "proportional"}
    return {
        "layer_types": kinds,
        "num_key_value_heads": of_kind.get(SLIDING, groups[0]),
        "num_global_key_value_heads": of_kind.get(FULL),
        "head_dim": keys.get("attention.key_length_swa", None),
        "global_head_dim": keys.get("attention.key_length", None),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names,
        "rope_parameters": ropes,
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
    }
