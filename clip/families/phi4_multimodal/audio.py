"""Audio of Phi-4-multimodal (arXiv:2503.01743): a conformer (arXiv:2005.08100) whose scores have a
bias for each distance, and a projector for audio alone and another for audio beside pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.audio.conformer import EPS, MAX_KERNEL, by_frequency
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.kaldi import KaldiPieces, read_kaldi
from mtmd.clip.blocks import attend, split_heads
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# In the words of the authors' examples.
INSTRUCTIONS = Instructions(
    transcribe="Transcribe the audio clip into text.",
    transcribe_in="Transcribe the {language} audio clip into text.",
    translate="Translate the audio to {language}.",
    seconds=30.0,
)
AUDIO_TOKEN = "<|endoftext11|>"  # of the published vocabulary
EMBED = "model.embed_tokens_extend.audio_embed"
STAGES, KERNEL = 3, 3  # of convolutions that halve time and frequency
STRIDE = 1 << STAGES
CONTEXT = 500  # positions, 40 s, that see each other
# By our names: as transformers saves them, and as the authors
LAYER = {
    "ffn_norm": ("feed_forward_in.layer_norm",) * 2,
    "ffn_up": ("feed_forward_in.gate_up_proj", "feed_forward_in.net.0.linear"),
    "ffn_down": ("feed_forward_in.down_proj", "feed_forward_in.net.2"),
    "ln1": ("layer_norm_att",) * 2,
    "attn_q": ("self_attn.q_proj", "self_attn.linear_q"),
    "attn_k": ("self_attn.k_proj", "self_attn.linear_k"),
    "attn_v": ("self_attn.v_proj", "self_attn.linear_v"),
    "attn_out": ("self_attn.o_proj", "self_attn.linear_out"),
    "norm_conv": ("conv.layer_norm",) * 2,
    "conv_pw1": ("conv.glu.ext_pw_conv_1d",) * 2,
    "conv_dw": ("conv.dw_sep_conv_1d.dw_conv",) * 2,
    "conv_sep": ("conv.dw_sep_conv_1d.pw_conv",) * 2,
    "conv_pw2": ("conv.ext_pw_conv_1d",) * 2,
    "ffn_norm_1": ("feed_forward_out.layer_norm",) * 2,
    "ffn_up_1": ("feed_forward_out.gate_up_proj", "feed_forward_out.net.0.linear"),
    "ffn_down_1": ("feed_forward_out.down_proj", "feed_forward_out.net.2"),
    "ln2": ("layer_norm",) * 2,
}
PROJECTORS = {
    "alone": (("up_proj_for_speech", "down_proj_for_speech"), "speech"),
    "beside": (("up_proj_for_vision_speech", "down_proj_for_vision_speech"), "vision"),
}


@dataclass(frozen=True)
class Phi4MultimodalAudio:
    """Layers L, width C, FFN width F, heads H; `channels` of the first convolutions, `kernel` of
    those in a layer; biases up to `reach` positions away.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    channels: int
    kernel: int
    reach: int
    text_width: int
    resolution: KaldiPieces
    token: str = AUDIO_TOKEN

    instructions = INSTRUCTIONS
    unused = ()
    in_line = True
    adapter = "speech-lora"

    @property
    def marker(self) -> str:
        return self.token

    @property
    def rate(self) -> int:
        return self.resolution.mel.rate

    @property
    def alongside_pictures(self) -> KaldiPieces:
        return replace(self.resolution, mark=1.0)

    @property
    def rows(self) -> int:
        """Frequencies that are left."""
        return -(-self.resolution.mel.bins // STRIDE)

    def parameters(self) -> Mapping[str, Parameter]:
        width, channels, bins = self.width, self.channels, self.resolution.mel.bins
        result = {
            "a.mel_mean": Parameter((bins,), _encoder("encoder_embedding.global_mean")),
            "a.mel_scale": Parameter((bins,), _encoder("encoder_embedding.global_invstd")),
            "a.distances": Parameter(
                (2 * self.reach, self.heads, 1),
                _encoder("relative_attention_bias_layer.bias_values.weight"),
                (2 * self.reach, self.heads),
                _by_distance,
            ),
        }
        for number in range(STAGES):
            index = max(0, 3 * number - 1)
            at, theirs = f"a.conv1d.{index}", f"embed.conv.{index}"
            shape = channels, 1, KERNEL, KERNEL
            result |= _both(at, _encoder(theirs), shape)
            if number:
                at, theirs = f"a.conv1d.{index + 1}", f"embed.conv.{index + 1}"
                square = channels, channels
                result |= _both(at, _encoder(theirs), square, (*square, 1, 1), _only_cell)
        flat = width, channels * self.rows
        turned = partial(by_frequency, channels)
        result |= _both("a.pre_encode.out", _encoder("embed.out"), flat, flat, turned)
        for layer in range(self.layers):
            result |= self._layer(layer)
        for which, ((up, down), name) in PROJECTORS.items():
            for at, theirs, into in (("up", up, width), ("down", down, self.text_width)):
                number = 0 if at == "up" else 2
                names = theirs, f"audio_projection.{name}.{number}"
                sources = tuple(f"{EMBED}.{one}" for one in names)
                result |= _both(f"mm.a.{which}.{at}", sources, (self.text_width, into))
        return result

    def _layer(self, layer: int) -> dict[str, Parameter]:
        width, ffn = self.width, self.ffn
        result: dict[str, Parameter] = {}
        shapes: dict[str, Shape] = {
            **{name: (width,) for name in LAYER if "norm" in name or name in ("ln1", "ln2")},
            **{f"attn_{part}": (width, width) for part in ("q", "k", "v", "out")},
            **{f"ffn_up{which}": (2 * ffn, width) for which in ("", "_1")},
            **{f"ffn_down{which}": (width, ffn) for which in ("", "_1")},
        }
        for name, ways in LAYER.items():
            at = f"a.blk.{layer}.{name}"
            sources = tuple(
                dict.fromkeys(f"{EMBED}.encoder.encoders.{layer}.{way}" for way in ways)
            )
            if name == "conv_dw":
                shape: Shape = (width, 1, 1, self.kernel)
                stored = width, 1, self.kernel
                result |= _both(at, sources, shape, stored, lambda kernel: kernel[:, None])
            elif name.startswith("conv"):
                shape = (2 * width if name == "conv_pw1" else width, width)
                result |= _both(at, sources, shape, (*shape, 1), lambda kernel: kernel[..., 0])
            else:
                result |= _both(at, sources, shapes[name])
        for part in ("b1", "b2"):
            result[f"a.blk.{layer}.conv_{part}"] = Parameter(
                (width,),
                _encoder(f"encoders.{layer}.conv.glu.{part}"),
                (1, width, 1),
                torch.flatten,
            )
        return result

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, F, M + 1] -> [B, T, D], T = F / 8 rounded up"""
        w = Weights(weights, tiles.dtype)
        batch, _, frames, bins = tiles.shape
        tiles = ops.reshape(tiles, shape=(batch, frames, bins), name="a.tile")
        x = ops.columns(tiles, start=0, stop=bins - 1, name="a.mel")
        less = ops.scale(w.tensor("a.mel_mean"), factor=-1.0, name="a.mel_mean.less")
        x = ops.add(x, less, name="a.mel.centered")
        x = ops.mul(x, w.tensor("a.mel_scale"), name="a.mel.normed")
        x = self._convolved(x, w)
        count = x.shape[1]
        one = torch.ones((batch, count, self.heads, 1), dtype=x.dtype)
        none = torch.zeros_like(one)
        ones = graph_input("inp.audio_ones", tuple(one.shape), x.dtype, lambda _: one)
        zeros = graph_input("inp.audio_zeros", tuple(one.shape), x.dtype, lambda _: none)
        biases = ops.rows(
            w.tensor("a.distances"),
            start=self.reach - count,
            stop=self.reach + count - 1,
            name="a.distances.seen",
        )
        grid = 1, count
        scale = (self.width // self.heads) ** -0.5
        far = ops.relative_queries(ones, None, biases, grid=grid, scale=scale, name="a.far")
        locations = ops.relative_keys(zeros, grid=grid, rows=False, name="a.locations")
        for layer in w.layers(self.layers):
            at = f"a.blk.{layer}"
            x = self._half_feed_forward(x, at, "", w)
            x = self._attention(x, at, far, locations, w, attention)
            x = self._convolution(x, at, w)
            x = self._half_feed_forward(x, at, "_1", w)
            x = w.layer_norm(x, f"{at}.ln2", EPS)
        return self._projected(x, tiles, w)

    def _convolved(self, x: Node, w: Weights) -> Node:
        """x [B, F, M] -> [B, T, C]"""
        batch, frames, bins = x.shape
        x = ops.reshape(x, shape=(batch, frames * bins, 1), name="a.mel.cells")
        for number in range(STAGES):
            index = max(0, 3 * number - 1)
            at = f"a.conv1d.{index}"
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
                x = w.linear(x, f"a.conv1d.{index + 1}", bias=True)
            x = ops.relu(x, name=f"{at}.relu")
        x = ops.reshape(x, shape=(batch, frames, bins * self.channels), name="a.frames")
        return w.linear(x, "a.pre_encode.out", bias=True)

    def _half_feed_forward(self, x: Node, at: str, which: str, w: Weights) -> Node:
        """Add half of a gated feed-forward layer          [B, T, C] -> [B, T, C]"""
        y = w.linear(
            w.layer_norm(x, f"{at}.ffn_norm{which}", EPS), f"{at}.ffn_up{which}", bias=True
        )
        up, gate = (
            ops.columns(y, start=i * self.ffn, stop=(i + 1) * self.ffn, name=f"{at}.{part}{which}")
            for i, part in enumerate(("ffn_value", "ffn_gate"))
        )
        y = ops.silu_mul(gate, up, name=f"{at}.ffn_gated{which}")
        y = w.linear(y, f"{at}.ffn_down{which}", bias=True)
        y = ops.scale(y, factor=0.5, name=f"{at}.ffn_half{which}")
        return ops.add(y, x, name=f"{at}.ffn_residual{which}")

    def _attention(
        self, x: Node, at: str, far: Node, locations: Node, w: Weights, attention: AttentionForm
    ) -> Node:
        """x [B, T, C], far and locations [B, T, H, E] -> [B, T, C]"""
        y = w.layer_norm(x, f"{at}.ln1", EPS)
        q, k, v = (
            split_heads(w.linear(y, f"{at}.attn_{p}", bias=True), self.heads, f"{at}.attn_{p}")
            for p in "qkv"
        )
        scale = q.shape[3] ** -0.5
        q = ops.concat(q, far, axis=3, name=f"{at}.attn_q.long")
        k = ops.concat(k, locations, axis=3, name=f"{at}.attn_k.long")
        y = attend(q, k, v, attention, at=at, scale=scale)
        return ops.add(w.linear(y, f"{at}.attn_out", bias=True), x, name=f"{at}.attn_residual")

    def _convolution(self, x: Node, at: str, w: Weights) -> Node:
        """Add the gated convolution of what came before          [B, T, C] -> [B, T, C]"""
        width = self.width
        y = w.linear(w.layer_norm(x, f"{at}.norm_conv", EPS), f"{at}.conv_pw1", bias=True)
        value, gate = (
            ops.add(
                ops.columns(y, start=i * width, stop=(i + 1) * width, name=f"{at}.conv_{part}"),
                w.tensor(f"{at}.conv_b{i + 1}"),
                name=f"{at}.conv_{part}.biased",
            )
            for i, part in enumerate(("value", "gate"))
        )
        y = ops.conv2d(
            ops.silu_mul(gate, value, name=f"{at}.conv_gated"),
            w.tensor(f"{at}.conv_dw.weight"),
            w.tensor(f"{at}.conv_dw.bias"),
            grid=(1, x.shape[1]),
            padding=(0, 0, self.kernel - 1, 0),
            groups=width,
            name=f"{at}.conv_dw",
        )
        y = ops.silu(w.linear(y, f"{at}.conv_sep", bias=True), name=f"{at}.conv_silu")
        y = w.linear(y, f"{at}.conv_pw2", bias=True)
        return ops.add(y, x, name=f"{at}.conv_residual")

    def _projected(self, x: Node, tiles: Node, w: Weights) -> Node:
        """Project by the one projector or the other, as the tile's last column says

        x [B, T, C], tiles [B, F, M + 1] -> [B, T, D]
        """
        last = tiles.shape[2] - 1
        mark = ops.columns(tiles, start=last, stop=last + 1, name="a.marks")
        at = torch.zeros(x.shape[1], dtype=torch.int64)
        first = graph_input("inp.mark_rows", tuple(at.shape), at.dtype, lambda _: at)
        shares = {"beside": ops.take_rows(mark, first, name="a.mark")}
        shares["alone"] = ops.scale(shares["beside"], factor=-1.0, offset=1.0, name="a.unmarked")
        both = []
        for which in PROJECTORS:
            y = w.linear(x, f"mm.a.{which}.up", bias=True)
            y = ops.gelu(y, approximate="none", name=f"mm.a.{which}.gelu")
            y = w.linear(y, f"mm.a.{which}.down", bias=True)
            both.append(ops.mul(y, shares[which], name=f"mm.a.{which}.share"))
        return ops.add(*both, name="mm.a.projected")


def _encoder(name: str) -> tuple[str, ...]:
    return (f"{EMBED}.encoder.{name}",)


def _both(
    at: str,
    sources: tuple[str, ...],
    shape: Shape,
    stored: Shape | None = None,
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, Parameter]:
    """.weight and .bias of a layer."""
    weights, biases = (tuple(f"{one}.{kind}" for one in sources) for kind in ("weight", "bias"))
    return {
        f"{at}.weight": Parameter(shape, weights, stored, convert),
        f"{at}.bias": Parameter(shape[:1], biases),
    }


def _by_distance(biases: torch.Tensor) -> torch.Tensor:
    """Biases by a key's place less a query's as those by a query's less a key's."""
    return biases.flip(0)[..., None]


def _only_cell(kernel: torch.Tensor) -> torch.Tensor:
    return kernel[..., 0, 0]


def read(top: Settings, features: Settings) -> Phi4MultimodalAudio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where one cannot be followed.
    """
    c = top.part("audio_config")
    width, heads = (
        c.count("hidden_size", 1024, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 16, maximum=MAX_HEADS),
    )
    for key in ("activation", "conv_activation", "conv_glu_type"):
        c.choice(key, ("swish", "silu"), "swish")
    c.choice("nemo_activation", ("relu",), "relu")
    for key in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        c.choice(key, (width,), 1024)
    for key in ("depthwise_multiplier", "downsample_rate"):
        c.choice(key, (1,), 1)
    c.choice("time_reduction", (STRIDE,), STRIDE)
    c.choice("chunk_size", (-1,), -1)
    c.choice("bias_symmetric", (False,), False)
    reach = c.count("bias_max_distance", 1000, maximum=MAX_WIDTH)
    bins = c.count("input_size", 80, maximum=MAX_WIDTH)
    if width % heads or reach < CONTEXT:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}, bias_max_distance {reach}; expected heads "
            f"that divide the width, and biases for {CONTEXT} positions"
        )
    token = features.part("tokens").get("audio_token", AUDIO_TOKEN)
    return Phi4MultimodalAudio(
        layers=c.count("num_blocks", 24, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 1536, maximum=MAX_WIDTH),
        heads=heads,
        channels=c.count("nemo_conv_channels", 1024, maximum=MAX_WIDTH),
        kernel=c.count("kernel_size", 3, maximum=MAX_KERNEL),
        reach=reach,
        text_width=top.count("hidden_size", 3072, maximum=MAX_WIDTH),
        resolution=KaldiPieces(read_kaldi(features, bins), CONTEXT * STRIDE, STRIDE),
        token=str(token.get("content", AUDIO_TOKEN) if isinstance(token, dict) else token),
    )
