"""Qwen3-VL's and Qwen3.5's vision tower: pictures of any size, a table of positions scaled to their
grid, patches turned by their row and column, 2 x 2 of them merged into a token, and in Qwen3-VL
features of several layers side by side (arXiv:2511.21631). Qwen3-Omni's eyes (arXiv:2509.17765)
are the same, with other names and videos that are one run of tokens; Cohere Compass's, with other
tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    ACTIVATIONS,
    GgufTower,
    biased_parameters,
    frames_kernel,
    gguf_vit,
    mlp,
    read_grid_rotary,
    rotary_attention,
    tower_keys,
    two_frames,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.marks import Marks, marks_of_template, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, gguf_dynamic, read_dynamic
from mtmd.clip.video.pairs import PairedFrames, Seconds, read_each_frame
from mtmd.clip.video.sound import ByTime
from mtmd.clip.video.timed_pairs import CLIP_PIXELS, read_timed_pairs
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-6  # of every norm; the settings do not say
GGUF_TOKENS = 64, 16384  # the limits of every published checkpoint; GGUF files do not say
OMNI = "qwen3_omni_moe_thinker"
COMPASS = "cohere_compass"
# Whatever the tokenizer's settings say
COMPASS_MARKS = Marks("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", ("<|VISION_START|>", "<|VISION_END|>"))
OTHER_PARTS = r"talker\..*", r"code2wav\..*"  # of a voice
# What Qwen3-Omni's mergers call their parts
MERGER = {"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"}


@dataclass(frozen=True)
class Qwen3Vision:
    layers: int
    width: int
    ffn: int
    heads: int
    text_width: int
    gelu: str
    side: int  # of the table of positions, a square
    stacked: tuple[
        int, ...
    ]  # layers whose features go to the decoder too, in the order of their mergers in a checkpoint
    rotary: Rotary
    resolution: DynamicResolution
    video: PairedFrames
    marks: Marks
    hears: bool  # whether it is a part of Qwen3-Omni, with ears and a voice that are not read

    bidirectional = False
    separator = None

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
        width, ffn, merged, text = (
            self.width,
            self.ffn,
            self.width * self.resolution.merge**2,
            self.text_width,
        )
        parameters = two_frames(width, self.resolution.patch, _names("patch_embed.proj.weight"))
        parameters["v.patch_embd.bias"] = Parameter((width,), _names("patch_embed.proj.bias"))
        parameters["v.position_embd.weight"] = Parameter(
            (self.side**2, width), _names("pos_embed.weight")
        )
        one, square = (width,), (merged, merged)
        block = {
            "ln1": ("norm1", one),
            "ln2": ("norm2", one),
            "attn_qkv": ("attn.qkv", (3 * width, width)),
            "attn_out": ("attn.proj", (width, width)),
            "ffn_up": ("mlp.linear_fc1", (ffn, width)),
            "ffn_down": ("mlp.linear_fc2", (width, ffn)),
        }
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.post_ln": ("merger.norm", one),
            "mm.0": ("merger.linear_fc1", square),
            "mm.2": ("merger.linear_fc2", (text, merged)),
        }
        for layer in range(self.layers):
            tensors |= {
                f"v.blk.{layer}.{part}": (f"blocks.{layer}.{name}", shape)
                for part, (name, shape) in block.items()
            }
        for index, layer in enumerate(self.stacked):
            merger = {
                "norm": ("norm", (merged,)),
                "fc1": ("linear_fc1", square),
                "fc2": ("linear_fc2", (text, merged)),
            }
            tensors |= {
                f"v.deepstack.{layer}.{part}": (f"deepstack_merger_list.{index}.{name}", shape)
                for part, (name, shape) in merger.items()
            }
        return parameters | biased_parameters(tensors, _names)

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """-> [B, T, D (1 + stacked)]: embeddings, then what each of the decoder's first layers
        adds
        """
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w, merge, grid = Weights(weights, tiles.dtype), self.resolution.merge, grids.shape
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        features = []
        x = ops.patch_embed(
            tiles, frames_kernel(tiles, w), w.tensor("v.patch_embd.bias"), name="v.patch_embd"
        )
        table = grids.table(
            w.tensor("v.position_embd.weight"),
            self.side,
            "v.position_embd.scaled",
            mode="bilinear",
            align_corners=True,
        )
        x = ops.add(x, table, name="v.position_embd")
        for layer in w.layers(self.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", EPS),
                at,
                w,
                attention,
                heads=self.heads,
                angles=angles,
                bounds=grids.segments,
                fused=True,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            x = ops.add(
                mlp(w.layer_norm(x, f"{at}.ln2", EPS), at, self.gelu, w),
                x,
                name=f"{at}.ffn_residual",
            )
            if layer in self.stacked:
                at = f"v.deepstack.{layer}"
                y = w.layer_norm(
                    ops.unshuffle(x, grid=grid, factor=merge, name=f"{at}.merged"),
                    f"{at}.norm",
                    EPS,
                )
                features.append(_merger(y, f"{at}.fc1", f"{at}.fc2", w))
        x = _merger(
            ops.unshuffle(
                w.layer_norm(x, "v.post_ln", EPS), grid=grid, factor=merge, name="mm.merged"
            ),
            "mm.0",
            "mm.2",
            w,
        )
        for index, feature in enumerate(features):
            x = ops.concat(x, feature, axis=2, name=f"mm.features.{index}")
        return x


def _merger(x: Node, first: str, second: str, w: Weights) -> Node:
    """Patches side by side to a token          [B, T, 4 C] -> [B, T, D]"""
    return w.linear(
        ops.gelu(w.linear(x, first, bias=True), approximate="none", name=f"{first}.gelu"),
        second,
        bias=True,
    )


def to_gguf(family: Qwen3Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    patch, merge = family.resolution.patch, family.resolution.merge
    keys = tower_keys(
        family, image_size=family.side * patch, patch=patch, text_width=family.text_width
    )
    return GgufTower(
        "qwen3vl_merger",
        keys
        | {
            "use_gelu": True,
            "vision.spatial_merge_size": merge,
            "vision.is_deepstack_layers": [i in family.stacked for i in range(family.layers)],
        },
    )


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
    plain, merge, patch = (
        gguf_vit(keys),
        keys.count("vision.spatial_merge_size", 2),
        keys.count("vision.patch_size", 16),
    )
    side = keys.count("vision.image_size") // patch
    on: object = keys.get("vision.is_deepstack_layers", [])
    vision = {
        **plain,
        "depth": plain["num_hidden_layers"],
        "num_heads": plain["num_attention_heads"],
        "spatial_merge_size": merge,
        "num_position_embeddings": side**2,
        "out_hidden_size": keys.count("vision.projection_dim"),
        "deepstack_visual_indexes": [i for i, stacked in enumerate(on) if stacked]
        if isinstance(on, (list, tuple))
        else on,
    }
    image = gguf_dynamic(keys, merge, GGUF_TOKENS)
    image["tokens"] = marks_of_template(keys.get("chat_template", ""))
    omni = {"model_type": OMNI, "position_id_per_seconds": 13}  # as published
    hears = keys.get("audio.projector_type", "") == "qwen3a"
    return {"vision_config": vision, **(omni if hears else {})}, image


def read(top: Settings, image: Settings) -> Qwen3Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    c.choice("in_channels", (3,), 3)
    c.choice("temporal_patch_size", (2,), 2)
    kind = top.get("model_type", "")
    hears = kind == OMNI
    marks = COMPASS_MARKS if kind == COMPASS else read_marks(image, Marks())
    layers, positions = (
        c.count("depth", 27, maximum=MAX_LAYERS),
        c.count("num_position_embeddings", 2304),
    )
    if isqrt(positions) ** 2 != positions:
        raise ModelError(
            f"{c.where}: num_position_embeddings is {positions}, expected those of a square"
        )
    stacked = c.get(
        "deepstack_visual_indexes",
        [8, 16, 24] if "_vl" in str(kind) or kind in (OMNI, COMPASS) else [],
    )
    if (
        not isinstance(stacked, list)
        or not all(type(i) is int and 0 <= i < layers for i in stacked)
        or stacked != sorted(set(stacked))
    ):
        raise ModelError(
            f"{c.where}: deepstack_visual_indexes is {stacked!r:.60}, expected layers below "
            f"{layers}, in order"
        )
    width, heads = (
        c.count("hidden_size", 1152, maximum=MAX_WIDTH),
        c.count("num_heads", 16, maximum=MAX_HEADS),
    )
    ffn, text_width = (
        c.count("intermediate_size", 4304, maximum=MAX_WIDTH),
        c.count("out_hidden_size", 3584, maximum=MAX_WIDTH),
    )
    gelu = ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")]
    patch, merge = c.count("patch_size", 16), c.count("spatial_merge_size", 2)
    return Qwen3Vision(
        layers=layers,
        width=width,
        ffn=ffn,
        heads=heads,
        text_width=text_width,
        gelu=gelu,
        side=isqrt(positions),
        stacked=tuple(stacked),
        rotary=read_grid_rotary(c, width, heads),
        resolution=read_dynamic(image, patch, merge),
        video=read_each_frame(
            image.part("video_processor"),
            patch=patch,
            merge=merge,
            token=marks.video,
            clock=Seconds(top.number("position_id_per_seconds", 25)),
            limits=CLIP_PIXELS,  # a frame's; the settings' are those of pictures
            sound=ByTime(),
        )
        if hears
        else read_timed_pairs(image.part("video_processor"), patch=patch, merge=merge, marks=marks),
        marks=marks,
        hears=hears,
    )


def _names(name: str) -> tuple[str, ...]:
    part, _, rest = name.partition(".")
    theirs = name
    if part in ("merger", "deepstack_merger_list"):
        stem, _, kind = rest.rpartition(".")
        index, _, last = stem.rpartition(".")
        at = f"merger_list.{index}" if index else "merger"
        theirs = f"{at}.{MERGER[last]}.{kind}"
    names = (
        *(f"{tower}.{name}" for tower in ("model.visual", "visual", "vision_tower")),
        *(f"{prefix}visual.{theirs}" for prefix in ("thinker.", "")),
    )
    return tuple(dict.fromkeys(names))
