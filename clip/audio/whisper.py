"""Whisper's encoder (arXiv:2212.04356): two convolutions over time, the second of which halves it,
a table of positions, pre-norm blocks whose keys have no bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import ACTIVATIONS, VitParams, vit_block
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-5  # of the layer norms; configurations do not say
KERNEL = 3
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
}
SLOWEST = 10_000.0  # of a table of sinusoids
# Names of its sizes in an audio_config: Whisper's own, and those that newer models have.
OWN_KEYS = {
    "width": "d_model",
    "ffn": "encoder_ffn_dim",
    "heads": "encoder_attention_heads",
    "layers": "encoder_layers",
}
PLAIN_KEYS = {
    "width": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
}
Source = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True)
class WhisperTower:
    """`bins` of the spectrum, and `positions` behind the second convolution, for which there is a
    table, or, with a `rotary`, none: heads turn.
    """

    vit: VitParams
    bins: int
    positions: int
    rotary: Rotary | None = None

    @property
    def frames(self) -> int:
        """Mel frames of a window."""
        return 2 * self.positions

    def parameters(
        self, source: Source, names: Mapping[str, str] = NAMES, last: str = "layer_norm"
    ) -> dict[str, Parameter]:
        """`source("conv1.weight")` lists the names it may have in a checkpoint; `names` are those
        of a block's parts there, `last` that of the norm behind the blocks.
        """
        width, ffn = self.vit.width, self.vit.ffn
        result: dict[str, Parameter] = {}
        if self.rotary is None:
            result["a.position_embd.weight"] = Parameter(
                (self.positions, width), source("embed_positions.weight")
            )
        for number, channels in ((1, self.bins), (2, width)):
            at, stored = f"a.conv1d.{number}", (width, channels, KERNEL)
            result[f"{at}.weight"] = Parameter(
                (width, channels, 1, KERNEL),
                source(f"conv{number}.weight"),
                stored,
                lambda w: w.unsqueeze(2),
                gguf=(
                    Stored(
                        (f"{at}.weight",),
                        stored,
                        lambda w: w.unsqueeze(2),
                        invert=lambda w: (w.squeeze(2),),
                    ),
                ),
            )
            result[f"{at}.bias"] = Parameter(
                (width,),
                source(f"conv{number}.bias"),
                gguf=(
                    Stored(
                        (f"{at}.bias",),
                        (width, 1),
                        lambda b: b.squeeze(1),
                        invert=lambda b: (b.unsqueeze(1),),
                    ),
                ),
            )
        shapes = {
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
            "ln1": (width,),
            "ln2": (width,),
        }
        for layer in range(self.vit.layers):
            for part, name in names.items():
                shape = shapes.get(part, (width, width))
                kinds = {"weight": shape} | ({} if part == "attn_k" else {"bias": shape[:1]})
                for kind, size in kinds.items():
                    result[f"a.blk.{layer}.{part}.{kind}"] = Parameter(
                        size, source(f"layers.{layer}.{name}.{kind}")
                    )
        for kind in ("weight", "bias"):
            result[f"a.post_ln.{kind}"] = Parameter((width,), source(f"{last}.{kind}"))
        return result

    def graph(self, tiles: Node, w: Weights, attention: AttentionForm, every: bool = False) -> Node:
        """tiles [B, 1, F, M] -> [B, T, C] before the last norm, T = F / 2 rounded down: the last
        frame of a window that is cut is seen by the first convolution alone. With `every` frame
        rounded up, and beyond the last there is nothing
        """
        batch, _, frames, bins = tiles.shape
        x = ops.reshape(tiles, shape=(batch, frames, bins), name="a.mel")
        odd = every and frames % 2
        for number in (1, 2):
            at = f"a.conv1d.{number}"
            x = ops.conv2d(
                x,
                w.tensor(f"{at}.weight"),
                w.tensor(f"{at}.bias"),
                grid=(1, frames),
                stride=(1, number),
                # the second needs none behind an even number
                padding=(0, 0, 1, 1 if odd else 2 - number),
                name=at,
            )
            x = ops.gelu(x, approximate="none", name=f"{at}.gelu")
        count = frames // 2 + odd
        angles: Node | None = None
        if self.rotary is None:
            table = w.tensor("a.position_embd.weight")
            if count < self.positions:
                table = ops.rows(table, start=0, stop=count, name="a.position_embd.rows")
            x = ops.add(x, table, name="a.placed")
        else:
            positions = torch.arange(count)[None]
            inputs = graph_input(
                "inp.audio_positions", (1, count), positions.dtype, lambda _: positions
            )
            angles = ops.rope_table(inputs, rotary=self.rotary, name="a.angles")
        for layer in w.layers(self.vit.layers):
            x = vit_block(
                x,
                layer,
                self.vit,
                w,
                attention=attention,
                blocks="a.blk",
                key_bias=False,
                angles=angles,
            )
        return x


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """[positions, width], sines before cosines"""
    step = math.log(SLOWEST) / (width // 2 - 1)
    speeds = torch.exp(-step * torch.arange(width // 2, dtype=torch.float32))
    turns = torch.arange(positions, dtype=torch.float32)[:, None] * speeds
    return torch.cat((turns.sin(), turns.cos()), dim=1)


def sinusoid_table(positions: int, width: int, other: tuple[str, ...]) -> Parameter:
    """The parameter of a table that no checkpoint but GGUF has: it is made, in the place of
    another tensor, [width], of these names.
    """
    return Parameter((positions, width), other, (width,), lambda _: sinusoids(positions, width))


def mean_of_pairs(x: Node) -> Node:
    """The mean of each two neighbours; an odd one at the end is left out

    [B, T, C] -> [B, T / 2, C]
    """
    batch, count, width = x.shape
    pairs = count // 2
    x = ops.reshape(x, shape=(batch, count * width), name="a.pool.flat")
    x = ops.columns(x, start=0, stop=2 * pairs * width, name="a.pool.pairs")
    x = ops.scale(x, factor=0.5, name="a.pool.half")
    x = ops.reshape(x, shape=(batch, pairs, 2 * width), name="a.pool.alongside")
    first, second = (
        ops.columns(x, start=start, stop=start + width, name=f"a.pool.{start}")
        for start in (0, width)
    )
    return ops.add(first, second, name="a.pool")


def tower_keys(tower: WhisperTower, text_width: int) -> dict[str, object]:
    """Return the keys of a GGUF that say its sizes."""
    return {
        "audio.projection_dim": text_width,
        "audio.embedding_length": tower.vit.width,
        "audio.feed_forward_length": tower.vit.ffn,
        "audio.block_count": tower.vit.layers,
        "audio.attention.head_count": tower.vit.heads,
        "audio.num_mel_bins": tower.bins,
        "audio.attention.layer_norm_epsilon": tower.vit.eps,
    }


def gguf_tower(
    keys: Settings, shapes: Mapping[str, Shape], names: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return an audio_config, by the `names` of its keys, and a text_config of the same sizes."""
    parts = {
        "width": "embedding_length",
        "ffn": "feed_forward_length",
        "heads": "attention.head_count",
        "layers": "block_count",
    }
    table = shapes.get("a.position_embd.weight", ())
    audio = {names[part]: keys.get(f"audio.{key}", None) for part, key in parts.items()}
    audio["num_mel_bins"] = keys.get("audio.num_mel_bins", None)
    audio["max_source_positions"] = table[0] if len(table) == 2 else None
    return audio, {"hidden_size": keys.get("audio.projection_dim", None)}


def keys_of(c: Settings) -> Mapping[str, str]:
    """Return the names that an audio_config has for its sizes."""
    return OWN_KEYS if c.get(OWN_KEYS["width"], None) is not None else PLAIN_KEYS


def read_tower(c: Settings, names: Mapping[str, str], **defaults: int) -> WhisperTower:
    """Read it from an audio_config, by the names of its keys: `width`, `ffn`, `heads`, `layers`.
    Raises ModelError.
    """
    sizes = {
        part: c.count(key, defaults[part], maximum=MAX_WIDTH)
        for part, key in names.items()
        if part in ("width", "ffn")
    }
    vit = VitParams(
        layers=c.count(names["layers"], defaults["layers"], maximum=MAX_LAYERS),
        heads=c.count(names["heads"], defaults["heads"], maximum=MAX_HEADS),
        eps=EPS,
        gelu=ACTIVATIONS[c.choice("activation_function", ("gelu",), "gelu")],
        **sizes,
    )
    if vit.width % vit.heads:
        raise ModelError(
            f"{c.where}: {vit.heads} heads of width {vit.width}; expected heads that divide the "
            "width"
        )
    return WhisperTower(
        vit,
        c.count("num_mel_bins", defaults["bins"], maximum=MAX_WIDTH),
        c.count("max_source_positions", 1500, maximum=MAX_WIDTH),
    )
