"""The oracles themselves: their models answer with variety, and pictures, their order and the words
around them count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision_stand_in as stand_in
from common import Messages, Oracle, literal, picture
from table import CASES, ROWS
from timm_stand_in import timm_here

PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]
REQUIRED = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
every_variant = pytest.mark.parametrize(
    ("row", "variant"), CASES, ids=[f"{row}: {variant}" for row, variant in CASES]
)


def conversation(words: str = "and", pictures: bool = True) -> Messages:
    image: Messages = [{"type": "image"}] if pictures else []
    return [
        {"role": "user", "content": [text("What is"), *image, text(words), *image, text("here?")]}
    ]


def question(oracle: Oracle, row: str, number: int = 0) -> Any:
    """What transformers makes of one of two questions that a row can be asked."""
    asks = ROWS[row].asks
    if asks:
        parts = [p if isinstance(p, int) else text(p) for p in asks[number]]
        content = [{"type": "image"} if isinstance(p, int) else p for p in parts]
        shown = [PICTURES[p] for p in parts if isinstance(p, int)]
        return oracle.inputs([{"role": "user", "content": content}], shown)
    vision = ROWS[row].vision
    words = ("and", "or")[number]
    return oracle.inputs(conversation(words, vision), PICTURES if vision else [])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).square().sum() / expected.square().sum())


@every_variant
def test_checkpoint_is_whole_and_small(build: Any, row: str, variant: str) -> None:
    files = {f.name: f.stat().st_size for f in build(row, variant).folder.iterdir()}
    bare = ROWS[row].bare
    assert set(REQUIRED) - ({"chat_template.jinja"} if bare else set()) <= set(files)
    assert (
        bare
        or not ROWS[row].vision
        or {"preprocessor_config.json", "processor_config.json"} & set(files)
    )
    assert sum(files.values()) < 3.5e6


@every_variant
def test_the_files_are_the_model(build: Any, row: str, variant: str) -> None:
    """transformers reads back what was written, also where `published` rewrote it: nothing missing,
    nothing over, the same answer.
    """
    oracle: Oracle = build(row, variant)
    if oracle.authors:
        pytest.skip("transformers does not read the configuration of its authors")
    if row == "trocr" and "sines" in variant:
        pytest.skip("transformers 5.23 reads such files without values for the sines")
    inputs = question(oracle, row)
    with timm_here():
        read, report = type(oracle.model).from_pretrained(
            oracle.folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert (
            distance(literal(read).eval()(**inputs).logits[0, -1], oracle.logits(inputs)) <= 1e-12
        )


@every_variant
def test_answers_vary(build: Any, row: str, variant: str) -> None:
    oracle: Oracle = build(row, variant)
    inputs = question(oracle, row)
    tokens = oracle.greedy(inputs, 48)
    assert len(tokens) == 48
    assert len(set(tokens)) > 8
    assert int(oracle.logits(inputs).argmax()) == tokens[0]
    other = question(oracle, row, 1)
    assert distance(oracle.logits(other), oracle.logits(inputs)) > 1e-4


@every_variant
def test_every_picture_counts(build: Any, row: str, variant: str) -> None:
    if not ROWS[row].vision:
        with pytest.raises(ValueError, match="no pictures"):
            build(row, variant).inputs(conversation(), PICTURES)
        return
    oracle: Oracle = build(row, variant)
    inputs = question(oracle, row)
    features, logits, pixels = (
        oracle.image_features(inputs),
        oracle.logits(inputs),
        oracle.pixels(inputs),
    )
    tokens = oracle.prompt_ids(inputs).count(oracle.image_token)
    assert features.shape[0] == tokens * oracle.rows_of_token
    assert all(np.isfinite(p).all() and p.std() > 0.05 for p in pixels)
    if ROWS[row].asks:  # of one picture
        return
    for changed in ([picture(7, 70, 50), PICTURES[1]], [PICTURES[0], picture(8, 33, 91)]):
        other = oracle.inputs(conversation(), changed)
        assert distance(oracle.image_features(other), features) > 0.01
        assert distance(oracle.logits(other), logits) > 1e-4


@pytest.mark.parametrize("size", [(24, 40), (111, 37), (30, 20)])
def test_stand_in_is_torchvision(size: tuple[int, int]) -> None:
    functional = pytest.importorskip(
        "torchvision.transforms.v2.functional",
        reason="torchvision is not installed",
        exc_type=(ImportError, RuntimeError),
    )
    image = torch.from_numpy(picture(3, 70, 50)).permute(2, 0, 1).contiguous()
    mode = functional.InterpolationMode
    for name in ("BILINEAR", "BICUBIC", "LANCZOS"):
        assert torch.equal(
            stand_in.resize(image, size, stand_in.InterpolationMode[name]),
            functional.resize(image, list(size), interpolation=mode[name], antialias=True),
        )
    mean = torch.tensor([127.5, 120.0, 3.0])
    assert torch.equal(
        stand_in.normalize(image.float(), mean, mean),
        functional.normalize(image.float(), mean, mean),
    )
