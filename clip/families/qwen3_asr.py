"""Qwen3-ASR (arXiv:2601.21337): three convolutions over time and frequency of each second, blocks
that see a few seconds each, an MLP. Qwen3-Omni's ears (arXiv:2509.17765) are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.conformer import by_channel, by_frequency
from mtmd.clip.audio.instructions import OMNI as OMNI_INSTRUCTIONS
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import read_mel
from mtmd.clip.audio.seconds import SECOND, TOKENS, MelSeconds
from mtmd.clip.audio.whisper import (
    NAMES,
    OWN_KEYS,
    WhisperTower,
    gguf_tower,
    read_tower,
    sinusoid_table,
    tower_keys,
)
from mtmd.clip.blocks import GgufTower, checkpoint_names, vit_block
from mtmd.clip.marks import Marks, marks_of_template, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

INSTRUCTIONS = Instructions(
    transcribe="",
    transcribe_in="",
    translate="Translate what is said in the audio into {language}.",
    seconds=30.0,
    heading="<asr_text>",
    begun="language {language}<asr_text>",
    hint_is_system=True,
)
CONVOLUTIONS, KERNEL = 3, 3
WINDOW = 800  # mel frames that see each other, as published; a GGUF does not say
ALIGNER = "qwen3_forced_aligner"
OMNI = "qwen3_omni_moe_thinker"


@dataclass(frozen=True)
class Qwen3Asr:
    """`channels` of the convolutions. Of the tower's table of positions a second takes the first
    rows.
    """

    tower: WhisperTower
    channels: int
    text_width: int
    resolution: MelSeconds
    rate: int
    marks: Marks
    instructions: Instructions

    unused = ()

    @property
    def marker(self) -> str:
        return self.token.join(self.marks.around_audio)

    @property
    def token(self) -> str:
        return self.marks.audio

    @property
    def rows(self) -> int:
        """Frequencies behind the convolutions."""
        rows = self.tower.bins
        for _ in range(CONVOLUTIONS):
            rows = _halved(rows)
        return rows

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, channels = self.tower.vit.width, self.tower.vit.ffn, self.channels
        flat = width, channels * self.rows
        result = {
            "a.position_embd.weight": sinusoid_table(
                self.tower.positions, width, _tower("ln_post.weight")
            ),
            "a.conv_out.weight": Parameter(
                flat,
                _tower("conv_out.weight"),
                flat,
                partial(by_frequency, channels),
                gguf=(
                    Stored(
                        ("a.conv_out.weight",),
                        flat,
                        partial(by_frequency, channels),
                        invert=lambda w: (by_channel(channels, w),),
                    ),
                ),
            ),
        }
        for number in range(1, CONVOLUTIONS + 1):
            at, source = f"a.conv2d.{number}", f"conv2d{number}"
            kernel = channels, channels if number > 1 else 1, KERNEL, KERNEL
            result[f"{at}.weight"] = Parameter(
                kernel,
                _tower(f"{source}.weight"),
                kernel,
                _turned,
                gguf=(Stored((f"{at}.weight",), kernel, _turned, invert=lambda w: (_turned(w),)),),
            )
            result[f"{at}.bias"] = Parameter(
                (channels,),
                _tower(f"{source}.bias"),
                gguf=(
                    Stored(
                        (f"{at}.bias",),
                        (channels, 1, 1),
                        torch.flatten,
                        invert=lambda b: (b.reshape(-1, 1, 1),),
                    ),
                ),
            )
        shapes: dict[str, Shape] = {
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
            "ln1": (width,),
            "ln2": (width,),
        }
        for layer in range(self.tower.vit.layers):
            for part, name in NAMES.items():
                shape = shapes.get(part, (width, width))
                for kind, size in (("weight", shape), ("bias", shape[:1])):
                    result[f"a.blk.{layer}.{part}.{kind}"] = Parameter(
                        size, _tower(f"layers.{layer}.{name}.{kind}")
                    )
        for kind in ("weight", "bias"):
            result[f"a.post_ln.{kind}"] = Parameter((width,), _tower(f"ln_post.{kind}"))
        for number, rows in ((1, width), (2, self.text_width)):
            for kind, size in (("weight", (rows, width)), ("bias", (rows,))):
                result[f"mm.a.mlp.{number}.{kind}"] = Parameter(
                    size,
                    (
                        *checkpoint_names(f"multi_modal_projector.linear_{number}.{kind}"),
                        *_tower(f"proj{number}.{kind}"),
                    ),
                )
        return result

    def prompt(self, plan: ImagePlan) -> str:
        return (self.token * plan.tokens).join(self.marks.around_audio)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, F, M] -> [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        batch, _, frames, bins = tiles.shape
        whole, rest = frames // SECOND, frames % SECOND
        flat = ops.reshape(tiles, shape=(batch, frames * bins), name="a.mel")
        x: Node | None = None
        if whole:
            part = ops.columns(flat, start=0, stop=whole * SECOND * bins, name="a.seconds")
            part = ops.reshape(part, shape=(batch * whole, SECOND * bins, 1), name="a.seconds.mel")
            x = self._convolved(part, SECOND, "a.second", w)
            x = ops.reshape(
                x, shape=(batch, whole * x.shape[1], x.shape[2]), name="a.seconds.tokens"
            )
        if rest:
            part = ops.columns(flat, start=whole * SECOND * bins, stop=frames * bins, name="a.rest")
            part = ops.reshape(part, shape=(batch, rest * bins, 1), name="a.rest.mel")
            last = self._convolved(part, rest, "a.rest", w)
            x = last if x is None else ops.concat(x, last, axis=1, name="a.tokens")
        assert x is not None
        for layer in w.layers(self.tower.vit.layers):
            x = vit_block(x, layer, self.tower.vit, w, attention=attention, blocks="a.blk")
        x = w.layer_norm(x, "a.post_ln", self.tower.vit.eps)
        x = ops.gelu(
            w.linear(x, "mm.a.mlp.1", bias=True), approximate=self.tower.vit.gelu, name="mm.a.gelu"
        )
        return w.linear(x, "mm.a.mlp.2", bias=True)

    def _convolved(self, x: Node, frames: int, at: str, w: Weights) -> Node:
        """A second, or the rest of one     x [N, frames * M, 1] -> [N, T, C]"""
        rows, columns = frames, self.tower.bins
        for number in range(1, CONVOLUTIONS + 1):
            x = ops.conv2d(
                x,
                w.tensor(f"a.conv2d.{number}.weight"),
                w.tensor(f"a.conv2d.{number}.bias"),
                grid=(rows, columns),
                stride=(2, 2),
                padding=(1, rows % 2, 1, columns % 2),
                name=f"{at}.conv2d.{number}",
            )
            x = ops.gelu(x, approximate="none", name=f"{at}.conv2d.{number}.gelu")
            rows, columns = _halved(rows), _halved(columns)
        shape = x.shape[0], rows, columns * self.channels
        x = ops.reshape(x, shape=shape, name=f"{at}.flat")
        table = ops.rows(
            w.tensor("a.position_embd.weight"), start=0, stop=rows, name=f"{at}.position_embd"
        )
        return ops.add(w.linear(x, "a.conv_out"), table, name=f"{at}.placed")


def _halved(count: int) -> int:
    return (count + 1) // 2


def _tower(name: str) -> tuple[str, ...]:
    return *checkpoint_names(f"audio_tower.{name}"), f"thinker.audio_tower.{name}"


def _turned(kernel: torch.Tensor) -> torch.Tensor:
    """A kernel over frequencies and frames as one over frames and frequencies, and back."""
    return kernel.transpose(2, 3).contiguous()


def to_gguf(family: Qwen3Asr) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None for a window that none says."""
    if family.resolution.frames != WINDOW:
        return None
    return GgufTower("qwen3a", tower_keys(family.tower, family.text_width))


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, OWN_KEYS)
    kernel = shapes.get("a.conv2d.1.weight", ())
    audio["downsample_hidden_size"] = kernel[0] if len(kernel) == 4 else None
    audio |= {"output_dim": text["hidden_size"], "n_window_infer": WINDOW}
    tokens = marks_of_template(keys.get("chat_template", ""))
    kind = OMNI if keys.get("has_vision_encoder", False) else "qwen3_asr"
    features = {"feature_size": audio["num_mel_bins"], "tokens": tokens}
    return {"model_type": kind, "audio_config": audio}, features


def read(top: Settings, features: Settings) -> Qwen3Asr:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    if top.get("model_type", "") == ALIGNER:
        raise ModelError(
            f"{top.where}: this is a forced aligner, which gives the times of words that are known "
            "and writes no text; use Qwen3-ASR itself"
        )
    c = top.part("audio_config")
    tower = read_tower(c, OWN_KEYS, width=1024, ffn=4096, heads=16, layers=24, bins=128)
    c.choice("n_window", (SECOND // 2,), SECOND // 2)
    c.choice("max_position_embeddings", (TOKENS,), TOKENS)
    is_asr = top.get("model_type", "") != OMNI
    usual = WINDOW if is_asr else WINDOW // 2
    seconds = c.choice("n_window_infer", range(SECOND, 100 * SECOND, SECOND), usual)
    mel = read_mel(features, tower.bins)
    shortest = features.count("min_length", 8000 if is_asr else 1, maximum=mel.rate)
    return Qwen3Asr(
        tower,
        c.count("downsample_hidden_size", 480, maximum=MAX_WIDTH),
        c.count("output_dim", 3584, maximum=MAX_WIDTH),
        MelSeconds(mel, seconds, shortest, bare=not is_asr),
        mel.rate,
        read_marks(features, Marks()),
        INSTRUCTIONS if is_asr else OMNI_INSTRUCTIONS,
    )
