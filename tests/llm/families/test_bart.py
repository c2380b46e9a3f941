"""BART's kind of decoder: transformers' defaults, tables, and what cannot be followed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trocr import trocr

from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.families.bart import FIRST_POSITION, BartText, read
from mtmd.llm.state import PAGE

HEAD, TABLE = "decoder.output_projection.weight", "decoder.model.decoder.embed_tokens.weight"


def of(**values: Any) -> BartText:
    return read(Settings({"encoder_rows": 577, **values}, "config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import TrOCRConfig

    c, text = TrOCRConfig(), of()
    assert (text.depth, text.width, text.ffn, text.heads) == (
        c.decoder_layers,
        c.d_model,
        c.decoder_ffn_dim,
        c.decoder_attention_heads,
    )
    assert (text.vocabulary, text.context, text.embedding_norm, text.tied) == (
        c.vocab_size,
        c.max_position_embeddings,
        c.layernorm_embedding,
        c.tie_word_embeddings,
    )
    assert text.parameters()["position_embd.weight"].shape == (512 + FIRST_POSITION, 1024)
    (own, seen) = text.layers[0]
    assert (own.rows, seen.rows) == (0, 19 * PAGE)


@pytest.mark.parametrize("head", ["none", "equal", "other"])
def test_a_table_of_outputs_that_differs_is_used(head: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    trocr(folder)
    tensors = load_file(folder / "model.safetensors")
    if head != "none":
        tensors[HEAD] = tensors[TABLE] * (1 if head == "equal" else -1)
        save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint.text, BartText) and checkpoint.text.tied == (head != "other")
    name = "output.weight" if head == "other" else "token_embd.weight"
    expected = tensors[HEAD if head == "other" else TABLE]
    assert torch.equal(checkpoint.text_weights.read(name, torch.float32), expected)


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"decoder_attention_heads": 5}, "5 heads of width 1024; expected heads that divide"),
        ({"d_model": 15, "decoder_attention_heads": 5}, "divide an even width"),
        ({"decoder_layers": 10**9}, "decoder_layers is 1000000000, expected"),
        ({"activation_function": "silu"}, "activation_function is 'silu', expected one of gelu"),
        ({"encoder_rows": 1 << 20}, "encoder_rows is 1048576, expected"),
        ({"pad_token_id": -1, "use_learned_position_embeddings": False}, "pad_token_id is -1"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        of(**values)


def test_a_decoder_alone_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    trocr(folder)
    config = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path / "alone")
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config["decoder"]))
    with pytest.raises(ModelError, match="encoder_rows is None"):
        open_checkpoint(tmp_path / "alone")
