"""Scores of rerankers, as transformers computes them from the published prompts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import rerankers
from common import Oracle, picture
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import data_url, image_part, png

from mtmd import load
from mtmd.base.errors import ContextError, DualEncoderError, ImageError, ModelError, PromptError
from mtmd.checkpoint.relevance import LOGIT_SCORE
from mtmd.convert.convert import convert
from mtmd.embedding.reranker import Reranker, load_reranker
from mtmd.embedding.service import RetrievalService
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.retrieval_app import create_retrieval_app

TEXT = [{"type": "text", "text": "a red circle"}]
SEEN = {"type": "image"}
PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]


def close(ours: Any, theirs: list[float]) -> bool:
    expected = np.array(theirs)
    return bool(np.square(ours - expected).sum() <= 1e-8 * np.square(expected).sum())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return rerankers.seeing(tmp_path_factory.mktemp("seeing") / "tiny-reranker")


@pytest.fixture(scope="module")
def model(oracle: Oracle) -> Reranker:
    return load_reranker(oracle.folder, dtype="fp32")


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("texts") / "tiny-reranker"
    return folder, rerankers.of_texts(folder)


def test_documents_of_every_kind(oracle: Oracle, model: Reranker) -> None:
    documents = [
        "a blue square",
        {"image": PICTURES[0]},
        {"text": "a blue square at the left", "image": PICTURES[1]},
        {"text": ["a", "b"], "image": [PICTURES[1], PICTURES[0]]},
        {},
        PICTURES[1],
    ]
    parts: list[tuple[list[dict[str, Any]], list[np.ndarray]]] = [
        ([{"type": "text", "text": "a blue square"}], []),
        ([SEEN], [PICTURES[0]]),
        ([SEEN, {"type": "text", "text": "a blue square at the left"}], [PICTURES[1]]),
        (
            [SEEN, SEEN, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            [PICTURES[1], PICTURES[0]],
        ),
        ([{"type": "text", "text": "NULL"}], []),
        ([SEEN], [PICTURES[1]]),
    ]
    result = model.rerank("a red circle", documents)
    theirs = [rerankers.seen_score(oracle, TEXT, *part) for part in parts]
    assert np.ptp(theirs) > 0.1  # they tell documents apart
    assert close(result.scores, theirs)
    assert [one.index for one in result.results] == list(np.argsort(theirs)[::-1])
    assert not result.failed and len(result.receipt.documents) == len(documents)
    assert "6 documents of" in str(result.receipt) and "5 images seen" in str(result.receipt)


def test_a_picture_as_the_query(oracle: Oracle, model: Reranker) -> None:
    documents = ["a blue square", {"image": PICTURES[1]}, "a circle, and a red one"]
    said, asked = "Find what is shown.", picture(2, 50, 64)
    result = model.rerank({"image": asked}, documents, instruction=said, top_n=2)
    parts: list[tuple[list[dict[str, Any]], list[np.ndarray]]] = [
        ([{"type": "text", "text": documents[0]}], [asked]),
        ([SEEN], [asked, PICTURES[1]]),
        ([{"type": "text", "text": documents[2]}], [asked]),
    ]
    theirs = [rerankers.seen_score(oracle, [SEEN], *part, said) for part in parts]
    assert close(result.scores, theirs) and len(result.results) == 2
    # The picture of the query is encoded once.
    assert sum(one.images[0].cached for one in result.receipt.documents) == 2


def test_a_video_is_judged(model: Reranker) -> None:
    frames = np.stack([picture(seed, 64, 64) for seed in range(4)])
    from mtmd import VideoInput

    result = model.rerank({"video": VideoInput(frames)}, ["a red circle", {"video": frames}])
    assert np.isfinite(result.scores).all()
    assert [len(one.videos) for one in result.receipt.documents] == [1, 2]


@pytest.mark.parametrize("limit", [7, 200])
def test_texts_in_batches_and_in_parts(
    of_texts: tuple[Path, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmd.llm.engine.runner.PREFILL", limit)
    folder, theirs = of_texts
    model = load_reranker(folder, dtype="fp32")
    documents = [f"the image of {'a circle and ' * n}a square" for n in range(10)]
    result = model.rerank("a red circle", documents)
    expected = [rerankers.text_score(theirs, folder, "a red circle", one) for one in documents]
    assert np.ptp(expected) > 0.01 and close(result.scores, expected)
    other = model.rerank("a red circle", documents[:2], instruction="Find it.").scores
    args = theirs, folder, "a red circle"
    assert close(other, [rerankers.text_score(*args, d, "Find it.") for d in documents[:2]])


@pytest.mark.parametrize("kind", ["gguf", "gguf, tied", "classifier", "logit score"])
def test_every_way_in_which_files_hold_it(
    of_texts: tuple[Path, Any], kind: str, tmp_path: Path
) -> None:
    folder, theirs = of_texts
    if kind == "gguf":  # a table of outputs of its own, which llama.cpp's converter leaves out
        folder = tmp_path / "untied"
        theirs = rerankers.of_texts(folder, tied=False)
    path = made = tmp_path / "model"
    weights = load_file(folder / "model.safetensors")
    yes, no = rerankers.words(folder)
    table = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    if kind.startswith("gguf"):
        made = path.with_suffix(".gguf")
        rows = table[[yes, no]].numpy()
        gguf_files.decoder(
            folder,
            made,
            "qwen3",
            {
                "qwen3.pooling_type": 4,
                "qwen3.classifier.output_labels": ["yes", "no"],
                "tokenizer.chat_template.rerank": "{query}{document}",
            },
            {"cls.output.weight": rows},
            without=("lm_head.weight",),
        )
    else:
        path.mkdir()
        for file in folder.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                (path / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text())
        if kind == "classifier":
            config["architectures"] = ["Qwen3ForSequenceClassification"]
            weights["score.weight"] = (table[yes] - table[no])[None]
        else:
            (path / LOGIT_SCORE).parent.mkdir()
            stated = {"true_token_id": yes, "false_token_id": no}
            (path / LOGIT_SCORE).write_text(json.dumps(stated))
        save_file(weights, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DualEncoderError, match="is a reranker"):
        load(made)
    result = load_reranker(made, dtype="fp32").rerank("a circle", ["a red circle", "a square"])
    documents = ["a red circle", "a square"]
    assert close(
        result.scores, [rerankers.text_score(theirs, folder, "a circle", d) for d in documents]
    )


def test_one_bad_document_is_named_or_left_out(model: Reranker, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    documents = ["a", {"image": broken}, "red " * 5000, "b"]
    with pytest.raises(ImageError, match=r"^documents\[1\]: .*broken.png"):
        model.rerank("a", documents)
    with pytest.raises(ContextError, match=r"^documents\[0\]: the prompt takes"):
        model.rerank("a", documents[2:])
    with pytest.raises(ImageError, match=r"^query: "):
        model.rerank({"image": broken}, ["a"])
    result = model.rerank("a", documents, on_error="return")
    assert sorted(result.failed) == [1, 2] and np.isnan(result.scores[[1, 2]]).all()
    assert {one.index for one in result.results} == {0, 3}
    whole = model.rerank("a", ["a", "b"])
    assert np.allclose(result.scores[[0, 3]], whole.scores, atol=1e-6)


def test_what_is_refused(
    oracle: Oracle, model: Reranker, of_texts: tuple[Path, Any], tmp_path: Path
) -> None:
    with pytest.raises(DualEncoderError, match="is a reranker, which scores documents"):
        load(oracle.folder)
    for documents, reason in (([], "at least one"), ("a", "expected a list"), ([3.5], "document")):
        with pytest.raises((PromptError, ImageError), match=reason):
            model.rerank("a", documents)
    with pytest.raises(PromptError, match="'url', expected 'text'"):
        model.rerank("a", [{"url": "x"}])
    with pytest.raises(PromptError, match=r"documents\[0\]: .* has no image encoder"):
        load_reranker(of_texts[0]).rerank("a", [PICTURES[0]])
    with pytest.raises(ModelError, match="the demo model writes answers"):
        load_reranker("demo")
    other = tmp_path / "other-reranker"
    other.mkdir()
    for file in oracle.folder.iterdir():
        (other / file.name).symlink_to(file)
    (other / LOGIT_SCORE).parent.mkdir()
    (other / LOGIT_SCORE).write_text('{"true_token_id": 5, "false_token_id": null}')
    with pytest.raises(ModelError, match=r"score is read by the tokens .5, None."):
        load_reranker(other)


def test_the_command_line(
    oracle: Oracle, model: Reranker, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(PICTURES[0]).save(tmp_path / "shown.png")
    (tmp_path / "said.txt").write_text("a blue square")
    arguments = ("-m", str(oracle.folder), "--dtype", "fp32")
    made = mtmd("rerank", "a circle", str(tmp_path), "--text", "a", *arguments, "--json")
    assert made.code == 0, made.err
    shown = json.loads(made.out)
    expected = model.rerank("a circle", ["a blue square", {"image": PICTURES[0]}, "a"])
    scores = {Path(one["document"]).name: one["score"] for one in shown["results"]}
    assert np.allclose(
        [scores[name] for name in ("said.txt", "shown.png", "a")], expected.scores, atol=1e-6
    )
    ranked = [one["score"] for one in shown["results"]]
    assert ranked == sorted(ranked, reverse=True)
    shown = mtmd("info", str(oracle.folder))
    assert shown.code == 0 and "qwen3_vl" in shown.out
    missing = str(tmp_path / "missing.txt")
    query = ("rerank", "--query-image", str(tmp_path / "shown.png"), missing)
    lines = io.TextIOWrapper(io.BytesIO(b"a square\n\na circle\n"))
    monkeypatch.setattr("sys.stdin", lines)
    made = mtmd(*query, "-", "--top", "1", *arguments)
    assert made.code == 1 and f"{missing}: cannot be read" in made.err
    assert len(made.out.splitlines()) == 1 and "2 documents of" in made.err
    for wrong, reason in (
        ((), "found no query"),
        (("a",), "found no document to rank"),
        (("a", missing), "cannot be read"),
        (("a", "--text", "b", "--top", "0"), "--top"),
    ):
        made = mtmd("rerank", *wrong, *arguments)
        assert made.code == 2 and reason in made.err


def test_behind_the_server(model: Reranker) -> None:
    service = RetrievalService(model)
    client = create_retrieval_app(service, ServerSettings()).test_client()
    shown = png(20, 10)
    documents = ["a", {"image": data_url(shown)}, {"text": "b", "image": data_url(shown)}]
    body = {"query": "a red circle", "documents": documents, "colour": 1}
    made = client.post("/v1/rerank", json=body).get_json()
    mixed = [documents[0], {"image": shown}, {"text": "b", "image": shown}]
    expected = model.rerank("a red circle", mixed).scores
    found = {one["index"]: one["relevance_score"] for one in made["results"]}
    assert np.allclose([found[i] for i in range(3)], expected, atol=1e-6)
    assert made["results"][0]["relevance_score"] == max(found.values())
    texts = {one["index"]: one["document"]["text"] for one in made["results"]}
    assert texts == {0: "a", 1: None, 2: "b"} and made["usage"]["prompt_tokens"] > 300
    assert "ignored: colour" in made["usage"]["mtmd_receipt"]["warnings"][-1]
    parts = {"content": [{"type": "text", "text": "b"}, image_part(data_url(shown))]}
    more = {"top_n": 1, "return_documents": False, "instruction": "Find it."}
    body = {"query": {"text": "a red circle"}, "documents": [parts], **more}
    (one,) = client.post("/rerank", json=body).get_json()["results"]
    said = model.rerank("a red circle", mixed[2:], instruction="Find it.").scores[0]
    assert "document" not in one and abs(one["relevance_score"] - said) < 1e-6
    tei = client.post("/rerank", json={"query": "a", "texts": ["a", "b"], "return_text": True})
    assert {row["text"] for row in tei.get_json()} == {"a", "b"}
    pairs = client.post("/v1/score", json={"text_1": "a red circle", "text_2": ["a", "b"]})
    scores = [row["score"] for row in pairs.get_json()["data"]]
    assert np.allclose(scores, model.rerank("a red circle", ["a", "b"]).scores, atol=1e-6)
    assert service.gives == "scores" and service.stats().prompt_tokens > 500


@pytest.mark.parametrize(
    "body, param",
    [
        ({"query": "a"}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a", {}]}, "documents[1]"),
        ({"query": "a", "documents": ["a", 5]}, "documents[1]"),
        ({"query": "a", "documents": ["a", {"image": "no base64!"}]}, "documents[1].image"),
        ({"query": {"image": data_url(b"no picture")}, "documents": ["a"]}, "query.image"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"query": "a", "documents": ["a", "red " * 5000]}, "documents[1]"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_requests_that_are_refused(model: Reranker, body: dict[str, Any], param: str) -> None:
    app = create_retrieval_app(RetrievalService(model), ServerSettings())
    result = app.test_client().post("/v1/rerank", json=body)
    error = result.get_json()["error"]
    assert result.status_code == 400 and error["param"] == param, error
    assert (error["code"] == "context_length_exceeded") is ("red red" in str(body))


def test_other_routes_say_what_this_model_gives(model: Reranker) -> None:
    client = create_retrieval_app(RetrievalService(model), ServerSettings()).test_client()
    result = client.post("/v1/chat/completions", json={"messages": []})
    assert "gives scores (POST /v1/rerank)" in result.get_json()["error"]["message"]
    result = client.post("/v1/embeddings", json={"input": "a"})
    assert result.get_json()["error"]["code"] == "no_embeddings"
    assert "reranker" in client.get("/").text
    assert client.get("/v1/models").get_json()["data"][0]["mtmd"]["gives"] == "scores"


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_reranker_scores_as_before(tied: bool, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-reranker"
    rerankers.of_texts(folder, tied=tied)
    convert(folder, tmp_path / "made.gguf", to="F32")
    file = GgufFile(tmp_path / "made.gguf")
    assert file.metadata["qwen3.pooling_type"] == 4 and "output.weight" not in file.names()
    assert file.metadata["qwen3.classifier.output_labels"] == ["yes", "no"]
    asked = "a circle", ["a red circle", "a square"]
    before = load_reranker(folder, dtype="fp32").rerank(*asked)
    after = load_reranker(tmp_path / "made.gguf", dtype="fp32").rerank(*asked)
    assert np.abs(before.scores - after.scores).max() < 1e-6
