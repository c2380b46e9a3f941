"""Qwen2.5-VL's vision tower: Qwen2-VL's with RMS norms, gated SiLU, and windows in which most
layers attend (arXiv:2502.13923). Qwen2.5-Omni's eyes (arXiv:2503.20215) are the same, those of
EXAONE 4.5 but for keys and values that heads share. HyperCLOVA X SEED Think's (arXiv:2601.03286)
have one more layer, to the decoder's width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    GGUF_IMAGE_SIZE,
    GgufTower,
    biased_parameters,
    frames_kernel,
    gguf_vit,
    qkv_parameters,
    read_grid_rotary,
    rotary_attention,
    tower_keys,
    two_frames,
)
from mtmd.clip.grids import Cells, Grids, OneGrid, Part, nothing_seen
from mtmd.clip.marks import CAPITALS, Marks, marks_of_template, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, gguf_dynamic, read_dynamic
from mtmd.clip.video.pairs import EACH_FRAME, PairedFrames, Seconds, read_each_frame
from mtmd.clip.video.sound import Chunks
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-6  # of every norm; the settings do not say
OMNI = "qwen2_5_omni_thinker"
PLAIN = "exaone4_5"
CLOVA = ("hyperclovax_vision_v2", "vlm")  # transformers' name, and the authors'
CLOVA_TOKENS = Marks("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", ("<|image_start|>", "<|image_end|>"))
# A voice, and a table that even the authors' code leaves unused
OTHER_PARTS = (
    r"(thinker\.)?audio_tower\.audio_bos_eos_token\.weight",
    r"talker\..*",
    r"token2wav\..*",
)


@dataclass(frozen=True)
class Qwen25Vision:
    """Layers outside `full` see windows of `window` x `window` tokens."""

    layers: int
    width: int
    ffn: int
    heads: int
    groups: int  # of heads that share keys and values, which then have one matrix with the queries
    text_width: int
    full: frozenset[int]
    window: int
    rotary: Rotary
    resolution: DynamicResolution
    video: PairedFrames | None
    marks: Marks
    hears: bool  # whether it is a part of Qwen2.5-Omni, with ears, and a voice that is not read
    plain: bool  # whether it is EXAONE 4.5's, whose tokens have plain positions

    bidirectional = False
    separator = None
    box_scale = "processed"

    @property
    def unused(self) -> tuple[str, ...]:
        return OTHER_PARTS if self.hears else ()

    @property
    def marker(self) -> str:
        return self.marks.image

    @property
    def image_token(self) -> str:
        return self.marks.image

    @property
    def around(self) -> tuple[str, str]:
        return self.marks.around

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, merged = self.width, self.ffn, self.width * self.resolution.merge**2
        parameters = two_frames(width, self.resolution.patch, _names("patch_embed.proj.weight"))
        norms = {"v.post_ln": "merger.ln_q"}
        matrices = {
            "mm.0": ("merger.mlp.0", (merged, merged)),
            "mm.2": ("merger.mlp.2", (self.text_width, merged)),
        }
        for layer in range(self.layers):
            at, block = f"v.blk.{layer}", f"blocks.{layer}"
            if self.plain:
                rows = width + 2 * self.groups * (width // self.heads)
                matrices[f"{at}.attn_qkv"] = (f"{block}.attn.qkv", (rows, width))
            else:
                parameters |= qkv_parameters(at, width, f"{block}.attn.qkv", _names)
            norms |= {f"{at}.ln1": f"{block}.norm1", f"{at}.ln2": f"{block}.norm2"}
            matrices |= {
                f"{at}.attn_out": (f"{block}.attn.proj", (width, width)),
                **{
                    f"{at}.ffn_{part}": (f"{block}.mlp.{part}_proj", (ffn, width))
                    for part in ("gate", "up")
                },
                f"{at}.ffn_down": (f"{block}.mlp.down_proj", (width, ffn)),
            }
        parameters |= {
            f"{name}.weight": Parameter((width,), _names(f"{source}.weight"))
            for name, source in norms.items()
        }
        return parameters | biased_parameters(matrices, _names)

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        """Patches go through the layers window by window, and in each token by token, so that what
        belongs together lies together.
        """
        w, merge, patches = Weights(weights, tiles.dtype), self.resolution.merge, grids.patches
        tokens = patches // merge**2

        def lie(parts: Sequence[Part]) -> Layout:
            return layouts(parts, patches, merge, self.window)

        order = grids.input("inp.order", (patches,), torch.int64, lambda p: lie(p).order)
        windows = grids.input(
            "inp.windows",
            (patches, 2),
            torch.int32,
            lambda p: lie(p).bounds,
            keys=(self.window * merge) ** 2,
        )
        back = grids.input("inp.order_back", (tokens,), torch.int64, lambda p: lie(p).back)
        positions = grids.input(
            "inp.positions", (2, patches), torch.int64, lambda p: lie(p).positions
        )
        angles = ops.rope_table(positions, rotary=self.rotary, name="v.angles")
        x = ops.take_rows(
            ops.patch_embed(tiles, frames_kernel(tiles, w), name="v.patch_embd"),
            order,
            name="v.ordered",
        )
        for layer in w.layers(self.layers):
            bounds = grids.segments if layer in self.full else windows
            x = self._block(x, layer, w, attention, angles=angles, bounds=bounds)
        x = ops.reshape(
            w.rms_norm(x, "v.post_ln", EPS),
            shape=(x.shape[0], tokens, self.width * merge**2),
            name="mm.merged",
        )
        x = w.linear(
            ops.gelu(w.linear(x, "mm.0", bias=True), approximate="none", name="mm.gelu"),
            "mm.2",
            bias=True,
        )
        return ops.take_rows(x, back, name="mm.ordered")

    def _block(
        self,
        x: Node,
        layer: int,
        w: Weights,
        attention: AttentionForm,
        *,
        angles: Node,
        bounds: Node | None,
    ) -> Node:
        at = f"v.blk.{layer}"
        y = w.rms_norm(x, f"{at}.ln1", EPS)
        y = rotary_attention(
            y,
            at,
            w,
            attention,
            heads=self.heads,
            groups=self.groups,
            angles=angles,
            bounds=bounds,
            fused=self.plain,
        )
        x = ops.add(y, x, name=f"{at}.attn_residual")
        y = w.rms_norm(x, f"{at}.ln2", EPS)
        y = ops.silu_mul(
            w.linear(y, f"{at}.ffn_gate", bias=True),
            w.linear(y, f"{at}.ffn_up", bias=True),
            name=f"{at}.ffn_gated",
        )
        return ops.add(w.linear(y, f"{at}.ffn_down", bias=True), x, name=f"{at}.ffn_residual")


@dataclass(frozen=True)
class ClovaVision(Qwen25Vision):
    """`text_width` is what the tower's own last layer gives, `decoder_width` what is read. Of a
    video its frames are shown as pictures: the published template leaves how long it is to the
    reference's processor.
    """

    decoder_width: int

    box_scale = ""  # nobody says

    def parameters(self) -> Mapping[str, Parameter]:
        shape = (self.decoder_width, self.text_width)
        last = biased_parameters({"mm.4": ("projector", shape)}, _last_names)
        return {**super().parameters(), **last}

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        x = super().graph_on(grids, tiles, weights, attention)
        return Weights(weights, tiles.dtype).linear(x, "mm.4", bias=True)


@dataclass(frozen=True, eq=False)
class Layout:
    """Order of the patches of a grid: the patch at each place, `order` [P]; its row and column,
    `positions` [2, P]; the first and last place of its window, `bounds` [P, 2]; and the place of
    each token in reading order, `back` [P / merge^2].
    """

    order: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor
    back: torch.Tensor


def layouts(parts: Sequence[Part], patches: int, merge: int, window: int) -> Layout:
    """Return the layout of pictures one after another, each window by window; what follows them
    stays in place.
    """
    order, bounds = torch.arange(patches), nothing_seen(patches)
    positions = torch.zeros(2, patches, dtype=torch.int64)
    back = torch.arange(patches // merge**2)
    for part in parts:
        own, token = layout(part.rows, part.columns, merge, window), part.first // merge**2
        order[part.locations] = part.first + part.behind[own.order]
        bounds[part.locations] = part.first + own.bounds
        positions[:, part.locations] = own.positions
        back[token : token + len(own.back)] = token + own.back
    return Layout(order, positions, bounds, back)


@lru_cache(maxsize=64)
def layout(rows: int, columns: int, merge: int, window: int) -> Layout:
    """Windows of `window` x `window` tokens of merge x merge patches in reading order, and the same
    within each of them.
    """
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    at = row // (merge * window) * columns + column // (merge * window)
    token = row // merge * (columns // merge) + column // merge
    order = np.lexsort((column, row, token, at))
    sorted_at = at[order]
    bounds = np.stack(
        (
            np.searchsorted(sorted_at, sorted_at, "left"),
            np.searchsorted(sorted_at, sorted_at, "right") - 1,
        ),
        1,
    )
    arrays = (
        order,
        np.stack((row[order], column[order])),
        bounds.astype(np.int32),
        np.argsort(token[order][:: merge**2]),
    )
    return Layout(*map(torch.from_numpy, arrays))


def to_gguf(family: Qwen25Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    if isinstance(family, ClovaVision):
        return GgufTower("", {})
    keys = tower_keys(
        family,
        image_size=GGUF_IMAGE_SIZE,
        patch=family.resolution.patch,
        text_width=family.text_width,
    )
    if family.plain:
        resolution = family.resolution
        keys |= {
            "vision.attention.head_count_kv": family.groups,
            "vision.image_min_pixels": resolution.minimum,
            "vision.image_max_pixels": resolution.maximum,
        }
    return GgufTower(
        PLAIN if family.plain else "qwen2.5o" if family.hears else "qwen2.5vl_merger",
        keys
        | {
            "use_silu": True,
            "vision.n_wa_pattern": min(family.full, default=family.layers) + 1,
            "vision.window_size": family.window * family.resolution.factor,
        },
    )


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
    plain, layers, every = (
        gguf_vit(keys),
        keys.count("vision.block_count", maximum=MAX_LAYERS),
        keys.count("vision.n_wa_pattern"),
    )
    vision = {
        "depth": layers,
        "num_heads": plain["num_attention_heads"],
        "num_key_value_heads": keys.get("vision.attention.head_count_kv", None),
        "out_hidden_size": keys.get("vision.projection_dim", None),
        "fullatt_block_indexes": list(range(every - 1, layers, every)),
        "window_size": keys.get("vision.window_size", None),
        "tokens_per_second": 2,  # of all that are published
        **{
            key: plain[key]
            for key in ("hidden_size", "intermediate_size", "hidden_act", "patch_size")
        },
    }
    image = gguf_dynamic(keys) | {"tokens": marks_of_template(keys.get("chat_template", ""))}
    projector = keys.get("projector_type", "")
    kind = {PLAIN: PLAIN, "qwen2.5o": OMNI}.get(projector, "qwen2_5_vl")
    return {"model_type": kind, "vision_config": vision}, image


def read(top: Settings, image: Settings) -> Qwen25Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    kind, c = top.get("model_type", ""), top.part("vision_config")
    hears, plain, clova = kind == OMNI, kind == PLAIN, kind in CLOVA
    usual = Marks(around=("<vision>", "</vision>")) if plain else Marks()
    marks = read_marks(image, CAPITALS if hears else CLOVA_TOKENS if clova else usual)
    for key, value in (("hidden_act", "silu"), ("in_channels", 3), ("temporal_patch_size", 2)):
        c.choice(key, (value,), value)
    width, heads = (
        c.count("hidden_size", 3584, maximum=MAX_WIDTH),
        c.count("num_heads", 16, maximum=MAX_HEADS),
    )
    patch, merge = c.count("patch_size", 14), c.count("spatial_merge_size", 2)
    groups = c.count("num_key_value_heads", 8, maximum=MAX_HEADS) if plain else heads
    if heads % groups:
        raise ModelError(
            f"{c.where}: {heads} heads in {groups} groups; expected groups that divide the heads"
        )
    resolution = read_dynamic(image, patch, merge, on_grid=not (plain or clova))
    if (window := c.count("window_size", 112)) < resolution.factor:
        raise ModelError(
            f"{c.where}: window_size is {window}, expected at least the {resolution.factor} pixels "
            "of a token"
        )
    full = c.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full, list) or any(type(i) is not int for i in full):
        raise ModelError(
            f"{c.where}: fullatt_block_indexes is {full!r:.40}, expected a list of layers"
        )
    tower = Qwen25Vision(
        layers=c.count("depth", 32, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 3420, maximum=MAX_WIDTH),
        heads=heads,
        groups=groups,
        text_width=c.count("out_hidden_size", 3584, maximum=MAX_WIDTH),
        full=frozenset(full),
        window=window // resolution.factor,
        rotary=read_grid_rotary(c, width, heads),
        resolution=resolution,
        video=read_each_frame(
            image.part("video_processor"),
            patch=patch,
            merge=merge,
            token=marks.video,
            clock=None
            if plain
            else Seconds(
                top.number("position_id_per_seconds", 25)
                if hears
                else c.number("tokens_per_second", 4)
            ),
            # Omni's processor has limits of its own, and none of the settings' for frames
            limits=EACH_FRAME if hears else None,
            sound=_sound(top) if hears else None,
        ),
        marks=marks,
        hears=hears,
        plain=plain,
    )
    return _read_clova(top, tower) if clova else tower


def _read_clova(top: Settings, tower: Qwen25Vision) -> ClovaVision:
    vision, text = top.part("vision_config"), top.part("text_config")
    vision.choice("model_type", ("qwen2_5_vl", "qwen2_5_vl_vision"), "qwen2_5_vl")
    text.choice("model_type", ("hyperclovax",), "hyperclovax")
    if top.get("audio_config", None) is not None:
        raise ModelError(f"{top.where}: audio_config is given; expected a model without ears")
    same = {field.name: getattr(tower, field.name) for field in fields(tower)}
    width = text.count("hidden_size", 4096, maximum=MAX_WIDTH)
    return ClovaVision(**same | {"video": None}, decoder_width=width)


def _sound(top: Settings) -> Chunks:
    seconds, each = top.number("seconds_per_chunk", 2), top.number("position_id_per_seconds", 25)
    if not 1 <= seconds * each < MAX_WIDTH:
        raise ModelError(
            f"{top.where}: seconds_per_chunk is {seconds:g}, expected one position at least, of "
            f"which there are {each:g} a second"
        )
    return Chunks(int(seconds * each))


def _names(name: str) -> tuple[str, ...]:
    towers = ("visual", "model.visual", "thinker.visual", "vision_tower", "model.vision_model")
    return tuple(f"{tower}.{name}" for tower in towers)


def _last_names(name: str) -> tuple[str, ...]:
    return tuple(f"model.{prefix}{name}" for prefix in ("", "vision_"))
