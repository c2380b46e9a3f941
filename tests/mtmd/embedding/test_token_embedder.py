"""A vector for each token of pages and queries, as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import token_vectors
import torch
from common import picture
from PIL import Image
from serving import data_url, png

from mtmd import load
from mtmd.base.errors import DualEncoderError, OptionError, PromptError
from mtmd.embedding import vectors_file
from mtmd.embedding.embedder import load_embedder
from mtmd.embedding.service import RetrievalService
from mtmd.embedding.token_embedder import TokenEmbedder, similarity
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.retrieval_app import create_retrieval_app

PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]
TEXTS = ["a red circle", "blue square at the left <|im_end|>"]


@pytest.fixture(scope="module", params=list(token_vectors.BUILDERS))
def oracle(request: Any, tmp_path_factory: pytest.TempPathFactory) -> token_vectors.Late:
    return token_vectors.BUILDERS[request.param](tmp_path_factory.mktemp("late") / request.param)


@pytest.fixture(scope="module")
def model(oracle: token_vectors.Late) -> TokenEmbedder:
    result = load_embedder(oracle.folder, dtype="fp32")
    assert isinstance(result, TokenEmbedder)
    return result


def close(ours: Any, theirs: Any) -> bool:
    assert ours.shape == theirs.shape
    return bool(np.square(ours - theirs).sum() <= 1e-8 * np.square(theirs).sum())


@pytest.mark.parametrize("limit", [7, 512])
def test_vectors_are_those_of_transformers(
    oracle: token_vectors.Late, model: TokenEmbedder, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.llm.engine.runner.PREFILL", limit)
    result = model.embeddings(PICTURES, TEXTS[:1])
    for ours, shown in zip(result.vectors, PICTURES, strict=False):
        assert close(ours, oracle.vectors(images=[shown]))
    assert close(result.vectors[-1], oracle.vectors(text=TEXTS[:1]))
    assert model.width == 24 and "2 images seen as" in str(result.receipt)


def test_pages_are_ranked_by_the_sum_of_greatest_products(
    oracle: token_vectors.Late, model: TokenEmbedder
) -> None:
    query = torch.from_numpy(oracle.vectors(text=TEXTS[:1]))
    pages = [torch.from_numpy(oracle.vectors(images=[shown])) for shown in PICTURES]
    theirs = oracle.processor.score_retrieval([query], pages)[0].numpy()
    made = model.rerank(TEXTS[0], [{"image": shown} for shown in PICTURES])
    assert close(made.scores, theirs)
    assert made.results[0].index == int(theirs.argmax())
    with pytest.raises(PromptError, match=r"^documents\[1\]: expected one text or one picture"):
        model.rerank("a", [PICTURES[0], {"text": "a", "image": PICTURES[0]}])
    with pytest.raises(OptionError, match=r"instruction: .* reads none"):
        model.rerank("a", PICTURES, instruction="Find it.")


def test_the_command_line(oracle: token_vectors.Late, mtmd: Any, tmp_path: Path) -> None:
    for index, pixels in enumerate(PICTURES):
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    arguments = ("-m", str(oracle.folder), "--dtype", "fp32")
    index = tmp_path / "pages.npz"
    made = mtmd("embed", str(tmp_path), *arguments, "--out", index)
    assert made.code == 0, made.err
    names, stored = vectors_file.read(index, 24, per_token=True)
    assert [Path(name).name for name in names] == ["0.png", "1.png"]
    assert close(stored[1], oracle.vectors(images=[PICTURES[1]]))
    made = mtmd("embed", "--index", index, *arguments, "--query", TEXTS[0], "--json")
    assert made.code == 0, made.err
    hits = json.loads(made.out)["queries"][0]["images"]
    found = {Path(hit["image"]).stem: hit["score"] for hit in hits}
    ranked = mtmd("rerank", TEXTS[0], str(tmp_path), *arguments, "--json")
    assert ranked.code == 0, ranked.err
    for one in json.loads(ranked.out)["results"]:
        assert abs(found[Path(one["document"]).stem] - one["score"]) < 1e-5
    for wrong, reason in (
        (("--out", tmp_path / "pages.npy"), "expected a file ending in .npz"),
        (("--labels", "a,b"), "gives no probabilities"),
    ):
        made = mtmd("embed", str(tmp_path), *arguments, *wrong)
        assert made.code == 2 and reason in made.err
    with pytest.raises(DualEncoderError, match="gives vectors of pages and queries"):
        load(oracle.folder)


def test_behind_the_server(model: TokenEmbedder) -> None:
    service = RetrievalService(model)
    client = create_retrieval_app(service, ServerSettings()).test_client()
    shown = [png(60, 40), png(40, 60, "blue")]
    inputs = [{"image": data_url(shown[0])}, TEXTS[0]]
    made = client.post("/v1/embeddings", json={"input": inputs, "encoding_format": "base64"})
    page, query = (np.float32(row["embedding"]) for row in made.get_json()["data"])
    assert page.shape[1] == query.shape[1] == 24
    np.testing.assert_allclose(page, model.embed(shown[0])[0], atol=1e-6)
    documents = [{"image": data_url(one)} for one in shown]
    made = client.post("/v1/rerank", json={"query": TEXTS[0], "documents": documents})
    scores = {one["index"]: one["relevance_score"] for one in made.get_json()["results"]}
    assert abs(scores[0] - similarity(query, page)) < 1e-4
    refused = client.post("/v1/embeddings", json={"input": "a", "normalize": False})
    assert refused.status_code == 400 and "length 1" in refused.text
