"""Audio of Gemma 4 12B (gemma4_unified), which has no encoder: raw samples of 40 ms, normed and
projected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.clip.audio.windows import RawFrames
from mtmd.clip.blocks import GgufTower, checkpoint_names
from mtmd.clip.families.gemma4.instructions import INSTRUCTIONS
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

SAMPLES, RATE = 640, 16_000
# of a token, and a second, as published; GGUF files do not say the second


@dataclass(frozen=True)
class Gemma4UnifiedAudio:
    width: int
    eps: float
    text_width: int
    resolution: RawFrames
    rate: int

    marker = token = "<|audio|>"
    instructions = INSTRUCTIONS
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            "mm.a.input_projection.weight": Parameter(
                (self.text_width, self.width),
                checkpoint_names("embed_audio.embedding_projection.weight"),
            )
        }

    def prompt(self, plan: ImagePlan) -> str:
        return f"<|audio>{self.token * plan.tokens}<audio|>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:  # noqa: ARG002
        w = Weights(weights, tiles.dtype)
        batch, _, tokens, samples = tiles.shape
        x = ops.reshape(tiles, shape=(batch, tokens, samples), name="a.frames")
        return w.linear(ops.rms_norm(x, eps=self.eps, name="mm.a.norm"), "mm.a.input_projection")


def to_gguf(family: Gemma4UnifiedAudio) -> GgufTower:
    """Return the keys of a GGUF that say the same: those of a transformer without blocks."""
    keys = {
        "audio.projection_dim": family.text_width,
        "audio.embedding_length": family.width,
        "audio.feed_forward_length": 0,
        "audio.block_count": 0,
        "audio.attention.head_count": 0,
        "audio.num_mel_bins": 128,  # not read
        "audio.attention.layer_norm_epsilon": family.eps,
    }
    return GgufTower("gemma4ua", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the feature extractor's settings would say."""
    width = keys.get("audio.embedding_length", None)
    audio = {
        "audio_embed_dim": width,
        "rms_norm_eps": keys.get("audio.attention.layer_norm_epsilon", None),
    }
    text = {"hidden_size": keys.get("audio.projection_dim", None)}
    return {"audio_config": audio, "text_config": text}, {"audio_samples_per_token": width}


def read(top: Settings, features: Settings) -> Gemma4UnifiedAudio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    width = c.count("audio_embed_dim", SAMPLES, maximum=MAX_WIDTH)
    features.choice("audio_samples_per_token", (width,), width)
    return Gemma4UnifiedAudio(
        width=width,
        eps=c.number("rms_norm_eps", 1e-6),
        text_width=text.count("hidden_size", 2304, maximum=MAX_WIDTH),
        resolution=RawFrames(width),
        rate=features.count("sampling_rate", RATE),
    )
