"""GLM-4.1V's vision tower: pictures of any size, RMS norms, SwiGLU, patches turned by their row and
column and told apart by a table of positions scaled to their grid; a convolution and a gated layer
make tokens of them (arXiv:2507.01006).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.clip.blocks import (
    GgufTower,
    frames_kernel,
    gguf_vit,
    read_grid_rotary,
    rotary_attention,
    tower_keys,
    two_frames,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import (
    DynamicResolution,
    enlarged,
    gguf_dynamic,
    read_dynamic,
)
from mtmd.clip.video.family import ClipShape, group_times
from mtmd.clip.video.pairs import AllFrames, PairedFrames, check_limits, read_limits, read_pairs
from mtmd.clip.video.rules import AtRate, ByLength, EveryInterval, FrameRule, Pick
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MERGER_EPS = 1e-5  # of the only layer norm; the settings do not say
FRAMES = 2  # a picture counts as that many equal ones against the limits of pixels
SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}  # transformers' defaults
IMAGE_TOKEN = "<|image|>"
OCR = "glm_ocr_vision"
# Pixels of all frames; transformers' defaults
CLIP_PIXELS, GLMGA_PIXELS = ((112 * 112, 28 * 28 * 2 * count) for count in (30000, 55790))
# Frames a second of GLM-4.6V, by the most seconds of a clip, and how many at most
RATES, MAX_FRAMES = ((30, 6.0), (300, 2.0), (2400, 1.0)), 640
GGUF_TOKENS = 8, 6144  # the limits of the published checkpoint; GGUF files do not say


@dataclass(frozen=True)
class Glm4Vision:
    """`merger` is the width of the gated layer at the end. `ocr`: GLM-OCR's tower, whose queries
    and keys are normed, with biases throughout, and without table of positions and first norm.
    """

    layers: int
    width: int
    ffn: int
    merger: int
    heads: int
    text_width: int
    eps: float
    bias: bool
    ocr: bool
    side: int  # of the table of positions, a square
    rotary: Rotary
    resolution: DynamicResolution
    video: PairedFrames | None

    marker = image_token = IMAGE_TOKEN
    around = ("<|begin_of_image|>", "<|end_of_image|>")
    bidirectional = False
    separator = None
    unused = ()

    @property
    def tasks(self) -> Mapping[str, str]:
        """Return those of GLM-OCR."""
        names = ("text", "table", "formula") if self.ocr else ()
        return {name: f"{name.title()} Recognition:" for name in names}

    def parameters(self) -> Mapping[str, Parameter]:
        width, text, merge = self.width, self.text_width, self.resolution.merge
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.patch_embd.bias": ("patch_embed.proj.bias", (width,)),
            "v.post_ln.weight": ("post_layernorm.weight", (width,)),
            "mm.patch_merger.bias": ("downsample.bias", (text,)),
            "mm.model.fc.weight": ("merger.proj.weight", (text, text)),
            "mm.post_norm.weight": ("merger.post_projection_norm.weight", (text,)),
            "mm.post_norm.bias": ("merger.post_projection_norm.bias", (text,)),
            "mm.gate.weight": ("merger.gate_proj.weight", (self.merger, text)),
            "mm.up.weight": ("merger.up_proj.weight", (self.merger, text)),
            "mm.down.weight": ("merger.down_proj.weight", (text, self.merger)),
        }
        if not self.ocr:
            table = (self.side**2, width)
            shapes |= {
                "v.norm_embd.weight": ("post_conv_layernorm.weight", (width,)),
                "v.position_embd.weight": ("embeddings.position_embedding.weight", table),
            }
        block: dict[str, tuple[str, tuple[int, ...]]] = {
            "ln1": ("norm1", (width,)),
            "ln2": ("norm2", (width,)),
            "attn_qkv": ("attn.qkv", (3 * width, width)),
            "attn_out": ("attn.proj", (width, width)),
            "ffn_gate": ("mlp.gate_proj", (self.ffn, width)),
            "ffn_up": ("mlp.up_proj", (self.ffn, width)),
            "ffn_down": ("mlp.down_proj", (width, self.ffn)),
        }
        if self.ocr:
            head = (width // self.heads,)
            block |= {"attn_q_norm": ("attn.q_norm", head), "attn_k_norm": ("attn.k_norm", head)}
        biased = (*["attn_qkv"] * self.bias, *["attn_out"] * (self.bias and self.ocr))
        biased += ("ffn_gate", "ffn_up", "ffn_down") * self.ocr
        for layer in range(self.layers):
            for part, (name, shape) in block.items():
                at, theirs = f"v.blk.{layer}.{part}", f"blocks.{layer}.{name}"
                shapes[f"{at}.weight"] = (f"{theirs}.weight", shape)
                if part in biased:
                    shapes[f"{at}.bias"] = (f"{theirs}.bias", shape[:1])
        parameters = {
            name: Parameter(shape, _names(theirs)) for name, (theirs, shape) in shapes.items()
        }
        kernels, merger = (text, width, merge, merge), "mm.patch_merger.weight"
        parameters[merger] = Parameter(
            shape=(text, width * merge**2),
            sources=_names("downsample.weight"),
            stored=kernels,
            convert=_flat,
            gguf=(Stored((merger,), kernels, _flat),),
        )
        return parameters | two_frames(
            width, self.resolution.patch, _names("patch_embed.proj.weight")
        )

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
        w = Weights(weights, tiles.dtype)
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = ops.patch_embed(
            tiles, frames_kernel(tiles, w), w.tensor("v.patch_embd.bias"), name="v.patch_embd"
        )
        if not self.ocr:
            rows, name = w.tensor("v.position_embd.weight"), "v.position_embd.scaled"
            table = grids.table(rows, self.side, name, mode="bicubic")
            x = ops.add(w.rms_norm(x, "v.norm_embd", self.eps), table, name="v.position_embd")
        for layer in w.layers(self.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.rms_norm(x, f"{at}.ln1", self.eps),
                at,
                w,
                attention,
                heads=self.heads,
                angles=angles,
                bounds=grids.segments,
                fused=True,
                bias=self.bias,
                out_bias=self.bias and self.ocr,
                norm_eps=self.eps if self.ocr else None,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            x = ops.add(
                _gated(w.rms_norm(x, f"{at}.ln2", self.eps), f"{at}.ffn_", w, self.ocr),
                x,
                name=f"{at}.ffn_residual",
            )
        x = w.rms_norm(x, "v.post_ln", self.eps)
        x = ops.unshuffle(
            x, grid=grids.shape, factor=self.resolution.merge, channels_first=True, name="mm.merged"
        )
        x = w.layer_norm(
            w.linear(w.linear(x, "mm.patch_merger", bias=True), "mm.model.fc"),
            "mm.post_norm",
            MERGER_EPS,
        )
        return _gated(ops.gelu(x, approximate="none", name="mm.gelu"), "mm.", w)


def _gated(x: Node, at: str, w: Weights, bias: bool = False) -> Node:
    """down(silu(gate(x)) * up(x))"""
    gate, up = (w.linear(x, f"{at}{part}", bias=bias) for part in ("gate", "up"))
    return w.linear(ops.silu_mul(gate, up, name=f"{at}gated"), f"{at}down", bias=bias)


def _flat(convolution: torch.Tensor) -> torch.Tensor:
    """The kernels of a convolution whose windows do not overlap, as the rows of a matrix."""
    return convolution.flatten(1)


def to_gguf(family: Glm4Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    patch, merge = family.resolution.patch, family.resolution.merge
    keys = tower_keys(
        family,
        image_size=family.side * patch,
        patch=patch,
        text_width=family.text_width,
        ffn=family.ffn if family.ocr else family.merger,
    )
    return GgufTower("glm4v", keys | {"use_silu": True, "vision.spatial_merge_size": merge})


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say."""
    plain, merge = gguf_vit(keys), keys.count("vision.spatial_merge_size", 2)
    vision = {
        **plain,
        "depth": plain["num_hidden_layers"],
        "num_heads": plain["num_attention_heads"],
        "spatial_merge_size": merge,
        "out_hidden_size": keys.get("vision.projection_dim", None),
        "rms_norm_eps": plain["layer_norm_eps"],
        "attention_bias": "v.blk.0.attn_qkv.bias" in names,
        "model_type": OCR if "v.blk.0.attn_q_norm.weight" in names else "glm4v_vision",
    }
    image = Settings(gguf_dynamic(keys, merge, GGUF_TOKENS), keys.where)
    edges = {
        "shortest_edge": FRAMES * image.count("min_pixels"),
        "longest_edge": FRAMES * image.count("max_pixels"),
    }
    kind = "glm_ocr" if vision["model_type"] == OCR else "glm4v"
    return {"model_type": kind, "vision_config": vision}, {**image.values, "size": edges}


def read(top: Settings, image: Settings) -> Glm4Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    for key, value in (("hidden_act", "silu"), ("in_channels", 3), ("temporal_patch_size", FRAMES)):
        c.choice(key, (value,), value)
    width, heads, patch = (
        c.count("hidden_size", 1536, maximum=MAX_WIDTH),
        c.count("num_heads", 12, maximum=MAX_HEADS),
        c.count("patch_size", 14),
    )
    limits = {
        "size": image.get("size", SIZE),
        "min_pixels": None,
        "max_pixels": None,
    }  # this processor knows `size` alone
    merge = c.count("spatial_merge_size", 2)
    # Whole tokens alone: transformers' two processors of glmga take others differently.
    image.choice("patch_expand_factor", (1,), 1)
    resolution = read_dynamic(
        Settings({**image.values, **limits}, image.where),
        patch,
        merge,
        frames=FRAMES,
        enlarge=enlarged,
    )
    ocr, text = c.get("model_type", "") == OCR, c.count("out_hidden_size", 4096, maximum=MAX_WIDTH)
    ffn = c.count("intermediate_size", 4096 if ocr else 13696, maximum=MAX_WIDTH)
    return Glm4Vision(
        layers=c.count("depth", 24, maximum=MAX_LAYERS),
        width=width,
        ffn=ffn if ocr else text,
        merger=3 * text if ocr else ffn,
        heads=heads,
        text_width=text,
        eps=c.number("rms_norm_eps", 1e-5),
        bias=c.flag("attention_bias", ocr),
        ocr=ocr,
        side=c.count("image_size", 336) // patch,
        rotary=read_grid_rotary(c, width, heads),
        resolution=resolution,
        video=None
        if ocr
        else _read_video(image.part("video_processor"), patch, merge, top.get("model_type", None)),
    )


def _read_video(video: Settings, patch: int, merge: int, kind: object) -> PairedFrames:
    """Read it by the model's `kind`. That of GLM-4.6V is also one whose settings say so: a mixture
    of experts has the model_type of GLM-4.5V.
    """
    glmga = kind == "glmga"
    later = kind == "glm46v" or video.get("video_processor_type", "") == "Glm46VVideoProcessor"
    factor, normalize, resample = read_pairs(video, patch=patch, merge=merge)
    minimum, maximum = read_limits(video, GLMGA_PIXELS if glmga else CLIP_PIXELS)
    check_limits(video, minimum, maximum, factor)
    rate = video.number("fps", 2.0)
    pick: Pick
    if glmga:
        video.choice("patch_expand_factor", (1,), 1)
        pick = AtRate(rate, video.count("max_frames", MAX_FRAMES))
    elif later:
        pick = ByLength(RATES, MAX_FRAMES)
    else:
        pick = EveryInterval(rate, video.number("max_duration", 300.0))
    return PairedFrames(
        factor=factor,
        limits=AllFrames(minimum, maximum, even=True),
        normalize=normalize,
        resample=resample,
        rule=FrameRule(pick),
        markers=("<|video|>",),
        token=IMAGE_TOKEN,
        write=_write_tenths if later or glmga else _write,
    )


def _write(video: Video, shape: ClipShape) -> str:
    """Each group before the second in which it begins."""
    tokens = f"<|begin_of_image|>{IMAGE_TOKEN * shape.tokens}<|end_of_image|>"
    return "".join(f"{tokens}{int(first)}" for first, _ in group_times(video, shape))


def _write_tenths(video: Video, shape: ClipShape) -> str:
    """Each group before the time at which it begins."""
    tokens = f"<|begin_of_image|>{IMAGE_TOKEN * shape.tokens}<|end_of_image|>"
    return "".join(f"{tokens}{first:.1f} seconds" for first, _ in group_times(video, shape))


def _names(name: str) -> tuple[str, ...]:
    return f"model.visual.{name}", f"visual.{name}", f"vision_tower.{name}"
