"""Swin's tower (arXiv:2103.14030) as Donut has it: attention within windows, which every second
layer shifts by half, with a learned bias of each head for each distance; between stages four
neighbours become one row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import ACTIVATIONS, attend, biased_parameters, mlp, split_heads
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MAX_STAGES = 8  # published models have 4
MAX_WINDOW = 32  # patches; published models have 10
MAX_PATCHES = 1 << 20  # of a picture; published models have 307,200
HIDDEN = -100.0  # what is added to scores of cells that were not neighbours, as in training
EPS = 1e-5  # of the norms between stages; the settings do not say
# Names within a layer
LAYER = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_out": "attention.output.dense",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
}
QKV_BIAS = re.compile(r"\.attn_[qkv]\.bias$")
Grid = tuple[int, int]


@dataclass(frozen=True)
class SwinParams:
    """`depths` and `heads` are those of each stage, `widths` and `ffns`, too; `grids` the rows and
    columns of cells that it has. Windows have `window` cells a side.
    """

    patch: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    ffns: tuple[int, ...]
    grids: tuple[Grid, ...]
    window: int
    biases: bool
    eps: float
    gelu: str

    @property
    def distances(self) -> int:
        """Return how many distances two cells of a window can have."""
        side: int = 2 * self.window - 1
        return side**2

    def parameters(self, names: Callable[[str], tuple[str, ...]]) -> dict[str, Parameter]:
        first = self.widths[0]
        tensors: dict[str, tuple[str, Shape]] = {
            "v.patch_embd": (
                "embeddings.patch_embeddings.projection",
                (first, 3, self.patch, self.patch),
            ),
            "v.patch_norm": ("embeddings.norm", (first,)),
        }
        parameters: dict[str, Parameter] = {}
        for stage, (depth, width, ffn) in enumerate(
            zip(self.depths, self.widths, self.ffns, strict=True)
        ):
            shapes: dict[str, Shape] = {"ln1": (width,), "ln2": (width,)}
            shapes |= {"ffn_up": (ffn, width), "ffn_down": (width, ffn)}
            for index in range(depth):
                at, theirs = f"v.{stage}.blk.{index}", f"encoder.layers.{stage}.blocks.{index}"
                tensors |= {
                    f"{at}.{part}": (f"{theirs}.{name}", shapes.get(part, (width, width)))
                    for part, name in LAYER.items()
                }
                parameters[f"{at}.attn_bias.weight"] = Parameter(
                    (self.heads[stage], self.distances),
                    names(f"{theirs}.attention.self.relative_position_bias_table"),
                    (self.distances, self.heads[stage]),
                    lambda table: table.t().contiguous(),
                )
        for stage, (width, wider) in enumerate(pairwise(self.widths)):
            at, theirs = f"v.{stage}.merge", f"encoder.layers.{stage}.downsample"
            for part, kind, shape in (
                ("norm", "weight", (4 * width,)),
                ("norm", "bias", (4 * width,)),
                ("reduction", "weight", (wider, 4 * width)),
            ):
                parameters[f"{at}_{part}.{kind}"] = Parameter(
                    shape, names(f"{theirs}.{part}.{kind}"), convert=_line_by_line
                )
        parameters |= biased_parameters(tensors, names)
        if not self.biases:
            for name in [n for n in parameters if QKV_BIAS.search(n)]:
                del parameters[name]
        return parameters

    def graph(self, tiles: Node, w: Weights, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> [B, P, C] of the last stage"""
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        x = w.layer_norm(x, "v.patch_norm", EPS)
        for stage, grid in enumerate(self.grids):
            moved = min(grid) > self.window and _Shift.of(x, grid, self.window, stage)
            for index in range(self.depths[stage]):
                shift = moved if moved and index % 2 else None
                x = self._block(x, stage, f"v.{stage}.blk.{index}", shift, w, attention)
            if stage + 1 < len(self.grids):
                at, (rows, columns) = f"v.{stage}.merge", self.grids[stage + 1]
                x = ops.windows(x, grid=grid, size=2, name=f"{at}.squares")
                shape = (tiles.shape[0], rows * columns, 4 * self.widths[stage])
                x = ops.reshape(x, shape=shape, name=f"{at}.rows")
                x = w.linear(w.layer_norm(x, f"{at}_norm", EPS), f"{at}_reduction")
        return x

    def _block(
        self,
        x: Node,
        stage: int,
        at: str,
        shift: _Shift | None,
        w: Weights,
        attention: AttentionForm,
    ) -> Node:
        grid, heads = self.grids[stage], self.heads[stage]
        cut: dict[str, Any] = {"grid": grid, "size": self.window}
        y = ops.windows(w.layer_norm(x, f"{at}.ln1", self.eps), **cut, name=f"{at}.windows")
        if shift is not None:
            y = shift.there(y, at)
        q, k, v = (
            split_heads(w.linear(y, f"{at}.attn_{part}", bias=self.biases), heads, f"{at}.{part}")
            for part in "qkv"
        )
        bias = self._bias(at, heads, w)
        if shift is None:
            y = attend(q, k, v, attention, at=at, mask=bias)
        else:
            y = shift.attended(q, k, v, bias, at, attention)
            y = shift.back(y, at)
        y = ops.from_windows(y, **cut, name=f"{at}.cells")
        x = ops.add(w.linear(y, f"{at}.attn_out", bias=True), x, name=f"{at}.attn_residual")
        y = mlp(w.layer_norm(x, f"{at}.ln2", self.eps), at, self.gelu, w)
        return ops.add(y, x, name=f"{at}.ffn_residual")

    def _bias(self, at: str, heads: int, w: Weights) -> Node:
        """Biases of the scores of a window's cells          -> [H, T, T]"""
        cells = self.window**2
        table = w.tensor(f"{at}.attn_bias.weight")
        columns = ops.reshape(
            table, shape=(heads, self.distances, 1), name=f"{at}.attn_bias.columns"
        )
        rows = _given("inp.distances", _distances(self.window))
        taken = ops.take_rows(columns, rows, name=f"{at}.attn_bias.taken")
        return ops.reshape(taken, shape=(heads, cells, cells), name=f"{at}.attn_bias")


@dataclass(frozen=True)
class _Shift:
    """Windows moved by half of themselves over a grid whose lower end is joined to its upper one
    and whose right end to its left one. `order` [B * N * T] says which cell of the windows before
    each cell is. Windows of a kind lie together, `ends` of each: those within the grid, and those
    over an edge to the right, below, and both, whose cells were not all neighbours.
    """

    order: Node
    back_order: Node
    ends: tuple[int, ...]
    hidden: tuple[Node | None, ...]

    @classmethod
    def of(cls, x: Node, grid: Grid, window: int, stage: int) -> _Shift:
        batch = x.shape[0]
        order, ends = _moved(batch, grid, window)
        there, back = (
            _given(f"inp.{stage}.{name}", o)
            for name, o in (("shifted", order), ("unshifted", torch.argsort(order)))
        )
        hidden = (
            _given(f"inp.{stage}.hidden.{number}", _hidden(window, *kind).to(x.dtype))
            for number, kind in enumerate(KINDS[1:], 1)
        )
        return cls(there, back, ends, (None, *hidden))

    def there(self, x: Node, at: str) -> Node:
        return _reordered(x, self.order, f"{at}.shifted")

    def back(self, x: Node, at: str) -> Node:
        return _reordered(x, self.back_order, f"{at}.unshifted")

    def attended(
        self, q: Node, k: Node, v: Node, bias: Node, at: str, attention: AttentionForm
    ) -> Node:
        """q, k, v [B * N, T, H, K], bias [H, T, T] -> [B * N, T, H * K]"""
        result, start = None, 0
        for number, (end, hidden) in enumerate(zip(self.ends, self.hidden, strict=True)):
            if end == start:
                continue
            name = f"{at}.{number}"
            some_q, some_k, some_v = (
                ops.rows(one, start=start, stop=end, name=f"{name}.{part}")
                for part, one in zip("qkv", (q, k, v), strict=True)
            )
            mask = bias if hidden is None else ops.add(bias, hidden, name=f"{name}.attn_bias")
            y = attend(some_q, some_k, some_v, attention, at=name, mask=mask)
            result = y if result is None else ops.concat(result, y, axis=0, name=f"{name}.joined")
            start = end
        assert result is not None
        return result


KINDS = ((False, False), (False, True), (True, False), (True, True))  # over an edge below, right


def _given(name: str, values: torch.Tensor) -> Node:
    """An input that is the same in every run."""
    return graph_input(name, tuple(values.shape), values.dtype, lambda _: values)


def _reordered(x: Node, order: Node, name: str) -> Node:
    """[N, T, C] -> [N, T, C]"""
    rows = ops.reshape(x, shape=(1, x.shape[0] * x.shape[1], x.shape[2]), name=f"{name}.rows")
    return ops.reshape(ops.take_rows(rows, order, name=name), shape=x.shape, name=f"{name}.windows")


@lru_cache(maxsize=16)
def _moved(batch: int, grid: Grid, window: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """`_Shift.order` and `_Shift.ends`, the latter in windows."""
    down, across = (-(-size // window) for size in grid)
    cells = np.arange(down * across * window**2).reshape(down, across, window, window)
    picture = cells.transpose(0, 2, 1, 3).reshape(down * window, across * window)
    half = window // 2
    moved = np.roll(picture, (-half, -half), (0, 1))
    squares = moved.reshape(down, window, across, window).transpose(0, 2, 1, 3)
    of_kind = [
        squares[row, column].reshape(-1, window**2)
        for below, right in KINDS
        for row in [slice(down - 1, None) if below else slice(0, down - 1)]
        for column in [slice(across - 1, None) if right else slice(0, across - 1)]
    ]
    first = (np.arange(batch) * cells.size)[:, None, None]
    parts = [(first + one).reshape(-1) for one in of_kind]
    ends = np.cumsum([batch * len(one) for one in of_kind])
    return torch.from_numpy(np.concatenate(parts)), tuple(int(end) for end in ends)


def _hidden(window: int, below: bool, right: bool) -> torch.Tensor:
    """fp32 [T, T]"""
    line = torch.arange(window) >= window - window // 2
    region = (line & below)[:, None] * 2 + (line & right)[None].int()
    cells = region.reshape(-1)
    return torch.where(cells[:, None] == cells, 0.0, HIDDEN)


@lru_cache(maxsize=4)
def _distances(window: int) -> torch.Tensor:
    """Row of the table of biases that two cells take, int64 [T * T]"""
    rows = torch.arange(window).repeat_interleave(window)
    columns = torch.arange(window).repeat(window)
    down, across = (at[:, None] - at + window - 1 for at in (rows, columns))
    return (down * (2 * window - 1) + across).reshape(-1)


def _line_by_line(x: torch.Tensor) -> torch.Tensor:
    """Four neighbours of a row [..., 4 * C], column after column, as lines."""
    lines: torch.Tensor = x.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
    return lines


def read_swin(c: Settings) -> SwinParams:
    """Read it from an encoder's config.json, with transformers' defaults (DonutSwinConfig).
    Raises ModelError for what cannot be followed.
    """
    c.choice("num_channels", (3,), 3)
    c.choice("use_absolute_embeddings", (False,), False)
    depths, heads = (
        _counts(c, key, default)
        for key, default in (("depths", (2, 2, 6, 2)), ("num_heads", (3, 6, 12, 24)))
    )
    first, window = c.count("embed_dim", 96, maximum=MAX_WIDTH), c.count("window_size", 7)
    patch, ratio = _patch(c), c.number("mlp_ratio", 4.0)
    if len(heads) != len(depths):
        raise ModelError(
            f"{c.where}: num_heads has {len(heads)} numbers for {len(depths)} stages (depths)"
        )
    widths = tuple(first * 2**stage for stage in range(len(depths)))
    for width, count in zip(widths, heads, strict=True):
        if width % count or width > MAX_WIDTH or not 0 < int(ratio * width) <= MAX_WIDTH * 4:
            raise ModelError(
                f"{c.where}: {count} heads of width {width} with mlp_ratio {ratio}; expected heads "
                f"that divide a width of at most {MAX_WIDTH}"
            )
    height, across = image_size(c)
    if height % patch or across % patch:
        raise ModelError(
            f"{c.where}: image_size {height} x {across} is no whole number of patches of {patch} "
            "pixels"
        )
    grids = [(height // patch, across // patch)]
    for _ in depths[1:]:
        grids.append((-(-grids[-1][0] // 2), -(-grids[-1][1] // 2)))
    if not 1 < window <= MAX_WINDOW or min(grids[-1]) < window:
        raise ModelError(
            f"{c.where}: window_size is {window}, expected 2 to {MAX_WINDOW} and no more than the "
            f"{grids[-1][0]} x {grids[-1][1]} cells of the last stage"
        )
    return SwinParams(
        patch=patch,
        depths=depths,
        heads=heads,
        widths=widths,
        ffns=tuple(int(ratio * width) for width in widths),
        grids=tuple(grids),
        window=window,
        biases=c.flag("qkv_bias", True),
        eps=c.number("layer_norm_eps", 1e-5),
        gelu=ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "gelu")],
    )


def _counts(c: Settings, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A number for each stage."""
    value = c.get(key, default)
    limit = MAX_LAYERS if key == "depths" else MAX_HEADS
    if (
        not isinstance(value, (list, tuple))
        or not 0 < len(value) <= MAX_STAGES
        or any(type(one) is not int or not 0 < one <= limit for one in value)
    ):
        raise ModelError(
            f"{c.where}: {key} is {value!r:.40}, expected a list of up to {MAX_STAGES} numbers, "
            f"each from 1 to {limit}"
        )
    return tuple(value)


def _patch(c: Settings) -> int:
    value = c.get("patch_size", 4)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return Settings({"patch_size": value}, c.where).count("patch_size")


def image_size(c: Settings) -> Grid:
    """Height and width of the pictures of an encoder. Raises ModelError."""
    value = c.get("image_size", 224)
    both = value if isinstance(value, (list, tuple)) and len(value) == 2 else [value, value]
    height, width = (Settings({"image_size": one}, c.where).count("image_size") for one in both)
    patch = _patch(c)
    if height * width > MAX_PATCHES * patch**2:
        raise ModelError(
            f"{c.where}: image_size {height} x {width} has more than {MAX_PATCHES:,} patches of "
            f"{patch} pixels a side"
        )
    return height, width
