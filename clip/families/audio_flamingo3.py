"""Audio Flamingo 3 (arXiv:2507.08128) and Music Flamingo (arXiv:2511.10289): Whisper's encoder over
what is heard of each 30 s, neighbours averaged, with the latter turned by their times, an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
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
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
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
WINDOWS, LONGER = 20, 40  # of 30 s, that are heard at most; by Music Flamingo
MUSIC = "musicflamingo"
AROUND = "<|sound_bos|>", "<|sound_eos|>"
CONVOLUTIONS = ("a.conv1d.1.weight", "a.conv1d.2.weight")


@dataclass(frozen=True)
class Times:
    """Pairs of a token's first numbers turn: half of them by the number of its window, the others
    by its place there, both times the seconds since the audio began, of which a token has
    `seconds`.
    """

    pairs: int
    longest: float
    seconds: float

    @property
    def rotary(self) -> Rotary:
        """Turns of a window's number times a token's, and of its place in the window times that."""
        count = 2 * self.pairs
        step = -2 * math.pi * self.seconds / self.longest
        half = [step * self.longest ** (-i / count) for i in range(0, count, 2)]
        axes = (0,) * self.pairs + (1,) * self.pairs
        return Rotary((*half, *(2 * math.pi * speed for speed in half)), axes)

    def turned(self, x: Node, window: Node, tokens: int) -> Node:
        """x [B, T, C], window fp32 [B, 1, 1], of `tokens` tokens each -> [B, T, C]"""
        batch, count, width = x.shape
        at = torch.arange(count, dtype=torch.float32).repeat(batch).view(batch, count, 1)
        location = graph_input("inp.audio_locations", tuple(at.shape), at.dtype, lambda _: at)
        before = ops.scale(window, factor=float(tokens), name="a.tokens_before")
        number = ops.add(location, before, name="a.numbers")
        products = [
            ops.reshape(
                ops.mul(number, factor, name=f"a.turns.{name}"),
                shape=(1, batch * count),
                name=f"a.turns.{name}.flat",
            )
            for name, factor in (("window", window), ("location", location))
        ]
        turns = ops.concat(*products, axis=0, name="a.turns")
        turns = ops.cast(turns, dtype=torch.int64, name="a.turns.whole")
        table = ops.rope_table(turns, rotary=self.rotary, name="a.angles")
        x = ops.reshape(x, shape=(batch * count, 1, width), name="a.rows")
        x = ops.rope(x, table, pairs="adjacent", name="a.turned")
        return ops.reshape(x, shape=(batch, count, width), name="a.turned.tiles")


@dataclass(frozen=True)
class AudioFlamingo3:
    """`times`: Music Flamingo's; None for one whose tokens are not turned. `around` a recording's
    tokens stand others.
    """

    tower: WhisperTower
    gelu: str
    text_width: int
    resolution: MelWindows
    rate: int
    times: Times | None = None
    around: tuple[str, str] = ("", "")

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
        begin, end = self.around
        return begin + self.token * plan.tokens + end

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, bins = Weights(weights, tiles.dtype), self.tower.bins
        spectrum = tiles
        if self.times is not None:
            spectrum = ops.columns(tiles, start=0, stop=bins, name="a.bins")
        x = mean_of_pairs(self.tower.graph(spectrum, w, attention))
        x = w.layer_norm(x, "a.post_ln", self.tower.vit.eps)
        if self.times is not None:
            window = ops.columns(tiles, start=bins, stop=bins + 1, name="a.windows")
            first = torch.zeros(1, dtype=torch.int64)
            rows = graph_input("inp.window_rows", (1,), first.dtype, lambda _: first)
            window = ops.take_rows(window, rows, name="a.window")
            window = ops.reshape(window, shape=(tiles.shape[0], 1, 1), name="a.window.flat")
            window = ops.cast(window, dtype=torch.float32, name="a.window.fp32")
            x = self.times.turned(x, window, self.resolution.max_tokens())
        x = w.linear(x, "mm.a.mlp.1", bias=True)
        x = ops.gelu(x, approximate=self.gelu, name="mm.a.gelu")
        return w.linear(x, "mm.a.mlp.2", bias=True)


def to_gguf(family: AudioFlamingo3) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None for one whose tokens are turned."""
    if family.times is not None:
        return None
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
    times = _read_times(top, tower) if top.get("model_type", None) == MUSIC else None
    windows = LONGER if times else WINDOWS
    return AudioFlamingo3(
        tower,
        ACTIVATIONS[top.choice("projector_hidden_act", ("gelu",), "gelu")],
        text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        MelWindows(mel, tower.frames, 4, whole=False, limit=windows, numbered=times is not None),
        mel.rate,
        times,
        AROUND if times else ("", ""),
    )


def _read_times(top: Settings, tower: WhisperTower) -> Times:
    """Read how tokens are turned. Raises ModelError."""
    rope = top.part("rope_parameters")
    rope.choice("rope_type", ("default",), "default")
    share = rope.number("partial_rotary_factor", top.number("partial_rotary_factor", 0.2))
    longest = rope.number("rope_theta", top.number("rope_theta", 1200.0))
    turning = int(tower.vit.width * share)
    if turning % 2 or not 0 < 2 * turning <= tower.vit.width or tower.frames // 4 > longest:
        raise ModelError(
            f"{top.where}: partial_rotary_factor {share} of a width of {tower.vit.width}, "
            f"rope_theta {longest}; expected an even number of numbers, at most half of the "
            f"width, and {tower.frames // 4} places at least"
        )
    return Times(turning // 2, longest, 4 * top.number("audio_frame_step", 0.01))
