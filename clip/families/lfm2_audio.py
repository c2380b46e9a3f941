"""LFM2-Audio and LFM2.5-Audio (Liquid AI), of which text is heard and written, not spoken: NeMo's
FastConformer (arXiv:2305.05084), whose attention knows how far away each position is
(arXiv:1901.02860), and an MLP.

What a position says of a distance d is its product with sines and cosines of d at C / 2 speeds. A
distance is the difference of two positions, so these are turned by one, as rotary embeddings turn a
head, and multiplied with those of the other: heads are C longer, and no table of distances exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.conformer import (
    EPS,
    MAX_KERNEL,
    Convolution,
    biased,
    by_channel,
    by_frequency,
    half_feed_forward,
)
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.nemo import NemoPieces, read_nemo
from mtmd.clip.blocks import GgufTower, attend, checkpoint_names, gguf_size, split_heads
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary, rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# The authors' system message; what else they trained is not said.
INSTRUCTIONS = Instructions(
    system="Perform ASR.",
    transcribe="",
    transcribe_in="",
    translate="Translate the audio into {language}.",
    seconds=30.0,
)
STAGES, KERNEL = 3, 3  # of convolutions that halve time and frequency
STRIDE = 1 << STAGES
PIECE = 6000  # frames, a minute, that are encoded at once; the authors have no limit
SLOWEST = 10_000.0
ROWS = 5000  # of a table in GGUF files, for 100 s in llama.cpp
CONVOLUTION = "pointwise_conv1", "depthwise_conv", "pointwise_conv2", "batch_norm"
NORMS = {
    "ffn_norm": "norm_feed_forward1",
    "ln1": "norm_self_att",
    "norm_conv": "norm_conv",
    "ffn_norm_1": "norm_feed_forward2",
    "ln2": "norm_out",
}


@dataclass(frozen=True)
class Lfm2Audio:
    """Layers L, width C, FFN width F, heads H; `channels` of the first convolutions, `kernel` of
    those in a layer. `scaled`: positions are multiplied by the root of C.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    channels: int
    kernel: int
    scaled: bool
    text_width: int
    resolution: NemoPieces
    rate: int

    marker = token = "<|reserved_123|>"
    instructions = INSTRUCTIONS
    in_line = True
    # Of training, and of speaking
    unused = (
        r"conformer\.pos_enc\..*",
        r"conformer\.layers\.\d+\.conv\.batch_norm\.num_batches_tracked",
        r"(audio_embedding|depth_linear|depth_embeddings|depthformer)\..*",
        r"codebook_offsets|audio_loss_weights",
        r"a\.(position_embd|position_embd_norm|embd_to_logits)\.weight",
    )

    @property
    def rows(self) -> int:
        """Frequencies that are left."""
        return -(-self.resolution.mel.bins // STRIDE)

    @property
    def turning(self) -> Rotary:
        return rotary(SLOWEST, self.width)

    @property
    def _convolution(self) -> Convolution:
        return Convolution(self.width, self.width, self.kernel, CONVOLUTION, bias=True)

    def parameters(self) -> Mapping[str, Parameter]:
        width, channels = self.width, self.channels
        result: dict[str, Parameter] = {}
        for number in range(STAGES):
            at = f"a.conv1d.{_index(number)}"
            result[f"{at}.weight"] = Parameter(
                (channels, 1, KERNEL, KERNEL), _early(number, "weight")
            )
            result[f"{at}.bias"] = _channel_bias(at, channels, _early(number, "bias"))
            if number:
                at = f"a.conv1d.{_index(number) + 1}"
                sources = _early(number, "weight", 1)
                result[f"{at}.weight"] = _matrix(f"{at}.weight", channels, sources)
                result[f"{at}.bias"] = _channel_bias(at, channels, _early(number, "bias", 1))
        flat, turned = (width, channels * self.rows), partial(by_frequency, channels)
        result["a.pre_encode.out.weight"] = Parameter(
            flat,
            checkpoint_names("conformer.pre_encode.out.weight"),
            flat,
            turned,
            gguf=(
                Stored(
                    ("a.pre_encode.out.weight",),
                    flat,
                    turned,
                    invert=lambda w: (by_channel(channels, w),),
                ),
            ),
        )
        result["a.pre_encode.out.bias"] = Parameter(
            (width,), checkpoint_names("conformer.pre_encode.out.bias")
        )
        for layer in range(self.layers):
            result |= self._layer(f"a.blk.{layer}", f"conformer.layers.{layer}")
        for number, shape in (
            (0, (width,)),
            (1, (self.text_width, width)),
            (3, (self.text_width, self.text_width)),
        ):
            result |= biased(f"mm.a.mlp.{number}", f"audio_adapter.model.{number}", shape)
        return result

    def _layer(self, at: str, theirs: str) -> dict[str, Parameter]:
        width, heads = self.width, self.heads
        result: dict[str, Parameter] = {}
        for norm, name in NORMS.items():
            result |= biased(f"{at}.{norm}", f"{theirs}.{name}", (width,))
        for which, name in (("", "feed_forward1"), ("_1", "feed_forward2")):
            up, down = (self.ffn, width), (width, self.ffn)
            result |= biased(f"{at}.ffn_up{which}", f"{theirs}.{name}.linear1", up)
            result |= biased(f"{at}.ffn_down{which}", f"{theirs}.{name}.linear2", down)
        for part in ("q", "k", "v", "out"):
            name = f"{theirs}.self_attn.linear_{part}"
            result |= biased(f"{at}.attn_{part}", name, (width, width))
        for part in "uv":
            result[f"{at}.pos_bias_{part}"] = Parameter(
                (heads, width // heads), checkpoint_names(f"{theirs}.self_attn.pos_bias_{part}")
            )
        name, shape = f"{at}.linear_pos.weight", (heads, width // heads, width)
        by_head = partial(torch.unflatten, dim=0, sizes=shape[:2])
        result[name] = Parameter(
            shape,
            checkpoint_names(f"{theirs}.self_attn.linear_pos.weight"),
            (width, width),
            by_head,
            gguf=(Stored((name,), (width, width), by_head, invert=lambda w: (w.flatten(0, 1),)),),
        )
        return result | self._convolution.parameters(at, f"{theirs}.conv")

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, F, M] -> [B, T, D], T = F / 8 rounded up"""
        w = Weights(weights, tiles.dtype)
        x = self._convolved(tiles, w)
        batch, count, width = x.shape
        positions = torch.arange(count)[None]
        inputs = graph_input("inp.positions", (1, count), positions.dtype, lambda _: positions)
        angles = ops.rope_table(inputs, rotary=self.turning, name="a.angles")
        still = torch.tensor([0.0, 1.0], dtype=x.dtype).repeat(width // 2)  # sine, cosine of 0
        table = still.expand(batch, count, self.heads, width)
        zero = graph_input("inp.distances", table.shape, table.dtype, lambda _: table)
        turned = ops.rope(zero, angles, pairs="adjacent", name="a.turned")
        for layer in range(self.layers):
            at = f"a.blk.{layer}"
            x = half_feed_forward(x, at, "", w)
            x = self._attention(x, at, angles, turned, w, attention)
            x = self._convolution.graph(x, at, w)
            x = half_feed_forward(x, at, "_1", w)
            x = w.layer_norm(x, f"{at}.ln2", EPS)
        x = w.linear(w.layer_norm(x, "mm.a.mlp.0", EPS), "mm.a.mlp.1", bias=True)
        return w.linear(ops.gelu(x, approximate="none", name="mm.a.gelu"), "mm.a.mlp.3", bias=True)

    def _convolved(self, tiles: Node, w: Weights) -> Node:
        """tiles [B, 1, F, M] -> [B, T, C]"""
        batch, _, frames, bins = tiles.shape
        x = ops.reshape(tiles, shape=(batch, frames * bins, 1), name="a.mel")
        for number in range(STAGES):
            at = f"a.conv1d.{_index(number)}"
            x = ops.conv2d(
                x,
                w.tensor(f"{at}.weight"),
                w.tensor(f"{at}.bias"),
                grid=(frames, bins),
                stride=(2, 2),
                padding=(1, frames % 2, 1, bins % 2),
                groups=self.channels if number else 1,
                name=at,
            )
            frames, bins = -(-frames // 2), -(-bins // 2)
            if number:
                x = w.linear(x, f"a.conv1d.{_index(number) + 1}", bias=True)
            x = ops.relu(x, name=f"{at}.relu")
        x = ops.reshape(x, shape=(batch, frames, bins * self.channels), name="a.frames")
        x = w.linear(x, "a.pre_encode.out", bias=True)
        return ops.scale(x, factor=self.width**0.5, name="a.scaled") if self.scaled else x

    def _attention(
        self, x: Node, at: str, angles: Node, turned: Node, w: Weights, attention: AttentionForm
    ) -> Node:
        """x [B, T, C], turned [B, T, H, C] -> [B, T, C]"""
        y = w.layer_norm(x, f"{at}.ln1", EPS)
        q, k, v = (
            split_heads(w.linear(y, f"{at}.attn_{p}", bias=True), self.heads, f"{at}.attn_{p}")
            for p in "qkv"
        )
        batch, count, heads, head = q.shape
        content = ops.add(q, w.tensor(f"{at}.pos_bias_u"), name=f"{at}.attn_q.content")
        far = ops.add(q, w.tensor(f"{at}.pos_bias_v"), name=f"{at}.attn_q.far")
        far = ops.reshape(far, shape=(batch * count, heads, head), name=f"{at}.attn_q.rows")
        far = w.heads(far, f"{at}.linear_pos", turned=True)
        far = ops.reshape(far, shape=(batch, count, heads, self.width), name=f"{at}.distances")
        far = ops.rope(far, angles, pairs="adjacent", name=f"{at}.distances.turned")
        q = ops.concat(content, far, axis=3, name=f"{at}.attn_q.long")
        k = ops.concat(k, turned, axis=3, name=f"{at}.attn_k.long")
        y = attend(q, k, v, attention, at=at, scale=head**-0.5)
        return ops.add(w.linear(y, f"{at}.attn_out", bias=True), x, name=f"{at}.attn_residual")


def _index(number: int) -> int:
    """Return which of the authors' layers is the strided convolution of a stage."""
    return max(0, 3 * number - 1)


def _early(number: int, kind: str, behind: int = 0) -> tuple[str, ...]:
    return checkpoint_names(f"conformer.pre_encode.conv.{_index(number) + behind}.{kind}")


def _channel_bias(at: str, channels: int, sources: tuple[str, ...]) -> Parameter:
    name = f"{at}.bias"
    stored = Stored(
        (name,), (channels, 1, 1), torch.flatten, invert=lambda b: (b.reshape(-1, 1, 1),)
    )
    return Parameter((channels,), sources, gguf=(stored,))


def _matrix(name: str, channels: int, sources: tuple[str, ...]) -> Parameter:
    """A kernel of one cell."""
    shape = channels, channels
    stored = Stored(
        (name,), (*shape, 1, 1), _only_cell, invert=lambda w: (w.reshape(*w.shape, 1, 1),)
    )
    return Parameter(shape, sources, stored.shape, _only_cell, gguf=(stored,))


def _only_cell(kernel: torch.Tensor) -> torch.Tensor:
    return kernel[..., 0, 0]


def usual_words(config: Settings) -> dict[str, Any]:
    """Return the authors' config.json, which names no model_type, in transformers' words."""
    text = {"model_type": "lfm2", **config.part("lfm").values}
    return {
        **config.values,
        "model_type": "lfm2_audio",
        "text_config": text,
        "audio_config": config.part("encoder").values,
    }


def to_gguf(family: Lfm2Audio) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None where a setting differs from what llama.cpp
    has as a constant.
    """
    mel = family.resolution.mel
    if family.scaled or family.kernel != 9 or (mel.size, mel.window, mel.hop) != (512, 400, 160):
        return None
    keys = {
        "audio.projection_dim": family.text_width,
        "audio.embedding_length": family.width,
        "audio.feed_forward_length": family.width,  # as llama.cpp's converter has it; not read
        "audio.block_count": family.layers,
        "audio.attention.head_count": family.heads,
        "audio.num_mel_bins": mel.bins,
        "audio.attention.layer_norm_epsilon": EPS,
    }
    unrounded = tuple(name for name in family.parameters() if ".conv" in name)
    # llama.cpp reads the size of this table, which is of audio that is spoken, and nothing else
    rows = {"a.position_embd.weight": torch.zeros(ROWS, family.text_width)}
    return GgufTower("lfm2a", keys, unrounded=unrounded, tensors=rows)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say."""

    width, ffn = keys.count("audio.embedding_length"), gguf_size(shapes, "a.blk.0.ffn_up.weight")
    encoder = {
        "feat_in": keys.get("audio.num_mel_bins", None),
        "n_layers": keys.get("audio.block_count", None),
        "d_model": width,
        "n_heads": keys.get("audio.attention.head_count", None),
        "ff_expansion_factor": max(ffn // width, 1) if ffn else None,
        "subsampling_conv_channels": gguf_size(shapes, "a.conv1d.0.weight"),
        "conv_kernel_size": gguf_size(shapes, "a.blk.0.conv_dw.weight", 1),
    }
    text = {"hidden_size": keys.get("audio.projection_dim", None)}
    return {"audio_config": encoder, "text_config": text}, {}


def read(top: Settings, features: Settings) -> Lfm2Audio:  # noqa: ARG001
    """Read it from config.json, which has the feature extractor's settings as well, with the
    authors' values where it says nothing; ModelError where one cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    c.choice("subsampling", ("dw_striding",), "dw_striding")
    c.choice("subsampling_factor", (STRIDE,), STRIDE)
    c.choice("self_attention_model", ("rel_pos",), "rel_pos")
    c.choice("conv_norm_type", ("batch_norm",), "batch_norm")
    c.choice("untie_biases", (True,), True)
    for key in ("causal_downsampling", "reduction", "conv_context_size"):
        c.choice(key, (False,), False)
    c.choice("att_context_size", ([-1, -1], [[-1, -1]]), [-1, -1])
    bins = c.count("feat_in", 128, maximum=MAX_WIDTH)
    width, heads = (
        c.count("d_model", 512, maximum=MAX_WIDTH),
        c.count("n_heads", 8, maximum=MAX_HEADS),
    )
    if width % heads or width % 2 or bins % STRIDE:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}, {bins} frequencies; expected heads that "
            f"divide an even width, and a multiple of {STRIDE} frequencies"
        )
    mel = read_nemo(top.part("preprocessor"), bins)
    return Lfm2Audio(
        layers=c.count("n_layers", 17, maximum=MAX_LAYERS),
        width=width,
        ffn=width * c.count("ff_expansion_factor", 4, maximum=64),
        heads=heads,
        channels=c.count("subsampling_conv_channels", 256, maximum=MAX_WIDTH),
        kernel=c.count("conv_kernel_size", 9, maximum=MAX_KERNEL),
        scaled=c.flag("xscaling", False),
        text_width=text.count("hidden_size", 2048, maximum=MAX_WIDTH),
        resolution=NemoPieces(mel, PIECE, STRIDE),
        rate=mel.rate,
    )
