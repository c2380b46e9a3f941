"""InternVL 2.5, 3 and 3.5 (arXiv:2412.05271, 2504.10479, 2508.18265) and Qianfan-OCR: InternViT
over tiles of a picture and the whole of it, pixel unshuffle, two layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip import blocks
from mtmd.clip.blocks import ACTIVATIONS, GgufTower, VitParams, checkpoint_names
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, fused, gguf_image, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.resolution.closest_grid import StretchedTiling, read_stretched_tiling
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.rules import FrameRule, Middles
from mtmd.clip.video.single import SingleFrames, Stretched
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

IMAGE_TOKEN = "<IMG_CONTEXT>"
FRAMES = 8  # that the authors' examples take, where the settings do not say
QK_EPS, PROJECTOR_EPS = 1e-6, 1e-5  # the settings do not say
LAYER = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
# The same in the authors' own layout, where queries, keys and values are one tensor.
OWN_LAYER = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ls1": "ls1",
    "ls2": "ls2",
    "attn_q_norm": "attn.q_norm.weight",
    "attn_k_norm": "attn.k_norm.weight",
}
OWN = {
    "v.class_embd": "vision_model.embeddings.class_embedding",
    "v.position_embd": "vision_model.embeddings.position_embedding",
    "v.patch_embd": "vision_model.embeddings.patch_embedding",
    "mm.model.mlp.0": "mlp1.0",
    "mm.model.mlp.1": "mlp1.1",
    "mm.model.mlp.3": "mlp1.3",
}
ROWS = ("v.position_embd",)  # has no ending of its own there
QIANFAN_PROMPT = "Parse this document to Markdown."
PLACEHOLDERS = {"qianfan_ocr": "<image>"}  # what templates write where it is no image token


@dataclass(frozen=True)
class InternVision:
    vit: VitParams
    rms: bool  # norms without mean and bias
    qkv_bias: bool
    qk_norm: bool  # over all heads together
    patch: int
    factor: int
    text_width: int
    gelu: str  # of the projection
    resolution: StretchedTiling
    video: SingleFrames | None
    marker: str = IMAGE_TOKEN

    image_token = IMAGE_TOKEN
    around = ("", "")
    bidirectional = False
    separator = None
    unused = (r"(model\.)?vision_tower\.embeddings\.mask_token",)

    @property
    def grid(self) -> int:
        return self.resolution.tile // self.patch

    @property
    def tasks(self) -> Mapping[str, str]:
        """Return that of Qianfan-OCR."""
        return {"markdown": QIANFAN_PROMPT} if self.marker != IMAGE_TOKEN else {}

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, merged, text = (
            self.vit.width,
            self.vit.ffn,
            self.vit.width * self.factor**2,
            self.text_width,
        )
        parameters = {
            "v.class_embd": _row_of_one((width,), 2, "v.class_embd", "cls_token"),
            "v.position_embd.weight": _row_of_one(
                (self.grid**2 + 1, width), 1, "v.position_embd.weight", "position_embeddings"
            ),
        }
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.patch_embd": (
                "vision_tower.embeddings.patch_embeddings.projection",
                (width, 3, self.patch, self.patch),
            ),
            "mm.model.mlp.0": ("multi_modal_projector.layer_norm", (merged,)),
            "mm.model.mlp.1": ("multi_modal_projector.linear_1", (text, merged)),
            "mm.model.mlp.3": ("multi_modal_projector.linear_2", (text, text)),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "ln1": (width,),
            "ln2": (width,),
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
        }
        vectors = {"ls1": "lambda_1", "ls2": "lambda_2"}
        if self.qk_norm:
            vectors |= {
                "attn_q_norm": "attention.q_norm.weight",
                "attn_k_norm": "attention.k_norm.weight",
            }
        for layer in range(self.vit.layers):
            at, block = f"v.blk.{layer}", f"vision_tower.encoder.layer.{layer}"
            tensors |= {
                f"{at}.{part}": (f"{block}.{name}", shapes.get(part, (width, width)))
                for part, name in LAYER.items()
            }
            parameters |= {
                f"{at}.{part}.weight": Parameter((width,), checkpoint_names(f"{block}.{name}"))
                for part, name in vectors.items()
            }
        without = (".ln1.bias", ".ln2.bias") * self.rms + (
            ".attn_q.bias",
            ".attn_k.bias",
            ".attn_v.bias",
        ) * (not self.qkv_bias)
        parameters |= {
            name: p
            for name, p in blocks.biased_parameters(tensors, checkpoint_names).items()
            if not name.endswith(without)
        }
        return {name: _also_own(name, p) for name, p in parameters.items()}

    def prompt(self, plan: ImagePlan) -> str:
        return f"<img>{self.image_token * plan.tokens}</img>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, patches = Weights(weights, tiles.dtype), self.grid**2
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        x = ops.prepend(x, w.tensor("v.class_embd"), name="v.class_embd.first")
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        for layer in w.layers(self.vit.layers):
            x = self._layer(x, f"v.blk.{layer}", w, attention)
        rest = graph_input(
            "inp.patches", (patches,), torch.int64, lambda _: torch.arange(1, patches + 1)
        )
        x = ops.take_rows(x, rest, name="v.patches")
        x = ops.unshuffle(x, grid=(self.grid, self.grid), factor=self.factor, name="mm.unshuffle")
        x = w.linear(w.layer_norm(x, "mm.model.mlp.0", PROJECTOR_EPS), "mm.model.mlp.1", bias=True)
        return w.linear(
            ops.gelu(x, approximate=self.gelu, name="mm.gelu"), "mm.model.mlp.3", bias=True
        )

    def _layer(self, x: Node, at: str, w: Weights, attention: AttentionForm) -> Node:
        norm = w.rms_norm if self.rms else w.layer_norm
        y = norm(x, f"{at}.ln1", self.vit.eps)
        q, k, v = (
            w.linear(y, f"{at}.{part}", bias=self.qkv_bias)
            for part in ("attn_q", "attn_k", "attn_v")
        )
        if self.qk_norm:
            q, k = (
                w.rms_norm(q, f"{at}.attn_q_norm", QK_EPS),
                w.rms_norm(k, f"{at}.attn_k_norm", QK_EPS),
            )
        q, k, v = (blocks.split_heads(part, self.vit.heads, part.name) for part in (q, k, v))
        y = w.linear(blocks.attend(q, k, v, attention, at=at), f"{at}.attn_out", bias=True)
        x = ops.add(
            ops.mul(y, w.tensor(f"{at}.ls1.weight"), name=f"{at}.ls1"),
            x,
            name=f"{at}.attn_residual",
        )
        y = blocks.mlp(norm(x, f"{at}.ln2", self.vit.eps), at, self.vit.gelu, w)
        return ops.add(
            ops.mul(y, w.tensor(f"{at}.ls2.weight"), name=f"{at}.ls2"), x, name=f"{at}.ffn_residual"
        )


def to_gguf(family: InternVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    resolution = family.resolution
    keys = blocks.tower_keys(
        family.vit, image_size=resolution.tile, patch=family.patch, text_width=family.text_width
    )
    return GgufTower(
        "internvl",
        keys
        | {
            "use_gelu": True,
            "vision.projector.scale_factor": family.factor,
            "vision.preproc_min_tiles": resolution.fewest,
            "vision.preproc_max_tiles": resolution.maximum,
        },
    )


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; older files leave out
    the number of tiles. Which model it is the chat template tells, by what it writes for a picture.
    """
    vision, size, factor = (
        blocks.gguf_vit(keys),
        keys.count("vision.image_size"),
        keys.count("vision.projector.scale_factor", 2),
    )
    vision |= {
        "hidden_act": "gelu" if keys.flag("use_gelu", False) else vision["hidden_act"],
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in shapes else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in shapes,
    }
    template = keys.get("chat_template", "")
    kinds = (kind for kind, written in PLACEHOLDERS.items() if written in template)
    config = {
        "model_type": "internvl" if IMAGE_TOKEN in template else next(kinds, "internvl"),
        "vision_config": vision,
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
        "downsample_ratio": 1 / factor,
    }
    return config, {
        **gguf_image(keys),
        "size": {"height": size, "width": size},
        "min_patches": keys.get("vision.preproc_min_tiles", None),
        "max_patches": keys.get("vision.preproc_max_tiles", None),
    }


def read(top: Settings, image: Settings) -> InternVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, kind = top.part("vision_config"), str(top.get("model_type", ""))
    vit = blocks.read_vit(c, layers=24, width=1024, ffn=4096, heads=16, act="gelu")
    for settings, key, value in (
        (c, "num_channels", 3),
        (c, "use_absolute_position_embeddings", True),
        (c, "use_mean_pooling", True),
        (top, "vision_feature_layer", -1),
        (top, "vision_feature_select_strategy", "default"),
    ):
        settings.choice(key, (value,), value)
    tile, patch, ratio = (
        _side(c, "image_size", 448),
        _side(c, "patch_size", 14),
        top.number("downsample_ratio", 0.5),
    )
    if (factor := round(1 / ratio)) < 1 or 1 / factor != ratio or tile % (side := patch * factor):
        raise ModelError(
            f"{top.where}: image_size {tile}, patch_size {patch} and downsample_ratio {ratio} do "
            "not fit together; "
            "expected whole patches, and whole groups of them"
        )
    return InternVision(
        vit=vit,
        rms=c.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "rms_norm",
        qkv_bias=c.flag("attention_bias", False),
        qk_norm=c.flag("use_qk_norm", False),
        patch=patch,
        factor=factor,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        gelu=ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
        resolution=read_stretched_tiling(image, tile, (tile // side) ** 2),
        video=None
        if kind in PLACEHOLDERS
        else _read_video(image.part("video_processor"), tile, (tile // side) ** 2),
        marker=PLACEHOLDERS.get(kind, IMAGE_TOKEN),
    )


def _read_video(video: Settings, tile: int, tokens: int) -> SingleFrames | None:
    """None where frames are shown in another size than pictures, for which the tower has no
    positions, or cut.
    """
    size = video.part("size")
    if {size.count("height", tile), size.count("width", tile)} != {tile}:
        return None
    if video.flag("do_center_crop", False):
        return None
    shift: object = video.get("initial_shift", True)
    return SingleFrames(
        how=Stretched(tile, tokens),
        normalize=fused(read_normalize(video, CLIP_MEAN, CLIP_STD)),
        resample=read_resample(video, 3, MODES),
        rule=FrameRule(
            Middles(
                video.count("num_frames", FRAMES),
                None if shift is True else float(video.get("initial_shift", 0)),
            )
        ),
        markers=("<video>",),
        token=IMAGE_TOKEN,
        write=_write,
    )


def _write(video: Video, shape: ClipShape) -> str:  # noqa: ARG001
    """A line for each frame, by its number."""
    tokens = f"<img>{IMAGE_TOKEN * shape.tokens}</img>"
    return "\n".join(f"Frame{i}: {tokens}" for i in range(1, shape.groups + 1))


def _side(c: Settings, key: str, default: int) -> int:
    """A size, or two equal ones."""
    side = c.get(key, default)
    if isinstance(side, (list, tuple)) and len(side) == 2 and side[0] == side[1]:
        side = side[0]
    return Settings({key: side}, c.where).count(key)


def _also_own(name: str, p: Parameter) -> Parameter:
    """The parameter, which may have the authors' own name too."""
    match = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        stem, _, end = name.rpartition(".")
        theirs = OWN[name] if name in OWN else OWN[stem] + f".{end}" * (stem not in ROWS)
        return replace(p, sources=(*p.sources, theirs))
    layer, part, end = match.groups()
    at = f"vision_model.encoder.layers.{layer}"
    if part in ("attn_q", "attn_k", "attn_v"):
        whole = (3 * p.shape[0], *p.shape[1:])
        pick = blocks.third("qkv".index(part[-1]))
        return replace(p, others=(Stored((f"{at}.attn.qkv.{end}",), whole, pick, picks_rows=True),))
    theirs = OWN_LAYER[part]
    bare = part in ("ls1", "ls2") or theirs.endswith(".weight")
    return replace(p, sources=(*p.sources, f"{at}.{theirs}" if bare else f"{at}.{theirs}.{end}"))


def _row_of_one(shape: tuple[int, ...], ones: int, name: str, theirs: str) -> Parameter:
    """An embedding that checkpoints, and GGUF files that kept its shape, have with axes of one
    before.
    """
    stored, convert = (1,) * ones + shape, partial(torch.reshape, shape=shape)
    return Parameter(
        shape=shape,
        sources=checkpoint_names(f"vision_tower.embeddings.{theirs}"),
        stored=stored,
        convert=convert,
        gguf=(Stored((name,), shape), Stored((name,), stored, convert)),
    )
