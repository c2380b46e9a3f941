"""Parts that the encoders of DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR have in common beside
SAM: names, projector, the vector behind the last view, the authors' configuration.
"""

from __future__ import annotations

from typing import Any

import torch

from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.tiles_then_whole import TilesThenWhole
from mtmd.clip.sam import published_sam
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Shape

# Published checkpoints have no template: their authors write one text behind another.
UNLIMITED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}{{ '<image>' }}{% elif 'text' in c %}"
    "{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEMPLATE = UNLIMITED_TEMPLATE.replace("<image>", "<image>\\n")
UNLIMITED_TASKS = {"markdown": "document parsing."}
TASKS = {
    "markdown": "<|grounding|>Convert the document to markdown.",
    "text": "Free OCR.",
    "layout": "<|grounding|>OCR this image.",
}
SEPARATOR = "v.view_seperator"  # spelled so in every file


def sam_names(authors: str, transformers: str) -> tuple[str, ...]:
    return (
        f"model.sam_model.{authors}",
        f"sam_model.{authors}",
        f"model.vision_tower.sam_encoder.{transformers}",
        f"vision_tower.sam_encoder.{transformers}",
    )


def projector_parameters(shape: Shape) -> dict[str, Parameter]:
    return {
        f"mm.model.fc.{kind}": Parameter(
            shape if kind == "weight" else shape[:1],
            (
                f"model.projector.layers.{kind}",
                f"projector.layers.{kind}",
                f"model.multi_modal_projector.{kind}",
                f"multi_modal_projector.{kind}",
            ),
        )
        for kind in ("weight", "bias")
    }


def separator_parameter(width: int) -> dict[str, Parameter]:
    """The vector behind the last view; GGUF files have it with an axis of one."""

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(width)

    def row(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.reshape(1, width),)

    names = "model.view_seperator", "view_seperator", "model.view_separator", "view_separator"
    stored = Stored((SEPARATOR,), (1, width), flat, invert=row)
    return {SEPARATOR: Parameter((width,), names, gguf=(stored,))}


def tile_keys(resolution: TilesThenWhole) -> dict[str, Any]:
    return {
        "vision.preproc_min_tiles": resolution.fewest,
        "vision.preproc_max_tiles": resolution.maximum,
    }


def gguf_tiles(keys: Settings, sam: dict[str, Any], tile: int) -> dict[str, Any]:
    """Return an image processor's settings; tiles are to the whole, which is as large as SAM's
    pictures, as `tile` is to 1024, in whole tokens.
    """
    sizes: dict[str, Any] = {}
    if (side := sam["image_size"]) is not None:
        step = 4 * sam["patch_size"]
        edge = max(side * tile // 1024 // step, 1) * step
        sizes = {"size": {"height": side, "width": side}, "tile_size": edge}
    return {
        **gguf_image(keys),
        **sizes,
        "min_patches": keys.get("vision.preproc_min_tiles", None),
        "max_patches": keys.get("vision.preproc_max_tiles", None),
    }


def is_published(vision: Settings) -> bool:
    """Return whether a vision_config has the authors' keys."""
    return vision.get("width", None) is not None


def sam_settings(vision: Settings) -> Settings:
    if is_published(vision):
        return Settings(published_sam(vision), vision.where)
    return vision.part("sam_config")


def text_width(top: Settings) -> int:
    key = "text_config" if top.get("text_config", None) is not None else "language_config"
    return top.part(key).count("hidden_size", 1280, maximum=MAX_WIDTH)
