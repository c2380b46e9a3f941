"""Audio Flamingo 3 (arXiv:2507.08128): Whisper's encoder over what is heard of each 30 s,
neighbours averaged, an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import MelWindows, read_mel
from mtmd.clip.audio.whisper import (
    PLAIN_KEYS,
    WhisperTower,
    gguf_tower,
    keys_of,
    mean_of_pairs,
    read_tower,
    tower_keys,
)
from mtmd.clip.blocks import ACTIVATIONS, GgufTower, biased_parameters, checkpoint_names
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# The first is the authors'.
INSTRUCTIONS = Instructions(
    transcribe="Transcribe the input speech.",
    transcribe_in="Transcribe the input speech, which is in {language}.",
    translate="Translate the input speech into {language}.",
    seconds=30.0,
    sentences=(
        "The spoken content of the audio is",
        "The transcription of the audio is",
        "The content of the input audio is",
    ),
)
WINDOWS = 20  # of 30 s, that are heard at most
CONVOLUTIONS = ("a.conv1d.1.weight", "a.conv1d.2.weight")


@dataclass(frozen=True)
class AudioFlamingo3:
    tower: WhisperTower
    gelu: str
    text_width: int
    resolution: MelWindows
    rate: int

    marker = token = "<sound>"
    instructions = INSTRUCTIONS
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.text_width
        shapes: dict[int, Shape] = {1: (width, self.tower.vit.width), 2: (width, width)}
        return {
            **self.tower.parameters(lambda name: checkpoint_names(f"audio_tower.{name}")),
            **biased_parameters(
                {
                    f"mm.a.mlp.{number}": (f"multi_modal_projector.linear_{number}", shape)
                    for number, shape in shapes.items()
                },
                checkpoint_names,
            ),
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = mean_of_pairs(self.tower.graph(tiles, w, attention))
        x = w.linear(w.layer_norm(x, "a.post_ln", self.tower.vit.eps), "mm.a.mlp.1", bias=True)
        x = ops.gelu(x, approximate=self.gelu, name="mm.a.gelu")
        return w.linear(x, "mm.a.mlp.2", bias=True)


def to_gguf(family: AudioFlamingo3) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    keys = tower_keys(family.tower, family.text_width)
    return GgufTower("musicflamingo", keys, unrounded=CONVOLUTIONS)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, PLAIN_KEYS)
    return {"audio_config": audio, "text_config": text}, {}


def read(top: Settings, features: Settings) -> AudioFlamingo3:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    tower = read_tower(c, keys_of(c), width=1280, ffn=5120, heads=20, layers=32, bins=128)
    top.choice("projector_bias", (True,), True)
    mel = read_mel(features, tower.bins)
    return AudioFlamingo3(
        tower,
        ACTIVATIONS[top.choice("projector_hidden_act", ("gelu",), "gelu")],
        text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        MelWindows(mel, tower.frames, 4, whole=False, limit=WINDOWS),
        mel.rate,
    )
