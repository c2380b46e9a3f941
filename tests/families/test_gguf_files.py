"""Families of which llama.cpp's converter wrote us no files: the same answers out of GGUF files
made here, as it makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import Oracle, picture
from gguf_files import (
    decoder,
    dots_projector,
    glm4v_projector,
    internvl_projector,
    janus_projector,
    llava_projector,
    nemotron_projector,
    pixtral_projector,
    read_json,
    step3_projector,
)
from ollama_files import one_file
from table import ROWS

from mtmd.checkpoint.open import open_checkpoint
from mtmd.convert.gguf import convert_to_gguf
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is"},
            {"type": "image", "image": PICTURES[0]},
            {"type": "text", "text": "and"},
            {"type": "image", "image": PICTURES[1]},
        ],
    }
]
PROJECTORS = {
    "pixtral": [pixtral_projector],
    "internvl": [internvl_projector, partial(internvl_projector, squeezed=True)],
    "glm4v": [glm4v_projector],
    "llava": [llava_projector, partial(llava_projector, typed=False)],
    "dots_ocr": [dots_projector],
    "janus": [janus_projector],
    "step3_vl": [step3_projector],
}
ARCHITECTURES = {
    "mistral": "llama",
    "mistral3": "mistral3",
    "glm4v": "glm4",
    "glmga": "glm4",
    "llava": "llama",
    "dots_ocr": "qwen2",
    "janus": "llama",
}  # by the text's or the whole's model_type
ONLY = {  # variants of a row that its projector has
    "llava": ("llava 1.5, llama",),
    "janus": ("janus, a projection of two layers, as published",),
}
CASES = [
    (row, variant, i)
    for row, kinds in PROJECTORS.items()
    for variant in ROWS[row].variants
    if variant in ONLY.get(row, (variant,)) and "experts" not in variant
    for i in range(len(kinds))
]


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected|^2 / |expected|^2"""
    return float(
        (result.double() - expected.double()).square().sum() / expected.double().square().sum()
    )


@pytest.mark.parametrize(
    ("row", "variant", "projector"),
    CASES,
    ids=[f"{row}: {variant} ({i})" for row, variant, i in CASES],
)
def test_the_same_answer_out_of_gguf(
    build: Build, tmp_path: Path, row: str, variant: str, projector: int
) -> None:
    oracle = build(row, variant)
    config = read_json(oracle.folder, "config.json")
    kind = config.get("text_config", config)["model_type"]
    decoder(
        oracle.folder,
        tmp_path / "text.gguf",
        ARCHITECTURES.get(config["model_type"], ARCHITECTURES.get(kind, kind)),
    )
    PROJECTORS[row][projector](oracle.folder, tmp_path / "mmproj.gguf")
    model = Model(open_checkpoint(tmp_path / "text.gguf"), LoadOptions(device="cpu", dtype="fp32"))
    inputs, spans = oracle.inputs(MESSAGES, PICTURES), model.spans(MESSAGES)
    assert [t for s in spans for t in s.tokens] == oracle.prompt_ids(inputs)
    rows = torch.cat([s.embeddings for s in spans if s.embeddings is not None])
    assert nmse(rows, oracle.image_features(inputs)) <= 1e-9
    assert (
        nmse(model.runner.prefill(spans, model.runner.new_cache()), oracle.logits(inputs)) <= 1e-9
    )


def test_a_square_out_of_gguf_is_the_same(build: Build, tmp_path: Path) -> None:
    """Files have positions of one square, in which every picture is shown."""
    oracle, shown = build("nemotron_vl", "heads of 20"), picture(3, 72, 72)
    convert_to_gguf(open_checkpoint(oracle.folder), tmp_path / "text.gguf", "F32", text_only=True)
    nemotron_projector(oracle.folder, tmp_path / "mmproj.gguf")
    model = Model(open_checkpoint(tmp_path / "text.gguf"), LoadOptions(device="cpu", dtype="fp32"))
    content = [{"type": "text", "text": "What is"}, {"type": "image", "image": shown}]
    messages = [{"role": "user", "content": content}]
    inputs, spans = oracle.inputs(messages, [shown]), model.spans(messages)
    assert [t for s in spans for t in s.tokens] == oracle.prompt_ids(inputs)
    rows = torch.cat([s.embeddings for s in spans if s.embeddings is not None])
    assert nmse(rows, oracle.image_features(inputs)) <= 1e-9
    assert (
        nmse(model.runner.prefill(spans, model.runner.new_cache()), oracle.logits(inputs)) <= 1e-9
    )


def test_one_file_of_ollama_is_the_model_that_two_are(build: Build, tmp_path: Path) -> None:
    """Its tower's queries and keys lie as transformers has them; it does not say its activation,
    which is that of the published ones.
    """
    oracle = build("pixtral", "mistral3")
    text, tower = tmp_path / "text.gguf", tmp_path / "mmproj.gguf"
    decoder(oracle.folder, text, "mistral3")
    pixtral_projector(oracle.folder, tower)
    theirs = open_checkpoint(text)
    ours = open_checkpoint(one_file("mistral3", text, tower, tmp_path / "sha256-0123"))
    assert ours.text == theirs.text and theirs.vision is not None
    assert ours.vision == replace(theirs.vision, act="silu")
    weights, expected = ours.vision_weights, theirs.vision_weights
    assert weights is not None and expected is not None
    for name in theirs.vision.parameters():
        value = weights.read(name, torch.float32)
        assert torch.equal(value, expected.read(name, torch.float32)), name
