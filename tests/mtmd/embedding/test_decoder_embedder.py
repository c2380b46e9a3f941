"""Vectors of a model that reads conversations: the last token's state, as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import Oracle, picture
from PIL import Image
from qwen3_vl import qwen3_vl

from mtmd import load
from mtmd.base.errors import DualEncoderError, ModelError, OptionError
from mtmd.checkpoint.pooling import POOLING
from mtmd.embedding.decoder_embedder import INSTRUCTION, DecoderEmbedder, conversation
from mtmd.embedding.embedder import load_embedder
from mtmd.embedding.service import RetrievalService

TEXTS = ["Describe a red circle", "blue square"]
PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    result = qwen3_vl(tmp_path_factory.mktemp("embedding") / "vectors", seed=1)
    path = result.folder / POOLING
    path.parent.mkdir()
    path.write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return result


@pytest.fixture(scope="module")
def model(oracle: Oracle) -> DecoderEmbedder:
    result = load_embedder(oracle.folder, dtype="fp32")
    assert isinstance(result, DecoderEmbedder)
    return result


@torch.no_grad()
def expected(oracle: Oracle, part: dict[str, Any], images: list[np.ndarray], said: str) -> Any:
    inputs = oracle.inputs(conversation(part, said), images)
    return oracle.model.model(**inputs).last_hidden_state[0, -1].numpy()


def test_vectors_are_those_of_transformers(oracle: Oracle, model: DecoderEmbedder) -> None:
    for instruction in (INSTRUCTION, "Find a shape."):
        result = model.embeddings(PICTURES, TEXTS, normalize=False, instruction=instruction)
        theirs = [expected(oracle, {"type": "image"}, [p], instruction) for p in PICTURES]
        theirs += [expected(oracle, {"type": "text", "text": t}, [], instruction) for t in TEXTS]
        for ours, reference in zip(result.vectors, theirs, strict=True):
            assert np.square(ours - reference).sum() <= 1e-8 * np.square(reference).sum()
    shown = str(result.receipt)
    assert "2 images seen as" in shown and "2 texts of" in shown
    unit = model.embed(PICTURES[0], TEXTS[0])
    assert np.abs(np.linalg.norm(unit, axis=1) - 1).max() < 1e-6
    cosine = model.similarity(PICTURES[0], TEXTS[0])[0, 0]
    assert abs(cosine - unit[0] @ unit[1]) < 1e-5


def test_a_long_prompt_is_read_in_parts(
    oracle: Oracle, model: DecoderEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.llm.engine.runner.PREFILL", 7)
    ours = model.embed(texts=TEXTS[0], normalize=False)[0]
    theirs = expected(oracle, {"type": "text", "text": TEXTS[0]}, [], INSTRUCTION)
    assert np.square(ours - theirs).sum() <= 1e-8 * np.square(theirs).sum()


def test_the_command_line(oracle: Oracle, mtmd: Any, tmp_path: Path) -> None:
    for index, pixels in enumerate(PICTURES):
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    arguments = ("embed", str(tmp_path), "-m", str(oracle.folder), "--dtype", "fp32")
    made = mtmd(*arguments, "--query", "a red circle", "--json")
    assert made.code == 0
    shown = json.loads(made.out)
    assert len(shown["queries"][0]["images"]) == 2 and shown["width"] == 64
    other = mtmd(*arguments, "--query", "a red circle", "--instruction", "Find it.", "--json")
    assert other.code == 0 and json.loads(other.out)["queries"] != shown["queries"]
    refused = mtmd(*arguments, "--labels", "a,b")
    assert refused.code == 2 and "no probabilities of labels" in refused.err


def test_behind_the_server(model: DecoderEmbedder) -> None:
    service = RetrievalService(model)
    made = service.embeddings([], TEXTS, whole=True)
    np.testing.assert_allclose(made.vectors, model.embed(texts=TEXTS), atol=1e-6)
    assert service.width == 64 and service.checkpoint_facts.architecture == "qwen3_vl"
    assert service.stats().prompt_tokens == sum(t.tokens for t in made.receipt.texts)


def test_what_is_refused(oracle: Oracle, model: DecoderEmbedder, tmp_path: Path) -> None:
    with pytest.raises(DualEncoderError, match="is an embedding model, which gives vectors"):
        load(oracle.folder)
    with pytest.raises(OptionError, match="neither images nor texts"):
        model.embed()
    alone = tmp_path / "text"
    alone.mkdir()
    for file in oracle.folder.iterdir():
        if file.is_file() and file.name != "config.json":
            (alone / file.name).symlink_to(file)
    config = json.loads((oracle.folder / "config.json").read_text())
    (alone / "config.json").write_text(
        json.dumps({**config["text_config"], "model_type": "qwen3_vl_text"})
    )
    (alone / POOLING).parent.mkdir()
    (alone / POOLING).write_text('{"pooling_mode": "lasttoken"}')
    with pytest.raises(ModelError):
        load_embedder(alone)
