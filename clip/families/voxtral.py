"""Voxtral (arXiv:2507.13264): Whisper's encoder over windows of 30 s, all of them heard, four
positions in a row a token, an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import MelWindows, read_mel
from mtmd.clip.audio.whisper import PLAIN_KEYS, WhisperTower, gguf_tower, read_tower, tower_keys
from mtmd.clip.blocks import ACTIVATIONS, GgufTower, checkpoint_names
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
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
STACKED = 4  # positions of a token


@dataclass(frozen=True)
class Voxtral:
    tower: WhisperTower
    gelu: str
    text_width: int
    resolution: MelWindows
    rate: int

    marker = token = "[AUDIO]"
    instructions = INSTRUCTIONS
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.text_width
        shapes = {1: (width, STACKED * self.tower.vit.width), 2: (width, width)}
        return {
            **self.tower.parameters(lambda name: checkpoint_names(f"audio_tower.{name}")),
            **{
                f"mm.a.mlp.{number}.weight": Parameter(
                    shape, checkpoint_names(f"multi_modal_projector.linear_{number}.weight")
                )
                for number, shape in shapes.items()
            },
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = w.layer_norm(self.tower.graph(tiles, w, attention), "a.post_ln", self.tower.vit.eps)
        batch, count, width = x.shape
        shape = batch, count // STACKED, STACKED * width
        x = w.linear(ops.reshape(x, shape=shape, name="a.stacked"), "mm.a.mlp.1")
        return w.linear(ops.gelu(x, approximate=self.gelu, name="mm.a.gelu"), "mm.a.mlp.2")


def to_gguf(family: Voxtral) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    keys = tower_keys(family.tower, family.text_width)
    return GgufTower("voxtral", keys | {"audio.projector.stack_factor": STACKED})


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, PLAIN_KEYS)
    keys.choice("audio.projector.stack_factor", (STACKED,), STACKED)
    return {"audio_config": audio, "text_config": text}, {}


def read(top: Settings, features: Settings) -> Voxtral:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    tower = read_tower(c, PLAIN_KEYS, width=1280, ffn=5120, heads=20, layers=32, bins=128)
    c.choice("intermediate_size", (STACKED * tower.vit.width,), STACKED * tower.vit.width)
    mel = read_mel(features, tower.bins)
    return Voxtral(
        tower,
        ACTIVATIONS[top.choice("projector_hidden_act", ("gelu",), "gelu")],
        text.count("hidden_size", 3072, maximum=MAX_WIDTH),
        MelWindows(mel, tower.frames, 2 * STACKED, whole=True),
        mel.rate,
    )
