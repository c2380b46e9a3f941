"""Vectors over HTTP, by the official client, of a tiny dual encoder."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from dual_encoders import clip
from fake_service import FakeService
from serving import client_for, data_url, image_part, noise, png, running, user

from mtmd import BusyError, DeviceError
from mtmd.embedding.embedder import load_embedder
from mtmd.embedding.service import RetrievalService
from mtmd.web.settings import MediaBudget, ServerSettings
from mtmd.web.small_apps.retrieval_app import OLLAMAS, WRITES, create_retrieval_app

RED, BLUE = png(20, 10), png(30, 30, "blue")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dual") / "tiny clip"
    clip(folder)
    return load_embedder(folder, threads=1)


@pytest.fixture(scope="module")
def sdk(embedder):
    service = RetrievalService(embedder)
    app = create_retrieval_app(service, ServerSettings(aliases=("vectors",)))
    with (
        running(SimpleNamespace(close=lambda: None), app) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(embedder):
    return small_client(embedder)


def small_client(embedder, **settings):
    return create_retrieval_app(
        RetrievalService(embedder), ServerSettings(**settings)
    ).test_client()


def vectors(result):
    return np.array([row["embedding"] for row in result.get_json()["data"]], np.float32)


def test_the_official_client_embeds_texts(sdk, embedder):
    texts = ["a red circle", "two dogs", ""]
    expected = embedder.embed(texts=texts)
    actual = sdk.embeddings.create(model="tiny clip", input=texts)  # asks for base64 by itself
    assert np.array_equal(np.array([row.embedding for row in actual.data], np.float32), expected)
    assert [row.index for row in actual.data] == [0, 1, 2]
    assert actual.usage.prompt_tokens == actual.usage.total_tokens > 3
    plain = sdk.embeddings.create(model="vectors", input=texts[0], encoding_format="float")
    assert plain.model == "vectors" and len(plain.data) == 1
    assert np.abs(np.float32(plain.data[0].embedding) - expected[0]).max() < 1e-6  # another batch


def test_a_misspelt_address_is_not_sent_to_pages_that_are_not_here(client):
    reported = client.post("/v1/embedding", json={}).get_json()["error"]["message"]
    assert reported == "there is no such route; did you mean /v1/embeddings?"
    page = client.get("/v1", headers={"Accept": "text/html"})
    assert page.status_code == 404 and "docs" not in page.text


def test_pictures_as_jinas_clients_send_them(client, embedder):
    bare = base64.b64encode(RED).decode()
    body = {
        "input": [{"text": "a"}, {"image": bare}, "b", {"image": data_url(BLUE)}],
        "normalized": True,
        "embedding_type": "float",
        "task": "retrieval.query",
    }
    result = vectors(client.post("/v1/embeddings", json=body))
    pictures, texts = embedder.embed([RED, BLUE]), embedder.embed(texts=["a", "b"])
    assert np.array_equal(result, np.stack([texts[0], pictures[0], texts[1], pictures[1]]))
    raw = vectors(client.post("/v1/embeddings", json={"input": "a", "normalize": False}))
    assert np.array_equal(raw, embedder.embed(texts="a", normalize=False))


def test_pictures_as_vllms_clients_send_them(client, embedder):
    shown = user(image_part(data_url(RED)), " ")
    result = client.post("/v1/embeddings", json={"messages": [shown], "encoding_format": "float"})
    assert np.array_equal(vectors(result), embedder.embed(RED))
    result = client.post("/embeddings", json={"messages": [user("two dogs")]})
    assert np.array_equal(vectors(result), embedder.embed(texts="two dogs"))


def test_large_pictures(client, embedder):
    large, other = noise(1), noise(2)
    inputs = [{"image": data_url(large)}, "a", {"image": base64.b64encode(other).decode()}]
    result = client.post("/v1/embeddings", json={"input": inputs})
    one, _, two = vectors(result)
    assert np.allclose([one, two], embedder.embed([large, other]), atol=1e-5)
    result = client.post("/v1/embeddings", json={"messages": [user(image_part(data_url(large)))]})
    assert np.allclose(vectors(result)[0], one, atol=1e-5)


def test_uploads_are_embedded(client, embedder):
    upload = client.post(
        "/v1/files", data={"file": (io.BytesIO(RED), "r.png"), "purpose": "vision"}
    )
    id_ = upload.get_json()["id"]
    result = client.post("/v1/embeddings", json={"input": {"image": id_}})
    assert np.array_equal(vectors(result), embedder.embed(RED))
    part = {"type": "file", "file": {"file_data": data_url(RED), "filename": "r.png"}}
    result = client.post("/v1/embeddings", json={"messages": [user(part)]})
    assert np.array_equal(vectors(result), embedder.embed(RED))


def test_a_text_that_is_cut_is_told_or_refused(client):
    long = "the quick brown fox " * 20
    result = client.post("/v1/embeddings", json={"input": ["a", long], "colour": 1})
    cut, unknown = result.get_json()["usage"]["mtmd_receipt"]["warnings"]
    assert "text 2: the end is not seen" in cut and "ignored: colour" in unknown
    result = client.post("/v1/embeddings", json={"input": ["a", long], "truncate": False})
    assert result.status_code == 400 and "text 2" in result.get_json()["error"]["message"]


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"input": []}, "input"),
        ({"input": [[1, 2]]}, "input[0]"),
        ({"input": [1, 2]}, "input[0]"),
        ({"input": [{"video": "x"}]}, "input[0]"),
        ({"input": ["x" * 70_000]}, "input[0]"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": {"image": "no base64!"}}, "input[0].image"),
        ({"input": {"image": base64.b64encode(b"no picture").decode()}}, "input[0].image"),
        ({"input": [{"image": data_url(RED)}] * 3}, "messages"),
        ({"messages": [user(image_part(data_url(RED)), "two dogs")]}, "messages"),
        ({"messages": [user("a"), user("b")]}, "messages"),
        ({}, "input"),
        ({"input": "a", "messages": [user("a")]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(embedder, body, param):
    client = small_client(embedder, media=MediaBudget(images=2))
    result = client.post("/v1/embeddings", json=body)
    assert result.status_code in (400, 404, 413), result.text
    assert result.get_json()["error"]["param"] == param and len(result.data) < 1000


def test_unknown_fields_may_be_refused(embedder):
    client = small_client(embedder, unknown_fields="refuse")
    result = client.post("/v1/embeddings", json={"input": "a", "colour": 1})
    assert result.status_code == 400 and result.get_json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    "more",
    [{}, {"dimensions": 8}, {"input": [[1, 2]]}, {"colour": 1}, {"encoding_format": "int8"}],
    ids=str,
)
def test_a_model_that_writes_says_first_that_it_gives_no_vectors(more):
    client = client_for(FakeService(), unknown_fields="refuse")
    result = client.post("/v1/embeddings", json={"input": "a"} | more)
    error = result.get_json()["error"]
    assert result.status_code == 400 and error["code"] == "no_embeddings"
    assert "dual encoder" in error["message"]


def test_a_model_that_is_not_here_is_told_where_no_model_gives_vectors():
    client = client_for(FakeService())
    result = client.post("/v1/embeddings", json={"input": "a", "model": "other"})
    assert result.status_code == 404 and result.get_json()["error"]["code"] == "model_not_found"
    assert client.post("/v1/embeddings", json={"model": 5}).get_json()["error"]["param"] == "model"


def test_a_dual_encoder_says_that_it_writes_nothing(client):
    for path in WRITES:
        result = client.post(path, json={"messages": []})
        error = result.get_json()["error"]
        text = error if isinstance(error, str) else error["message"]
        assert result.status_code == 400 and "gives vectors (POST /v1/embeddings)" in text
    assert isinstance(client.post("/api/chat", json={}).get_json()["error"], str)
    assert client.post("/v1/messages", json={}).get_json()["type"] == "error"


def test_a_dual_encoder_tells_ollamas_clients_where_its_vectors_are(client):
    for path in OLLAMAS:
        result = client.post(path, json={"model": "tiny clip", "input": "a"})
        assert result.status_code == 400
        assert "gives vectors at POST /v1/embeddings" in result.get_json()["error"]


def test_what_a_dual_encoder_tells_of_itself(embedder):
    client = small_client(embedder, api_keys=("a-long-enough-key",))
    for path in ("/", "/health", "/ready", "/version"):
        assert client.get(path).status_code == 200
    assert "dual encoder" in client.get("/").text
    assert client.get("/v1/models").status_code == 401
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 401
    key = {"Authorization": "Bearer a-long-enough-key"}
    (model,) = client.get("/v1/models", headers=key).get_json()["data"]
    assert model["id"] == "tiny clip" and model["mtmd"]["embedding_width"] == 24
    assert client.get("/v1/models/other", headers=key).status_code == 404
    client.post("/v1/embeddings", json={"input": ["a", {"image": data_url(RED)}]}, headers=key)
    lines = client.get("/metrics", headers=key).text.splitlines()
    reported = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert (reported["mtmd_images_total"], reported["mtmd_finished_total"]) == ("1.0", "1.0")
    assert client.get("/warmup", headers=key).get_json()["model"] == "tiny clip"
    assert client.get("/props", headers=key).get_json()["modalities"]["vision"]


def test_facts_of_a_dual_encoder(embedder):
    result = RetrievalService(embedder).checkpoint_facts
    stored = 4 * result.parameters
    assert stored == embedder.checkpoint.weight_bytes and result.parameters > 1000
    assert (result.format, result.architecture, result.width) == ("safetensors", "clip", 24)
    assert result.weight_type == "F32"


def test_threads_share_a_dual_encoder(embedder):
    service = RetrievalService(embedder)
    texts = ["a red circle", "two dogs", "a cat", "the fox"]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda text: service.embeddings([], [text]).vectors[0], texts * 3))
    expected = embedder.embed(texts=texts)
    for vector, text in zip(made, itertools.cycle(range(4)), strict=False):
        assert np.abs(vector - expected[text]).max() < 1e-5
    stats = service.stats()
    assert (stats.requests, stats.finished, stats.running) == (12, 12, 0)
    with contextlib.suppress(Exception):
        service.embeddings([], [])
    assert service.stats().failed == 1
    service.close(1)
    with pytest.raises(BusyError):
        service.embeddings([], ["a"])


def test_a_device_that_fails_is_told(embedder, monkeypatch):
    service, reported = RetrievalService(embedder), []
    service.on_fault(reported.append)

    def fails(*_, **__):
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(embedder, "embeddings", fails)
    with pytest.raises(RuntimeError):  # of this request alone, as the device goes on
        service.embeddings([], ["a"])
    assert service.fault is None and service.stats().failed == 1
    broken = SimpleNamespace(name="gpu", synchronize=fails)
    monkeypatch.setattr(embedder, "backends", [broken])
    for _ in range(2):
        with pytest.raises(DeviceError, match="the device gpu has failed"):
            service.embeddings([], ["a"])
    assert reported == [service.fault] and service.stats().failed == 2
