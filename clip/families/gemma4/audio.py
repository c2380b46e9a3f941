"""Audio of Gemma 4 E2B and E4B: a conformer (arXiv:2005.08100) of the Universal Speech Model's kind
(arXiv:2303.01037). Two convolutions leave a quarter of the frames; layers of half a feed-forward
layer, attention to the last half second, a causal convolution, and half a feed-forward layer; one
projection (transformers' models/gemma4; there is no paper of its own).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.audio.usm import UsmFrames, UsmMel, read_usm
from mtmd.clip.audio.usm_conformer import (
    EPS,
    MAX_REACH,
    Reach,
    UsmConformer,
    read_channels,
    read_width,
)
from mtmd.clip.blocks import GgufTower, checkpoint_names, gguf_size
from mtmd.clip.clipped_linear import ENDS
from mtmd.clip.families.gemma4.instructions import INSTRUCTIONS
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

BINS = 128
STRIDE = 4  # frames of a token
KERNEL = 3  # of the two convolutions
KEY_SCALE = math.log(1 + math.e) / math.log(2)
# Names in transformers, without the layer's prefix, by those of GGUF. llama.cpp's converter swaps
# the two norms of the convolution.
NAMES = {
    "ffn_norm": "feed_forward1.pre_layer_norm",
    "ffn_post_norm": "feed_forward1.post_layer_norm",
    "attn_pre_norm": "norm_pre_attn",
    "attn_post_norm": "norm_post_attn",
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm",
    "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "ln2": "norm_out",
    "ffn_up": "feed_forward1.ffw_layer_1.linear",
    "ffn_down": "feed_forward1.ffw_layer_2.linear",
    "attn_q": "self_attn.q_proj.linear",
    "attn_k": "self_attn.k_proj.linear",
    "attn_v": "self_attn.v_proj.linear",
    "attn_out": "self_attn.post.linear",
    "conv_pw1": "lconv1d.linear_start.linear",
    "conv_pw2": "lconv1d.linear_end.linear",
    "ffn_up_1": "feed_forward2.ffw_layer_1.linear",
    "ffn_down_1": "feed_forward2.ffw_layer_2.linear",
    "attn_k_rel": "self_attn.relative_k_proj",
    "per_dim_scale": "self_attn.per_dim_scale",
    "conv_dw": "lconv1d.depthwise_conv1d",
}


@dataclass(frozen=True)
class Gemma4Audio:
    """`channels` are those of the two convolutions, `output_width` the width before the
    projection.
    """

    conformer: UsmConformer
    channels: tuple[int, int]
    output_width: int
    text_width: int
    resolution: UsmFrames
    rate: int

    marker = token = "<|audio|>"
    instructions = INSTRUCTIONS
    unused = ()

    @property
    def rows(self) -> int:
        """Frequencies behind the convolutions."""
        return _halved(_halved(self.resolution.mel.bins))

    def parameters(self) -> Mapping[str, Parameter]:
        width, flat = self.conformer.width, self.channels[1] * self.rows
        result = {
            "a.input_projection.weight": Parameter(
                (width, flat), _tower("subsample_conv_projection.input_proj_linear.weight")
            ),
            "a.pre_encode.out.weight": Parameter(
                (self.output_width, width), _tower("output_proj.weight")
            ),
            "a.pre_encode.out.bias": Parameter((self.output_width,), _tower("output_proj.bias")),
            "mm.a.input_projection.weight": Parameter(
                (self.text_width, self.output_width),
                checkpoint_names("embed_audio.embedding_projection.weight"),
            ),
        }
        for number, (inner, outer) in enumerate(
            zip((1, self.channels[0]), self.channels, strict=True)
        ):
            at, theirs = f"a.conv1d.{number}", f"subsample_conv_projection.layer{number}"
            result[f"{at}.weight"] = Parameter(
                (outer, inner, KERNEL, KERNEL), _tower(f"{theirs}.conv.weight")
            )
            result[f"{at}.norm.weight"] = Parameter((outer,), _tower(f"{theirs}.norm.weight"))
        layers = self.conformer.parameters(lambda name: _tower(f"layers.{name}"), NAMES)
        return {**result, **layers}

    def prompt(self, plan: ImagePlan) -> str:
        return f"<|audio>{self.token * plan.tokens}<audio|>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, F, M] -> [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        x = self._convolved(tiles, w)
        x = self.conformer.graph(x, w, attention)
        x = ops.rms_norm(
            w.linear(x, "a.pre_encode.out", bias=True), eps=self.conformer.eps, name="mm.a.norm"
        )
        return w.linear(x, "mm.a.input_projection")

    def _convolved(self, tiles: Node, w: Weights) -> Node:
        """tiles [B, 1, F, M] -> [B, T, C], T = F / 4 rounded up"""
        batch, _, frames, bins = tiles.shape
        x = ops.reshape(tiles, shape=(batch, frames * bins, 1), name="a.mel")
        for number in range(2):
            at = f"a.conv1d.{number}"
            x = ops.conv2d(
                x,
                w.tensor(f"{at}.weight"),
                grid=(frames, bins),
                stride=(2, 2),
                padding=(1, frames % 2, 1, bins % 2),
                name=at,
            )
            x = ops.relu(
                w.layer_norm(x, f"{at}.norm", self.conformer.eps, bias=False), name=f"{at}.relu"
            )
            frames, bins = _halved(frames), _halved(bins)
        x = ops.reshape(x, shape=(batch, frames, bins * x.shape[2]), name="a.frames")
        return w.linear(x, "a.input_projection")


def _halved(count: int) -> int:
    return (count + 1) // 2


def _tower(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"audio_tower.{name}")


def to_gguf(family: Gemma4Audio) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None where a setting differs from what llama.cpp
    has as a constant.
    """
    bins = family.resolution.mel.bins
    c = family.conformer
    constants = c.kernel, c.ffn_scale, c.cap, c.eps, c.reach
    if constants != (5, 0.5, 50.0, EPS, Reach()) or family.resolution.mel != UsmMel(bins):
        return None
    keys = {
        "audio.projection_dim": family.text_width,
        "audio.embedding_length": c.width,
        "audio.feed_forward_length": 4 * c.width,
        "audio.block_count": c.layers,
        "audio.attention.head_count": c.heads,
        "audio.num_mel_bins": bins,
        "audio.attention.layer_norm_epsilon": c.eps,
    }
    first = ("a.conv1d.", "a.input_projection.")
    unrounded = tuple(name for name in family.parameters() if name.startswith(first))
    return GgufTower("gemma4a", keys, unrounded=unrounded)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say. The epsilon is not
    read: older files have a wrong one.
    """

    audio = {
        "hidden_size": keys.get("audio.embedding_length", None),
        "num_hidden_layers": keys.get("audio.block_count", None),
        "num_attention_heads": keys.get("audio.attention.head_count", None),
        "subsampling_conv_channels": [gguf_size(shapes, f"a.conv1d.{i}.weight") for i in range(2)],
        "conv_kernel_size": gguf_size(shapes, "a.blk.0.conv_dw.weight", 1),
        "output_proj_dims": gguf_size(shapes, "a.pre_encode.out.weight"),
        "use_clipped_linears": f"a.blk.0.attn_q.{ENDS[0]}" in shapes,
    }
    text = {"hidden_size": keys.get("audio.projection_dim", None)}
    bins = keys.get("audio.num_mel_bins", None)
    return {"audio_config": audio, "text_config": text}, {"feature_size": bins}


def read(top: Settings, features: Settings) -> Gemma4Audio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("gradient_clipping", (1e10,), 1e10)
    c.choice("attention_invalid_logits_value", (-1e9,), -1e9)
    bins = features.count("feature_size", BINS, maximum=MAX_WIDTH)
    width, heads = read_width(c, 1024, "num_attention_heads")
    channels, rows = read_channels(c, "subsampling_conv_channels"), _halved(_halved(bins))
    if channels[0] // 4 != rows:
        raise ModelError(
            f"{c.where}: subsampling_conv_channels begins with {channels[0]}, expected four for "
            f"each of the {rows} frequencies that are left of {bins}"
        )
    conformer = UsmConformer(
        layers=c.count("num_hidden_layers", 12, maximum=MAX_LAYERS),
        width=width,
        heads=heads,
        kernel=c.count("conv_kernel_size", 5, maximum=MAX_REACH),
        ffn_scale=c.number("residual_weight", 0.5),
        cap=c.number("attention_logit_cap", 50.0),
        clipped=c.flag("use_clipped_linears", True),
        eps=c.number("rms_norm_eps", EPS),
        reach=_read_reach(c),
        key_scale=KEY_SCALE,
    )
    return Gemma4Audio(
        conformer=conformer,
        channels=channels,
        output_width=c.count("output_proj_dims", 1536, maximum=MAX_WIDTH),
        text_width=text.count("hidden_size", 2304, maximum=MAX_WIDTH),
        resolution=(frames := read_usm(features, bins, STRIDE)),
        rate=frames.mel.rate,
    )


def _read_reach(c: Settings) -> Reach:
    """Raises ModelError."""
    chunk, left = (
        c.count(f"attention_{key}", usual, maximum=MAX_REACH)
        for key, usual in (("chunk_size", 12), ("context_left", 13))
    )
    ahead, back = c.get("attention_context_right", 0), left - 1
    if type(ahead) is not int or not 0 <= ahead <= MAX_REACH or back < 1:
        raise ModelError(
            f"{c.where}: attention_context_left is {left}, attention_context_right {ahead!r:.60}; "
            f"expected 2 to {MAX_REACH}, and 0 to {MAX_REACH}"
        )
    # transformers has positions for half of the tokens that a chunk sees
    return Reach(back, ahead, (chunk + back + ahead) // 2 - back)
