"""MERaLiON-2 and MERaLiON-3 (MERaLiON): Whisper's encoder over windows of 30 s, whose samples are
brought to mean 0 and variance 1, fifteen positions in a row a token, a gated MLP; Gemma 2 as its
decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.base.errors import ModelError
from mtmd.clip.audio.audio import Samples
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import Mel, read_mel
from mtmd.clip.audio.whisper import OWN_KEYS, WhisperTower, gguf_tower, read_tower, tower_keys
from mtmd.clip.audio.windows import first_seconds
from mtmd.clip.blocks import GgufTower, checkpoint_names
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, Type, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

_ASK = "Instruction: {} \nFollow the text instruction based on the following audio: "
# In the authors' words.
INSTRUCTIONS = Instructions(
    transcribe=_ASK.format("Please transcribe this speech."),
    transcribe_in=_ASK.format("Please transcribe this speech, which is in {language}."),
    translate=_ASK.format("Please translate the speech into {language}."),
    seconds=30.0,
    audio_last=True,
)
EPS = 1e-5  # of the norm before the projector; configurations do not say
ADDED_VARIANCE = 1e-7
STACKED, SECONDS, WINDOW_S = 15, 300, 30  # as published
WIDER = 5  # the projector's width in those of the encoder


@dataclass(frozen=True)
class EvenWindows:
    """Windows of `frames` mel frames, `limit` at most, of samples with mean 0 and variance 1 in
    each; the last is filled up with zeros, and all of its tokens are heard.

    A tile is fp32 [1, frames, bins].
    """

    mel: Mel
    frames: int
    stride: int
    limit: int
    even: bool = True

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        size = self.frames * self.mel.hop
        heard, notes = first_seconds(samples, self.limit * size, self.mel.rate)
        tiles = []
        for at in range(0, len(heard), size):
            part = heard[at : at + size]
            if self.even:
                part = (part - part.mean()) / np.sqrt(part.var() + ADDED_VARIANCE)
            tiles.append(self.mel(np.pad(part, (0, size - len(part))))[None])
        sizes = ((self.mel.bins, self.frames),) * len(tiles)
        return ImagePlan(tuple(tiles), sizes, self.token_count(len(samples)), notes=notes)

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        return min(-(-samples // (self.frames * self.mel.hop)), self.limit) * self.max_tokens()

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a window."""
        return self.frames // self.stride

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


@dataclass(frozen=True)
class Meralion:
    """`stacked` positions of a token; `gated`: the projector's second layer is a product of two."""

    tower: WhisperTower
    stacked: int
    gated: bool
    text_width: int
    resolution: EvenWindows
    rate: int

    marker = token = "<SpeechHere>"
    in_line = True
    instructions = INSTRUCTIONS
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.tower.vit.width
        wide = WIDER * width
        layers = {0: ("mlp_adapter.0", (wide, self.stacked * width))}
        if self.gated:
            layers |= {1: ("gate_proj", (wide, wide)), 2: ("pool_proj", (wide, wide))}
        layers[3] = ("out_proj", (self.text_width, wide))
        result = self.tower.parameters(lambda name: checkpoint_names(f"speech_encoder.{name}"))
        for kind in ("weight", "bias"):
            result[f"mm.a.norm_pre.{kind}"] = Parameter(
                (width,), checkpoint_names(f"ln_speech.{kind}")
            )
            for number, (name, shape) in layers.items():
                result[f"mm.a.mlp.{number}.{kind}"] = Parameter(
                    shape if kind == "weight" else shape[:1],
                    checkpoint_names(f"speech_audio_adapter.{name}.{kind}"),
                )
        return result

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = w.layer_norm(self.tower.graph(tiles, w, attention), "a.post_ln", self.tower.vit.eps)
        x = w.layer_norm(x, "mm.a.norm_pre", EPS)
        batch, count, width = x.shape
        shape = batch, count // self.stacked, self.stacked * width
        x = w.linear(ops.reshape(x, shape=shape, name="a.stacked"), "mm.a.mlp.0", bias=True)
        x = ops.silu(x, name="mm.a.silu")
        if self.gated:
            gate, up = (w.linear(x, f"mm.a.mlp.{number}", bias=True) for number in (1, 2))
            x = ops.silu_mul(gate, up, name="mm.a.gated")
        return w.linear(x, "mm.a.mlp.3", bias=True)


def to_gguf(family: Meralion) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None for a projector that none has."""
    if not family.gated:
        return None
    keys = tower_keys(family.tower, family.text_width)
    return GgufTower("meralion", keys | {"audio.projector.stack_factor": family.stacked})


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, OWN_KEYS)
    stacked = keys.get("audio.projector.stack_factor", None)
    config = {"speech_config": audio, "text_config": text, "speech_mlp_scale_factor": stacked}
    return config, {}


def read(top: Settings, features: Settings) -> Meralion:
    """Read it from config.json and the feature extractor's settings, with the authors' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("speech_config"), top.part("text_config")
    tower = read_tower(c, OWN_KEYS, width=1280, ffn=5120, heads=20, layers=32, bins=128)
    stacked = top.count("speech_mlp_scale_factor", STACKED, maximum=tower.positions)
    if tower.positions % stacked:
        raise ModelError(
            f"{top.where}: speech_mlp_scale_factor is {stacked}, expected a number that divides "
            f"the encoder's {tower.positions} positions"
        )
    mel, processor = read_mel(features, tower.bins), features.part("processor")
    limit = processor.count("time_duration_limit", SECONDS) // processor.count(
        "whisper_chunk_size", WINDOW_S
    )
    return Meralion(
        tower,
        stacked,
        top.flag("speech_mlp_use_projection", True),
        text.count("hidden_size", 2304, maximum=MAX_WIDTH),
        EvenWindows(
            mel, tower.frames, 2 * stacked, max(1, limit), processor.flag("do_normalize", True)
        ),
        mel.rate,
    )
