"""Audio of Gemma 3n: a conformer of the Universal Speech Model's kind (arXiv:2303.01037). Two
convolutions, normed by all that was heard so far, leave a quarter of the frames; behind the layers
every fourth token is left; a recording always takes as many tokens, those behind what was heard
being one of the vocabulary (transformers' models/gemma3n; there is no paper of its own).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.usm import UsmFrames, read_emphasizing_usm
from mtmd.clip.audio.usm_conformer import (
    EPS,
    MAX_REACH,
    Reach,
    UsmConformer,
    read_channels,
    read_width,
)
from mtmd.clip.blocks import GgufTower, checkpoint_names, gguf_size
from mtmd.clip.families.gemma3n.embedder import Embedder, read_embedder
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, constant
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

BINS = 128
STRIDE = 4  # frames of what a layer reads
KERNEL = 3  # of the two convolutions
TOKENS, MAX_TOKENS = 188, 1 << 13  # of a recording
TEXT_ROWS = 262400
END = 262272  # the token behind audio
# Names in transformers, without the layer's prefix, by those of GGUF files of Gemma 4
NAMES = {
    "ffn_norm": "ffw_layer_start.pre_layer_norm",
    "ffn_post_norm": "ffw_layer_start.post_layer_norm",
    "attn_pre_norm": "attention.pre_attn_norm",
    "attn_post_norm": "attention.post_norm",
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "ffn_norm_1": "ffw_layer_end.pre_layer_norm",
    "ffn_post_norm_1": "ffw_layer_end.post_layer_norm",
    "ln2": "norm",
    "ffn_up": "ffw_layer_start.ffw_layer_1",
    "ffn_down": "ffw_layer_start.ffw_layer_2",
    "attn_q": "attention.attn.q_proj",
    "attn_k": "attention.attn.k_proj",
    "attn_v": "attention.attn.v_proj",
    "attn_out": "attention.post",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
    "ffn_up_1": "ffw_layer_end.ffw_layer_1",
    "ffn_down_1": "ffw_layer_end.ffw_layer_2",
    "attn_k_rel": "attention.attn.relative_position_embedding.pos_proj",
    "per_dim_scale": "attention.attn.per_dim_scale",
    "conv_dw": "lconv1d.depthwise_conv1d",
}
# and those of its own
GGUF_NAMES = {
    "attn_pre_norm": "ln1",
    "attn_post_norm": "ln2",
    "ln2": "layer_pre_norm",
    "attn_k_rel": "linear_pos",
}
INSTRUCTIONS = Instructions(
    transcribe="Transcribe the following speech segment:",
    transcribe_in="Transcribe the following speech segment in {language}:",
    translate="Translate the following speech segment into {language}:",
    seconds=30.0,
)


@dataclass(frozen=True)
class Gemma3nAudio:
    """`channels` are those of the two convolutions, of whose norms `norm_eps` is; of every
    `reduction` tokens behind the layers one is left. `end` is the token behind audio, `padding`
    the one that stands behind what was heard.
    """

    conformer: UsmConformer
    channels: tuple[int, int]
    norm_eps: float
    reduction: int
    embedder: Embedder
    resolution: UsmFrames
    rate: int
    end: int = field(compare=False)  # which no GGUF says
    padding: int = field(compare=False)

    marker = token = "<audio_soft_token>"
    instructions = INSTRUCTIONS
    mark_tokens = ("<end_of_audio>",)
    marks, separator = "mm.a.marks", "mm.a.padding"
    unused = ()

    @property
    def rows(self) -> int:
        """Frequencies behind the convolutions."""
        return _halved(_halved(self.resolution.mel.bins))

    def parameters(self) -> Mapping[str, Parameter]:
        width, projection = self.conformer.width, "subsample_conv_projection"
        result = {
            "a.pre_encode.out.weight": Parameter(
                (width, self.channels[1] * self.rows),
                _tower(f"{projection}.input_proj_linear.weight"),
            )
        }
        for number, (inner, outer) in enumerate(
            zip((1, self.channels[0]), self.channels, strict=True)
        ):
            at, theirs = f"a.conv1d.{number}", f"{projection}.conv_{number}"
            result[f"{at}.weight"] = Parameter(
                (outer, inner, KERNEL, KERNEL), _tower(f"{theirs}.conv.weight")
            )
            result[f"{at}.norm.weight"] = Parameter((outer,), _tower(f"{theirs}.norm.weight"))
        layers = self.conformer.parameters(
            lambda name: _tower(f"conformer.{name}"), NAMES, GGUF_NAMES
        )
        return {
            **result,
            **layers,
            **self.embedder.parameters("mm.a"),
            self.marks: self.embedder.tokens_parameter("mm.a", (self.end,)),
            self.separator: self.embedder.tokens_parameter("mm.a", (self.padding,)),
        }

    def prompt(self, plan: ImagePlan) -> str:
        return f"\n\n<start_of_audio>{self.token * plan.tokens}<end_of_audio>\n\n"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, F, M] -> [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        x = self.conformer.graph(self._convolved(tiles, w), w, attention)
        left = constant("inp.left", torch.arange(0, x.shape[1], self.reduction))
        return self.embedder.graph(ops.take_rows(x, left, name="a.left"), "mm.a", w)

    def _convolved(self, tiles: Node, w: Weights) -> Node:
        """tiles [B, 1, F, M] -> [B, T, C], T = F / 4 rounded up"""
        batch, _, frames, bins = tiles.shape
        x = ops.reshape(tiles, shape=(batch, frames * bins, 1), name="a.mel")
        for number, channels in enumerate(self.channels):
            at = f"a.conv1d.{number}"
            x = ops.conv2d(
                x,
                w.tensor(f"{at}.weight"),
                grid=(frames, bins),
                stride=(2, 2),
                padding=(0, KERNEL - 1, 1, 1),
                name=at,
            )
            frames, bins = _halved(frames), _halved(bins)
            x = ops.reshape(x, shape=(batch, frames, bins * channels), name=f"{at}.frames")
            x = ops.cumulative_norm(
                x, w.tensor(f"{at}.norm.weight"), eps=self.norm_eps, name=f"{at}.norm"
            )
            x = ops.relu(x, name=f"{at}.relu")
            if number == 0:
                x = ops.reshape(x, shape=(batch, frames * bins, channels), name=f"{at}.grid")
        return w.linear(x, "a.pre_encode.out")


def _halved(count: int) -> int:
    return (count + 1) // 2


def _tower(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"audio_tower.{name}")


def to_gguf(family: Gemma3nAudio) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None where a setting differs from what is
    published, which no key says.
    """
    c, bins = family.conformer, family.resolution.mel.bins
    constants = c.kernel, c.ffn_scale, c.cap, c.eps, c.reach, family.norm_eps, family.reduction
    tokens = family.embedder.first, family.embedder.first + family.embedder.tokens - 1
    if (family.end, family.padding) != tokens:
        return None
    if constants != (5, 0.5, 50.0, EPS, Reach(13), 1e-3, 4):
        return None
    usual = read_emphasizing_usm(Settings({}, ""), bins, STRIDE * family.reduction, TOKENS)
    if family.resolution != usual:
        return None
    keys = {
        "audio.projection_dim": family.embedder.text_width,
        "audio.embedding_length": c.width,
        "audio.feed_forward_length": 4 * c.width,
        "audio.block_count": c.layers,
        "audio.attention.head_count": c.heads,
        "audio.num_mel_bins": bins,
        "audio.attention.layer_norm_epsilon": 1e-5,  # not read
    }
    return GgufTower("gemma3na", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""

    bins = keys.get("audio.num_mel_bins", None)
    audio = {
        "input_feat_size": bins,
        "hidden_size": keys.get("audio.embedding_length", None),
        "conf_num_hidden_layers": keys.get("audio.block_count", None),
        "conf_num_attention_heads": keys.get("audio.attention.head_count", None),
        "sscp_conv_channel_size": [gguf_size(shapes, f"a.conv1d.{i}.weight") for i in range(2)],
        "vocab_size": (rows := gguf_size(shapes, "mm.a.embedding.weight")),
    }
    text = {"hidden_size": keys.get("audio.projection_dim", None), "vocab_size": END + (rows or 0)}
    return {"audio_config": audio, "text_config": text}, {"feature_size": bins}


def read(top: Settings, features: Settings) -> Gemma3nAudio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    c.choice("gradient_clipping", (1e10,), 1e10)
    c.choice("conf_attention_context_right", (0,), 0)
    for key, usual in (("sscp_conv_kernel_size", KERNEL), ("sscp_conv_stride_size", 2)):
        _need_both(c, key, usual)
    bins = c.count("input_feat_size", BINS, maximum=MAX_WIDTH)
    width, heads = read_width(c, 1536, "conf_num_attention_heads")
    reduction = c.count("conf_reduction_factor", 4, maximum=MAX_REACH)
    back = c.count("conf_attention_context_left", 13, maximum=MAX_REACH)
    embedder = read_embedder(c, text, "embed_audio", width, END)
    frames = read_emphasizing_usm(
        features,
        bins,
        STRIDE * reduction,
        top.count("audio_soft_tokens_per_image", TOKENS, maximum=MAX_TOKENS),
    )
    return Gemma3nAudio(
        conformer=UsmConformer(
            layers=c.count("conf_num_hidden_layers", 12, maximum=MAX_LAYERS),
            width=width,
            heads=heads,
            kernel=c.count("conf_conv_kernel_size", 5, maximum=MAX_REACH),
            ffn_scale=c.number("conf_residual_weight", 0.5),
            cap=c.number("conf_attention_logit_cap", 50.0),
            clipped=False,
            eps=c.number("rms_norm_eps", EPS),
            reach=Reach(back),
        ),
        channels=read_channels(c, "sscp_conv_channel_size"),
        norm_eps=c.number("sscp_conv_group_norm_eps", 1e-3),
        reduction=reduction,
        embedder=embedder,
        end=top.token_id("eoa_token_id", END),
        padding=text.count("vocab_size", TEXT_ROWS) - 1,
        resolution=frames,
        rate=frames.mel.rate,
    )


def _need_both(c: Settings, key: str, usual: int) -> None:
    """Raises ModelError where a setting of both convolutions is not the usual one."""
    expected = [[usual, usual]] * 2
    if (value := c.get(key, expected)) != expected:
        raise ModelError(f"{c.where}: {key} is {value!r:.60}, expected {expected}")
