"""MiniCPM-V 4.6, 4.7 and MiniCPM-OCR: SigLIP over a picture and its slices, windows that become one patch inside of the
tower, and Qwen3.5's decoder.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, load_tokenizer, randomize, save, template_of, tokenizer, write
from published import published
from qwen3_5 import TEXT
from torchvision_stand_in import torchvision_here

PREFIX = "MiniCPMV4_6"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NAMES = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}{{ '<|image_pad|>' }}{% elif c.type == 'video' %}{{ '<|video_pad|>' }}\
{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
VISION = {
    "hidden_size": 72,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 42,
    "patch_size": 6,
}
HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # equal, as in published ones


def tiles(
    inputs: Any, patch: int, key: str = "pixel_values", sizes: str = "target_sizes"
) -> list[np.ndarray]:
    """[3, Y, X] of each tile, from columns of patches."""
    strip, result, start = inputs[key][0].numpy(), [], 0
    for rows, columns in inputs[sizes].tolist():
        width = rows * columns * patch
        cells = strip[:, :, start : start + width].reshape(3, patch, rows, columns, patch)
        result.append(cells.transpose(0, 2, 1, 3, 4).reshape(3, rows * patch, columns * patch))
        start += width
    return result


def minicpmv4_6(
    folder: Path,
    *,
    seed: int = 0,
    mode: str = "16x",
    after: int = 1,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
    ocr: bool = False,
    canvases: bool = False,
) -> Oracle:
    """`after`: the layer after which windows become one patch. `ocr`: a MiniCPM-OCR. `canvases`: a
    MiniCPM-V 4.7, which has 4.6's processors of pictures and videos.
    """
    kind, prefix, pil = ("minicpm_ocr", "MiniCPMOcr", "") if ocr else ("minicpmv4_6", PREFIX, "pil")

    def theirs(file: str, name: str, kind: str = kind, prefix: str = prefix) -> Any:
        module = import_module(f"transformers.models.{kind}.{file}_{kind}")
        return getattr(module, f"{prefix}{name}")

    with torchvision_here():
        suffix = pil and f"_{pil}"
        make_pictures = theirs(f"image_processing{suffix}", f"ImageProcessor{pil.capitalize()}")
        make_videos = theirs("video_processing", "VideoProcessor")
    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {})
    marks = {}
    if canvases:
        theirs = partial(theirs, kind="minicpmv4_7", prefix="MiniCPMV4_7")
        names = ("image_start", "image_end", "slice_start", "slice_end")
        marks = {f"{name}_id": tokens.token_to_id(NAMES[f"{name}_token"]) for name in names}
        marks["newline_id"] = tokens.encode("\n").ids[-1]
    image = tokens.token_to_id("<|image_pad|>")
    config = theirs("configuration", "Config")(
        vision_config=tower,
        text_config=TEXT
        | HEADS
        | {"model_type": "qwen3_5_text", "vocab_size": tokens.get_vocab_size() + 3}
        | (text or {}),
        image_token_id=image,
        video_token_id=tokens.token_to_id("<|video_pad|>"),
        downsample_mode=mode,
        insert_layer_id=after,
        tie_word_embeddings=(text or {}).get("tie_word_embeddings", False),
        **marks,
    )
    model = randomize(theirs("modeling", "ForConditionalGeneration")(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    settings = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": tower["patch_size"],
        "scale_resolution": 48,
        "downsample_mode": mode,
        **(images or {}),
    }
    named = {"image_processor_type": f"{prefix}ImageProcessor"}
    write(folder, "preprocessor_config.json", named | settings)
    unchecked = type(
        "Processor",
        (theirs("processing", "Processor"),),
        {"check_argument_for_proper_class": lambda *result: type(result[-1])},
    )
    processor = unchecked(
        image_processor=make_pictures(**settings),
        video_processor=make_videos(**settings),
        tokenizer=load_tokenizer(folder),
        chat_template=template_of(folder),
    )
    return Oracle(
        folder,
        model,
        processor,
        image,
        "columns of all patches of a tile, [3, patch, patches * patch]",
        partial(tiles, patch=tower["patch_size"]),
    )


ROW = Row(
    "MiniCPM-V 4.6, 4.7, MiniCPM-OCR",
    {
        "slices, windows merged after the second layer": minicpmv4_6,
        "whole pictures, none merged, tied, as published": published(
            lambda f: minicpmv4_6(
                f,
                seed=1,
                mode="4x",
                vision={"num_attention_heads": 2, "hidden_size": 80, "patch_size": 8},
                text={"tie_word_embeddings": True},
                images={"slice_mode": False},
            )
        ),
        "minicpm_ocr, small pictures as they are": partial(
            minicpmv4_6,
            seed=2,
            mode="4x",
            text={"tie_word_embeddings": True},
            images={"small_image_upsize": "never"},
            ocr=True,
        ),
        "4.7, slices on canvases": partial(minicpmv4_6, seed=3, canvases=True),
    },
    notes="a picture and its slices, on a canvas in 4.7, windows merged inside of the tower",
)
