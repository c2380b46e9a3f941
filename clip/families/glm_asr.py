"""GLM-ASR: Whisper's encoder with rotary positions over windows of 30 s, four positions in a row a
token, of which those of silence behind the end are left out, an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.mel import MelWindows, read_mel
from mtmd.clip.audio.whisper import NAMES, PLAIN_KEYS, WhisperTower, gguf_tower, read_tower
from mtmd.clip.blocks import ACTIVATIONS, biased_parameters, checkpoint_names
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import rope_settings, rotary, turning_dims
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# The first is the authors'.
INSTRUCTIONS = Instructions(
    transcribe="Please transcribe this audio into text",
    transcribe_in="Please transcribe this audio, which is in {language}, into text",
    translate="Please translate this audio into {language}",
    seconds=30.0,
)
BLOCK = NAMES | {
    "attn_out": "self_attn.o_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
}
STACKED = 4  # positions of a token
SHARE = 0.5  # of a head's dimensions that turn
SECONDS = 30  # of a window
HEARD = 655  # seconds, at most


@dataclass(frozen=True)
class GlmAsr:
    tower: WhisperTower
    gelu: str
    text_width: int
    resolution: MelWindows
    rate: int

    token = "<|pad|>"
    marker = f"<|begin_of_audio|>{token}<|end_of_audio|>"
    instructions = INSTRUCTIONS
    # A table that heads which turn do not need, and vectors that the decoder's table has as well.
    unused = (r"a\.position_embd\.weight", r"v\.(boi|eoi)")

    def parameters(self) -> Mapping[str, Parameter]:
        tower = self.tower.parameters(
            lambda name: checkpoint_names(f"audio_tower.{name}"), BLOCK, "norm"
        )
        for layer in range(self.tower.vit.layers):
            for name in ("attn_q.weight", "attn_q.bias", "attn_k.weight"):
                at = f"a.blk.{layer}.{name}"
                halves = partial(_in_halves, self.tower.vit.heads, self._turning)
                stored = Stored((at,), tower[at].shape, halves, picks_rows=name.endswith("weight"))
                tower[at] = replace(tower[at], gguf=(stored,))
        for kind in ("weight", "bias"):
            at = f"a.post_ln.{kind}"
            stored = Stored((f"mm.a.norm_pre.{kind}",), tower[at].shape)
            tower[at] = replace(tower[at], gguf=(stored,))
        hidden = 2 * self.text_width
        shapes: dict[int, Shape] = {
            1: (hidden, STACKED * self.tower.vit.width),
            2: (self.text_width, hidden),
        }
        projector = {
            f"mm.a.mlp.{number}": (f"multi_modal_projector.linear_{number}", shape)
            for number, shape in shapes.items()
        }
        return tower | biased_parameters(projector, checkpoint_names)

    @property
    def _turning(self) -> int:
        """Return how many dimensions of a head turn."""
        assert self.tower.rotary is not None
        return 2 * len(self.tower.rotary.frequencies)

    def prompt(self, plan: ImagePlan) -> str:
        return self.marker.replace(self.token, self.token * plan.tokens)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = w.layer_norm(self.tower.graph(tiles, w, attention), "a.post_ln", self.tower.vit.eps)
        batch, count, width = x.shape
        shape = batch, count // STACKED, STACKED * width
        x = w.linear(ops.reshape(x, shape=shape, name="a.stacked"), "mm.a.mlp.1", bias=True)
        x = ops.gelu(x, approximate=self.gelu, name="mm.a.gelu")
        return w.linear(x, "mm.a.mlp.2", bias=True)


def _in_halves(heads: int, turning: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of queries or keys, of whose heads pairs of neighbours turn, as those of heads in whose
    first `turning` dimensions each of the first half turns with its like in the second.
    """
    by_head = rows.unflatten(0, (heads, -1))
    pairs = by_head[:, :turning].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, by_head[:, turning:]), 1).flatten(0, 1)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""
    audio, text = gguf_tower(keys, shapes, PLAIN_KEYS)
    keys.choice("audio.projector.stack_factor", (STACKED,), STACKED)
    return {"audio_config": audio, "text_config": text}, {}


def read(top: Settings, features: Settings) -> GlmAsr:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    tower = read_tower(c, PLAIN_KEYS, width=1280, ffn=5120, heads=20, layers=32, bins=128)
    vit = tower.vit
    c.choice("hidden_act", ("gelu",), "gelu")
    c.choice("num_key_value_heads", (vit.heads,), vit.heads)
    c.choice("intermediate_size", (STACKED * vit.width,), STACKED * vit.width)
    rope = rope_settings(c)
    rope.choice("rope_type", ("default",), "default")
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor", SHARE))
    turning = turning_dims(vit.head, share, c.where)
    if turning < 2 or turning % 2:
        raise ModelError(
            f"{c.where}: {turning} dimensions of a head of {vit.head} are rotated, expected an "
            "even number of them"
        )
    mel = read_mel(features, tower.bins)
    seconds = features.count("chunk_length", SECONDS, maximum=HEARD)
    frames = seconds * mel.rate // mel.hop
    return GlmAsr(
        replace(tower, rotary=rotary(rope.number("rope_theta", 1e4), turning)),
        ACTIVATIONS[top.choice("projector_hidden_act", ("gelu",), "gelu")],
        text.count("hidden_size", 2048, maximum=MAX_WIDTH),
        MelWindows(mel, frames, 2 * STACKED, whole=True, limit=HEARD // seconds),
        mel.rate,
    )
