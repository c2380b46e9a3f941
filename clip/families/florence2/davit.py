"""DaViT (arXiv:2204.03645): blocks by turns with attention within windows of a grid and with
attention of its channels to each other, a depthwise convolution before each part; convolutions with
strides between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import ACTIVATIONS, attend, biased_parameters, mlp, split_heads, third
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.image import conv_grid
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-5  # of all norms; the settings do not say
MAX_STAGES, MAX_WINDOW, MAX_KERNEL = 8, 64, 32  # published models have 4, 12 and 7
SPATIAL, CHANNEL = "spatial", "channel"
# Names within a block, transformers' and the authors'
BLOCK = {
    "conv1": ("conv1", "conv1.fn.dw"),
    "ln1": ("norm1", "{attn}.norm"),
    "attn_out": ("{attn}.proj", "{attn}.fn.proj"),
    "conv2": ("conv2", "conv2.fn.dw"),
    "ln2": ("norm2", "ffn.norm"),
    "ffn_up": ("ffn.fc1", "ffn.fn.net.fc1"),
    "ffn_down": ("ffn.fc2", "ffn.fn.net.fc2"),
}
QKV = ("{attn}.qkv", "{attn}.fn.qkv")
Grid = tuple[int, int]


@dataclass(frozen=True)
class Stage:
    """A convolution of `kernel` pixels a side, and `depth` pairs of blocks; `norms_first`: the norm
    stands before the convolution. `grid`: rows and columns of cells that it makes.
    """

    depth: int
    width: int
    heads: int
    groups: int
    ffn: int
    kernel: int
    stride: int
    padding: int
    norms_first: bool
    grid: Grid


@dataclass(frozen=True)
class DavitParams:
    stages: tuple[Stage, ...]
    side: int
    window: int
    biases: bool
    gelu: str

    def parameters(self) -> dict[str, Parameter]:
        parameters: dict[str, Parameter] = {}
        read = 3
        for index, stage in enumerate(self.stages):
            width, at = stage.width, f"v.{index}"
            normed = read if stage.norms_first else width
            parameters |= biased_parameters(
                {
                    f"{at}.conv": ("conv|proj", (width, read, stage.kernel, stage.kernel)),
                    f"{at}.norm": ("norm", (normed,)),
                },
                partial(_either, f"convs.{index}"),
            )
            shapes: dict[str, Shape] = {
                "conv1": (width, 1, 3, 3),
                "conv2": (width, 1, 3, 3),
                "ln1": (width,),
                "ln2": (width,),
                "attn_out": (width, width),
                "ffn_up": (stage.ffn, width),
                "ffn_down": (width, stage.ffn),
            }
            for block in range(stage.depth):
                for kind in (SPATIAL, CHANNEL):
                    theirs = f"blocks.{index}.{block}.{kind}_block"
                    inner = f"{at}.{block}.{kind}"
                    attn = "window_attn" if kind == SPATIAL else "channel_attn"

                    def names(name: str, at: str = theirs, attn: str = attn) -> tuple[str, ...]:
                        return _either(at, name.replace("{attn}", attn))

                    parameters |= biased_parameters(
                        {f"{inner}.{p}": ("|".join(BLOCK[p]), shapes[p]) for p in BLOCK}, names
                    )
                    fused: dict[str, Shape] = {"weight": (width, width)}
                    fused |= {"bias": (width,)} if self.biases else {}
                    parameters |= {
                        f"{inner}.attn_{part}.{suffix}": Parameter(
                            shape,
                            names(f"{'|'.join(QKV)}.{suffix}"),
                            (3 * width, *shape[1:]),
                            third(number),
                        )
                        for number, part in enumerate("qkv")
                        for suffix, shape in fused.items()
                    }
            read = width
        return parameters

    def graph(self, tiles: Node, w: Weights, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> [B, P, C] of the last stage"""
        x = ops.patches(tiles, size=1, name="v.pixels")
        grid: Grid = (self.side, self.side)
        for index, stage in enumerate(self.stages):
            at = f"v.{index}"
            x = w.layer_norm(x, f"{at}.norm", EPS) if stage.norms_first else x
            x = ops.conv2d(
                x,
                w.tensor(f"{at}.conv.weight"),
                w.tensor(f"{at}.conv.bias"),
                grid=grid,
                stride=(stage.stride, stage.stride),
                padding=(stage.padding,) * 4,
                name=f"{at}.conv",
            )
            x = x if stage.norms_first else w.layer_norm(x, f"{at}.norm", EPS)
            grid = stage.grid
            for block in range(stage.depth):
                for kind in (SPATIAL, CHANNEL):
                    x = self._block(x, stage, kind, f"{at}.{block}.{kind}", w, attention)
        return x

    def _block(
        self, x: Node, stage: Stage, kind: str, at: str, w: Weights, attention: AttentionForm
    ) -> Node:
        x = _blurred(x, stage, f"{at}.conv1", w)
        y = w.layer_norm(x, f"{at}.ln1", EPS)
        if kind == SPATIAL:
            y = self._within_windows(y, stage, at, w, attention)
        else:
            parts = self._projected(y, stage.groups, at, w)
            y = ops.channel_attention(*parts, scale=y.shape[1] ** -0.5, name=f"{at}.attn")
            y = ops.reshape(y, shape=x.shape, name=f"{at}.attn.flat")
        y = w.linear(y, f"{at}.attn_out", bias=True)
        x = _blurred(ops.add(y, x, name=f"{at}.attn_residual"), stage, f"{at}.conv2", w)
        y = mlp(w.layer_norm(x, f"{at}.ln2", EPS), at, self.gelu, w)
        return ops.add(y, x, name=f"{at}.ffn_residual")

    def _within_windows(
        self, x: Node, stage: Stage, at: str, w: Weights, attention: AttentionForm
    ) -> Node:
        cut: dict[str, Any] = {"grid": stage.grid, "size": self.window}
        y = ops.windows(x, **cut, name=f"{at}.windows")
        y = attend(*self._projected(y, stage.heads, at, w), attention, at=at)
        return ops.from_windows(y, **cut, name=f"{at}.cells")

    def _projected(self, x: Node, heads: int, at: str, w: Weights) -> tuple[Node, Node, Node]:
        """[B, T, C] -> queries, keys and values [B, T, H, K]"""
        q, k, v = (
            split_heads(w.linear(x, f"{at}.attn_{part}", bias=self.biases), heads, f"{at}.{part}")
            for part in "qkv"
        )
        return q, k, v


def _blurred(x: Node, stage: Stage, at: str, w: Weights) -> Node:
    """A depthwise convolution of 3 x 3, added          [B, P, C] -> [B, P, C]"""
    y = ops.conv2d(
        x,
        w.tensor(f"{at}.weight"),
        w.tensor(f"{at}.bias"),
        grid=stage.grid,
        padding=(1, 1, 1, 1),
        groups=stage.width,
        name=at,
    )
    return ops.add(y, x, name=f"{at}_residual")


def _either(at: str, name: str) -> tuple[str, ...]:
    """The names of a tensor in transformers' checkpoints and in the authors': `name` has both, as
    `conv1|conv1.fn.dw.weight`, or one that is the same.
    """
    stem, _, kind = name.rpartition(".")
    inner = [f"vision_tower.{at}.{one}.{kind}" for one in stem.split("|")]
    return (*(f"model.{one}" for one in inner[:1]), *inner)


def read_davit(c: Settings, side: int) -> DavitParams:
    """Read it from a vision_config, with transformers' defaults (Florence2VisionConfig) or as the
    authors have it, for pictures of `side` pixels a side. Raises ModelError for what cannot be
    followed.
    """
    c.choice("in_channels", (3,), 3)
    widths = _listed(c, ("embed_dim", "dim_embed"), (128, 256, 512, 1024), MAX_WIDTH)
    numbers = {
        key: _listed(c, (key,), default, maximum)
        for key, default, maximum in (
            ("depths", (1, 1, 9, 1), MAX_LAYERS),
            ("num_heads", (4, 8, 16, 32), MAX_HEADS),
            ("num_groups", (4, 8, 16, 32), MAX_HEADS),
            ("patch_size", (7, 3, 3, 3), MAX_KERNEL),
            ("patch_stride", (4, 2, 2, 2), MAX_KERNEL),
            ("patch_padding", (3, 1, 1, 1), MAX_KERNEL),
        )
    }
    numbers["patch_prenorm"] = _listed(
        c, ("patch_prenorm",), (False, True, True, True), 1, kind=bool
    )
    if lengths := {key: len(n) for key, n in numbers.items() if len(n) != len(widths)}:
        key, count = next(iter(lengths.items()))
        raise ModelError(
            f"{c.where}: {key} has {count} numbers for {len(widths)} stages (embed_dim)"
        )
    window, ratio = c.count("window_size", 12, maximum=MAX_WINDOW), c.number("mlp_ratio", 4.0)
    stages, grid = [], (side, side)
    for width, depth, heads, groups, kernel, stride, padding, first in zip(
        widths, *numbers.values(), strict=True
    ):
        if width % heads or width % groups or not 0 < int(width * ratio) <= MAX_WIDTH * 4:
            raise ModelError(
                f"{c.where}: {heads} heads and {groups} groups of width {width} with mlp_ratio "
                f"{ratio}; expected numbers that divide the width"
            )
        grid = conv_grid(grid, (kernel, kernel), (stride, stride), (padding,) * 4)
        if min(grid) < 1:
            raise ModelError(
                f"{c.where}: a picture of {side} pixels a side is smaller than a patch of {kernel} "
                "in one of the stages"
            )
        stages.append(
            Stage(
                depth=depth,
                width=width,
                heads=heads,
                groups=groups,
                ffn=int(width * ratio),
                kernel=kernel,
                stride=stride,
                padding=padding,
                norms_first=bool(first),
                grid=grid,
            )
        )
    return DavitParams(
        stages=tuple(stages),
        side=side,
        window=window,
        biases=c.flag("qkv_bias", True),
        gelu=ACTIVATIONS[c.choice("activation_function", ACTIVATIONS, "gelu")],
    )


def _listed(
    c: Settings, keys: Sequence[str], default: tuple[int, ...], maximum: int, kind: type[int] = int
) -> tuple[int, ...]:
    """A number for each stage, by the first of these keys that is there; paddings may be 0."""
    key = next((one for one in keys if c.get(one, None) is not None), keys[0])
    value = c.get(key, default)
    smallest = 0 if kind is bool or key == "patch_padding" else 1
    if (
        not isinstance(value, (list, tuple))
        or not 0 < len(value) <= MAX_STAGES
        or any(type(one) is not kind or not smallest <= one <= maximum for one in value)
    ):
        what = "flags" if kind is bool else f"numbers from {smallest} to {maximum}"
        raise ModelError(
            f"{c.where}: {key} is {value!r:.40}, expected a list of up to {MAX_STAGES} {what}"
        )
    return tuple(value)
