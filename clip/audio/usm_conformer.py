"""Layers of the Universal Speech Model's conformers (arXiv:2005.08100, arXiv:2303.01037) as Gemma
has them: half a feed-forward layer, attention to the last half second, a causal convolution, and
half a feed-forward layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import attend, split_heads
from mtmd.clip.clipped_linear import clipped_linear, linear_parameters
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-6  # of norms that the settings do not reach
SLOWEST = 10_000.0
MAX_REACH = 256  # tokens that attention reaches, and that a convolution sees
NORMS = (
    "ffn_norm",
    "ffn_post_norm",
    "attn_pre_norm",
    "attn_post_norm",
    "conv_norm",
    "norm_conv",
    "ffn_norm_1",
    "ffn_post_norm_1",
    "ln2",
)
LINEAR = {
    "ffn_up": (4, 1),
    "ffn_down": (1, 4),
    "attn_q": (1, 1),
    "attn_k": (1, 1),
    "attn_v": (1, 1),
    "attn_out": (1, 1),
    "conv_pw1": (2, 1),
    "conv_pw2": (1, 1),
    "ffn_up_1": (4, 1),
    "ffn_down_1": (1, 4),
}  # output and input width, in units of the encoder's


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
class UsmConformer:
    """Layers L, width C, heads H. `kernel` are the tokens that the convolutions see. The outputs of
    feed-forward layers are multiplied by `ffn_scale`, scores of attention are capped at `cap`, keys
    are multiplied by `key_scale`. `clipped`: inputs and outputs of linear layers stay within limits
    that the checkpoint holds.
    """

    layers: int
    width: int
    heads: int
    kernel: int
    ffn_scale: float
    cap: float
    clipped: bool
    eps: float
    reach: Reach
    key_scale: float = 1.0

    @property
    def head(self) -> int:
        return self.width // self.heads

    def parameters(
        self,
        source: Callable[[str], tuple[str, ...]],
        names: Mapping[str, str],
        gguf: Mapping[str, str] | None = None,
    ) -> Mapping[str, Parameter]:
        """Parameters of all layers. `source("0.norm.weight")` lists the names that a tensor of a
        layer may have in a checkpoint, `names` has those of its parts there, and `gguf` those in a
        GGUF that are others than ours.
        """
        result: dict[str, Parameter] = {}
        width, renamed = self.width, gguf or {}
        for layer in range(self.layers):
            at = f"a.blk.{layer}"

            def stored(part: str, at: str = at) -> tuple[Stored, ...]:
                name = f"{at}.{renamed.get(part, part)}.weight"
                return (Stored((name,), (width,)),) if part in renamed else ()

            theirs = {part: f"{layer}.{name}" for part, name in names.items()}
            for part in NORMS:
                result[f"{at}.{part}.weight"] = Parameter(
                    (width,), source(f"{theirs[part]}.weight"), gguf=stored(part)
                )
            for part, (outer, inner) in LINEAR.items():
                result |= linear_parameters(
                    f"{at}.{part}",
                    (outer * width, inner * width),
                    source(theirs[part]),
                    clipped=self.clipped,
                )
            far = f"{at}.{renamed.get('attn_k_rel', 'attn_k_rel')}.weight"
            result[f"{at}.attn_k_rel.weight"] = Parameter(
                (width, width),
                source(f"{theirs['attn_k_rel']}.weight"),
                gguf=(Stored((far,), (width, width)),),
            )
            result[f"{at}.per_dim_scale.weight"] = Parameter(
                (self.head,),
                source(theirs["per_dim_scale"]),
                convert=lambda scale: F.softplus(scale.float()),
                gguf=(Stored((f"{at}.per_dim_scale.weight",), (self.head,)),),
            )
            name = f"{at}.conv_dw.weight"
            result[name] = self._kernel(name, source(f"{theirs['conv_dw']}.weight"))
        return result

    def _kernel(self, name: str, sources: tuple[str, ...]) -> Parameter:
        """Kernel of a depthwise convolution, which MLX stores with its channels last."""
        shape = self.width, 1, 1, self.kernel

        def full(kernel: torch.Tensor) -> torch.Tensor:
            return kernel.reshape(shape)

        flat, turned = (self.width, self.kernel), (self.width, 1, self.kernel)
        own = Stored(
            (name,),
            flat,
            lambda kernel: kernel[:, None, None],
            invert=lambda kernel: (kernel[:, 0, 0],),
        )
        mlx = tuple(Stored((source,), (*flat, 1), full) for source in sources)
        return Parameter(shape, sources, turned, full, mlx, (own, Stored((name,), turned, full)))

    def graph(self, x: Node, w: Weights, attention: AttentionForm) -> Node:
        """[B, T, C] -> [B, T, C]"""
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
        return x

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
        # Keys are multiplied, and the embeddings of distances are not
        q = ops.relative_queries(
            q, None, table, grid=grid, scale=self.key_scale, name=f"{at}.attn_q.relative"
        )
        k = ops.relative_keys(k, grid=grid, rows=False, name=f"{at}.attn_k.relative")
        scale = self.key_scale * self.head**-0.5 / math.log(2)
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


def read_width(c: Settings, width: int, heads_key: str) -> tuple[int, int]:
    """Read the width, and the heads, 8 by default. Raises ModelError."""
    width = c.count("hidden_size", width, maximum=MAX_WIDTH)
    heads = c.count(heads_key, 8, maximum=MAX_HEADS)
    if width % heads or width % 2:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide an even width"
        )
    return width, heads


def read_channels(c: Settings, key: str) -> tuple[int, int]:
    """Read the channels of the two convolutions before the layers. Raises ModelError."""
    channels: Any = c.get(key, [128, 32])
    if (
        not isinstance(channels, (list, tuple))
        or len(channels) != 2
        or any(type(n) is not int or not 0 < n <= MAX_WIDTH for n in channels)
    ):
        raise ModelError(
            f"{c.where}: {key} is {channels!r:.60}, expected two counts up to {MAX_WIDTH}"
        )
    return channels[0], channels[1]
