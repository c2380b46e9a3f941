"""Granite for Docling (transformers' models/granite_docling; there is no paper): SigLIP over tiles
of a page, 16 patches a token, features of several depths for the decoder's first layers. The path
of four times the tokens, and the router that recommends it, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    biased_parameters,
    plain_vit_parameters,
    position_sines,
    read_vit,
    vit_block,
)
from mtmd.clip.resolution.closest_grid import StretchedTiling, read_stretched_tiling
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sizes import MAX_TILES, Size, closest_grid
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

IMAGE_TOKEN, AROUND = "<image>", "<fake_token_around_image>"
LONGEST = 16  # rows and columns of tiles: as many have tokens
USUAL = 32  # tiles, where the settings do not say
EPS = 1e-5  # of the connector's norms; the settings do not say
DEPTHS = [3, 7, 10]


@dataclass(frozen=True)
class PageTiling(StretchedTiling):
    """Up to `dense` tiles for pages that would be shown below `below` of their width and whose
    width is more than `over` of their height and at most `up_to`; 0 for none of these.
    """

    dense: int = 0
    below: float = 0.0
    over: float = 0.0
    up_to: float = 0.0

    def choose(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> tuple[Size, tuple[str, ...]]:
        if not self._is_dense(size):
            return super().choose(size, budget)
        return replace(self, maximum=self.dense, dense=0).choose(size, budget)

    def _is_dense(self, size: Size) -> bool:
        aspect = size[0] / size[1]
        if not self.dense or not (self.below or self.over):
            return False
        if (self.over and aspect <= self.over) or (self.up_to and aspect > self.up_to):
            return False
        columns, _ = super().choose(size)[0]
        return not self.below or columns * self.tile / size[0] < self.below

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        largest = max(self.maximum, self.dense)
        return budget.maximum([self.tokens(largest), self.tokens(1)])


def page_grid(size: Size, grids: Any, tile: int) -> Size:
    """The closest of the grids that have tokens for all rows and columns."""
    return closest_grid(size, [grid for grid in grids if max(grid) <= LONGEST], tile)


@dataclass(frozen=True)
class GraniteDoclingVision:
    """`depths`: the layers, from 0, whose features go to the decoder's first layers."""

    vit: VitParams
    patch: int
    factor: int
    text_width: int
    depths: tuple[int, ...]
    resolution: PageTiling

    marker = image_token = IMAGE_TOKEN
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    unused = (r"(model\.)?(vision_model\.connector\.fine|density_router)\..*", r"mtp\..*")

    @property
    def grid(self) -> int:
        return self.resolution.tile // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width, text, merged = self.vit.width, self.text_width, self.vit.width * self.factor**2
        norms: dict[str, tuple[str, Shape]] = {
            "mm.ln_in": ("connector.ln_in", (width,)),
            "mm.ln_mid": ("connector.ln_mid", (text,)),
            "mm.ln_out": ("connector.ln_out", (text,)),
        }
        for index in range(len(self.depths)):
            at, theirs = f"v.deepstack.{index}", f"connector.coarse.deepstack_mergers.{index}"
            norms |= {
                f"{at}.norm": (f"{theirs}.layer_norm", (merged,)),
                f"{at}.fc1": (f"{theirs}.linear_1", (text, merged)),
                f"{at}.fc2": (f"{theirs}.linear_2", (text, text)),
            }
        plain = {
            "mm.projection": ("connector.coarse.projection", (text, merged)),
            "mm.fc2": ("connector.mlp_fc2", (text, text)),
        }
        return {
            **plain_vit_parameters(self.vit, self.patch, self.grid**2, _names),
            **biased_parameters(norms, _names),
            **{
                f"{name}.weight": Parameter(shape, _names(f"{theirs}.weight"))
                for name, (theirs, shape) in plain.items()
            },
        }

    def prompt(self, plan: ImagePlan) -> str:
        """Tiles line by line, each behind its row and column; the page where there are several."""
        (rows, columns), images = plan.cut, IMAGE_TOKEN * self.resolution.tile_tokens
        lines = "".join(
            "".join(f"{AROUND}<row_{row}_col_{column}>{images}" for column in range(1, columns + 1))
            + "\n"
            for row in range(1, rows + 1)
        )
        page = f"\n{AROUND}<global-img>{images}{AROUND}"
        return lines + page * (len(plan.sizes) > 1)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D (1 + depths)]"""
        w, grid = Weights(weights, tiles.dtype), (self.grid, self.grid)
        tokens = self.grid // self.factor
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        states = []
        for layer in range(self.vit.layers):
            x = vit_block(x, layer, self.vit, w, attention=attention)
            states.append(x)
        x = w.layer_norm(w.layer_norm(x, "v.post_ln", self.vit.eps), "mm.ln_in", EPS)
        x = ops.unshuffle(x, grid=grid, factor=self.factor, name="mm.merged")
        sines = graph_input(
            "inp.sines",
            (tokens**2, self.text_width),
            tiles.dtype,
            lambda _: position_sines(tokens, tokens, self.text_width).to(tiles.dtype),
        )
        x = ops.add(w.linear(x, "mm.projection"), sines, name="mm.placed")
        x = ops.gelu(w.layer_norm(x, "mm.ln_mid", EPS), approximate="none", name="mm.gelu")
        x = w.layer_norm(w.linear(x, "mm.fc2"), "mm.ln_out", EPS)
        for index, depth in enumerate(self.depths):
            at = f"v.deepstack.{index}"
            y = ops.unshuffle(states[depth], grid=grid, factor=self.factor, name=f"{at}.merged")
            y = w.linear(w.layer_norm(y, f"{at}.norm", EPS), f"{at}.fc1", bias=True)
            y = ops.gelu(y, approximate="none", name=f"{at}.gelu")
            x = ops.concat(x, w.linear(y, f"{at}.fc2", bias=True), axis=2, name=f"{at}.beside")
        return x


def _names(name: str) -> tuple[str, ...]:
    return f"model.vision_model.{name}", f"vision_model.{name}"


def read(top: Settings, image: Settings) -> GraniteDoclingVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("vision_config"), top.part("text_config")
    c.choice("num_channels", (3,), 3)
    vit = read_vit(c, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    size, patch = c.count("image_size", 512), c.count("patch_size", 16)
    factor, width = c.count("scale_factor", 4), c.count("out_hidden_size", 1024, maximum=MAX_WIDTH)
    depths: Any = c.get("deepstack_visual_indexes", DEPTHS)
    if size % (patch * factor) or width % 4 or text.count("hidden_size", 1024) != width:
        raise ModelError(
            f"{c.where}: image_size {size}, patch_size {patch}, scale_factor {factor} and "
            f"out_hidden_size {width}; expected whole tokens, and the decoder's width, a multiple "
            "of 4"
        )
    if (
        not isinstance(depths, list)
        or any(type(d) is not int or not 0 <= d < vit.layers for d in depths)
        or depths != sorted({*depths})
    ):
        raise ModelError(
            f"{c.where}: deepstack_visual_indexes is {depths!r:.60}, expected layers below "
            f"{vit.layers} in order"
        )
    tokens = (size // patch // factor) ** 2
    if (expected := image.part("processor").count("image_seq_len", tokens)) != tokens:
        raise ModelError(
            f"{image.where}: image_seq_len is {expected}, expected {tokens}, the tokens of a tile"
        )
    return GraniteDoclingVision(
        vit, patch, factor, width, tuple(depths), _read_tiling(image, size, tokens)
    )


def _read_tiling(image: Settings, size: int, tokens: int) -> PageTiling:
    image.choice("fine_route", (False,), False)
    usual = {"max_patches": image.count("max_patches", USUAL, maximum=MAX_TILES)}
    way = read_stretched_tiling(
        Settings({**image.values, **usual}, image.where), size, tokens, usual=512
    )
    key = "dense_max_patches"
    dense = image.count(key, maximum=MAX_TILES) if image.get(key, 0) else 0
    limits = [
        image.number(key) if image.get(key, 0) else 0.0
        for key in ("dense_max_scale", "dense_min_aspect", "dense_max_aspect")
    ]
    if dense and dense < way.fewest:
        raise ModelError(
            f"{image.where}: dense_max_patches is {dense}, expected at least min_patches, "
            f"{way.fewest}"
        )
    if not image.flag("crop_to_patches", True):
        way = replace(way, fewest=1, maximum=1)
        dense = 0
    return PageTiling(
        tile=way.tile,
        tile_tokens=tokens,
        fewest=way.fewest,
        maximum=way.maximum,
        normalize=way.normalize,
        resample=way.resample,
        closest=page_grid,
        dense=dense,
        below=limits[0],
        over=limits[1],
        up_to=limits[2],
    )
