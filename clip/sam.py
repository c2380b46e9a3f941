"""SAM's image encoder (arXiv:2304.02643) as models that read pages have it: most layers see windows
of the picture, some see all of it; a neck and two convolutions with strides leave a sixteenth of
its patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import ACTIVATIONS, attend, split_heads
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.image import Padding
from mtmd.kernels.plan.flash_choice import AttentionForm

Source = Callable[[str, str], tuple[str, ...]]
"""The names that a tensor may have in a checkpoint, from the authors' and transformers'."""

BOTH_SIDES: Padding = (1, 1, 1, 1)
MAX_SIDE = 1 << 10  # patches; published models have 64
# By canonical name: the authors' and transformers'.
LAYER = {
    "pre_ln": ("norm1", "layer_norm1"),
    "post_ln": ("norm2", "layer_norm2"),
    "attn.qkv": ("attn.qkv", "attn.qkv"),
    "attn.out": ("attn.proj", "attn.proj"),
    "mlp.lin1": ("mlp.lin1", "mlp.lin1"),
    "mlp.lin2": ("mlp.lin2", "mlp.lin2"),
}
NECK = {
    "neck.0": ("neck.0", "neck.conv1"),
    "neck.1": ("neck.1", "neck.layer_norm1"),
    "neck.2": ("neck.2", "neck.conv2"),
    "neck.3": ("neck.3", "neck.layer_norm2"),
    "net_2": ("net_2", "proj.conv1"),
    "net_3": ("net_3", "proj.conv2"),
}


@dataclass(frozen=True)
class SamParams:
    """`side` patches a side are what positions and distances are learned for. The layers `whole`
    see all of a picture, others windows of `window` x `window` patches. `neck` and `ends` are the
    channels of the convolutions.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    eps: float
    gelu: str
    patch: int
    side: int
    window: int
    whole: tuple[int, ...]
    neck: int
    ends: tuple[int, int]

    @property
    def head(self) -> int:
        return self.width // self.heads

    def tokens_a_side(self, pixels: int) -> int:
        """Return how many rows of features a picture of so many pixels a side gives."""
        return -(-pixels // self.patch // 4)

    @property
    def step(self) -> int:
        """Pixels a side of what becomes a token."""
        return 4 * self.patch


def sam_parameters(p: SamParams, source: Source) -> dict[str, Parameter]:
    c, n = p.width, p.neck
    table = (1, p.side, p.side, c)
    parameters = {
        "v.sam.pos_embd.weight": _reshaped(
            "v.sam.pos_embd.weight", (p.side**2, c), table, source("pos_embed", "pos_embed")
        )
    }
    kernel = (c, 3, p.patch, p.patch)
    parameters |= _both(
        "v.sam.patch_embd", kernel, "patch_embed.proj", "patch_embed.projection", source
    )
    shapes: dict[str, Shape] = {
        "pre_ln": (c,),
        "post_ln": (c,),
        "attn.qkv": (3 * c, c),
        "attn.out": (c, c),
        "mlp.lin1": (p.ffn, c),
        "mlp.lin2": (c, p.ffn),
    }
    for layer in range(p.layers):
        at, blocks = f"v.sam.blk.{layer}", (f"blocks.{layer}", f"layers.{layer}")
        for part, names in LAYER.items():
            own, new = (f"{block}.{name}" for block, name in zip(blocks, names, strict=True))
            parameters |= _both(f"{at}.{part}", shapes[part], own, new, source)
        distances = 2 * (p.side if layer in p.whole else p.window) - 1
        for axis in "hw":
            parameters[f"{at}.attn.pos_{axis}.weight"] = Parameter(
                (distances, p.head), source(*(f"{block}.attn.rel_pos_{axis}" for block in blocks))
            )
    convolutions: dict[str, Shape] = {
        "neck.2": (n, n, 3, 3),
        "net_2": (p.ends[0], n, 3, 3),
        "net_3": (p.ends[1], p.ends[0], 3, 3),
    }
    for part, names in NECK.items():
        at, theirs = f"v.sam.{part}", source(*(f"{name}.weight" for name in names))
        if part in ("neck.1", "neck.3"):
            parameters |= _both(at, (n,), *names, source)
        elif part == "neck.0":
            parameters[f"{at}.weight"] = _reshaped(f"{at}.weight", (n, c), (n, c, 1, 1), theirs)
        else:
            parameters[f"{at}.weight"] = Parameter(convolutions[part], theirs)
    return parameters


def _both(
    at: str, shape: Shape, authors: str, transformers: str, source: Source
) -> dict[str, Parameter]:
    """A weight and its bias."""
    return {
        f"{at}.{kind}": Parameter(
            shape if kind == "weight" else shape[:1],
            source(f"{authors}.{kind}", f"{transformers}.{kind}"),
        )
        for kind in ("weight", "bias")
    }


def _reshaped(name: str, shape: Shape, stored: Shape, sources: tuple[str, ...]) -> Parameter:
    """A matrix that files have with axes of one."""

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(shape)

    def full(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.reshape(stored),)

    return Parameter(
        shape, sources, stored, flat, gguf=(Stored((name,), stored, flat, invert=full),)
    )


def sam_features(tiles: Node, p: SamParams, w: Weights, attention: AttentionForm) -> Node:
    """Features of a sixteenth of the patches

    tiles [B, 3, Y, X] -> [B, ceil(Y / 4 patch) * ceil(X / 4 patch), last of `ends`]
    """
    grid = tiles.shape[2] // p.patch, tiles.shape[3] // p.patch
    x = ops.patch_embed(
        tiles,
        w.tensor("v.sam.patch_embd.weight"),
        w.tensor("v.sam.patch_embd.bias"),
        name="v.sam.patch_embd",
    )
    table = w.tensor("v.sam.pos_embd.weight")
    x = ops.add(
        x, at_size(table, (p.side, p.side), grid, "v.sam.pos_embd.resized"), name="v.sam.pos_embd"
    )
    for layer in w.layers(p.layers):
        x = _layer(
            x, f"v.sam.blk.{layer}", grid, None if layer in p.whole else p.window, p, w, attention
        )
    x = w.layer_norm(w.linear(x, "v.sam.neck.0"), "v.sam.neck.1", p.eps)
    x = ops.conv2d(
        x, w.tensor("v.sam.neck.2.weight"), grid=grid, padding=BOTH_SIDES, name="v.sam.neck.2"
    )
    x = w.layer_norm(x, "v.sam.neck.3", p.eps)
    for part in ("net_2", "net_3"):
        x = ops.conv2d(
            x,
            w.tensor(f"v.sam.{part}.weight"),
            grid=grid,
            stride=(2, 2),
            padding=BOTH_SIDES,
            name=f"v.sam.{part}",
        )
        grid = -(-grid[0] // 2), -(-grid[1] // 2)
    return x


def at_size(table: Node, grid: tuple[int, int], size: tuple[int, int], name: str) -> Node:
    """A table of positions [rows * columns, C] for another grid, interpolated as transformers
    does.
    """
    if grid == size:
        return table
    return ops.resize2d(table, grid=grid, size=size, mode="bicubic", antialias=True, name=name)


def _layer(
    x: Node,
    at: str,
    grid: tuple[int, int],
    window: int | None,
    p: SamParams,
    w: Weights,
    attention: AttentionForm,
) -> Node:
    y = w.layer_norm(x, f"{at}.pre_ln", p.eps)
    seen = grid
    if window is not None:
        y, seen = ops.windows(y, grid=grid, size=window, name=f"{at}.windows"), (window, window)
    qkv = w.linear(y, f"{at}.attn.qkv", bias=True)
    q, k, v = (
        split_heads(
            ops.columns(qkv, start=i * p.width, stop=(i + 1) * p.width, name=f"{at}.attn.{n}"),
            p.heads,
            f"{at}.attn.{n}",
        )
        for i, n in enumerate("qkv")
    )
    scale = p.head**-0.5
    tables = (w.tensor(f"{at}.attn.pos_{axis}.weight") for axis in "hw")
    q = ops.relative_queries(q, *tables, grid=seen, scale=scale, name=f"{at}.attn.q.relative")
    k = ops.relative_keys(k, grid=seen, name=f"{at}.attn.k.relative")
    y = w.linear(attend(q, k, v, attention, at=at, scale=scale), f"{at}.attn.out", bias=True)
    if window is not None:
        y = ops.from_windows(y, grid=grid, size=window, name=f"{at}.whole")
    x = ops.add(y, x, name=f"{at}.attn_residual")
    y = w.linear(w.layer_norm(x, f"{at}.post_ln", p.eps), f"{at}.mlp.lin1", bias=True)
    y = ops.gelu(y, approximate=p.gelu, name=f"{at}.mlp.gelu")
    return ops.add(w.linear(y, f"{at}.mlp.lin2", bias=True), x, name=f"{at}.mlp_residual")


def read_sam(c: Settings, ends: tuple[int, int] | None = None) -> SamParams:
    """Read it from a sam_config with transformers' keys and defaults. `ends`: the channels of the
    last convolutions, where the settings do not say. Raises ModelError for what cannot be
    followed.
    """
    for key, value in (("use_abs_pos", True), ("use_rel_pos", True), ("qkv_bias", True)):
        c.choice(key, (value,), value)
    c.choice("num_channels", (3,), 3)
    layers = c.count("num_hidden_layers", 12, maximum=MAX_LAYERS)
    width, heads = (
        c.count("hidden_size", 768, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 12, maximum=MAX_HEADS),
    )
    patch, size = one_side(c, "patch_size", 16), one_side(c, "image_size", 1024)
    whole: object = c.get("global_attn_indexes", [2, 5, 8, 11])
    if (
        not isinstance(whole, (list, tuple))
        or len(whole) > layers
        or any(type(i) is not int or not 0 <= i < layers for i in whole)
    ):
        raise ModelError(
            f"{c.where}: global_attn_indexes is {whole!r:.60}, expected numbers of layers below "
            f"{layers}"
        )
    if width % heads or size % patch or size // patch > MAX_SIDE:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}, pictures of {size} pixels in patches of "
            f"{patch}; expected heads that divide the width, and whole patches, at most {MAX_SIDE} "
            "a side"
        )
    given: Any = c.get("downsample_channels", ends or [512, 1024])
    if (
        not isinstance(given, (list, tuple))
        or len(given) != 2
        or any(type(n) is not int or not 0 < n <= MAX_WIDTH for n in given)
    ):
        raise ModelError(
            f"{c.where}: downsample_channels is {given!r:.60}, expected two counts up to "
            f"{MAX_WIDTH}"
        )
    return SamParams(
        layers=layers,
        width=width,
        ffn=c.count("mlp_dim", 3072, maximum=MAX_WIDTH),
        heads=heads,
        eps=c.number("layer_norm_eps", 1e-6),
        gelu=ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "gelu")],
        patch=patch,
        side=size // patch,
        window=c.count("window_size", 14, maximum=MAX_SIDE),
        whole=tuple(sorted(set(whole))),
        neck=c.count("output_channels", 256, maximum=MAX_WIDTH),
        ends=(given[0], given[1]),
    )


def one_side(c: Settings, key: str, default: int) -> int:
    """A size, or two equal ones."""
    side = c.get(key, default)
    if isinstance(side, (list, tuple)) and len(side) == 2 and side[0] == side[1]:
        side = side[0]
    return Settings({key: side}, c.where).count(key)


def sam_from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return what a sam_config would say: a GGUF has some of it in the shapes of tensors alone."""

    def size(name: str, axis: int = 0) -> int | None:
        shape = shapes.get(f"v.sam.{name}", ())
        return shape[axis] if len(shape) > axis else None

    layers, window = (
        keys.count("vision.sam.block_count", maximum=MAX_LAYERS),
        keys.count("vision.window_size", 14),
    )
    patch, side = size("patch_embd.weight", 2) or 16, size("pos_embd.weight", 1)
    return {
        "num_hidden_layers": layers,
        "hidden_size": keys.count("vision.sam.embedding_length"),
        "num_attention_heads": keys.count("vision.sam.head_count"),
        "mlp_dim": size("blk.0.mlp.lin1.weight"),
        "patch_size": patch,
        "image_size": None if side is None else side * patch,
        "window_size": window,
        "global_attn_indexes": [
            i for i in range(layers) if size(f"blk.{i}.attn.pos_h.weight") != 2 * window - 1
        ],
        "output_channels": size("neck.0.weight"),
        "downsample_channels": [size("net_2.weight"), size("net_3.weight")],
    }


def sam_keys(p: SamParams) -> dict[str, Any]:
    """Return the keys with which a GGUF says the rest."""
    return {
        "vision.window_size": p.window,
        "vision.sam.block_count": p.layers,
        "vision.sam.embedding_length": p.width,
        "vision.sam.head_count": p.heads,
    }


def published_sam(vision: Settings) -> dict[str, Any]:
    """Return what a sam_config would say of a vision_config with the authors' keys."""
    theirs = vision.part("width").part("sam_vit_b")
    return {
        "num_hidden_layers": theirs.get("layers", None),
        "hidden_size": theirs.get("width", None),
        "num_attention_heads": theirs.get("heads", None),
        "mlp_dim": 4 * theirs.count("width", 768, maximum=MAX_WIDTH),
        "global_attn_indexes": theirs.get("global_attn_indexes", None),
        "downsample_channels": theirs.get("downsample_channels", None),
        "image_size": vision.get("image_size", None),
    }
