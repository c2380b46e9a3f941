"""Audio of Gemma 4 E2B and E4B: a conformer (arXiv:2005.08100) of the Universal Speech Model's kind
(arXiv:2303.01037). Two convolutions leave a quarter of the frames; layers of half a feed-forward
layer, attention to the last half second, a causal convolution, and half a feed-forward layer; one
projection (transformers' models/gemma4; there is no paper of its own).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mtmd.base.errors import ModelError
from mtmd.clip.audio.usm import UsmFrames, UsmMel, read_usm
from mtmd.clip.blocks import GgufTower, attend, checkpoint_names, split_heads
from mtmd.clip.families.gemma4.instructions import INSTRUCTIONS
from mtmd.clip.families.gemma4.linear import ENDS, clipped_linear, linear_parameters
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-6  # of norms that the settings do not reach
BINS = 128
STRIDE = 4  # frames of a token
KERNEL = 3  # of the two convolutions
SLOWEST = 10_000.0
MAX_REACH = 256  # tokens that attention reaches
KEY_SCALE = math.log(1 + math.e) / math.log(2)
# Names in transformers, without the layer's prefix, by those of GGUF. llama.cpp's converter swaps
# the two norms of the convolution.
NORMS = {
    "ffn_norm": "feed_forward1.pre_layer_norm",
    "ffn_post_norm": "feed_forward1.post_layer_norm",
    "attn_pre_norm": "norm_pre_attn",
    "attn_post_norm": "norm_post_attn",
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm",
    "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "ln2": "norm_out",
}
LINEAR = {
    "ffn_up": ("feed_forward1.ffw_layer_1", 4, 1),
    "ffn_down": ("feed_forward1.ffw_layer_2", 1, 4),
    "attn_q": ("self_attn.q_proj", 1, 1),
    "attn_k": ("self_attn.k_proj", 1, 1),
    "attn_v": ("self_attn.v_proj", 1, 1),
    "attn_out": ("self_attn.post", 1, 1),
    "conv_pw1": ("lconv1d.linear_start", 2, 1),
    "conv_pw2": ("lconv1d.linear_end", 1, 1),
    "ffn_up_1": ("feed_forward2.ffw_layer_1", 4, 1),
    "ffn_down_1": ("feed_forward2.ffw_layer_2", 1, 4),
}  # and output and input width, in units of the encoder's


@dataclass(frozen=True)
class Reach:
    """Window of attention: a token attends to itself, to those less than `back` before it and to
    those less than `ahead` after it. Its own relative position is `first`; those of the tokens
    before it are larger, and a token after it whose position would be below 0 has none.
    """

    back: int = 12
    ahead: int = 0
    first: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in the window."""
        return self.back + max(self.ahead - 1, 0)

    def bounds(self, count: int) -> torch.Tensor:
        """Return the first and the last token that each of `count` attends to, int32 [count, 2]."""
        at = torch.arange(count, dtype=torch.int32)
        last = at + max(self.ahead - 1, 0)
        return torch.stack((at - (self.back - 1), last), 1).clamp(0, count - 1)

    def table(self, width: int) -> torch.Tensor:
        """Return sines, then cosines, of relative positions, by the distance of a query and a key
        in lines of `tokens`, as `relative_queries` takes them: [2 `tokens` - 1, width].
        """
        steps = torch.arange(width // 2) * -(math.log(SLOWEST) / max(width // 2 - 1, 1))
        locations = torch.arange(1 - self.tokens, self.tokens)
        nearest = -max(self.ahead - 1, 0)
        positions = (locations - nearest) % self.tokens + nearest + self.first
        turns = positions[:, None] * torch.exp(steps)
        table = torch.cat((torch.sin(turns), torch.cos(turns)), 1)
        return table * (positions >= 0)[:, None]


@dataclass(frozen=True)
class Gemma4Audio:
    """Layers L, width C, heads H. `channels` are those of the two convolutions, `kernel` the tokens
    that the convolutions of layers see, `output_width` the width before the projection. The outputs
    of feed-forward layers are multiplied by `ffn_scale`, scores of attention are capped at `cap`.
    `clipped`: inputs and outputs of linear layers stay within limits that the checkpoint holds.
    """

    layers: int
    width: int
    heads: int
    channels: tuple[int, int]
    kernel: int
    output_width: int
    ffn_scale: float
    cap: float
    clipped: bool
    eps: float
    reach: Reach
    text_width: int
    resolution: UsmFrames
    rate: int

    marker = token = "<|audio|>"
    instructions = INSTRUCTIONS
    unused = ()

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def rows(self) -> int:
        """Frequencies behind the convolutions."""
        return _halved(_halved(self.resolution.mel.bins))

    def parameters(self) -> Mapping[str, Parameter]:
        width, flat = self.width, self.channels[1] * self.rows
        result = {
            "a.input_projection.weight": Parameter(
                (width, flat), _tower("subsample_conv_projection.input_proj_linear.weight")
            ),
            "a.pre_encode.out.weight": Parameter(
                (self.output_width, width), _tower("output_proj.weight")
            ),
            "a.pre_encode.out.bias": Parameter((self.output_width,), _tower("output_proj.bias")),
            "mm.a.input_projection.weight": Parameter(
                (self.text_width, self.output_width),
                checkpoint_names("embed_audio.embedding_projection.weight"),
            ),
        }
        for number, (inner, outer) in enumerate(
            zip((1, self.channels[0]), self.channels, strict=True)
        ):
            at, theirs = f"a.conv1d.{number}", f"subsample_conv_projection.layer{number}"
            result[f"{at}.weight"] = Parameter(
                (outer, inner, KERNEL, KERNEL), _tower(f"{theirs}.conv.weight")
            )
            result[f"{at}.norm.weight"] = Parameter((outer,), _tower(f"{theirs}.norm.weight"))
        for layer in range(self.layers):
            at, theirs = f"a.blk.{layer}", f"layers.{layer}"
            for part, name in NORMS.items():
                result[f"{at}.{part}.weight"] = Parameter(
                    (width,), _tower(f"{theirs}.{name}.weight")
                )
            for part, (name, outer, inner) in LINEAR.items():
                result |= linear_parameters(
                    f"{at}.{part}",
                    (outer * width, inner * width),
                    _tower(f"{theirs}.{name}"),
                    clipped=self.clipped,
                )
            result[f"{at}.attn_k_rel.weight"] = Parameter(
                (width, width), _tower(f"{theirs}.self_attn.relative_k_proj.weight")
            )
            result[f"{at}.per_dim_scale.weight"] = Parameter(
                (self.head,),
                _tower(f"{theirs}.self_attn.per_dim_scale"),
                convert=lambda scale: F.softplus(scale.float()),
                gguf=(Stored((f"{at}.per_dim_scale.weight",), (self.head,)),),
            )
            result[f"{at}.conv_dw.weight"] = self._kernel(
                f"{at}.conv_dw.weight", _tower(f"{theirs}.lconv1d.depthwise_conv1d.weight")
            )
        return result

    def _kernel(self, name: str, sources: tuple[str, ...]) -> Parameter:
        """Kernel of a depthwise convolution, which MLX stores with its channels last."""
        shape = self.width, 1, 1, self.kernel

        def full(kernel: torch.Tensor) -> torch.Tensor:
            return kernel.reshape(shape)

        flat = self.width, self.kernel
        own = Stored(
            (name,),
            flat,
            lambda kernel: kernel[:, None, None],
            invert=lambda kernel: (kernel[:, 0, 0],),
        )
        mlx = tuple(Stored((source,), (*flat, 1), full) for source in sources)
        return Parameter(shape, sources, (self.width, 1, self.kernel), full, mlx, (own,))

    def prompt(self, plan: ImagePlan) -> str:
        return f"<|audio>{self.token * plan.tokens}<audio|>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 1, F, M] -> [B, T, D]"""
        w = Weights(weights, tiles.dtype)
        x = self._convolved(tiles, w)
        table, bounds = self.reach.table(self.width).to(x.dtype), self.reach.bounds(x.shape[1])
        distances = graph_input("inp.distances", table.shape, table.dtype, lambda _: table)
        seen = graph_input(
            "inp.reach", bounds.shape, bounds.dtype, lambda _: bounds, keys=self.reach.tokens
        )
        for layer in w.layers(self.layers):
            at = f"a.blk.{layer}"
            x = self._feed_forward(x, at, "", w)
            x = self._attention(x, at, distances, seen, w, attention)
            x = self._convolution(x, at, w)
            x = self._feed_forward(x, at, "_1", w)
            x = w.rms_norm(x, f"{at}.ln2", EPS)
        x = ops.rms_norm(w.linear(x, "a.pre_encode.out", bias=True), eps=self.eps, name="mm.a.norm")
        return w.linear(x, "mm.a.input_projection")

    def _convolved(self, tiles: Node, w: Weights) -> Node:
        """tiles [B, 1, F, M] -> [B, T, C], T = F / 4 rounded up"""
        batch, _, frames, bins = tiles.shape
        x = ops.reshape(tiles, shape=(batch, frames * bins, 1), name="a.mel")
        for number in range(2):
            at = f"a.conv1d.{number}"
            x = ops.conv2d(
                x,
                w.tensor(f"{at}.weight"),
                grid=(frames, bins),
                stride=(2, 2),
                padding=(1, frames % 2, 1, bins % 2),
                name=at,
            )
            x = ops.relu(w.layer_norm(x, f"{at}.norm", self.eps, bias=False), name=f"{at}.relu")
            frames, bins = _halved(frames), _halved(bins)
        x = ops.reshape(x, shape=(batch, frames, bins * x.shape[2]), name="a.frames")
        return w.linear(x, "a.input_projection")

    def _feed_forward(self, x: Node, at: str, which: str, w: Weights) -> Node:
        """Add half of a feed-forward layer          [B, T, C] -> [B, T, C]"""
        y = w.rms_norm(x, f"{at}.ffn_norm{which}", EPS)
        y = ops.silu(self._linear(y, f"{at}.ffn_up{which}", w), name=f"{at}.ffn_silu{which}")
        y = w.rms_norm(
            self._linear(y, f"{at}.ffn_down{which}", w), f"{at}.ffn_post_norm{which}", EPS
        )
        y = ops.scale(y, factor=self.ffn_scale, name=f"{at}.ffn_half{which}")
        return ops.add(y, x, name=f"{at}.ffn_residual{which}")

    def _attention(
        self, x: Node, at: str, distances: Node, seen: Node, w: Weights, attention: AttentionForm
    ) -> Node:
        """x [B, T, C], distances [2 W - 1, C], seen [T, 2] -> [B, T, C]"""
        y = w.rms_norm(x, f"{at}.attn_pre_norm", EPS)
        q, k, v = (
            split_heads(self._linear(y, f"{at}.attn_{part}", w), self.heads, f"{at}.attn_{part}")
            for part in "qkv"
        )
        q = ops.mul(q, w.tensor(f"{at}.per_dim_scale.weight"), name=f"{at}.attn_q.scaled")
        table = w.linear(distances, f"{at}.attn_k_rel")
        table = ops.reshape(
            table, shape=(table.shape[0], self.heads, self.head), name=f"{at}.attn_k_rel.heads"
        )
        grid = -(-x.shape[1] // self.reach.tokens), self.reach.tokens
        # transformers scales keys, and not the embeddings of distances
        q = ops.relative_queries(
            q, None, table, grid=grid, scale=KEY_SCALE, name=f"{at}.attn_q.relative"
        )
        k = ops.relative_keys(k, grid=grid, rows=False, name=f"{at}.attn_k.relative")
        scale = KEY_SCALE * self.head**-0.5 / math.log(2)
        y = attend(q, k, v, attention, at=at, bounds=seen, scale=scale, softcap=self.cap)
        y = w.rms_norm(self._linear(y, f"{at}.attn_out", w), f"{at}.attn_post_norm", EPS)
        return ops.add(y, x, name=f"{at}.attn_residual")

    def _convolution(self, x: Node, at: str, w: Weights) -> Node:
        """Gated causal convolution of each channel          x [B, T, C] -> [B, T, C]"""
        y = self._linear(w.rms_norm(x, f"{at}.conv_norm", self.eps), f"{at}.conv_pw1", w)
        y, gate = (
            ops.columns(
                y, start=i * self.width, stop=(i + 1) * self.width, name=f"{at}.conv_{part}"
            )
            for i, part in enumerate(("value", "gate"))
        )
        y = ops.conv2d(
            ops.sigmoid_gate(y, gate, name=f"{at}.conv_gated"),
            w.tensor(f"{at}.conv_dw.weight"),
            grid=(1, x.shape[1]),
            padding=(0, 0, self.kernel - 1, 0),
            groups=self.width,
            name=f"{at}.conv_dw",
        )
        y = ops.silu(w.rms_norm(y, f"{at}.norm_conv", self.eps), name=f"{at}.conv_silu")
        return ops.add(self._linear(y, f"{at}.conv_pw2", w), x, name=f"{at}.conv_residual")

    def _linear(self, x: Node, at: str, w: Weights) -> Node:
        return clipped_linear(x, at, w) if self.clipped else w.linear(x, at)


def _halved(count: int) -> int:
    return (count + 1) // 2


def _tower(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"audio_tower.{name}")


def to_gguf(family: Gemma4Audio) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; None where a setting differs from what llama.cpp
    has as a constant.
    """
    bins = family.resolution.mel.bins
    constants = family.kernel, family.ffn_scale, family.cap, family.eps, family.reach
    if constants != (5, 0.5, 50.0, EPS, Reach()) or family.resolution.mel != UsmMel(bins):
        return None
    keys = {
        "audio.projection_dim": family.text_width,
        "audio.embedding_length": family.width,
        "audio.feed_forward_length": 4 * family.width,
        "audio.block_count": family.layers,
        "audio.attention.head_count": family.heads,
        "audio.num_mel_bins": bins,
        "audio.attention.layer_norm_epsilon": family.eps,
    }
    first = ("a.conv1d.", "a.input_projection.")
    unrounded = tuple(name for name in family.parameters() if name.startswith(first))
    return GgufTower("gemma4a", keys, unrounded=unrounded)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the feature extractor's settings would say. The epsilon is not
    read: older files have a wrong one.
    """

    def size(name: str, axis: int = 0) -> int | None:
        shape = shapes.get(f"{name}.weight", ())
        return shape[axis] if len(shape) > axis else None

    audio = {
        "hidden_size": keys.get("audio.embedding_length", None),
        "num_hidden_layers": keys.get("audio.block_count", None),
        "num_attention_heads": keys.get("audio.attention.head_count", None),
        "subsampling_conv_channels": [size("a.conv1d.0"), size("a.conv1d.1")],
        "conv_kernel_size": size("a.blk.0.conv_dw", 1),
        "output_proj_dims": size("a.pre_encode.out"),
        "use_clipped_linears": f"a.blk.0.attn_q.{ENDS[0]}" in shapes,
    }
    text = {"hidden_size": keys.get("audio.projection_dim", None)}
    bins = keys.get("audio.num_mel_bins", None)
    return {"audio_config": audio, "text_config": text}, {"feature_size": bins}


def read(top: Settings, features: Settings) -> Gemma4Audio:
    """Read it from config.json and the feature extractor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("audio_config"), top.part("text_config")
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("gradient_clipping", (1e10,), 1e10)
    c.choice("attention_invalid_logits_value", (-1e9,), -1e9)
    bins = features.count("feature_size", BINS, maximum=MAX_WIDTH)
    width, heads = (
        c.count("hidden_size", 1024, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 8, maximum=MAX_HEADS),
    )
    if width % heads or width % 2:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide an even width"
        )
    channels: Any = c.get("subsampling_conv_channels", [128, 32])
    if (
        not isinstance(channels, (list, tuple))
        or len(channels) != 2
        or any(type(n) is not int or not 0 < n <= MAX_WIDTH for n in channels)
        or channels[0] // 4 != _halved(_halved(bins))
    ):
        raise ModelError(
            f"{c.where}: subsampling_conv_channels is {channels!r:.60}, expected two counts up to "
            f"{MAX_WIDTH}, the first of them four for each of the {_halved(_halved(bins))} "
            f"frequencies that are left of {bins}"
        )
    return Gemma4Audio(
        layers=c.count("num_hidden_layers", 12, maximum=MAX_LAYERS),
        width=width,
        heads=heads,
        channels=(channels[0], channels[1]),
        kernel=c.count("conv_kernel_size", 5, maximum=MAX_REACH),
        output_width=c.count("output_proj_dims", 1536, maximum=MAX_WIDTH),
        ffn_scale=c.number("residual_weight", 0.5),
        cap=c.number("attention_logit_cap", 50.0),
        clipped=c.flag("use_clipped_linears", True),
        eps=c.number("rms_norm_eps", EPS),
        reach=_read_reach(c),
        text_width=text.count("hidden_size", 2304, maximum=MAX_WIDTH),
        resolution=(frames := read_usm(features, bins, STRIDE)),
        rate=frames.mel.rate,
    )


def _read_reach(c: Settings) -> Reach:
    """Raises ModelError."""
    chunk, left = (
        c.count(f"attention_{key}", usual, maximum=MAX_REACH)
        for key, usual in (("chunk_size", 12), ("context_left", 13))
    )
    ahead, back = c.get("attention_context_right", 0), left - 1
    if type(ahead) is not int or not 0 <= ahead <= MAX_REACH or back < 1:
        raise ModelError(
            f"{c.where}: attention_context_left is {left}, attention_context_right {ahead!r:.60}; "
            f"expected 2 to {MAX_REACH}, and 0 to {MAX_REACH}"
        )
    # transformers has positions for half of the tokens that a chunk sees
    return Reach(back, ahead, (chunk + back + ahead) // 2 - back)
