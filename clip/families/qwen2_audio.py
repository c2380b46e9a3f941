"""Qwen2-Audio (arXiv:2407.10759): Whisper's encoder over what is heard of 30 s, neighbours
averaged, one projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import MelWindows, read_mel
from mtmd.clip.audio.whisper import (
    OWN_KEYS,
    WhisperTower,
    gguf_tower,
    mean_of_pairs,
    read_tower,
    tower_keys,
)
from mtmd.clip.blocks import GgufTower, checkpoint_names
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

INSTRUCTIONS = Instructions(
    transcribe="Transcribe the audio. Write only what is said.",
    transcribe_in="Transcribe the audio, which is in {language}. Write only what is said.",
    translate="Translate what is said in the audio into {language}. Write only the translation.",
    seconds=30.0,
)


@dataclass(frozen=True)
class Qwen2Audio:
    tower: WhisperTower
    text_width: int
    resolution: MelWindows
    rate: int

    marker = token = "<|AUDIO|>"
    instructions = INSTRUCTIONS
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        shapes = {"weight": (self.text_width, self.tower.vit.width), "bias": (self.text_width,)}
        return {
            **self.tower.parameters(lambda name: checkpoint_names(f"audio_tower.{name}")),
            **{
                f"mm.a.fc.{kind}": Parameter(
                    shape, checkpoint_names(f"multi_modal_projector.linear.{kind}")
                )
                for kind, shape in shapes.items()
            },
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = mean_of_pairs(self.tower.graph(tiles, w, attention))
        return w.linear(w.layer_norm(x, "a.post_ln", self.tower.vit.eps), "mm.a.fc", bias=True)


def to_gguf(family: Qwen2Audio) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    return GgufTower("qwen2a", tower_keys(family.tower, family.text_width))


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, OWN_KEYS)
    return {"audio_config": audio, "text_config": text}, {}


def read(top: Settings, features: Settings) -> Qwen2Audio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    tower = read_tower(c, OWN_KEYS, width=1280, ffn=5120, heads=20, layers=32, bins=128)
    mel = read_mel(features, tower.bins)
    return Qwen2Audio(
        tower,
        text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        MelWindows(mel, tower.frames, 4, whole=False, limit=1),
        mel.rate,
    )
