"""Llama 3.2 Vision's tower (arXiv:2407.21783): all tiles of a picture at once, local and gated
global layers; features of several layers side by side, to which the decoder attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    ACTIVATIONS,
    VitParams,
    attend,
    biased_parameters,
    checkpoint_names,
    learned_queries,
    mlp,
    split_heads,
)
from mtmd.clip.resolution.canvas import TiledCanvas, read_tiled_canvas
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sizes import MAX_IN_A_ROW
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

PICTURES = 4  # of a prompt, for which a decoder keeps room
WHOLE = 8  # patches of a tile are padded to a multiple
NORM_EPS = 1e-5  # of norms between the two stacks, torch's default
GATES = ("attn", "ffn")


@dataclass(frozen=True)
class Rows:
    """The rows of a picture of n tiles, of N that there may be, as they lie in the tower: patches
    of its tiles as they lie in the canvas, class tokens, patches of tiles that are padding, and at
    the end what pads tiles.
    """

    grid: tuple[int, int]  # of tiles
    side: int  # patches on a side of a tile
    tiles: int

    @property
    def real_tiles(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return self.side**2

    @property
    def real(self) -> int:
        return self.real_tiles * (self.patches + 1)

    @property
    def total(self) -> int:
        """All but what pads tiles."""
        return self.tiles * (self.patches + 1)

    @cached_property
    def seen(self) -> torch.Tensor:
        """int64 [n P, 2]: tile and patch of each patch of the canvas."""
        rows, columns = (torch.arange(count * self.side) for count in self.grid)
        tile = (rows // self.side)[:, None] * self.grid[1] + columns // self.side
        patch = (rows % self.side)[:, None] * self.side + columns % self.side
        return torch.stack((tile.flatten(), patch.flatten()), 1)

    @cached_property
    def locations(self) -> torch.Tensor:
        """int64 [total, 2]: tile, and 0 for its class token or 1 plus the patch."""
        tiles = torch.arange(self.tiles)
        classes = torch.stack((tiles, torch.zeros_like(tiles)), 1)
        padding = torch.cartesian_prod(
            torch.arange(self.real_tiles, self.tiles), torch.arange(1, self.patches + 1)
        )
        shift = torch.tensor([[0, 1]])
        return torch.cat((self.seen + shift, classes, padding.view(-1, 2)))

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [total]: the rows tile by tile, class tokens first."""
        tile, at = self.locations.T
        return torch.argsort(tile * (self.patches + 1) + at)


@dataclass(frozen=True)
class MllamaVision:
    vit: VitParams
    global_layers: int
    features: tuple[int, ...]  # layers whose outputs are read
    patch: int
    text_width: int
    resolution: TiledCanvas

    marker = image_token = "<|image|>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    pictures = PICTURES
    unused = ()

    @property
    def side(self) -> int:
        """Patches on a side of a tile."""
        return self.resolution.side // self.patch

    def rows(self, grid: tuple[int, int]) -> Rows:
        return Rows(grid, self.side, self.resolution.tiles)

    def real_rows(self, plan: ImagePlan) -> int:
        return self.rows(plan.cut).real

    def parameters(self) -> Mapping[str, Parameter]:
        vit, tiles, grids = self.vit, self.resolution.tiles, len(self.resolution.grids) + 1
        width, rows = vit.width, self.side**2 + 1
        position = "gated_positional_embedding"
        parameters = {
            "v.patch_embd.weight": Parameter(
                (width, 3, self.patch, self.patch), _tower("patch_embedding.weight")
            ),
            "v.class_embd": Parameter(
                (1, width), _tower("class_embedding"), (width,), lambda w: w[None]
            ),
            "v.position_embd.weight": Parameter((rows, width), _tower(f"{position}.embedding")),
            "v.position_embd.gate": Parameter(
                (1,), _tower(f"{position}.gate"), convert=lambda g: 1 - g.float().tanh()
            ),
            "v.tile_position_embd.weight": Parameter(
                (grids * tiles * rows, width),
                _tower(f"{position}.tile_embedding.weight"),
                (grids, tiles * rows * width),
                lambda w: w.reshape(-1, width),
            ),
            "v.tile_position_embd.gate": _gate(f"{position}.gate"),
        }
        for ours, theirs in (("pre", "pre_tile"), ("post", "post_tile")):
            name = f"{theirs}_positional_embedding"
            parameters[f"v.{ours}_tile_embd.weight"] = Parameter(
                (grids * tiles, width),
                _tower(f"{name}.embedding.weight"),
                (grids, tiles * width),
                lambda w: w.reshape(-1, width),
            )
            parameters[f"v.{ours}_tile_embd.gate"] = _gate(f"{name}.gate")
        parameters |= biased_parameters(
            {"v.pre_ln": ("layernorm_pre", (width,)), "v.post_ln": ("layernorm_post", (width,))},
            _tower,
        )
        stacks = (
            ("v.blk", "transformer", vit.layers),
            ("v.global", "global_transformer", self.global_layers),
        )
        for blocks, stack, count in stacks:
            for index in range(count):
                parameters |= self._layer(f"{blocks}.{index}", f"{stack}.layers.{index}")
        for index in range(self.global_layers):
            for part in GATES:
                parameters[f"v.global.{index}.{part}_gate"] = _gate(
                    f"global_transformer.layers.{index}.gate_{part}"
                )
        count = len(self.features)
        parameters["mm.0.weight"] = Parameter(
            (self.text_width, width * (count + 1)),
            checkpoint_names("multi_modal_projector.weight"),
            convert=partial(_alongside, width),
        )
        parameters["mm.0.bias"] = Parameter(
            (self.text_width,), checkpoint_names("multi_modal_projector.bias")
        )
        return parameters

    def _layer(self, at: str, theirs: str) -> dict[str, Parameter]:
        width, ffn = self.vit.width, self.vit.ffn
        biased: dict[str, tuple[str, Shape]] = {
            f"{at}.ln1": (f"{theirs}.input_layernorm", (width,)),
            f"{at}.ln2": (f"{theirs}.post_attention_layernorm", (width,)),
            f"{at}.ffn_up": (f"{theirs}.mlp.fc1", (ffn, width)),
            f"{at}.ffn_down": (f"{theirs}.mlp.fc2", (width, ffn)),
        }
        plain = {
            f"{at}.attn_{ours}.weight": Parameter(
                (width, width), _tower(f"{theirs}.self_attn.{name}_proj.weight")
            )
            for ours, name in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
        }
        return biased_parameters(biased, _tower) | plain

    def prompt(self, plan: ImagePlan) -> str:  # noqa: ARG002
        return self.image_token

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """Embeddings of the picture's tiles, then of those that are padding: [B, N (P + 1), D]"""
        w, batch = Weights(weights, tiles.dtype), tiles.shape[0]
        grid = tiles.shape[2] // self.resolution.side, tiles.shape[3] // self.resolution.side
        rows, number = self.rows(grid), self.resolution.grids.index(grid) + 1
        bounds = _bounds(rows)
        x = self._embedded(tiles, rows, number, w)
        inner = []
        for index in range(self.vit.layers):
            x = self._block(x, f"v.blk.{index}", w, attention, bounds, gated=False)
            inner += [x] * self.features.count(index)
        x = w.layer_norm(x, "v.post_ln", NORM_EPS)
        padding = torch.arange(rows.tiles).repeat_interleave(_padding(rows))
        tile = torch.cat((rows.locations[:, 0], padding)) + number * rows.tiles
        x = ops.add(x, _gated("v.post_tile_embd", tile, w), name="v.post_tile")
        for index in range(self.global_layers):
            x = self._block(x, f"v.global.{index}", w, attention, bounds, gated=True)
        for index, feature in enumerate(inner):
            x = ops.concat(x, feature, axis=2, name=f"mm.features.{index}")
        length, width = x.shape[1:]
        at = (torch.arange(batch)[:, None] * length + rows.order).flatten()
        taken = ops.take_rows(
            ops.reshape(x, shape=(batch * length, width), name="mm.flat"),
            graph_input("inp.order", tuple(at.shape), at.dtype, lambda _: at),
            name="mm.rows",
        )
        x = ops.reshape(taken, shape=(batch, rows.total, width), name="mm.tiles")
        return w.linear(x, "mm.0", bias=True)

    def _embedded(self, tiles: Node, rows: Rows, number: int, w: Weights) -> Node:
        """[B, 3, Y, X] -> [B, N (P + 1 + padding), C]"""
        batch, width = tiles.shape[0], self.vit.width
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        first = number * rows.tiles
        tile = _gated("v.pre_tile_embd", rows.seen[:, 0] + first, w, ".real")
        x = ops.add(x, tile, name="v.pre_tile")
        x = ops.concat(
            x, learned_queries("v.class_embd", batch, w, rows.tiles), axis=1, name="v.classes"
        )
        empty = (rows.tiles - rows.real_tiles) * rows.patches
        if empty:
            at = torch.arange(rows.real_tiles, rows.tiles).repeat_interleave(rows.patches) + first
            blank = _zeros("inp.empty_tiles", batch, empty, width, tiles.dtype)
            blank = ops.add(blank, _gated("v.pre_tile_embd", at, w, ".empty"), name="v.empty_tiles")
            x = ops.concat(x, blank, axis=1, name="v.all_tiles")
        tile, at = rows.locations.T
        position = _gated("v.position_embd", at, w)
        position = ops.add(
            position,
            _gated("v.tile_position_embd", (tile + first) * (rows.patches + 1) + at, w),
            name="v.positions",
        )
        x = w.layer_norm(ops.add(x, position, name="v.embedded"), "v.pre_ln", NORM_EPS)
        padding = _zeros("inp.padding", batch, rows.tiles * _padding(rows), width, tiles.dtype)
        return ops.concat(x, padding, axis=1, name="v.padded")

    def _block(
        self, x: Node, at: str, w: Weights, attention: AttentionForm, bounds: Node, *, gated: bool
    ) -> Node:
        p = self.vit
        y = w.layer_norm(x, f"{at}.ln1", p.eps)
        q, k, v = (
            split_heads(w.linear(y, name), p.heads, name)
            for name in (f"{at}.attn_{part}" for part in "qkv")
        )
        y = w.linear(attend(q, k, v, attention, at=at, bounds=bounds), f"{at}.attn_out")
        x = ops.add(_through(y, f"{at}.attn", w, gated), x, name=f"{at}.attn_residual")
        y = mlp(w.layer_norm(x, f"{at}.ln2", p.eps), at, p.gelu, w)
        return ops.add(_through(y, f"{at}.ffn", w, gated), x, name=f"{at}.ffn_residual")


def _alongside(width: int, w: torch.Tensor) -> torch.Tensor:
    """The projector's columns by feature; checkpoints have the inner layers' interleaved."""
    inner = w[:, width:].unflatten(1, (width, -1)).transpose(1, 2).flatten(1)
    return torch.cat((w[:, :width], inner), 1)


def _through(y: Node, at: str, w: Weights, gated: bool) -> Node:
    return ops.mul(y, w.tensor(f"{at}_gate"), name=f"{at}_gated") if gated else y


def _gated(table: str, at: torch.Tensor, w: Weights, suffix: str = "") -> Node:
    """Rows of a table times its gate          -> [N, C]"""
    name = f"{table}{suffix}"
    rows = graph_input(f"inp.{name}", tuple(at.shape), at.dtype, lambda _: at)
    taken = ops.take_rows(w.tensor(f"{table}.weight"), rows, name=f"{name}.rows")
    return ops.mul(taken, w.tensor(f"{table}.gate"), name=f"{name}.gated")


def _zeros(name: str, batch: int, rows: int, width: int, dtype: torch.dtype) -> Node:
    shape = (batch, rows, width)
    return graph_input(name, shape, dtype, lambda _: torch.zeros(shape, dtype=dtype))


def _padding(rows: Rows) -> int:
    """Return how many rows pad each tile: some, as one more than a square is never whole."""
    return -(rows.patches + 1) % WHOLE


def _bounds(rows: Rows) -> Node:
    """int32 [R, 2]: a real row sees all there are, padding among them, and padding sees what is
    real. Real rows lie first, but for class tokens of padding, which follow those of tiles.
    """
    count = rows.total + rows.tiles * _padding(rows)
    bounds = torch.zeros(count, 2, dtype=torch.int32)
    bounds[:, 1] = rows.real - 1
    bounds[: rows.real, 1] = count - 1
    return graph_input("inp.tile_bounds", (count, 2), torch.int32, lambda _: bounds)


def _tower(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"vision_model.{name}")


def _gate(name: str) -> Parameter:
    return Parameter((1,), _tower(name), convert=lambda gate: gate.float().tanh())


def read(top: Settings, image: Settings) -> MllamaVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    vision.choice("num_channels", (3,), 3)
    vit = VitParams(
        layers=vision.count("num_hidden_layers", 32, maximum=MAX_LAYERS),
        width=vision.count("hidden_size", 1280, maximum=MAX_WIDTH),
        ffn=vision.count("intermediate_size", 5120, maximum=MAX_WIDTH),
        heads=vision.count("attention_heads", 16, maximum=MAX_HEADS),
        eps=vision.number("norm_eps", 1e-5),
        gelu=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu")],
    )
    if vit.width % vit.heads:
        raise ModelError(
            f"{vision.where}: {vit.heads} heads of width {vit.width}; expected heads that divide "
            "the width"
        )
    side, patch = vision.count("image_size", 448), vision.count("patch_size", 14)
    if side % patch:
        raise ModelError(
            f"{vision.where}: image_size {side} is no whole number of patches of {patch} pixels"
        )
    resolution = read_tiled_canvas(
        image, side, vision.count("max_num_tiles", 4, maximum=MAX_IN_A_ROW)
    )
    grids = [list(grid) for grid in resolution.grids]
    if vision.get("supported_aspect_ratios", grids) != grids:
        raise ModelError(
            f"{vision.where}: supported_aspect_ratios are not all of up to {resolution.tiles} "
            "tiles, by which pictures are cut"
        )
    features = vision.get("intermediate_layers_indices", [3, 7, 15, 23, 30])
    if not isinstance(features, (list, tuple)) or not all(
        type(i) is int and 0 <= i < vit.layers for i in features
    ):
        raise ModelError(
            f"{vision.where}: intermediate_layers_indices is {features!r:.40}, expected layers "
            f"below {vit.layers}"
        )
    width = vit.width * (len(features) + 1)
    vision.choice("vision_output_dim", (width,), width)
    return MllamaVision(
        vit=vit,
        global_layers=vision.count("num_global_layers", 8, maximum=MAX_LAYERS),
        features=tuple(features),
        patch=patch,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        resolution=resolution,
    )
