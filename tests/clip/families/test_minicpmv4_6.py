"""MiniCPM-V 4.6's eye: transformers' defaults, what cannot be followed, names, what a GGUF says."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families import minicpmv4_6
from mtmd.clip.family import Numbered, gguf_vision_family, ties_tables, vision_family
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.spans import Span, lay_out
from mtmd.prompt.pieces import Part, on_canvases, pieces_of

PATCH = {"patch_size": 14}


def read(
    image: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **top: Any
) -> minicpmv4_6.MiniCpmVision:
    config = {"vision_config": PATCH | (vision or {}), **top}
    result = vision_family(
        "minicpmv4_6",
        Settings(config, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, minicpmv4_6.MiniCpmVision)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import (
        MiniCPMV4_6Config,
        MiniCPMV4_6VisionConfig,
    )
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessorPil,
    )

    c, top, p = MiniCPMV4_6VisionConfig(), MiniCPMV4_6Config(), MiniCPMV4_6ImageProcessorPil()
    result = read()
    vit, pictures = result.vit, result.resolution
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.eps) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.layer_norm_eps,
    )
    assert (result.merged_after, result.text_width) == (
        top.insert_layer_id,
        top.text_config.hidden_size,
    )
    assert (result.positions, result.numbers) == (c.image_size // p.patch_size, p.use_image_id)
    assert (pictures.factor, pictures.side, pictures.slices) == (
        4 * p.patch_size,
        p.scale_resolution,
        p.max_slice_nums,
    )
    assert pictures.normalize.mean == tuple(p.image_mean)
    assert pictures.resample == p.resample.name.lower()


def test_ocrs_defaults_are_those_of_transformers() -> None:
    from transformers.models.minicpm_ocr.configuration_minicpm_ocr import MiniCPMOcrConfig

    result, top = read(model_type="minicpm_ocr"), MiniCPMOcrConfig()
    assert (result.cells.merge, top.downsample_mode) == (2, "4x")
    assert (result.resolution.enlarged, result.resolution.by_tensor) == ("always", True)
    assert ties_tables("minicpm_ocr") == top.tie_word_embeddings
    with pytest.raises(ModelError, match=r"small_image_upsize is 'x', expected one of always, nev"):
        read({"small_image_upsize": "x"}, model_type="minicpm_ocr")


def test_pictures_are_counted() -> None:
    family = read()
    assert isinstance(family, Numbered)
    assert family.numbered(2, video=True) == "<image_id>2</image_id>"
    assert read({"use_image_id": False}).numbered(2, video=False) == ""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layer": ({"insert_layer_id": 12}, "config.json: insert_layer_id is 12, expected a layer"),
    "mode": ({"downsample_mode": "8x"}, "config.json: downsample_mode is '8x', expected one of"),
    "another mode": (
        {"downsample_mode": "4x"},
        "preprocessor_config.json: downsample_mode is 16x, expected 4x as config.json says",
    ),
    "merges": ({"merger_times": 2}, "config.json: merger_times is 2, expected one of 1"),
    "kernel": (
        {"merge_kernel_size": [3, 3]},
        r"config.json: merge_kernel_size is \[3, 3\], expected \[2, 2\]",
    ),
    "window": (
        {"vision": {"window_kernel_size": [1, 2]}},
        r"vision_config: window_kernel_size is \[1, 2\], expected \[2, 2\]",
    ),
    "stack": (
        {"image": {"video_processor": {"stack_frames": 5}}},
        "video_processor: stack_frames is 5, expected one of 1",
    ),
    "heads": ({"vision": {"num_attention_heads": 7}}, "vision_config: 7 heads of width 768"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_what_a_gguf_says() -> None:
    said = minicpmv4_6.to_gguf(family := read(text_config={"hidden_size": 1024}))
    keys = {f"clip.{key}": value for key, value in said.keys.items()}
    mean = {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    shapes = {name: p.shape for name, p in family.parameters().items()}
    assert gguf_vision_family("minicpmv4_6", keys | mean, shapes, "file") == family
    keys["clip.vision.projector.scale_factor"] = 3
    with pytest.raises(ModelError, match=r"file: clip: downsample_mode is '3', expected one of"):
        gguf_vision_family("minicpmv4_6", keys | mean, shapes, "file")
    keys |= {"clip.vision.projector.scale_factor": 4, "clip.vision.wa_layer_indexes": [1, 2]}
    with pytest.raises(ModelError, match=r"file: clip: insert_layer_id is -1, expected a layer"):
        gguf_vision_family("minicpmv4_6", keys | mean, shapes, "file")


def test_places_on_canvases_are_the_references() -> None:
    """Pictures with and without slices, beside each other, before line breaks and text; at the
    beginning of a prompt, too.
    """
    from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

    marks = {"<image>": 1, "</image>": 2, "<slice>": 3, "</slice>": 4, "\n": 5, "<|image_pad|>": 9}
    names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    model = object.__new__(MiniCPMV4_7Model)
    model.__dict__["config"] = SimpleNamespace(
        **dict(zip(names, marks.values(), strict=False)), downsample_mode="16x"
    )
    settings = {"patch_size": 14, "scale_resolution": 112, "use_image_id": False}
    family = vision_family(
        "minicpmv4_7",
        Settings({"vision_config": PATCH, "model_type": "minicpmv4_7"}, "config.json"),
        Settings(settings, "preprocessor_config.json"),
    )
    assert isinstance(family, minicpmv4_6.MiniCpmVision)
    assert family.numbered(0, video=True) == family.numbered(0, video=False) == ""
    rng = random.Random(3)
    for _ in range(40):
        sizes = [(rng.randint(30, 500), rng.randint(30, 500)) for _ in range(rng.randint(1, 4))]
        plans = [prepare_blank(family.resolution, *size) for size in sizes]
        tokens = [20] * rng.randint(0, 3)
        for plan in plans:
            text = re.findall("<[^>]+>|\n", family.prompt(plan))
            tokens += [marks[mark] for mark in text]
            tokens += [5] * rng.randint(0, 2) + [21] * rng.choice((0, 0, 3))
        pieces = pieces_of(tokens, {9}, [Part(i, plan) for i, plan in enumerate(plans)])
        canvases = {i: family.canvas(plan) for i, plan in enumerate(plans)}
        spans = [
            Span(piece.tokens, on_canvas=piece.on_canvas, later=piece.later)
            for piece in on_canvases(pieces, canvases, 5)
        ]
        located, position = lay_out(spans, 0)
        assert [token for span in located for token in span.tokens] == tokens
        actual = np.concatenate([span.positions for span in located], 1)[:3]
        sides = [(height // 14, width // 14) for plan in plans for width, height in plan.sizes]
        expected, deltas = model.get_rope_index(
            torch.tensor([tokens]),
            torch.tensor([[int(token == 9) for token in tokens]]),
            torch.tensor(sides),
        )
        np.testing.assert_array_equal(actual, expected[:, 0].numpy())
        assert position == len(tokens) + int(deltas)
