"""Audio encoder of Qwen2.5-Omni (arXiv:2503.20215): Whisper's over two seconds at a time, with
positions that begin anew in each, neighbours averaged, one projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.audio.instructions import OMNI
from mtmd.clip.audio.mel import MelChunks, read_mel
from mtmd.clip.audio.whisper import (
    OWN_KEYS,
    WhisperTower,
    gguf_tower,
    mean_of_pairs,
    read_tower,
    sinusoid_table,
    tower_keys,
)
from mtmd.clip.blocks import GgufTower
from mtmd.clip.marks import CAPITALS, Marks, marks_of_template, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

WINDOW = 100  # half of a chunk, in mel frames
SECONDS = 300  # that are heard at most, as published


@dataclass(frozen=True)
class Qwen25OmniAudio:
    """Has a tower of whose table of positions a chunk takes the first rows."""

    tower: WhisperTower
    text_width: int
    resolution: MelChunks
    rate: int
    marks: Marks

    instructions = OMNI
    unused = ()

    @property
    def marker(self) -> str:
        return self.token.join(self.marks.around_audio)

    @property
    def token(self) -> str:
        return self.marks.audio

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.tower.vit.width
        own = {"weight": (self.text_width, width), "bias": (self.text_width,)}
        return {
            **self.tower.parameters(_names),
            "a.position_embd.weight": sinusoid_table(
                self.tower.positions, width, _names("ln_post.weight")
            ),
            **{f"a.post_ln.{k}": Parameter((width,), _names(f"ln_post.{k}")) for k in own},
            **{f"mm.a.fc.{k}": Parameter(own[k], _names(f"proj.{k}")) for k in own},
        }

    def prompt(self, plan: ImagePlan) -> str:
        return (self.token * plan.tokens).join(self.marks.around_audio)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = mean_of_pairs(self.tower.graph(tiles, w, attention, every=True))
        return w.linear(w.layer_norm(x, "a.post_ln", self.tower.vit.eps), "mm.a.fc", bias=True)


def _names(name: str) -> tuple[str, ...]:
    return tuple(f"{prefix}audio_tower.{name}" for prefix in ("", "thinker."))


def to_gguf(family: Qwen25OmniAudio) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None for chunks that none says."""
    if family.resolution.frames != 2 * WINDOW:
        return None
    return GgufTower("qwen2.5o", tower_keys(family.tower, family.text_width))


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, OWN_KEYS)
    audio["output_dim"] = text["hidden_size"]
    tokens = marks_of_template(keys.get("chat_template", ""))
    features = {"feature_size": audio["num_mel_bins"], "chunk_length": SECONDS, "tokens": tokens}
    return {"audio_config": audio}, features


def read(top: Settings, features: Settings) -> Qwen25OmniAudio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("audio_config")
    tower = read_tower(c, OWN_KEYS, width=1280, ffn=5120, heads=20, layers=32, bins=128)
    window = c.count("n_window", WINDOW, maximum=tower.positions)
    if window % 2:
        raise ModelError(
            f"{c.where}: n_window is {window}, expected an even number, so that neighbours that "
            "are averaged are of one chunk"
        )
    mel = read_mel(features, tower.bins)
    seconds = features.count("chunk_length", 30, maximum=4 * 3600)
    return Qwen25OmniAudio(
        tower,
        c.count("output_dim", 3584, maximum=MAX_WIDTH),
        MelChunks(mel, 2 * window, seconds * mel.rate // mel.hop),
        mel.rate,
        read_marks(features, CAPITALS),
    )
