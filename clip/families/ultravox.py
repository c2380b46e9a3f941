"""Ultravox (fixie-ai): Whisper's encoder over what is heard of each 30 s, eight positions in a row
a token, a gated MLP. Its decoder may be any; its vocabulary need not know of audio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import read_mel
from mtmd.clip.audio.stacks import MelStacks
from mtmd.clip.audio.whisper import (
    OWN_KEYS,
    WhisperTower,
    gguf_tower,
    keys_of,
    read_tower,
    tower_keys,
)
from mtmd.clip.blocks import GgufTower, checkpoint_names
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# In the authors' words.
INSTRUCTIONS = Instructions(
    transcribe="Transcribe",
    transcribe_in="Transcribe the {language} audio",
    translate="Please translate the text to {language}. Your response should only include the "
    "{language} translation, without any additional words:",
    seconds=30.0,
)
EPS = 1e-6  # of the projector's norms
# A token that answers have no use for, by what templates of decoders with that vocabulary write.
UNUSED_TOKENS = {
    "<|eot_id|>": "<|reserved_special_token_0|>",
    "<|im_start|>": "<|image_pad|>",
    "<start_of_turn>": "<unused0>",
}


@dataclass(frozen=True)
class Ultravox:
    """`stacked` positions of a token, `hidden` numbers between the projector's matrices;
    `norm_between`: the second norm is between them, as in version 0.5 and later, not behind.
    """

    tower: WhisperTower
    stacked: int
    hidden: int
    norm_between: bool
    text_width: int
    resolution: MelStacks
    rate: int
    token: str

    marker = "<|audio|>"
    instructions = INSTRUCTIONS
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        stacked, half = self.stacked * self.tower.vit.width, self.hidden // 2
        norm, size = ("mid", half) if self.norm_between else ("post", self.text_width)
        tensors: dict[str, tuple[str, Shape]] = {
            "norm_pre": ("ln_pre", (stacked,)),
            "mlp.1": ("linear_1", (self.hidden, stacked)),
            f"norm_{norm}": (f"ln_{norm}", (size,)),
            "mlp.2": ("linear_2", (self.text_width, half)),
        }
        return {
            **self.tower.parameters(lambda name: checkpoint_names(f"audio_tower.{name}")),
            **{
                f"mm.a.{name}.weight": Parameter(
                    shape, checkpoint_names(f"multi_modal_projector.{theirs}.weight")
                )
                for name, (theirs, shape) in tensors.items()
            },
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = self.tower.graph(tiles, w, attention, every=True)
        x = self._stacks(w.layer_norm(x, "a.post_ln", self.tower.vit.eps))
        x = w.linear(w.rms_norm(x, "mm.a.norm_pre", EPS), "mm.a.mlp.1")
        half = self.hidden // 2
        up, gate = (
            ops.columns(x, start=start, stop=start + half, name=f"mm.a.{part}")
            for part, start in (("up", 0), ("gate", half))
        )
        x = ops.silu_mul(gate, up, name="mm.a.gated")
        if self.norm_between:
            x = w.rms_norm(x, "mm.a.norm_mid", EPS)
        x = w.linear(x, "mm.a.mlp.2")
        return x if self.norm_between else w.rms_norm(x, "mm.a.norm_post", EPS)

    def _stacks(self, x: Node) -> Node:
        """[B, T, C] -> [B, T / stacked, stacked * C], the last filled up with zeros"""
        batch, count, width = x.shape
        stacks = -(-count // self.stacked)
        if missing := stacks * self.stacked - count:
            zeros = torch.zeros((batch, missing, width), dtype=x.dtype)
            rest = graph_input("inp.audio_padding", zeros.shape, zeros.dtype, lambda _: zeros)
            x = ops.concat(x, rest, axis=1, name="a.padded")
        return ops.reshape(x, shape=(batch, stacks, self.stacked * width), name="a.stacked")


def to_gguf(family: Ultravox) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None for a norm that none has."""
    if not family.norm_between:
        return None
    keys = tower_keys(family.tower, family.text_width)
    return GgufTower("ultravox", keys | {"audio.projector.stack_factor": family.stacked})


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, OWN_KEYS)
    matrix = shapes.get("mm.a.mlp.1.weight", ())
    config = {
        "audio_config": audio,
        "text_config": text,
        "hidden_size": matrix[0] if len(matrix) == 2 else None,
        "stack_factor": keys.get("audio.projector.stack_factor", None),
        "projector_ln_mid": True,
    }
    return config, {"tokens": {"chat_template": keys.get("chat_template", "")}}


def read(top: Settings, features: Settings) -> Ultravox:
    """Read it from config.json and the feature extractor's settings, with the authors' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    tower = read_tower(c, keys_of(c), width=384, ffn=1536, heads=6, layers=4, bins=80)
    top.choice("projector_act", ("swiglu",), "swiglu")
    top.choice("audio_latency_block_size", (None,), None)
    stacked = top.count("stack_factor", 8, maximum=tower.positions)
    hidden = top.count("hidden_size", 4096, maximum=MAX_WIDTH)
    mel = read_mel(features, tower.bins)
    template = str(features.part("tokens").get("chat_template", ""))
    tokens = (token for written, token in UNUSED_TOKENS.items() if written in template)
    return Ultravox(
        tower,
        stacked,
        hidden - hidden % 2,
        top.flag("projector_ln_mid", False),
        text.count("hidden_size", 4096, maximum=MAX_WIDTH),
        MelStacks(mel, tower.frames, 2 * stacked),
        mel.rate,
        next(tokens, Ultravox.marker),
    )
