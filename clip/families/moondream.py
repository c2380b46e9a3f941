"""Moondream 2 as its authors publish it (github.com/vikhyat/moondream): SigLIP over a whole picture
and over crops that overlap, whose features are put together, averaged over as many cells as the
whole has, and projected beside its own. In llama.cpp's GGUF files, the whole picture alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    biased_parameters,
    encoded_patches,
    gguf_vit,
    plain_vit,
    qkv_parameters,
    read_vit,
    vit_parameters,
)
from mtmd.clip.image.pixels import RoundedNormalize, gguf_image, read_normalize
from mtmd.clip.pictures_first import pictures_first
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.overlapping import OverlappingCrops, read_overlapping_crops
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

END = "<|endoftext|>"
SKILL, ARGUMENT, ANSWER = (f"<|md_reserved_{i}|>" for i in range(3))
# Revisions from 2025-06-21 on are in bfloat16 and have this tokenizer, which is not in their
# repository; those before are in float16 and have their own, which later ones still hold.
TOKENIZER = "moondream/starmie-v1"
TASKS = {"caption": "Caption", "short-caption": "Short caption", "long-caption": "Long caption"}
_BEGIN = "{{ '" + END + "' }}"
# The authors' code of 2024 and of 2025-01-09 to 2025-04-14
QUESTIONS = _BEGIN + pictures_first(
    "{% if loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ ' ' + text + '\\n\\n' }}"
    "{% elif text | trim in ('Caption', 'Short caption', 'Long caption') %}{{ text | trim + ':' }}"
    "{% elif text | trim %}{{ 'Question: ' + text + '\\n\\nAnswer:' }}"
    "{% else %}{{ 'Caption:' }}{% endif %}"
)
# That of 2025-06-21, which ends a question twice where it does not reason before the answer
QUERY = f"{SKILL}query{ARGUMENT}{{}}{ANSWER}{ANSWER}"
DESCRIBE = f"{SKILL}describe{ARGUMENT}{{}}{ANSWER}"
LENGTHS = {"Caption": "normal", "Short caption": "short", "Long caption": "long"}
SKILLS = _BEGIN + pictures_first(
    "{% if m.role == 'assistant' %}{{ text + '" + END + "' }}"
    "{% elif text | trim %}{{ '" + QUERY.format("' + text + '") + "' }}"
    "{% else %}{{ '" + DESCRIBE.format("normal") + "' }}{% endif %}"
)


@dataclass(frozen=True)
class MoondreamVision:
    vit: VitParams
    patch: int
    inner: int  # width between the two layers of the projection
    text_width: int
    resolution: OverlappingCrops

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = True
    whole_prompt = False
    separator = None
    video = None
    tasks = TASKS
    template = MappingProxyType({SKILL: SKILLS, "": QUESTIONS})
    end = END
    control = (SKILL, ARGUMENT, ANSWER)
    unused = (r"(model\.)?region\..*",)  # coordinates of detect and point

    @property
    def side(self) -> int:
        """Patches on a side of a crop."""
        return self.resolution.side // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, count = self.vit.width, self.patch, self.side**2
        parameters = vit_parameters(self.vit, _layer_names)
        for index in range(self.vit.layers):
            at = f"v.blk.{index}"
            parameters |= qkv_parameters(at, width, f"blocks.{index}.attn.qkv", _names)
        ends: dict[str, tuple[str, Shape]] = {
            "v.post_ln": ("post_ln", (width,)),
            "mm.0": ("proj_mlp.fc1", (self.inner, 2 * width)),
            "mm.2": ("proj_mlp.fc2", (self.text_width, self.inner)),
        }
        kernels = Parameter(
            (width, 3, patch, patch),
            _names("patch_emb.weight"),
            (width, 3 * patch * patch),
            lambda w: w.unflatten(1, (3, patch, patch)),
        )
        table = Parameter((count, width), _names("pos_emb"), (1, count, width), lambda w: w[0])
        return {
            **parameters,
            **biased_parameters(ends, _names),
            "v.patch_embd.weight": kernels,
            "v.patch_embd.bias": Parameter((width,), _names("patch_emb.bias")),
            "v.position_embd.weight": table,
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def rewritten(self, text: str) -> str:
        """Return the prompt with captions asked for as such: a template may change no words."""
        for words, length in LENGTHS.items():
            text = text.replace(QUERY.format(words), DESCRIBE.format(length))
        return text

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] -> embeddings [B, T, D]"""
        w, batch, side = Weights(weights, tiles.dtype), tiles.shape[0], self.side
        grid = self.resolution.grid_of(tiles.shape)
        crops = 1 + grid[0] * grid[1]
        count = crops * side**2
        kernel = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *kernel, name="v.patch_embd")
        x = self._taken(x, self._crops(grid), "v.crops")
        x = ops.reshape(x, shape=(batch * crops, side**2, self.vit.width), name="v.crop")
        x = encoded_patches(x, w.tensor("v.position_embd.weight"), self.vit, w, attention)
        x = ops.reshape(x, shape=(batch, count, self.vit.width), name="v.encoded")
        whole = self._taken(x, torch.arange(side**2), "v.whole")
        cells = self._cells(grid)
        parts = self._taken(x, cells.flatten(), "v.parts")
        parts = ops.pool2d(parts, grid=tuple(cells.shape), size=(side, side), name="v.pool")
        x = ops.concat(whole, parts, axis=2, name="v.features")
        return _projected(x, w)

    def _taken(self, x: Node, at: torch.Tensor, name: str) -> Node:
        rows = graph_input(f"inp.{name}", tuple(at.shape), at.dtype, lambda _: at)
        return ops.take_rows(x, rows, name=name)

    def _crops(self, grid: tuple[int, int]) -> torch.Tensor:
        """int64 [P]: which patches of a tile the whole and the crops have, one after another."""
        side, step = self.side, self.resolution.step // self.patch
        columns = self.resolution.size(grid)[0] // self.patch
        corners = [(0, 0)]
        corners += [(side + i * step, j * step) for i in range(grid[0]) for j in range(grid[1])]
        at = torch.arange(side)
        return torch.cat([((y + at)[:, None] * columns + x + at).flatten() for y, x in corners])

    def _cells(self, grid: tuple[int, int]) -> torch.Tensor:
        """int64 [rows, columns] of the picture: which of the crops' patches lies there, that of the
        crop in whose middle it is.
        """
        side, margin = self.side, self.resolution.margin // self.patch
        step = self.resolution.step // self.patch

        def located(crops: int) -> tuple[torch.Tensor, torch.Tensor]:
            at = torch.arange(crops * step + 2 * margin)
            crop = ((at - margin) // step).clamp(0, crops - 1)
            return crop, at - crop * step

        (down, y), (across, x) = located(grid[0]), located(grid[1])
        crop = 1 + down[:, None] * grid[1] + across
        return crop * side**2 + y[:, None] * side + x


@dataclass(frozen=True)
class WholeMoondreamVision:
    """Moondream 2 in a GGUF, whose projection has one half for the whole and for crops."""

    vit: VitParams
    patch: int
    inner: int
    text_width: int
    resolution: FixedSquare

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = False  # as llama.cpp reads it
    separator = None
    video = None
    tasks = TASKS
    template = QUESTIONS
    end = END
    control = ()

    @property
    def unused(self) -> tuple[str, ...]:
        return (rf"v\.blk\.{self.vit.layers}\..*",)  # the last layer once more, for llama.cpp

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        ends: dict[str, tuple[str, Shape]] = {
            "v.patch_embd": ("", (width, 3, self.patch, self.patch)),
            "v.post_ln": ("", (width,)),
            "mm.0": ("", (self.inner, width)),
            "mm.2": ("", (self.text_width, self.inner)),
        }
        table = Parameter((self.resolution.tokens, width), ())
        return {
            **vit_parameters(self.vit, _nowhere),
            **biased_parameters(ends, _nowhere),
            "v.position_embd.weight": table,
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = plain_vit(tiles, w.tensor("v.position_embd.weight"), self.vit, w, attention)
        return _projected(x, w)


def _projected(x: Node, w: Weights) -> Node:
    x = ops.gelu(w.linear(x, "mm.0", bias=True), approximate="tanh", name="mm.gelu")
    return w.linear(x, "mm.2", bias=True)


def _names(name: str) -> tuple[str, ...]:
    return (f"model.vision.{name}", f"vision.{name}")


def _nowhere(name: str) -> tuple[str, ...]:  # noqa: ARG001
    return ()


def _layer_names(name: str) -> tuple[str, ...]:
    """Return the authors' names for one of transformers': encoder.layers.0.mlp.fc1.weight"""
    renamed = {"encoder.layers.": "blocks.", "layer_norm": "ln", "self_attn.out_proj": "attn.proj"}
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return _names(name)


def usual_words(config: Settings) -> dict[str, Any]:
    """Return what config.json says in transformers' words: the authors' has sizes only where they
    are not those of Moondream 2. Raises ModelError for what is not read.
    """
    if config.get("text_config", None) is not None or config.get("phi_config", None) is not None:
        raise ModelError(
            f"{config.where}: found a revision of 2024, which has another encoder; use one of 2025 "
            "(org/name@2025-06-21), or its GGUF files"
        )
    own = config.part("config")
    vision, text = own.part("vision"), own.part("text")
    if text.get("group_size", None) is not None:
        raise ModelError(
            f"{text.where}: group_size is {text.get('group_size', None)!r:.20}: int4 in a layout "
            "of the authors' own is not read; use the revision that is not quantized, and --weights"
        )
    kind = config.get("torch_dtype", config.get("dtype", ""))
    return {
        "model_type": config.get("model_type", None),
        "torch_dtype": kind,
        "image_processor": {},
        "vision_config": {
            "hidden_size": vision.get("enc_dim", 1152),
            "intermediate_size": vision.get("enc_ff_dim", 4304),
            "num_hidden_layers": vision.get("enc_n_layers", 27),
            "num_attention_heads": vision.get("enc_n_heads", 16),
            "patch_size": vision.get("enc_patch_size", 14),
            "num_channels": vision.get("in_channels", 3),
            **vision.values,
        },
        "text_config": {
            "model_type": "phi",
            "hidden_size": text.get("dim", 2048),
            "intermediate_size": text.get("ff_dim", 8192),
            "num_hidden_layers": text.get("n_layers", 24),
            "vocab_size": text.get("vocab_size", 51200),
            "max_position_embeddings": text.get("max_context", 2048),
            "num_attention_heads": text.get("n_heads", 32),
            "num_key_value_heads": text.get("n_kv_heads", text.get("n_heads", 32)),
            "eos_token_id": None,
        },
    }


def borrowed_tokenizer(config: Settings) -> tuple[str, str] | None:
    """Return the repository that has the tokenizer of such a checkpoint, and a token that no other
    one has; None where its own is the right one.
    """
    kinds = ("float16", "bfloat16", "float32", "")
    kind = config.choice("torch_dtype", kinds, config.choice("dtype", kinds, ""))
    return None if kind == "float16" else (TOKENIZER, SKILL)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; of layers the file has
    the last one twice, as llama.cpp leaves it out.
    """
    size = keys.count("vision.image_size")
    config = {
        "vision_config": {
            **gguf_vit(keys),
            "hidden_act": "gelu_pytorch_tanh",
            "num_hidden_layers": keys.count("vision.block_count") - 1,
            "proj_inner_dim": [*shapes.get("mm.0.weight", ()), None][0],
        },
        "text_config": {"hidden_size": [*shapes.get("mm.2.weight", ()), None][0]},
    }
    return config, {**gguf_image(keys), "size": {"height": size, "width": size}}


def read(top: Settings, image: Settings) -> MoondreamVision | WholeMoondreamVision:
    """Read it from config.json in transformers' words; ModelError where a value cannot be
    followed.
    """
    vision = top.part("vision_config")
    vision.choice("num_channels", (3,), 3)
    vit = read_vit(
        vision, layers=27, width=1152, ffn=4304, heads=16, act="gelu_pytorch_tanh", eps=1e-5
    )
    patch = vision.count("patch_size", 14)
    inner = vision.count("proj_inner_dim", 8192, maximum=MAX_WIDTH)
    width = top.part("text_config").count("hidden_size", 2048, maximum=MAX_WIDTH)
    normalize = read_normalize(image)
    if image.get("size", None) is not None:
        side = vision.count("image_size")
        if side % patch:
            raise ModelError(
                f"{vision.where}: image_size {side} is no whole number of patches of {patch} pixels"
            )
        square = read_fixed_square(
            image, side, (side // patch) ** 2, normalize, crops=False, ground=None
        )
        return WholeMoondreamVision(vit, patch, inner, width, square)
    vision.choice("proj_out_dim", (width,), width)
    half = "float16" if top.get("torch_dtype", "") == "float16" else "bfloat16"
    rounded = RoundedNormalize(normalize.mean, normalize.std, normalize.scale, half)
    return MoondreamVision(vit, patch, inner, width, read_overlapping_crops(vision, patch, rounded))
