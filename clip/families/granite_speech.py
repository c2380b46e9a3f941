"""Granite Speech (arXiv:2505.08699): a conformer (arXiv:2005.08100) whose attention sees blocks of
a few seconds with relative positions (arXiv:1803.02155), and a Q-Former (arXiv:2301.12597) that
asks three queries of each 15 positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.conformer import EPS, MAX_KERNEL, Convolution, biased, half_feed_forward
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.pairs import PairWindows, read_pairs
from mtmd.clip.blocks import GgufTower, attend, checkpoint_names, learned_queries, split_heads
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# In the words of the authors' examples.
INSTRUCTIONS = Instructions(
    transcribe="can you transcribe the speech into a written format?",
    transcribe_in="can you transcribe the {language} speech into a written format?",
    translate="can you translate the speech to {language}?",
    seconds=30.0,
)
QUERY_EPS = 1e-12  # of the Q-Former's
PIECE = 15_000  # positions, five minutes, that are encoded at once; the authors have no limit
MAX_CONTEXT = 4096
NORMS = {
    "ffn_norm": "ff1.pre_norm",
    "ln1": "attn.pre_norm",
    "norm_conv": "conv.norm",
    "ffn_norm_1": "ff2.pre_norm",
    "ln2": "post_norm",
}
CONVOLUTION = ("up_conv", "depth_conv.conv", "down_conv", "batch_norm")
ENDS = {
    "a.input_projection": "encoder.input_linear",
    "a.enc_ctc_out": "encoder.out",
    "a.enc_ctc_out_mid": "encoder.out_mid",
    "a.proj_norm": "projector.qformer.layernorm",
    "a.proj_linear": "projector.linear",
}


@dataclass(frozen=True)
class QueryFormer:
    """Layers L, width C, FFN width F, heads H; `queries` of each `window` positions."""

    layers: int
    width: int
    ffn: int
    heads: int
    eps: float
    window: int
    queries: int


@dataclass(frozen=True)
class GraniteSpeech:
    """Layers L, width C, FFN width F, heads H of size K. A block of `context` positions sees
    itself, with distances up to `reach`; `kernel` positions are convolved in `inner` channels; in
    the middle `classes` are told apart.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    head: int
    context: int
    reach: int
    kernel: int
    inner: int
    classes: int
    former: QueryFormer
    text_width: int
    resolution: PairWindows
    rate: int

    marker = token = "<|audio|>"
    instructions = INSTRUCTIONS
    unused = (r"(model\.)?encoder\.layers\.\d+\.conv\.batch_norm\.num_batches_tracked",)
    in_line = True

    def parameters(self) -> Mapping[str, Parameter]:
        width, former = self.width, self.former
        result: dict[str, Parameter] = {}
        sizes: dict[str, Shape] = {
            "a.input_projection": (width, 2 * self.resolution.mel.bins),
            "a.enc_ctc_out": (self.classes, width),
            "a.enc_ctc_out_mid": (width, self.classes),
            "a.proj_norm": (former.width,),
            "a.proj_linear": (self.text_width, former.width),
        }
        for at, theirs in ENDS.items():
            result |= biased(at, theirs, sizes[at])
        for layer in range(self.layers):
            result |= self._layer(f"a.blk.{layer}", f"encoder.layers.{layer}")
        for layer in range(former.layers):
            result |= self._query_layer(
                f"a.proj_blk.{layer}", f"projector.qformer.encoder.layer.{layer}"
            )
        shape = former.queries, former.width
        result["a.proj_query"] = Parameter(
            shape,
            checkpoint_names("projector.query"),
            (1, *shape),
            lambda rows: rows[0],
            gguf=(
                Stored(
                    ("a.proj_query",),
                    (1, *shape),
                    lambda rows: rows[0],
                    invert=lambda rows: (rows[None],),
                ),
            ),
        )
        return result

    def _layer(self, at: str, theirs: str) -> dict[str, Parameter]:
        width, mixed = self.width, self.heads * self.head
        result: dict[str, Parameter] = {}
        for norm, name in NORMS.items():
            result |= biased(f"{at}.{norm}", f"{theirs}.{name}", (width,))
        for which, name in (("", "ff1"), ("_1", "ff2")):
            up, down = (self.ffn, width), (width, self.ffn)
            result |= biased(f"{at}.ffn_up{which}", f"{theirs}.{name}.up_proj", up)
            result |= biased(f"{at}.ffn_down{which}", f"{theirs}.{name}.down_proj", down)
        result[f"{at}.attn_q.weight"] = Parameter(
            (mixed, width), checkpoint_names(f"{theirs}.attn.to_q.weight")
        )
        for part in "kv":
            result[f"{at}.attn_{part}.weight"] = Parameter(
                (mixed, width),
                checkpoint_names(f"{theirs}.attn.to_kv.weight"),
                (2 * mixed, width),
                _keys if part == "k" else _values,
            )
        result |= biased(f"{at}.attn_out", f"{theirs}.attn.to_out", (width, mixed))
        result[f"{at}.attn_rel_pos_emb"] = Parameter(
            (2 * self.reach + 1, self.head), checkpoint_names(f"{theirs}.attn.rel_pos_emb.weight")
        )
        return result | self._convolution.parameters(at, f"{theirs}.conv")

    @property
    def _convolution(self) -> Convolution:
        return Convolution(self.width, self.inner, self.kernel, CONVOLUTION)

    def _query_layer(self, at: str, theirs: str) -> dict[str, Parameter]:
        former, result = self.former, dict[str, Parameter]()
        square: Shape = (former.width, former.width)
        for kind, name, seen in (
            ("self", "attention", former.width),
            ("cross", "crossattention", self.width),
        ):
            for part, full in (("q", "query"), ("k", "key"), ("v", "value")):
                shape = square if part == "q" else (former.width, seen)
                result |= biased(
                    f"{at}.{kind}_attn_{part}", f"{theirs}.{name}.attention.{full}", shape
                )
            result |= biased(f"{at}.{kind}_attn_out", f"{theirs}.{name}.output.dense", square)
            norm = f"{theirs}.{name}.output.LayerNorm"
            result |= biased(f"{at}.{kind}_attn_norm", norm, square[:1])
        up, down = (former.ffn, former.width), (former.width, former.ffn)
        result |= biased(f"{at}.ffn_up", f"{theirs}.intermediate_query.dense", up)
        result |= biased(f"{at}.ffn_down", f"{theirs}.output_query.dense", down)
        return result | biased(f"{at}.ffn_norm", f"{theirs}.output_query.LayerNorm", square[:1])

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, T, 2 M] -> [B, N, D]"""
        w = Weights(weights, tiles.dtype)
        batch, _, count, bins = tiles.shape
        x = ops.reshape(tiles, shape=(batch, count, bins), name="a.mel")
        x = w.linear(x, "a.input_projection", bias=True)
        at = torch.arange(count, dtype=torch.int32)
        first = at - at % self.context
        limits = torch.stack((first, (first + self.context - 1).clamp(max=count - 1)), 1)
        seen = graph_input(
            "inp.blocks", limits.shape, limits.dtype, lambda _: limits, keys=self.context
        )
        for layer in w.layers(self.layers):
            x = self._conformer(x, f"a.blk.{layer}", seen, w, attention)
            if layer + 1 == self.layers // 2:
                x = self._classified(x, w)
        return self._queried(x, w, attention)

    def _conformer(
        self, x: Node, at: str, seen: Node, w: Weights, attention: AttentionForm
    ) -> Node:
        x = half_feed_forward(x, at, "", w)
        x = self._attention(x, at, seen, w, attention)
        x = self._convolution.graph(x, at, w)
        x = half_feed_forward(x, at, "_1", w)
        return w.layer_norm(x, f"{at}.ln2", EPS)

    def _attention(
        self, x: Node, at: str, seen: Node, w: Weights, attention: AttentionForm
    ) -> Node:
        """x [B, T, C], seen [T, 2] -> [B, T, C]"""
        y = w.layer_norm(x, f"{at}.ln1", EPS)
        q, k, v = (
            split_heads(w.linear(y, f"{at}.attn_{part}"), self.heads, f"{at}.attn_{part}")
            for part in "qkv"
        )
        table = ops.rows(
            w.tensor(f"{at}.attn_rel_pos_emb"),
            start=self.reach - self.context + 1,
            stop=self.reach + self.context,
            name=f"{at}.attn_distances",
        )
        grid = -(-x.shape[1] // self.context), self.context
        q = ops.relative_queries(q, None, table, grid=grid, scale=1.0, name=f"{at}.attn_q.relative")
        k = ops.relative_keys(k, grid=grid, rows=False, name=f"{at}.attn_k.relative")
        y = attend(q, k, v, attention, at=at, bounds=seen, scale=self.head**-0.5)
        return ops.add(w.linear(y, f"{at}.attn_out", bias=True), x, name=f"{at}.attn_residual")

    def _classified(self, x: Node, w: Weights) -> Node:
        """Add the projected classes of each position          x [B, T, C] -> [B, T, C]"""
        scores = w.linear(x, "a.enc_ctc_out", bias=True)
        shape = scores.shape[0], 1, *scores.shape[1:]
        scores = ops.cast(scores, dtype=torch.float32, name="a.enc_ctc.fp32")
        scores = ops.reshape(scores, shape=shape, name="a.enc_ctc.scores")
        shares = ops.reshape(
            ops.attn_softmax(scores, name="a.enc_ctc.softmax"),
            shape=(shape[0], *shape[2:]),
            name="a.enc_ctc.flat",
        )
        shares = ops.cast(shares, dtype=x.dtype, name="a.enc_ctc.shares")
        return ops.add(w.linear(shares, "a.enc_ctc_out_mid", bias=True), x, name="a.enc_ctc")

    def _queried(self, x: Node, w: Weights, attention: AttentionForm) -> Node:
        """The queries of each window, projected          x [B, T, C] -> [B, N, D]"""
        former = self.former
        batch, count, width = x.shape
        windows = -(-count // former.window)
        if missing := windows * former.window - count:
            zeros = torch.zeros((batch, missing, width), dtype=x.dtype)
            rest = graph_input("inp.audio_padding", zeros.shape, zeros.dtype, lambda _: zeros)
            x = ops.concat(x, rest, axis=1, name="a.padded")
        shown = ops.reshape(x, shape=(batch * windows, former.window, width), name="a.windows")
        x = w.layer_norm(
            learned_queries("a.proj_query", batch * windows, w), "a.proj_norm", former.eps
        )
        for layer in range(former.layers):
            at = f"a.proj_blk.{layer}"
            x = self._query(x, x, f"{at}.self_attn", w, attention)
            x = self._query(x, shown, f"{at}.cross_attn", w, attention)
            y = ops.gelu(
                w.linear(x, f"{at}.ffn_up", bias=True), approximate="none", name=f"{at}.gelu"
            )
            y = ops.add(w.linear(y, f"{at}.ffn_down", bias=True), x, name=f"{at}.ffn_residual")
            x = w.layer_norm(y, f"{at}.ffn_norm", former.eps)
        shape = batch, windows * former.queries, former.width
        return w.linear(ops.reshape(x, shape=shape, name="a.queried"), "a.proj_linear", bias=True)

    def _query(self, x: Node, shown: Node, at: str, w: Weights, attention: AttentionForm) -> Node:
        """Attention of queries, and a norm behind it          x [B, N, C] -> [B, N, C]"""
        heads = self.former.heads
        q = split_heads(w.linear(x, f"{at}_q", bias=True), heads, f"{at}_q")
        k, v = (
            split_heads(w.linear(shown, f"{at}_{part}", bias=True), heads, f"{at}_{part}")
            for part in "kv"
        )
        y = w.linear(attend(q, k, v, attention, at=at), f"{at}_out", bias=True)
        return w.layer_norm(ops.add(y, x, name=f"{at}.residual"), f"{at}_norm", self.former.eps)


def _keys(both: torch.Tensor) -> torch.Tensor:
    return both.chunk(2)[0]


def _values(both: torch.Tensor) -> torch.Tensor:
    return both.chunk(2)[1]


def to_gguf(family: GraniteSpeech) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None where llama.cpp has another constant."""
    former = family.former
    own = former.layers, former.eps, former.width, family.inner, family.heads * family.head
    if own != (2, QUERY_EPS, family.width, 2 * family.width, family.width):
        return None
    keys = {
        "audio.projection_dim": family.text_width,
        "audio.embedding_length": family.width,
        "audio.feed_forward_length": family.ffn,
        "audio.block_count": family.layers,
        "audio.attention.head_count": family.heads,
        "audio.num_mel_bins": 2 * family.resolution.mel.bins,
        "audio.attention.layer_norm_epsilon": EPS,
        "audio.chunk_size": family.context,
        "audio.conv_kernel_size": family.kernel,
        "audio.max_pos_emb": family.reach,
        "audio.projector.window_size": former.window,
        "audio.projector.downsample_rate": former.window // former.queries,
        "audio.projector.head_count": former.heads,
    }
    unrounded = tuple(name for name in family.parameters() if ".conv_" in name)
    return GgufTower("granite_speech", keys, unrounded=unrounded)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    same = {
        "hidden_dim": "embedding_length",
        "num_layers": "block_count",
        "num_heads": "attention.head_count",
        "input_dim": "num_mel_bins",
        "context_size": "chunk_size",
        "conv_kernel_size": "conv_kernel_size",
        "max_pos_emb": "max_pos_emb",
    }
    encoder = {ours: keys.get(f"audio.{theirs}", None) for ours, theirs in same.items()}
    width, ffn = (
        keys.count(f"audio.{key}", 1) for key in ("embedding_length", "feed_forward_length")
    )
    classes = shapes.get("a.enc_ctc_out.bias", ())
    encoder |= {"feedforward_mult": max(ffn // width, 1), "output_dim": [*classes, None][0]}
    projector = {
        "hidden_size": width,
        "num_attention_heads": keys.get("audio.projector.head_count", None),
        "num_hidden_layers": 2,
        "intermediate_size": [*shapes.get("a.proj_blk.0.ffn_up.bias", ()), None][0],
        "encoder_hidden_size": width,
        "cross_attention_frequency": 1,
    }
    config = {
        "encoder_config": encoder,
        "projector_config": projector,
        "text_config": {"hidden_size": keys.get("audio.projection_dim", None)},
        "window_size": keys.get("audio.projector.window_size", None),
        "downsample_rate": keys.get("audio.projector.downsample_rate", None),
    }
    return config, {}


def read(top: Settings, features: Settings) -> GraniteSpeech:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("encoder_config"), top.part("text_config")
    width, heads = (
        c.count("hidden_dim", 1024, maximum=MAX_WIDTH),
        c.count("num_heads", 8, maximum=MAX_HEADS),
    )
    if width % heads:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide the width"
        )
    context = c.count("context_size", 200, maximum=MAX_CONTEXT)
    reach = c.count("max_pos_emb", 512, maximum=MAX_CONTEXT)
    if context > reach:
        raise ModelError(
            f"{c.where}: context_size is {context}, max_pos_emb {reach}; expected distances as "
            "large as a block"
        )
    bins = c.count("input_dim", 160, maximum=MAX_WIDTH)
    c.choice("input_dim", range(2, MAX_WIDTH + 1, 2), bins)
    former = _read_former(top, width)
    mel, whole = read_pairs(features, bins // 2), math.lcm(context, former.window)
    return GraniteSpeech(
        layers=c.count("num_layers", 10, maximum=MAX_LAYERS),
        width=width,
        ffn=width * c.count("feedforward_mult", 4, maximum=64),
        heads=heads,
        head=c.count("dim_head", width // heads, maximum=MAX_WIDTH),
        context=context,
        reach=reach,
        kernel=c.count("conv_kernel_size", 15, maximum=MAX_KERNEL),
        inner=width * c.count("conv_expansion_factor", 2, maximum=64),
        classes=c.count("output_dim", 42, maximum=MAX_WIDTH),
        former=former,
        text_width=text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        resolution=PairWindows(mel, max(PIECE // whole, 1) * whole, former.window, former.queries),
        rate=mel.rate,
    )


def _read_former(top: Settings, shown: int) -> QueryFormer:
    """Raises ModelError."""
    c = top.part("projector_config")
    c.choice("model_type", ("blip_2_qformer",), "blip_2_qformer")
    c.choice("hidden_act", ("gelu",), "gelu")
    c.choice("cross_attention_frequency", (1,), 2)
    c.choice("encoder_hidden_size", (shown,), 1408)
    window = top.count("window_size", 15, maximum=MAX_CONTEXT)
    rate = top.count("downsample_rate", 5, maximum=window)
    width, heads = (
        c.count("hidden_size", 768, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 12, maximum=MAX_HEADS),
    )
    if window % rate or width % heads:
        raise ModelError(
            f"{top.where}: a window of {window} and every {rate}, {heads} heads of width {width}; "
            "expected numbers that divide"
        )
    return QueryFormer(
        layers=c.count("num_hidden_layers", 12, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 3072, maximum=MAX_WIDTH),
        heads=heads,
        eps=c.number("layer_norm_eps", QUERY_EPS),
        window=window,
        queries=window // rate,
    )
