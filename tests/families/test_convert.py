"""Families written to GGUF and read back: the same tensors, sizes and tokens, in every type; and
files that llama.cpp's converter wrote of the same checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from common import Oracle
from table import ROWS

from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.checkpoint.requantize import with_weights
from mtmd.convert.gguf import convert_to_gguf
from mtmd.kernels.checkpoint.gguf_file import GgufFile

Build = Callable[[str, str], Oracle]
GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
WITHOUT = {
    "aya_vision",
    "blip",
    "blip2",
    "instructblip",
    "moondream",
    "phi4_multimodal",
    "llava_onevision",
    "llava_video",
    "granite_docling",
    "paligemma",
    "idefics2",
    "mllama",
    "trocr",
    "donut",
    "florence2",
    "ovis2",
    "got_ocr2",
    "hyperclovax",
    "video_llama3",
    "nemotron_vl",
    "lfm3_vl",
}  # towers that llama.cpp has no projector for
REFUSED = {  # variants of which llama.cpp takes something else for granted
    "6 heads on 2, image block wider than the window, as published": "does not say scale",
    "one token an image, linear rope, scalar of its own": "does not say scale",
    "llava 1.5, llama with 6 heads on 2 and llama3 rope, last layer with its class token, as "
    "published": "projector mlp does not say tower",
    "dense, tied, 6 heads on 2, bias, head of 36, as published": "no biases of attention",
    "groups of nine patches, biases, at most 3 tiles, as published": "no biases of attention",
    "experts, a dense layer between, as published": "no layers without experts",
    "tied, biases, 6 heads on 2, as published": "has no biases of every layer",
    "chunks of 16, temperature by 8, no norms, largest canvas": "does not say turning",
    # Published ones have heads of one size, as those of the golden files below.
    "cohere_compass": "no positions for each kind of layer",
    "untied, positions in all layers, biases": "no biases of attention",
    "4.7, slices on canvases": "does not say canvases",
    "attention alone, dense": "no decoder without Mamba-2 layers",
    "qwen3_5": "no heads of keys that differ from those of values",
    "qwen3_next": "no heads of keys that differ from those of values",
    "0.4 of heads of 20, 4 on 2, normed, as published": "has no norms of queries and keys",
    "lfm3_vl": "no norms behind layers",
    "granite_docling": "no scaled pictures with features for layers",
    "32b, as published": "no norms after blocks",
    "blip": "no layers that attend to pictures",
    "ernie4_5_vl": "no experts of pictures",
    "aria": "no experts whose weights are divided by their sum",
    "opt": "no learned positions",
    "untied, biases, 6 heads on 2, as published": "no biases of every layer",
    "experts in every second of four layers, none shared, untied, as published": "no layers "
    "without experts behind the first",
    "opt, cross attention in every second layer": "no learned positions",
    "opt, 4 heads, cross attention in each third": "no learned positions",
    "mllama": "no layers that attend to pictures",
    "trocr": "no layers that attend to pictures",
    "donut": "no layers that attend to pictures",
    "florence2": "no layers that attend to pictures",
    "janus, of three, 6 heads on 2, no system prompt": "no GGUF holds its image encoder",
    "windows of 4, Q-Formers of two layers": "no GGUF holds its image encoder",
    "deepseek-vl, tied": "no GGUF holds its image encoder",
    "three streams, the second computed, widths by layer": "no feed-forward layers of several "
    "widths",
    "no tiles, untied, no projector norm, 6 heads on 2, head of 36, as published": "tile_size",
}
CASES = [(row, variant) for row in ROWS for variant in ROWS[row].variants]
DIFFERENT = (
    "vision.pos_emb_height",  # numbers that no program reads: tensors have their shapes
    "vision.pos_emb_width",
    "vision.pos_emb_time",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.bos_token_id",  # where the tokenizer names none
    "tokenizer.ggml.unknown_token_id",  # which vocabularies of bytes never give
    "clip.vision.image_size",  # where the tower takes any
    "tokenizer.ggml.eot_token_id",  # the other one of two that end answers, which they leave out
)
TEXTS = ("Hello, world!", "a  b\n\n12345 naïve ü 你好 don't", "<|im_end|>x")
MORE = [
    GOLDEN.parent / "golden_more" / name / "text-BF16.gguf"
    for name in (
        "gemma4_e2b",
        "gemma4_unified",
        "glm46v",
        "glm_ocr",
        "internvl3_5",
        "minicpmv4_6",
        "paddleocr_vl",
        "qianfan_ocr",
        "qwen2_5_omni",
        "lighton_ocr",
        "deepseek_ocr2",
        "unlimited_ocr",
        "kimi_k25",
    )
]
# Whose generation_config.json names another end than their tokenizer, which the converter asks.
END = "tokenizer.ggml.eos_token_id"
OTHER_ENDS = ("deepseek_ocr2", "kimi_k25", "paddleocr_vl", "unlimited_ocr")
AUDIO = ("a.", "mm.a.")
AUDIO_KEYS = ("clip.audio.", "clip.has_audio")
# Of CLIP's feed-forward layers and norms the converter writes other numbers than tensors have.
CLIP_KEYS = ("clip.vision.feed_forward_length", "clip.vision.attention.layer_norm_epsilon")
DRAFTING = {"glm_ocr": 3}  # a layer that drafts, which is not read and so not written
DRAFTING_KEYS = ("glm4.block_count", "glm4.nextn_predict_layers")


@pytest.mark.parametrize(("row", "variant"), CASES, ids=[f"{r}: {v}" for r, v in CASES])
def test_every_family_comes_back(build: Build, tmp_path: Path, row: str, variant: str) -> None:
    checkpoint = open_checkpoint(build(row, variant).folder)
    if refused := REFUSED.get(variant, REFUSED.get(row)):
        with pytest.raises(ModelError, match=refused):
            convert_to_gguf(checkpoint, tmp_path / "model.gguf", "F32", text_only=row in WITHOUT)
        assert not list(tmp_path.iterdir())
        return
    for mixture in ("F32", "BF16", "Q8_0", "Q4_K_M"):
        out = tmp_path / f"model-{mixture}.gguf"
        *_, last = convert_to_gguf(checkpoint, out, mixture, text_only=row in WITHOUT)
        back = open_checkpoint(out, None if last.path == out else last.path)
        expected = with_weights(checkpoint, mixture).text_weights
        for name in expected.shapes:
            a, b = back.text_weights.read(name, torch.float32), expected.read(name, torch.float32)
            if name == "per_layer_token_embd.weight":  # copies of a row stand for other tokens
                assert torch.equal(a[len(b) :], b[:1].expand(len(a) - len(b), -1))
                a = a[: len(b)]
            assert torch.equal(a, b), name
        assert back.stop_tokens >= checkpoint.stop_tokens
        for text in TEXTS:
            assert back.tokenizer.encode(text) == checkpoint.tokenizer.encode(text)
        assert back.template.source == checkpoint.template.source
        if checkpoint.vision_weights and back.vision_weights:
            for name in checkpoint.vision_weights.shapes:
                a = back.vision_weights.read(name, torch.float32)
                assert torch.equal(a, checkpoint.vision_weights.read(name, torch.float32)), name
        assert (back.vision is None) == (checkpoint.vision is None or row in WITHOUT)


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
@pytest.mark.parametrize(
    "path", [*sorted(GOLDEN.glob("*/text-BF16.gguf")), *MORE], ids=lambda path: path.parent.name
)
def test_files_are_those_of_llama_cpps_converter(tmp_path: Path, path: Path) -> None:
    """Tensors bit for bit, and the keys of sizes; its tokenizers name another cut than they have."""
    out = tmp_path / "model.gguf"
    family = path.parent.name
    checkpoint = open_checkpoint(path.parent / "hf")
    made = convert_to_gguf(checkpoint, out, "BF16")
    projector = path.with_name("mmproj-BF16.gguf")
    theirs = [path, *([projector] if projector.exists() else [])]
    assert len(made) == len(theirs)
    for ours, other in zip(
        (GgufFile(file.path) for file in made), map(GgufFile, theirs), strict=True
    ):
        unread = AUDIO * (checkpoint.audio is None)
        ears = {n for n in other.names() if n.startswith(unread)}
        drafting = {n for n in other.names() if re.match(rf"blk\.{DRAFTING.get(family)}\.", n)}
        assert set(ours.names()) == set(other.names()) - drafting - ears
        names = set(ours.names())
        for name in names:
            a, b = ours.read(name), other.read(name)
            if name == "mm.input_projection.weight" or name.startswith("a.conv"):
                a = a.to(b.dtype)  # F16 there
            b = b.reshape(b.shape[b.dim() - a.dim() :])  # outer axes of one are none in ggml
            assert a.dtype == b.dtype and torch.equal(a, b), name
        for key in other.metadata:
            if key.startswith(("general.", *AUDIO_KEYS * (checkpoint.audio is None))):
                continue
            if key in (*DIFFERENT, *DRAFTING_KEYS * bool(drafting)):
                continue
            if family in OTHER_ENDS and key in (END, *CLIP_KEYS * ("v.class_embd" in names)):
                continue
            assert ours.metadata.get(key) == other.metadata[key], key
