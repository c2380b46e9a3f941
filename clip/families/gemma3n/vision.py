"""Gemma 3n's vision tower: MobileNet-V5, convolutions and attention with one key and value head on
smaller and smaller grids; the last two grids are put together, averaged to 16 x 16 cells, and
projected. There is no paper of it: arXiv:2404.10518 describes the blocks, timm's mobilenetv5 and
transformers' models/gemma3n the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, TypeAlias

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import GgufTower, attend, checkpoint_names, split_heads
from mtmd.clip.families.gemma3n.embedder import Embedder, read_embedder
from mtmd.clip.image.pixels import gguf_image, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, pointwise
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.image import Padding
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-6  # of the tower's norms; no setting says it
SIDE, MAX_SIDE = 768, 4096  # pixels of a picture; published models have 768
WIDTH, STEM, EXPANSION = 2048, 64, 2.0  # of what the tower gives, of its stem, of the last layers
SOFT_TOKENS, END_OF_IMAGE = 256, 262_144
KERNELS, MAX_STRIDE = (1, 3, 5, 7), 4  # published models have 3, 5 and 2
ARCHITECTURE = "mobilenetv5_300m_enc"
STAGES = 4
UNUSED = {  # settings of blocks that are read with one value alone
    "noskip": False,
    "dw_kernel_size_end": 0,
    "pw_kernel_size": 1,
    "force_in_chs": 0,
    "se_ratio": 0.0,
}
Grid: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class EdgeResidual:
    """A convolution that widens to `middle`, and one of single cells back (arXiv:2003.02838)."""

    inner: int
    middle: int
    outer: int
    kernel: int
    stride: int

    def parameters(self, at: str, theirs: str) -> dict[str, Parameter]:
        kernel = (self.middle, self.inner, self.kernel, self.kernel)
        return {
            f"{at}.conv_exp.weight": Parameter(kernel, _names(f"{theirs}.conv_exp.weight")),
            **_norm(f"{at}.bn1", f"{theirs}.bn1", self.middle),
            **_matrix(f"{at}.conv_pwl", f"{theirs}.conv_pwl", self.outer, self.middle),
            **_norm(f"{at}.bn2", f"{theirs}.bn2", self.outer),
        }

    def graph(self, x: Node, grid: Grid, at: str, w: Weights, _: AttentionForm) -> Node:
        y = convolved(x, grid, f"{at}.conv_exp", w, stride=self.stride)
        y = _gelu(w.rms_norm(y, f"{at}.bn1", EPS))
        y = w.rms_norm(w.linear(y, f"{at}.conv_pwl"), f"{at}.bn2", EPS)
        return ops.add(y, x, name=f"{at}.residual") if y.shape == x.shape else y


@dataclass(frozen=True)
class InvertedBottleneck:
    """MobileNet-V4's universal inverted bottleneck: cells widened to `middle` and back; depthwise
    convolutions before it, of `start` cells a side, and within, of `mid`, or none (0). The stride
    is that of the last of them. `scaled`: the result by learned factors.
    """

    inner: int
    middle: int
    outer: int
    start: int
    mid: int
    stride: int
    scaled: bool = True

    def parameters(self, at: str, theirs: str) -> dict[str, Parameter]:
        parameters: dict[str, Parameter] = {}
        for part, kernel, width in (
            ("dw_start", self.start, self.inner),
            ("dw_mid", self.mid, self.middle),
        ):
            if kernel:
                parameters |= _depthwise(
                    f"{at}.{part}.conv", f"{theirs}.{part}.conv", width, kernel
                )
                parameters |= _norm(f"{at}.{part}.bn", f"{theirs}.{part}.bn", width)
        for part, outer, inner in (
            ("pw_exp", self.middle, self.inner),
            ("pw_proj", self.outer, self.middle),
        ):
            parameters |= _matrix(f"{at}.{part}.conv", f"{theirs}.{part}.conv", outer, inner)
            parameters |= _norm(f"{at}.{part}.bn", f"{theirs}.{part}.bn", outer)
        return parameters | (_factors(at, theirs, self.outer) if self.scaled else {})

    def graph(self, x: Node, grid: Grid, at: str, w: Weights, _: AttentionForm) -> Node:
        y = x
        if self.start:
            stride = 1 if self.mid else self.stride
            y = convolved(y, grid, f"{at}.dw_start.conv", w, stride=stride, groups=self.inner)
            y = w.rms_norm(y, f"{at}.dw_start.bn", EPS)
        y = _gelu(w.rms_norm(w.linear(y, f"{at}.pw_exp.conv"), f"{at}.pw_exp.bn", EPS))
        if self.mid:
            middle = f"{at}.dw_mid.conv"
            y = convolved(y, grid, middle, w, stride=self.stride, groups=self.middle)
            y = _gelu(w.rms_norm(y, f"{at}.dw_mid.bn", EPS))
        y = w.rms_norm(w.linear(y, f"{at}.pw_proj.conv"), f"{at}.pw_proj.bn", EPS)
        if not self.scaled:
            return y
        y = ops.mul(y, w.tensor(f"{at}.layer_scale.gamma"), name=f"{at}.scaled")
        return ops.add(y, x, name=f"{at}.residual") if y.shape == x.shape else y


@dataclass(frozen=True)
class MultiQuery:
    """Attention of cells whose heads share one head of keys and one of values, both made of a grid
    that a depthwise convolution of `kernel` cells a side has made smaller, `stride` times.
    """

    inner: int
    heads: int
    head: int
    kernel: int
    stride: int

    @property
    def outer(self) -> int:
        return self.inner

    def parameters(self, at: str, theirs: str) -> dict[str, Parameter]:
        ours, theirs_too = f"{at}.attn", f"{theirs}.attn"
        all_heads = self.heads * self.head
        parameters = _norm(f"{at}.norm", f"{theirs}.norm", self.inner)
        for part, outer, inner in (
            ("query", all_heads, self.inner),
            ("key", self.head, self.inner),
            ("value", self.head, self.inner),
            ("output", self.inner, all_heads),
        ):
            parameters |= _matrix(f"{ours}.{part}.proj", f"{theirs_too}.{part}.proj", outer, inner)
        for part in ("key", "value") if self.stride > 1 else ():
            down, there = f"{ours}.{part}", f"{theirs_too}.{part}"
            parameters |= _depthwise(
                f"{down}.down_conv", f"{there}.down_conv", self.inner, self.kernel
            )
            parameters |= _norm(f"{down}.norm", f"{there}.norm", self.inner)
        return parameters | _factors(at, theirs, self.inner)

    def graph(self, x: Node, grid: Grid, at: str, w: Weights, attention: AttentionForm) -> Node:
        y = w.rms_norm(x, f"{at}.norm", EPS)
        q = split_heads(w.linear(y, f"{at}.attn.query.proj"), self.heads, f"{at}.attn.query")
        k, v = (self._smaller(y, grid, f"{at}.attn.{part}", w) for part in ("key", "value"))
        y = w.linear(attend(q, k, v, attention, at=at), f"{at}.attn.output.proj")
        y = ops.mul(y, w.tensor(f"{at}.layer_scale.gamma"), name=f"{at}.scaled")
        return ops.add(y, x, name=f"{at}.residual")

    def _smaller(self, x: Node, grid: Grid, at: str, w: Weights) -> Node:
        """x [B, P, C] -> [B, S, 1, K]"""
        if self.stride > 1:
            x = convolved(x, grid, f"{at}.down_conv", w, stride=self.stride, groups=self.inner)
            x = w.rms_norm(x, f"{at}.norm", EPS)
        return split_heads(w.linear(x, f"{at}.proj"), 1, at)


Block: TypeAlias = "EdgeResidual | InvertedBottleneck | MultiQuery"


@dataclass(frozen=True)
class Gemma3nVision:
    """`stages`: blocks on one grid after the other; those of the last two are put together in
    `fusion`.
    """

    stem: int
    stages: tuple[tuple[Block, ...], ...]
    fusion: InvertedBottleneck
    embedder: Embedder
    resolution: FixedSquare
    end: int = field(compare=False)  # the id of the token behind a picture, which no GGUF says

    marker = image_token = "<image_soft_token>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    mark_tokens, marks = ("<end_of_image>",), "mm.marks"
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        at, stem = "v.conv_stem.conv", self.stem
        parameters = {
            f"{at}.weight": Parameter((stem, 3, 3, 3), _names("conv_stem.conv.weight")),
            f"{at}.bias": _column(f"{at}.bias", "conv_stem.conv.bias", stem),
            **_norm("v.conv_stem.bn", "conv_stem.bn", stem),
        }
        for at, block in self._blocks():
            parameters |= block.parameters(f"v.blk.{at}", f"blocks.{at}")
        parameters |= self.fusion.parameters("v.msfa.ffn", "msfa.ffn")
        parameters |= _norm("v.msfa.norm", "msfa.norm", self.fusion.outer)
        marks = self.embedder.tokens_parameter("mm", (self.end,))
        return parameters | self.embedder.parameters("mm") | {self.marks: marks}

    def prompt(self, plan: ImagePlan) -> str:
        return f"\n\n<start_of_image>{self.image_token * plan.tokens}<end_of_image>\n\n"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        grid: Grid = (tiles.shape[2], tiles.shape[3])
        x = ops.patches(tiles, size=1, name="v.pixels")
        x = convolved(x, grid, "v.conv_stem.conv", w, stride=2, bias=True)
        x = _gelu(w.rms_norm(x, "v.conv_stem.bn", EPS))
        grid = _smaller(grid, 2)
        fused: list[tuple[Node, Grid]] = []
        for number, stage in enumerate(self.stages):
            for index, block in enumerate(stage):
                x = block.graph(x, grid, f"v.blk.{number}.{index}", w, attention)
                grid = _smaller(grid, _stride(block))
            fused.append((x, grid))
        return self._fused(fused[-2:], w, attention)

    def _fused(
        self, features: Sequence[tuple[Node, Grid]], w: Weights, attention: AttentionForm
    ) -> Node:
        """[B, P, C] of a grid and [B, Q, E] of one that is no larger -> [B, T, D]"""
        (large, grid), (small, other) = features
        if other != grid:
            rows = _nearest(grid, other)
            at = graph_input("inp.nearest", tuple(rows.shape), rows.dtype, lambda _: rows)
            small = ops.take_rows(small, at, name="v.msfa.nearest")
        x = ops.concat(large, small, axis=2, name="v.msfa.features")
        x = self.fusion.graph(x, grid, "v.msfa.ffn", w, attention)
        side = isqrt(self.resolution.tokens)
        if grid != (side, side):
            x = ops.pool2d(x, grid=grid, size=(side, side), name="v.msfa.pool")
        x = w.rms_norm(x, "v.msfa.norm", EPS)
        return self.embedder.graph(x, "mm", w, scale=self.embedder.width**0.5)

    def _blocks(self) -> list[tuple[str, Block]]:
        return [
            (f"{number}.{index}", block)
            for number, stage in enumerate(self.stages)
            for index, block in enumerate(stage)
        ]


def convolved(
    x: Node, grid: Grid, at: str, w: Weights, *, stride: int, groups: int = 1, bias: bool = False
) -> Node:
    """Convolution with as many zeros around the grid as leave a cell for each `stride` cells, more
    of them below and to the right          [B, P, C] -> [B, P', N]
    """
    kernel = w.tensor(f"{at}.weight")
    return ops.conv2d(
        x,
        kernel,
        w.tensor(f"{at}.bias") if bias else None,
        grid=grid,
        stride=(stride, stride),
        padding=same_padding(grid, kernel.shape[2], stride),
        groups=groups,
        name=at,
    )


def same_padding(grid: Grid, kernel: int, stride: int) -> Padding:
    """Return the zeros around a grid that TensorFlow's padding "same" puts there."""
    down, across = (max((-(-cells // stride) - 1) * stride + kernel - cells, 0) for cells in grid)
    return down // 2, down - down // 2, across // 2, across - across // 2


def _smaller(grid: Grid, stride: int) -> Grid:
    return -(-grid[0] // stride), -(-grid[1] // stride)


def _stride(block: Block) -> int:
    """Factor by which a block makes its grid smaller."""
    return 1 if isinstance(block, MultiQuery) else block.stride


def _nearest(grid: Grid, other: Grid) -> torch.Tensor:
    """Return the cell of a smaller grid `other` that each cell of `grid` shows, int64 [P]."""
    rows, columns = (
        torch.arange(cells) * fewer // cells for cells, fewer in zip(grid, other, strict=True)
    )
    return (rows[:, None] * other[1] + columns).flatten()


def _gelu(x: Node) -> Node:
    return ops.gelu(x, approximate="tanh", name=f"{x.name}.gelu")


def _names(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"vision_tower.timm_model.{name}")


def _norm(at: str, theirs: str, width: int) -> dict[str, Parameter]:
    return {f"{at}.weight": Parameter((width,), _names(f"{theirs}.weight"))}


def _matrix(at: str, theirs: str, outer: int, inner: int) -> dict[str, Parameter]:
    """A convolution of single cells."""
    name, shape, stored = f"{at}.weight", (outer, inner), (outer, inner, 1, 1)
    own = Stored((name,), stored, pointwise, invert=lambda w: (w[..., None, None],))
    return {name: Parameter(shape, _names(f"{theirs}.weight"), stored, pointwise, gguf=(own,))}


def _depthwise(at: str, theirs: str, width: int, kernel: int) -> dict[str, Parameter]:
    shape = (width, 1, kernel, kernel)
    return {f"{at}.weight": Parameter(shape, _names(f"{theirs}.weight"))}


def _factors(at: str, theirs: str, width: int) -> dict[str, Parameter]:
    name = f"{at}.layer_scale.gamma"
    return {name: _column(name, f"{theirs}.layer_scale.gamma", width)}


def _column(name: str, theirs: str, width: int) -> Parameter:
    """Numbers of channels, which GGUF has as a picture of one cell."""
    own = Stored(
        (name,), (1, width, 1, 1), torch.Tensor.flatten, invert=lambda row: (row.view(1, -1, 1, 1),)
    )
    return Parameter((width,), _names(theirs), gguf=(own,))


def to_gguf(family: Gemma3nVision) -> GgufTower | None:
    """Return the keys of a GGUF that say the same; what blocks there are, its tensors say. None
    where the token behind a picture is not the first that the embedder has.
    """
    side, embedder = family.resolution.side, family.embedder
    if family.end != embedder.first:
        return None
    keys = {
        "vision.block_count": 128,  # not read; llama.cpp's converter writes it
        "vision.embedding_length": embedder.width,
        "vision.feed_forward_length": 4 * embedder.width,
        "vision.attention.head_count": 8,
        "vision.attention.layer_norm_epsilon": embedder.eps,
        "vision.image_size": side,
        "vision.patch_size": side // family.resolution.tokens,
        "vision.projection_dim": embedder.text_width,
    }
    return GgufTower("gemma3nv", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; the tower's blocks are
    read off its tensors.
    """
    size = keys.count("vision.image_size", SIDE)
    tokens = size // keys.count("vision.patch_size", SIDE // SOFT_TOKENS)
    table = [*shapes.get("mm.embedding.weight", ()), None]
    vision = {
        "hidden_size": keys.get("vision.embedding_length", None),
        "rms_norm_eps": keys.get("vision.attention.layer_norm_epsilon", None),
        "vocab_size": table[0],
        "model_args": {
            "stem_size": [*shapes.get("v.conv_stem.conv.weight", ()), STEM][0],
            "msfa_output_resolution": isqrt(tokens),
            "block_args": _seen_blocks(shapes),
        },
    }
    config = {
        "vision_config": vision,
        "text_config": {"hidden_size": keys.get("vision.projection_dim", None)},
        "vision_soft_tokens_per_image": tokens,
    }
    return config, {**gguf_image(keys), "size": {"height": size, "width": size}}


def _seen_blocks(shapes: Mapping[str, Shape]) -> list[list[dict[str, Any]]]:
    """The blocks of each stage, in timm's words, by the tensors of a GGUF; the first block of a
    stage has a stride of 2.
    """

    def shape(at: str, name: str) -> Shape | None:
        known = shapes.get(f"v.blk.{at}.{name}.weight")
        return known if known and len(known) == 4 and all(known) else None

    stages: list[list[dict[str, Any]]] = []
    for number in range(STAGES):
        stage: list[dict[str, Any]] = []
        while True:
            at, stride = f"{number}.{len(stage)}", 1 if stage else 2
            if widened := shape(at, "conv_exp"):
                narrowed = shape(at, "conv_pwl") or widened
                one: dict[str, Any] = {
                    "block_type": "er",
                    "out_chs": narrowed[0],
                    "exp_kernel_size": widened[2],
                    "exp_ratio": widened[0] / widened[1],
                    "stride": stride,
                }
            elif widened := shape(at, "pw_exp.conv"):
                start, mid = shape(at, "dw_start.conv"), shape(at, "dw_mid.conv")
                one = {
                    "block_type": "uir",
                    "out_chs": (shape(at, "pw_proj.conv") or widened)[0],
                    "dw_kernel_size_start": start[2] if start else 0,
                    "dw_kernel_size_mid": mid[2] if mid else 0,
                    "exp_ratio": widened[0] / widened[1],
                    "stride": stride,
                }
            elif queries := shape(at, "attn.query.proj"):
                head = (shape(at, "attn.key.proj") or queries)[0]
                down = shape(at, "attn.key.down_conv")
                one = {
                    "block_type": "mqa",
                    "out_chs": queries[1],
                    "num_heads": queries[0] // max(head, 1),
                    "key_dim": head,
                    "value_dim": head,
                    "dw_kernel_size": down[2] if down else 3,
                    "kv_stride": 2 if down else 1,
                    "stride": 1,
                }
            else:
                break
            stage.append(one)
        stages.append(stage)
    return stages


def _published_blocks() -> list[list[dict[str, Any]]]:
    """The blocks of mobilenetv5_300m_enc, in timm's words."""

    def edge(stride: int) -> dict[str, Any]:
        return {
            "block_type": "er",
            "out_chs": 128,
            "exp_kernel_size": 3,
            "exp_ratio": 4.0,
            "stride": stride,
        }

    def bottleneck(out: int, start: int, mid: int, ratio: float, stride: int = 1) -> dict[str, Any]:
        return {
            "block_type": "uir",
            "out_chs": out,
            "dw_kernel_size_start": start,
            "dw_kernel_size_mid": mid,
            "exp_ratio": ratio,
            "stride": stride,
        }

    def attention(out: int, heads: int, head: int, down: int) -> dict[str, Any]:
        return {
            "block_type": "mqa",
            "out_chs": out,
            "num_heads": heads,
            "key_dim": head,
            "value_dim": head,
            "dw_kernel_size": 3,
            "kv_stride": down,
            "stride": 1,
        }

    third = [bottleneck(640, 5, 5, 6.0, 2), *[bottleneck(640, 5, 0, 4.0)] * 7]
    third += [bottleneck(640, 0, 0, 1.0)]
    third += [attention(640, 12, 64, 2), bottleneck(640, 0, 0, 2.0)] * 14
    fourth = [attention(1280, 16, 96, 1), bottleneck(1280, 0, 0, 2.0)] * 19
    return [
        [edge(2), edge(1), edge(1)],
        [bottleneck(256, 3, 5, 6.0, 2), *[bottleneck(256, k, 0, 4.0) for k in (5, 3, 5, 3)]],
        third,
        [bottleneck(1280, 5, 5, 6.0, 2), *fourth],
    ]


def read(top: Settings, image: Settings) -> Gemma3nVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    c.choice("architecture", (ARCHITECTURE,), ARCHITECTURE)
    stem, stages, side = _read_network(c.part("model_args"))
    embedder = read_embedder(c, top.part("text_config"), "embed_vision", WIDTH, END_OF_IMAGE)
    tokens = top.count("vision_soft_tokens_per_image", SOFT_TOKENS)
    if side * side != tokens or embedder.width != WIDTH:
        raise ModelError(
            f"{top.where}: {tokens} tokens of a picture (vision_soft_tokens_per_image) of width "
            f"{embedder.width}; expected the {side} x {side} of width {WIDTH} that the tower gives"
        )
    resolution = _read_resolution(image, tokens)
    grids, grid = [], _smaller((resolution.side,) * 2, 2)
    for stage in stages:
        for block in stage:
            grid = _smaller(grid, _stride(block))
        grids.append(grid)
    if grids[-2][0] % side:
        raise ModelError(
            f"{image.where}: a picture of {resolution.side} pixels a side becomes {grids[-2][0]} "
            f"cells a side; expected a multiple of the {side} that are left"
        )
    wide = sum(stage[-1].outer for stage in stages[-2:])
    fusion = InvertedBottleneck(wide, _divisible(wide * EXPANSION), WIDTH, 0, 0, 1, scaled=False)
    return Gemma3nVision(
        stem=stem,
        stages=stages,
        fusion=fusion,
        embedder=embedder,
        end=top.token_id("eoi_token_id", END_OF_IMAGE),
        resolution=resolution,
    )


def _read_network(args: Settings) -> tuple[int, tuple[tuple[Block, ...], ...], int]:
    """Return the width of the stem, the blocks of each stage, and the cells a side that remain."""
    known = ("stem_size", "block_args", "msfa_output_resolution")
    if other := sorted(k for k, v in args.values.items() if k not in known and v is not None):
        raise ModelError(
            f"{args.where}: {other[0]:.40} is not supported, expected {', '.join(known)}"
        )
    width = stem = _divisible(args.count("stem_size", STEM, maximum=MAX_WIDTH))
    listed = args.get("block_args", None) or _published_blocks()
    if (
        not isinstance(listed, list)
        or len(listed) != STAGES
        or not all(isinstance(stage, list) and 0 < len(stage) <= MAX_LAYERS for stage in listed)
    ):
        raise ModelError(
            f"{args.where}: block_args is no list of {STAGES} stages, each a list of up to "
            f"{MAX_LAYERS} blocks"
        )
    stages: list[tuple[Block, ...]] = []
    for number, stage in enumerate(listed):
        blocks: list[Block] = []
        for index, one in enumerate(stage):
            where = f"{args.where}: block_args {number}.{index}"
            blocks.append(_read_block(Settings(one, where), width))
            width = blocks[-1].outer
        stages.append(tuple(blocks))
    return stem, tuple(stages), args.count("msfa_output_resolution", 16)


def _read_block(c: Settings, inner: int) -> Block:
    kind = c.choice("block_type", ("er", "uir", "mqa"), "uir")
    outer = _divisible(c.count("out_chs", maximum=MAX_WIDTH))
    stride = c.count("stride", 1, maximum=MAX_STRIDE)
    for key, value in UNUSED.items():
        c.choice(key, (value,), value)
    if kind == "mqa":
        head = c.count("key_dim", 64, maximum=MAX_WIDTH)
        c.choice("value_dim", (head,), head)
        if stride != 1 or outer != inner:
            raise ModelError(
                f"{c.where}: attention from width {inner} to {outer} with a stride of {stride}; "
                "expected one width and a stride of 1"
            )
        return MultiQuery(
            inner=inner,
            heads=c.count("num_heads", 8, maximum=MAX_HEADS),
            head=head,
            kernel=c.choice("dw_kernel_size", KERNELS, 3),
            stride=c.count("kv_stride", 1, maximum=MAX_STRIDE),
        )
    wide = inner * c.number("exp_ratio", 1.0)
    if wide > MAX_WIDTH:
        raise ModelError(
            f"{c.where}: exp_ratio widens {inner} channels to {wide:g}; expected up to {MAX_WIDTH}"
        )
    middle = _divisible(wide)
    if kind == "er":
        return EdgeResidual(inner, middle, outer, c.choice("exp_kernel_size", KERNELS, 3), stride)
    start, mid = (
        c.choice(f"dw_kernel_size_{part}", (0, *KERNELS), default)
        for part, default in (("start", 0), ("mid", 3))
    )
    if stride > 1 and not (start or mid):
        raise ModelError(f"{c.where}: a stride of {stride} without a kernel, expected one")
    return InvertedBottleneck(inner, middle, outer, start, mid, stride)


def _divisible(width: float) -> int:
    """Return the multiple of 8 that timm rounds a width to, not below nine tenths of it."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded


def _read_resolution(image: Settings, tokens: int) -> FixedSquare:
    size = image.get("size", SIDE)
    edges = Settings(
        {"height": size, "width": size} if type(size) is int else size, f"{image.where}: size"
    )
    height, width = (edges.count(edge, maximum=MAX_SIDE) for edge in ("height", "width"))
    if height != width:
        raise ModelError(f"{edges.where} is {height} x {width}, expected a square")
    values = dict(image.values)
    if not image.flag("do_normalize", True):
        values |= {"do_normalize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    settings = Settings(values, image.where)
    return FixedSquare(
        side=height,
        tokens=tokens,
        normalize=read_normalize(settings),
        resample=read_resample(settings, 2),
        edge=height,
    )
