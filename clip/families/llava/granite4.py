"""Granite 4 Vision (transformers' models/granite4_vision; there is no paper): LLaVA-NeXT's tiles,
whose features of several depths are brought to a quarter of the tokens by Q-Formers over windows,
each for a layer of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import GgufTower, biased_parameters, checkpoint_names, gguf_vit, tower_keys
from mtmd.clip.families.llava.tower import FeatureTower
from mtmd.clip.families.llava.vision import TOWERS, check_grid, check_uncut, read_tower
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, gguf_image, read_normalize
from mtmd.clip.qformer import QFormer, read_qformer
from mtmd.clip.resolution.anyres import AnyResolution, read_canvases
from mtmd.clip.resolution.fixed_square import read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

NEWLINE = "v.image_newline"
EPS = 1e-6  # of the norm of features; the settings do not say
HEAD = 64  # values of a Q-Former's head, whatever its settings say
CORNERS = 4  # of two by two patches, of which each projection from the last depth takes one
SPATIAL_LAYERS = [12, 15, 18, 21]


@dataclass(frozen=True)
class Depth:
    """A projection of the hidden state that so many layers have made. Its queries begin as one
    `corner` of each two by two patches, or as their mean. `name` is a checkpoint's.
    """

    state: int
    corner: int | None
    name: str = field(compare=False)


@dataclass(frozen=True)
class Granite4Vision:
    """Windows of `window` patches a side become `query` tokens a side. `depths` are in the order of
    the decoder's layers.
    """

    tower: FeatureTower
    depths: tuple[Depth, ...]
    qformer: QFormer
    window: int
    query: int
    resolution: AnyResolution

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = False
    separator = NEWLINE
    video = None

    @property
    def unused(self) -> tuple[str, ...]:
        return self.tower.unused

    @cached_property
    def side(self) -> int:
        """Tokens a side of a tile."""
        return self.tower.grid // self.window * self.query

    def parameters(self) -> Mapping[str, Parameter]:
        width, text, count = self.tower.vit.width, self.tower.text_width, len(self.depths)
        parameters = self.tower.tower_parameters()
        repeated = partial(_repeated, count)
        parameters[NEWLINE] = Parameter(
            (count * text,),
            checkpoint_names("image_newline"),
            (text,),
            repeated,
            gguf=(Stored((NEWLINE,), (text,), repeated, invert=lambda rows: (rows[:text],)),),
        )
        for index, depth in enumerate(self.depths):
            at = f"v.proj_blk.{index}"
            names = partial(_names, depth.name)
            ends: dict[str, tuple[str, Shape]] = {
                f"{at}.norm": ("norm", (width,)),
                f"{at}.linear": ("out_linear", (text, width)),
            }
            parameters |= biased_parameters(ends, names)
            for part, name, rows in (
                ("query", "query", self.query**2),
                ("img_pos", "image_positions", self.window**2),
            ):
                parameters[f"{at}.{part}"] = _rows(f"{at}.{part}", (rows, width), names(name))
            inner = partial(_names, f"{depth.name}.qformer")
            parameters |= self.qformer.parameters(at, self._blocks(at), inner)
        return parameters

    def _blocks(self, at: str) -> Sequence[str]:
        return [at, *(f"{at}.layer.{i}" for i in range(1, self.qformer.layers))]

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D times the depths]"""
        w = Weights(weights, tiles.dtype)
        states = self.tower.states(tiles, w, attention)
        rows = [
            self._projected(states[depth.state], f"v.proj_blk.{index}", depth.corner, w, attention)
            for index, depth in enumerate(self.depths)
        ]
        x = rows[0]
        for index, more in enumerate(rows[1:], 1):
            x = ops.concat(x, more, axis=2, name=f"mm.depths.{index}")
        return x

    def _projected(
        self, x: Node, at: str, corner: int | None, w: Weights, attention: AttentionForm
    ) -> Node:
        """Features [B, P, C] -> [B, T, D]"""
        if self.tower.skip_first:
            x = self.tower.without_first(x, f"{at}.patches")
        x, grid = w.layer_norm(x, f"{at}.norm", EPS), (self.tower.grid, self.tower.grid)
        seen = ops.windows(x, grid=grid, size=self.window, name=f"{at}.windows")
        seen = ops.add(seen, w.tensor(f"{at}.img_pos"), name=f"{at}.placed")
        fewer = (self.side, self.side)
        if corner is None:
            queries = ops.pool2d(x, grid=grid, size=fewer, name=f"{at}.pool")
        else:
            queries = ops.take_rows(x, self._corners(corner), name=f"{at}.corner")
        queries = ops.windows(queries, grid=fewer, size=self.query, name=f"{at}.query.windows")
        queries = ops.add(queries, w.tensor(f"{at}.query"), name=f"{at}.queries")
        y = self.qformer.graph(queries, seen, at, self._blocks(at), w, attention)
        y = ops.from_windows(y, grid=fewer, size=self.query, name=f"{at}.whole")
        return w.linear(y, f"{at}.linear", bias=True)

    def _corners(self, corner: int) -> Node:
        """int64 [T], the patches at one corner of each two by two."""
        grid = self.tower.grid
        cells = torch.arange(grid**2).view(grid, grid)[corner // 2 :: 2, corner % 2 :: 2].flatten()
        return graph_input(f"inp.corner.{corner}", tuple(cells.shape), cells.dtype, lambda _: cells)


def _repeated(count: int, row: torch.Tensor) -> torch.Tensor:
    return row.repeat(count)


def _names(part: str, name: str) -> tuple[str, ...]:
    return checkpoint_names(f"{part}.{name}")


def _rows(name: str, shape: Shape, sources: tuple[str, ...]) -> Parameter:
    """A table that files have with an axis of one before."""
    stored = (1, *shape)
    return Parameter(
        shape,
        sources,
        stored,
        _squeezed,
        gguf=(Stored((name,), stored, _squeezed, invert=lambda rows: (rows[None],)),),
    )


def _squeezed(rows: torch.Tensor) -> torch.Tensor:
    return rows[0]


def to_gguf(family: Granite4Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same; none has Q-Formers of several layers, or another
    tower than SigLIP.
    """
    tower, depths = family.tower, family.depths
    keys = tower_keys(
        tower.vit, image_size=tower.image_size, patch=tower.patch, text_width=tower.text_width
    )
    # The layer that makes a state counts from 0.
    keys |= {
        "use_gelu": True,
        "vision.preproc_image_size": family.resolution.side,
        "vision.feature_layer": [depth.state - 1 for depth in depths],
        "vision.projector.query_side": family.query,
        "vision.projector.window_side": family.window,
        "vision.projector.spatial_offsets": [
            -1 if depth.corner is None else depth.corner for depth in depths
        ],
        "vision.image_grid_pinpoints": [
            edge for size in family.resolution.canvases for edge in size
        ],
    }
    known = family.qformer.layers == 1 and not tower.class_token
    return GgufTower("granite4_vision" if known else "", keys)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say. Which layers of the
    decoder get what is in its own file.
    """
    size = keys.count("vision.image_size")
    edges, states, corners = (
        _listed(keys.get(f"vision.{key}", []))
        for key in ("image_grid_pinpoints", "feature_layer", "projector.spatial_offsets")
    )
    pinpoints = {
        "image_grid_pinpoints": [edges[at : at + 2][::-1] for at in range(0, len(edges), 2)]
    }
    # A layer that makes a state counts from 0; indices stand for the decoder's layers.
    depths = [
        (state + 1 if type(state) is int else state, corner)
        for state, corner in zip(states, corners, strict=False)
    ]
    index_of = {corner: index for index, (_, corner) in enumerate(depths)}
    ffn = [*shapes.get("v.proj_blk.0.ffn_up.weight", ()), None][0]
    config = {
        **pinpoints,
        "vision_config": {
            **gguf_vit(keys),
            "hidden_act": "gelu_pytorch_tanh",
            "model_type": TOWERS[1],
        },
        "text_config": {"hidden_size": [*shapes.get("v.proj_blk.0.linear.weight", ()), None][0]},
        "vision_feature_select_strategy": "full",
        "downsample_rate": "/".join(
            str(keys.count(f"vision.projector.{part}_side")) for part in ("query", "window")
        ),
        "deepstack_layer_map": [[s, i] for i, (s, corner) in enumerate(depths) if corner == -1],
        "spatial_vision_layer": next((s for s, corner in depths if corner != -1), None),
        "spatial_target_layers": [index_of.get(corner, -1) for corner in range(CORNERS)],
        "qformer_config": {"intermediate_size": ffn},
    }
    return config, {**gguf_image(keys), **pinpoints, "size": {"height": size, "width": size}}


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, (list, tuple)) else []


def read(top: Settings, image: Settings) -> Granite4Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    kind = top.part("vision_config").get("model_type", TOWERS[0])
    whole = {"vision_feature_layer": -1}  # its own settings say which
    tower = read_tower(Settings({**top.values, **whole}, top.where))
    check_grid(top, tower)
    depths = tuple(_depths(top, tower.vit.layers))
    tower = replace(
        tower,
        vit=replace(tower.vit, layers=max(depth.state for depth in depths)),
        features=tuple(depth.state for depth in depths),
    )
    query, window = _rate(top, tower.grid)
    width, given = tower.vit.width, top.part("qformer_config")
    if width % HEAD:
        raise ModelError(
            f"{top.where}: vision_config has a width of {width}, expected a multiple of {HEAD}, of "
            "which heads are made"
        )
    same = {
        "hidden_size": width,
        "encoder_hidden_size": width,
        "num_attention_heads": width // HEAD,
    }
    qformer = read_qformer(
        Settings({**given.values, **same}, given.where),
        layers=1,
        every=1,
        width=width,
        heads=width // HEAD,
        seen=width,
    )
    normalize = read_normalize(image, CLIP_MEAN, CLIP_STD)
    square = read_fixed_square(
        image, tower.image_size, tower.tokens, normalize, crops=kind == TOWERS[0], ground=None
    )
    check_uncut(image, square)
    resolution = AnyResolution(
        side=square.side,
        grid=tower.grid // window * query,
        canvases=read_canvases(top, image, square.side),
        normalize=normalize,
        resample=square.resample,
        saved=tower.saved,
    )
    return Granite4Vision(tower, depths, qformer, window, query, resolution)


def _rate(top: Settings, grid: int) -> tuple[int, int]:
    """Tokens and patches a side of a window."""
    rate = top.get("downsample_rate", "")
    query, _, window = rate.partition("/") if isinstance(rate, str) else ("", "", "")
    sides = [int(n) if n.isascii() and n.isdigit() and len(n) < 4 else 0 for n in (query, window)]
    if not 0 < sides[0] * 2 == sides[1] or grid % sides[1]:
        raise ModelError(
            f"{top.where}: downsample_rate is {rate!r:.40}, expected the sides of a window "
            "in tokens and in patches, one half of the other, such as 4/8, and windows that "
            f"divide the {grid} patches a side"
        )
    return sides[0], sides[1]


def _depths(top: Settings, layers: int) -> Iterator[Depth]:
    """Raises ModelError where they are not for layers of their own, the first among them."""
    pairs: Any = top.get("deepstack_layer_map", [])
    last: Any = top.get("spatial_vision_layer", -1)
    corners: Any = top.get("spatial_target_layers", SPATIAL_LAYERS)
    listed = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)
    if not listed or not isinstance(corners, list) or len(corners) != CORNERS:
        raise ModelError(
            f"{top.where}: deepstack_layer_map is {pairs!r:.60} and spatial_target_layers "
            f"{corners!r:.60}, expected pairs of layers, and {CORNERS} layers"
        )
    depths: list[tuple[Any, Any, int | None, str]] = [
        (state, layer, None, f"layerwise_projectors.{i}") for i, (state, layer) in enumerate(pairs)
    ]
    depths += [(last, layer, i, f"spatial_projectors.{i}") for i, layer in enumerate(corners)]
    numbers = [n for state, layer, *_ in depths for n in (state, layer)]
    targets = [layer for _, layer, *_ in depths]
    if (
        any(type(n) is not int for n in numbers)
        or any(not -layers - 1 <= state <= layers for state, *_ in depths)
        or any(not 0 <= layer < MAX_LAYERS for layer in targets)
        or len({*targets}) < len(targets)
        or 0 not in targets
    ):
        raise ModelError(
            f"{top.where}: deepstack_layer_map, spatial_vision_layer and spatial_target_layers "
            f"are {pairs!r:.60}, {last!r:.20} and {corners!r:.40}, expected features from "
            f"{-layers - 1} to {layers}, each for a layer of its own, the first layer among them"
        )
    for state, _, corner, name in sorted(depths, key=lambda depth: depth[1]):
        yield Depth(state if state >= 0 else layers + 1 + state, corner, name)
