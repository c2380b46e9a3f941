"""The pieces that text families are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.rotary import Rotary, sections
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.experts import Experts
from mtmd.llm.inputs import TextInputs
from mtmd.llm.state import KV, PAGE

KeysValues = tuple[Node, Node]


@dataclass(frozen=True)
class Multipliers:
    """Numbers that Granite multiplies by: what is embedded, pictures too; what a block adds;
    scores, in place of 1 / sqrt(K); and what logits are divided by.
    """

    embedding: float
    residual: float
    attention: float
    logits: float

    def gguf_keys(self) -> dict[str, float]:
        return {
            "embedding_scale": self.embedding,
            "residual_scale": self.residual,
            "attention.scale": self.attention,
            "logit_scale": self.logits,
        }


def added(y: Node, x: Node, at: str, times: Multipliers | None) -> Node:
    """Return what a block gives, times its multiplier, added to what it was given."""
    if times:
        y = ops.scale(y, factor=times.residual, name=f"{at}_scaled")
    return ops.add(y, x, name=f"{at}_residual")


def token_embeddings(inputs: TextInputs, w: Weights, scale: float = 1.0) -> Node:
    """Rows of the token table times `scale`, images put in unscaled          -> [T, D]"""
    x = w.embed(inputs.token_ids(), "token_embd", scale)
    if not inputs.images:
        return x
    return ops.place_rows(
        x, image_features(inputs, 0, x.shape[1]), inputs.image_at(), name="image_embd"
    )


def add_positions(x: Node, inputs: TextInputs, w: Weights, first: int = 0) -> Node:
    """Return x with a learned vector of each token's position added: row `first` of the table for
    position 0.

    x [T, D], position_embd.weight [N, D] -> [T, D]
    """
    rows = ops.take_rows(
        w.tensor("position_embd.weight"), inputs.position_rows(first), name="position_embd"
    )
    return ops.add(x, rows, name="positions")


def image_features(inputs: TextInputs, part: int, width: int) -> Node:
    """Return what each image token holds: 0 its embedding, others what a layer adds -> [M, D]"""
    rows = inputs.image_rows()
    if inputs.image_width == width:
        return rows
    return ops.columns(rows, start=part * width, stop=(part + 1) * width, name=f"image_part.{part}")


def deepstack(x: Node, part: int, at: str, inputs: TextInputs) -> Node:
    """Return x with what the rows of pictures hold for a layer of their own, behind their
    embeddings, added where pictures are (arXiv:2406.04334).

    x [T, D], image rows [M, D times their parts] -> [T, D]
    """
    if not inputs.images or inputs.image_width < (part + 1) * x.shape[1]:
        return x
    features, at_images = image_features(inputs, part, x.shape[1]), inputs.image_at()
    if inputs.images < inputs.tokens:
        return ops.add_rows(x, features, at_images, name=f"{at}.deepstack")
    # One row may be there several times, to fill up (`make_batch`): it is put so often, not added.
    rows = ops.add(
        ops.take_rows(x, at_images, name=f"{at}.deepstack.images"),
        features,
        name=f"{at}.deepstack.sum",
    )
    return ops.place_rows(x, rows, at_images, name=f"{at}.deepstack")


def cache_keys_values(k: Node, v: Node | None, layer: int, inputs: TextInputs) -> KeysValues:
    """k, v [T, G, K] written to the layer's cache -> all keys and values of the batch's sequences,
    [1, S, G, K] each. Without v keys are the values, too.
    """
    cache = inputs.state(layer, KV(k.shape[1], k.shape[2], values=v is not None))
    stored = inputs.kv if v is not None else inputs.kv.keys
    quantized = {"quant": stored.quant} if stored.quant else {}
    slots, name = inputs.cache_slots(), f"blk.{layer}.kv_store"
    kv = ops.kv_store(cache, k, k if v is None else v, slots, name=name, **quantized)
    gathered = [
        ops.gather_pages(
            kv,
            inputs.page_table(),
            which=which,
            size=PAGE,
            name=f"blk.{layer}.{name}",
            **stored.read_as(inputs.dtype, k.shape[2]),
        )
        for which, name in enumerate(("keys",) if v is None else ("keys", "values"))
    ]
    return gathered[0], gathered[-1]


def carry_state(packed: Node, state: Node, inputs: TextInputs, name: str) -> Node:
    """Return the rows of the batch's tokens of what a recurrent op gave. Those behind them are the
    states that its sequences go on from, which are stored.
    """
    after = ops.rows(packed, start=inputs.tokens, stop=packed.shape[0], name=f"{name}.after")
    inputs.saved.append(
        ops.state_store(state, after, inputs.sequence_slots, name=f"{name}.state_store")
    )
    return ops.rows(packed, start=0, stop=inputs.tokens, name=f"{name}.tokens")


def context_keys_values(k: Node, v: Node, layer: int, inputs: TextInputs, kv: KV) -> KeysValues:
    """k, v [N, G, K] of what tokens attend to, written to the layer's state -> all keys and values
    of the contexts of the batch's sequences, [1, S, G, K] each
    """
    quantized = {"quant": inputs.kv.quant} if inputs.kv.quant else {}
    cache = ops.kv_store(
        inputs.state(layer, kv),
        k,
        v,
        inputs.context_slots(),
        name=f"blk.{layer}.kv_store",
        **quantized,
    )
    keys, values = (
        ops.gather_pages(
            cache,
            inputs.context_pages(kv.rows),
            which=which,
            size=PAGE,
            name=f"blk.{layer}.{name}",
            **inputs.kv.read_as(inputs.dtype, kv.head),
        )
        for which, name in enumerate(("keys", "values"))
    )
    return keys, values


def queries_keys_values(
    x: Node, at: str, w: Weights, *, heads: int, groups: int, bias: bool = False
) -> tuple[Node, Node, Node]:
    """The projections of grouped attention (arXiv:2305.13245)

    [T, D] -> [T, H, K], [T, G, K], [T, G, K]
    """
    q, k, v = (
        split_heads(w.linear(x, f"{at}.{part}", bias=bias), count, f"{at}.{part}")
        for part, count in (("attn_q", heads), ("attn_k", groups), ("attn_v", groups))
    )
    return q, k, v


def fused_queries_keys_values(
    x: Node, at: str, w: Weights, *, heads: int, groups: int
) -> tuple[Node, Node, Node]:
    """`queries_keys_values` of one matrix, `attn_qkv`."""
    fused, start, result = w.linear(x, f"{at}.attn_qkv"), 0, []
    head = fused.shape[1] // (heads + 2 * groups)
    for part, count in (("attn_q", heads), ("attn_k", groups), ("attn_v", groups)):
        stop = start + count * head
        rows = ops.columns(fused, start=start, stop=stop, name=f"{at}.{part}")
        result.append(split_heads(rows, count, f"{at}.{part}"))
        start = stop
    q, k, v = result
    return q, k, v


def attend(
    q: Node,
    keys_values: KeysValues,
    at: str,
    attention: AttentionForm,
    *,
    bounds: Node,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Node | None = None,
) -> Node:
    """Attention to everything in the cache that `bounds` and `mask` let see, scaled by 1 / sqrt(K)
    unless said otherwise

    q [T, H, K], keys and values [1, S, G, K] -> [T, H * K]
    """
    (rows, count, size), (keys, values) = q.shape, keys_values
    mixed = attention(
        ops.reshape(q, shape=(1, rows, count, size), name=f"{at}.attn_q.batch"),
        keys,
        values,
        mask,
        bounds,
        scale=size**-0.5 if scale is None else scale,
        softcap=softcap,
        name=f"{at}.attn",
    )
    return ops.reshape(mixed, shape=(rows, count * size), name=f"{at}.attn.flat")


def split_heads(x: Node, count: int, name: str) -> Node:
    """[T, H * K] -> [T, H, K]"""
    return ops.reshape(x, shape=(x.shape[0], count, x.shape[1] // count), name=f"{name}.heads")


def normed_rope(x: Node, at: str, angles: Node, w: Weights, *, eps: float) -> Node:
    """Queries or keys with each head RMS-normed, then turned by their positions

    x [T, H, K], angles [T, 2, R] -> [T, H, K]; `at` is such as "blk.3.attn_q"
    """
    return ops.rope(w.rms_norm(x, f"{at}_norm", eps), angles, name=f"{at}.rope")


def swiglu(x: Node, at: str, w: Weights, suffix: str = "", *, bias: bool = False) -> Node:
    """The gated feed-forward layer of arXiv:2002.05202          [T, D] -> [T, D]"""
    gate, up = (w.linear(x, f"{at}.ffn_{part}{suffix}", bias=bias) for part in ("gate", "up"))
    return w.linear(
        ops.silu_mul(gate, up, name=f"{at}.ffn_gated{suffix}"), f"{at}.ffn_down{suffix}", bias=bias
    )


def squared_relu(x: Node, at: str, w: Weights, suffix: str = "") -> Node:
    """The feed-forward layer of arXiv:2109.08668          [T, D] -> [T, D]"""
    y = ops.relu(w.linear(x, f"{at}.ffn_up{suffix}"), name=f"{at}.ffn_relu{suffix}")
    y = ops.mul(y, y, name=f"{at}.ffn_squared{suffix}")
    return w.linear(y, f"{at}.ffn_down{suffix}")


def fused_swiglu(x: Node, at: str, w: Weights) -> Node:
    """`swiglu` whose gate and way up are one matrix, `ffn_up`          [T, D] -> [T, D]"""
    both = w.linear(x, f"{at}.ffn_up")
    ffn = both.shape[1] // 2
    gate, up = (
        ops.columns(both, start=i * ffn, stop=(i + 1) * ffn, name=f"{at}.ffn_{part}")
        for i, part in enumerate(("gate", "way_up"))
    )
    return w.linear(ops.silu_mul(gate, up, name=f"{at}.ffn_gated"), f"{at}.ffn_down")


def geglu(x: Node, at: str, w: Weights) -> Node:
    """The same with GELU, by its tanh approximation          [T, D] -> [T, D]"""
    gate, up = (w.linear(x, f"{at}.ffn_{part}") for part in ("gate", "up"))
    gated = ops.gelu_mul(gate, up, approximate="tanh", name=f"{at}.ffn_gated")
    return w.linear(gated, f"{at}.ffn_down")


def moe_ffn(
    x: Node,
    at: str,
    w: Weights,
    experts: Experts,
    *,
    router_input: Node | None = None,
    shares: Node | None = None,
    reads: Node | None = None,
    act: str = "silu",
) -> Node:
    """Experts, some for each token, and the one that reads every token, where there is one

    [T, D] -> [T, D]; arXiv:2401.06066 for the shared expert. The router reads `router_input` [T, D]
    where it is not what the experts read; `shares` [E], `reads` [T] and `act` are the op's. The
    shared one reads every token all the same.
    """
    own = {"gate": "gate" if experts.gated else "up", "up": "up", "down": "down"}
    quants = {
        f"{part}_quant": quant
        for part, name in own.items()
        if (quant := w.quant(f"{at}.ffn_{name}_exps.weight"))
    }
    router = w.linear(x if router_input is None else router_input, f"{at}.ffn_gate_inp")
    stored = {name: w.tensor(f"{at}.ffn_{name}_exps.weight") for name in own.values()}
    tables = [stored[name] for name in own.values()]
    bias = w.tensor(f"{at}.exp_probs_b.bias", torch.float32) if experts.biased else None
    y = ops.moe(
        x,
        router,
        *tables,
        shares,
        *(() if bias is None and reads is None else (bias,)),
        *(() if reads is None else (reads,)),
        routing=experts.routing,
        act=act if experts.gated else "relu",
        **quants,
        name=f"{at}.ffn_moe",
    )
    if not experts.shared:
        return y
    shared = (swiglu if experts.gated else squared_relu)(x, at, w, "_shexp")
    if experts.shared_gate:
        gate = w.linear(x, f"{at}.ffn_gate_inp_shexp")
        gate = ops.sigmoid(gate, name=f"{at}.ffn_gate_shexp.sigmoid")
        shared = ops.mul(shared, gate, name=f"{at}.ffn_shexp")
    return ops.add(shared, y, name=f"{at}.ffn_experts")


def logits(x: Node, inputs: TextInputs, w: Weights, *, eps: float, tied: bool) -> Node:
    """The final norm and the table of outputs, for the rows wanted          [T, D] -> [R, V]"""
    x = w.rms_norm(ops.take_rows(x, inputs.requested_rows(), name="wanted"), "output_norm", eps)
    return w.linear(x, "token_embd" if tied else "output", name="logits")


def read_heads(
    c: Settings, count: int, groups: int | None, head: int | None
) -> tuple[int, int, int]:
    """Heads H, groups G and head size K of a text_config; the numbers are the family's defaults,
    None where it has none: as many groups as heads, and heads that share the width. Raises
    ModelError where they do not fit together.
    """
    count = c.count("num_attention_heads", count, maximum=MAX_HEADS)
    groups = c.count("num_key_value_heads", groups or count, maximum=MAX_HEADS)
    head = c.count(
        "head_dim", head or c.count("hidden_size", maximum=MAX_WIDTH) // count, maximum=MAX_HEADS
    )
    if count % groups or head % 2:
        raise ModelError(
            f"{c.where}: {count} heads of size {head} in {groups} groups; expected groups that "
            "divide the heads, "
            "an even head size"
        )
    return count, groups, head


def read_layer_types(
    c: Settings, layers: int, among: Sequence[str], default: list[str]
) -> tuple[str, ...]:
    """The kind of each layer of a text_config, one `among` those known; `default` where it does not
    say. Raises ModelError for others, and for too few or too many.
    """
    kinds = c.get("layer_types", None) or default
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in among for k in kinds):
        raise ModelError(
            f"{c.where}: layer_types has to name {layers} layers, each {' or '.join(among)}"
        )
    return tuple(kinds)


def by_sections(
    rotary: Rotary, rope: Settings, head: int, default: list[int] | None, *, interleaved: bool
) -> Rotary:
    """M-RoPE where `rope` has a `mrope_section` or the family a default, else as it is. Raises
    ModelError for sections that do not fit.
    """
    counts = rope.get("mrope_section", default)
    if counts is None:
        return rotary
    numbers = (
        isinstance(counts, (list, tuple))
        and len(counts) == 3
        and all(type(n) is int and n >= 0 for n in counts)
    )
    if not numbers or sum(counts) != head // 2:
        raise ModelError(
            f"{rope.where}: mrope_section is {counts!r:.40}, expected 3 counts with a sum of "
            f"{head // 2}, half a head"
        )
    return rotary.by_axes(sections(counts, interleaved))
