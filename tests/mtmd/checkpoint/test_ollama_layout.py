"""Files as Ollama's own converter lays them out: one file of decoder and eyes gives the same model
as the two that llama.cpp's converter wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ollama_files
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.ollama_layout import NOTE
from mtmd.checkpoint.open import open_checkpoint

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def one_file(family: str, path: Path, **changed: Any) -> Path:
    text, tower = (GOLDEN / family / f"{name}-BF16.gguf" for name in ("text", "mmproj"))
    return ollama_files.one_file(family, text, tower, path, **changed)


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    result = {}
    for part, weights in (("t", checkpoint.text_weights), ("v", checkpoint.vision_weights)):
        assert weights is not None
        family = checkpoint.text if part == "t" else checkpoint.vision
        assert family is not None
        for name in family.parameters():
            result[f"{part} {name}"] = weights.read(name, torch.float32)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_one_file_is_the_model_that_two_are(family: str, tmp_path: Path) -> None:
    """Families equal in every field, weights in every value, prompts in every token."""
    made = open_checkpoint(one_file(family, tmp_path / "sha256-0123"))
    pair = GOLDEN / family / "text-BF16.gguf", GOLDEN / family / "mmproj-BF16.gguf"
    theirs = open_checkpoint(*pair)
    assert made.text == theirs.text
    assert made.vision == theirs.vision
    assert (made.stop_tokens, made.architecture) == (theirs.stop_tokens, theirs.architecture)
    assert made.template.source == theirs.template.source
    assert made.notes == (NOTE, *theirs.notes)
    ours, expected = values(made), values(theirs)
    assert ours.keys() == expected.keys()
    # Weights were made F16 of BF16, which loses what is below its smallest number
    near = (torch.allclose(ours[n], expected[n], rtol=0, atol=2**-25) for n in expected)
    assert all(near)


def test_a_file_without_template_has_the_one_its_vocabulary_was_made_for(tmp_path: Path) -> None:
    path = one_file("gemma3", tmp_path / "x", **{"tokenizer.chat_template": None})
    checkpoint = open_checkpoint(path)
    assert "<start_of_turn>" in checkpoint.template.source and not checkpoint.template.missing
    assert any("built-in one" in note and "gemma" in note for note in checkpoint.notes)


def test_keys_of_the_wrong_type_are_told(tmp_path: Path) -> None:
    for key in ("vision.fullatt_block_indexes", "rope.mrope_section"):
        path = one_file("qwen2_5_vl", tmp_path / "x", **{f"qwen25vl.{key}": "many"})
        with pytest.raises(ModelError, match=rf"{key} is \['many'\], expected whole numbers"):
            open_checkpoint(path)
