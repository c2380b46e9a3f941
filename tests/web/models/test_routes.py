"""Every interface over several models: which one answers, what lists say, what is told of one that is
not there.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from fake_models import FakeLoader, registry_of
from fake_service import until
from prometheus_client.parser import text_string_to_metric_families
from serving import post_chat, user

from mtmd import ModelError
from mtmd.checkpoint import collection
from mtmd.checkpoint.cached_models import Cache
from mtmd.web.app import create_app_of_many
from mtmd.web.models.entry import Waiter
from mtmd.web.models.presets import Preset
from mtmd.web.settings import ServerSettings

NEEDS = {"left": 4, "right": 4, "broken": 1}
PRESETS = {"right": Preset("Be brief.", {"max_tokens": 3}, aliases=("gpt-4o",))}


@pytest.fixture
def loader():
    made = FakeLoader(NEEDS)
    made.fails["broken"] = ModelError("tokenizer.json: not there")
    return made


@pytest.fixture
def registry(loader):
    made, _ = registry_of(NEEDS, PRESETS, loader)
    made.start()
    yield made
    loader.gate.set()
    made.close()


@pytest.fixture
def client(registry):
    return create_app_of_many(registry, ServerSettings()).test_client()


def test_a_model_of_the_hub_is_added(registry, loader, monkeypatch):
    """Without keys, on this machine's own address; with keys where an option says so."""
    monkeypatch.setattr(collection, "ask_hub", hub)
    monkeypatch.setattr(collection, "read_cache", lambda: Cache((), ()))
    client = create_app_of_many(registry, ServerSettings()).test_client()
    assert client.get("/api/models").get_json()["may_add"] is True
    loader.needs = NEEDS | {"org/new:Q4_K_M": 4}
    for name, reason in (
        ("org/none", "found on the Hugging Face hub"),
        ("org/new:Q8_0", "expected one GGUF file of type Q8_0 in the repository, found"),
        ("/etc/passwd", "is no name on the Hugging Face hub"),
        ("a/b/c", "is no name on the Hugging Face hub"),
        (".", "is no name on the Hugging Face hub"),
    ):
        refused = client.post("/models/add", json={"model": name})
        assert refused.status_code == 400 and reason in refused.get_json()["error"]["message"]
    assert client.post("/models/add", json={"model": "org/new:Q4_K_M"}).status_code == 200
    until(lambda: "load org/new:Q4_K_M" in loader.log)
    assert client.post("/models/add", json={"model": "org/new:Q4_K_M"}).status_code == 200
    listed = [model["name"] for model in client.get("/api/models").get_json()["models"]]
    assert listed.count("org/new:Q4_K_M") == 1
    result = post_chat(client, "hi", model="org/new:Q4_K_M").get_json()
    assert result["choices"][0]["message"]["content"].startswith("org/new:Q4_K_M says")


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({}, True),
        ({"add_models": False}, False),
        ({"api_keys": ("k" * 16,)}, False),
        ({"api_keys": ("k" * 16,), "add_models": True}, True),
        ({"host": "0.0.0.0", "insecure_no_auth": True}, False),
    ],
)
def test_who_may_add_models(registry, settings, may):
    client = create_app_of_many(registry, ServerSettings(**settings)).test_client()
    key = {"Authorization": f"Bearer {'k' * 16}"}
    assert client.get("/api/models", headers=key).get_json()["may_add"] is may
    if not may:
        refused = client.post("/models/add", json={"model": "org/new"}, headers=key)
        assert refused.status_code == 403
        assert refused.get_json()["error"]["code"] == "adding_denied"


def hub(model, repo, *_, **__):
    if repo != "org/new":
        raise ModelError(
            f"model {model!r} is neither a local folder nor found on the Hugging Face hub"
        )
    return SimpleNamespace(siblings=[SimpleNamespace(rfilename="new-Q4_K_M.gguf")])


def test_the_model_that_a_request_names_answers_and_its_name_is_in_the_answer(client, loader):
    for name, own in (("left", "left"), ("right", "right"), ("gpt-4o", "right")):
        result = post_chat(client, "hi", model=name, max_tokens=9).get_json()
        assert result["model"] == name
        assert result["choices"][0]["message"]["content"].startswith(f"{own} says")
    assert loader.log == ["load left", "load right"]


BODIES = {
    "/v1/chat/completions": {"messages": [user("hi")]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions/input_tokens": {"messages": [user("hi")]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/completion": {"prompt": "hi"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [65]},
    "/apply-template": {"messages": [user("hi")]},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_interface_goes_through_the_same_choice(client, registry, loader, path):
    body = BODIES[path]
    result = client.post(path, json=body | {"model": "right"})
    assert result.status_code == 200 and loader.log == ["load right"]
    assert all(not entry.users for entry in registry._entries.values()), "it may go again"
    unknown = client.post(path, json=body | {"model": "wrong"})
    assert unknown.status_code == 404 and "'left', 'right'" in unknown.get_data(as_text=True)
    broken = client.post(path, json=body | {"model": "broken"})
    assert broken.status_code == 503
    assert "tokenizer.json: not there" in broken.get_data(as_text=True)
    assert client.post(path, json=body | {"model": "right"}).status_code == 200


def test_a_wrong_request_loads_nothing(client, loader):
    assert post_chat(client, "hi", model="left", temperature=-1).status_code == 400
    assert client.post("/v1/messages", json={"model": "left"}).status_code == 400
    assert loader.log == []


def test_what_a_preset_says_holds_where_a_request_does_not(client, registry):
    post_chat(client, "hi", model="right")
    service = registry._entries["right"].served.service
    ticket = service.tickets[-1]
    assert ticket.settings.max_tokens == 3
    assert ticket.messages[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Be long."}, user("hi")]
    client.post("/v1/chat/completions", json={"model": "right", "messages": own, "max_tokens": 7})
    ticket = service.tickets[-1]
    assert ticket.settings.max_tokens == 7 and ticket.messages[0]["content"] == "Be long."
    client.post("/v1/responses", json={"model": "right", "input": "hi"})
    assert service.tickets[-1].messages[0]["content"] == "Be brief."
    # The page shows the system prompt, which its reader may have cleared.
    path = f"/api/conversations/{client.post('/api/conversations', json={}).get_json()['id']}"
    asked = client.post(f"{path}/messages", json={"text": "hi"}).get_json()["message"]["id"]
    client.post(f"{path}/answers", json={"parent": asked, "options": {"model": "right"}})
    assert [m["role"] for m in service.tickets[-1].messages] == ["user"]
    assert service.tickets[-1].settings.max_tokens == 3


def test_lists_tell_all_and_their_states(client, registry):
    registry.load("left")
    assert until(lambda: registry.find("left").state == "loaded")
    assert until(lambda: registry.find("right").room == "fits")
    listed = {m["id"]: m for m in client.get("/v1/models").get_json()["data"]}
    assert list(listed) == ["left", "right", "gpt-4o", "broken"]
    assert {abs(time.time() - m["created"]) < 600 for m in listed.values()} == {True}
    assert listed["left"]["status"] == {"value": "loaded"}
    assert listed["right"]["status"] == {"value": "unloaded"}
    assert listed["right"]["mtmd"]["memory_bytes"] == {"cpu": 4 << 30}
    assert client.get("/v1/models/gpt-4o").get_json()["id"] == "gpt-4o"
    assert client.get("/v1/models/wrong").status_code == 404
    tags = client.get("/api/tags").get_json()["models"]
    assert [m["name"] for m in tags] == [
        "left:latest",
        "right:latest",
        "gpt-4o:latest",
        "broken:latest",
    ]
    assert [(m["details"]["family"], m["details"]["parameter_size"]) for m in tags[:2]] == [
        ("unknown", ""),  # opened, and its loader says nothing of it
        ("unknown", ""),
    ]
    running = client.get("/api/ps").get_json()["models"]
    assert [m["name"] for m in running] == ["left:latest"]
    shown = client.get("/api/models").get_json()
    assert [(m["name"], m["state"], m["room"]) for m in shown["models"][:2]] == [
        ("left", "loaded", ""),
        ("right", "unloaded", "fits"),
    ]
    assert shown["memory"]["cpu"]["taken"] == 4 << 30


def test_loading_by_hand_and_how_far_it_is(client, registry, loader):
    loader.gate.clear()
    assert client.post("/models/load", json={"model": "left"}).get_json() == {"success": True}
    assert until(lambda: "load left" in loader.log)
    loader.read = (1, 4)
    for path, status in (("/ready", "ready"), ("/health", "ok")):
        result = client.get(path)
        assert result.status_code == 200 and result.get_json()["status"] == status
        assert result.get_json()["loading"]["progress"] == 0.25
    loader.gate.set()
    assert until(lambda: registry.find("left").state == "loaded")
    assert "loading" not in client.get("/ready").get_json()
    assert client.post("/models/unload", json={"model": "left"}).get_json() == {"success": True}
    assert until(lambda: loader.log[-1] == "unload left")
    assert client.post("/models/load", json={"model": "wrong"}).status_code == 404


def test_ollamas_way_to_load_and_unload(client, loader):
    loaded = client.post("/api/generate", json={"model": "left:latest"}).get_json()
    assert loaded["done_reason"] == "load" and loader.log == ["load left"]
    gone = client.post("/api/generate", json={"model": "left", "keep_alive": 0}).get_json()
    assert gone["done_reason"] == "unload"
    assert until(lambda: loader.log[-1] == "unload left")


def test_what_asks_about_a_model_loads_none(client, loader):
    assert client.get("/slots").get_json() == []
    assert client.get("/warmup").status_code == 409
    assert client.get("/api/verdict").get_json()["state"] == "none"
    assert client.get("/api/stats").get_json()["model"] is None
    assert client.get("/props").get_json()["models"] == ["left", "right", "broken"]
    assert client.get("/api/about?model=right").get_json()["preset"]["max_tokens"] == 3
    assert client.post("/api/count", json={"text": "hi"}).get_json() == {"in_memory": False}
    assert loader.log == []
    post_chat(client, "hi", model="right")
    assert client.get("/warmup").get_json()["model"] == "fake"
    assert client.get("/warmup?model=left").status_code == 409
    assert client.get("/api/stats").get_json()["model"] == "right"


def test_the_default_is_what_pages_and_programs_begin_with_whatever_was_used_last(loader):
    registry, _ = registry_of(NEEDS, PRESETS, loader, default="left")
    registry.start()
    client = create_app_of_many(registry, ServerSettings()).test_client()
    try:
        post_chat(client, "hi", model="right")
        assert client.get("/api/about").get_json()["model"] == "left"
        assert client.get("/props").get_json()["model"] == "left"
        assert client.post("/api/count", json={"text": "hi"}).get_json() == {"in_memory": False}
        assert client.get("/api/stats").get_json()["model"] == "right"
        body = {"messages": [user("hi")]}
        result = client.post("/v1/chat/completions", json=body).get_json()
        assert result["model"] == "left"
    finally:
        registry.close()


def test_metrics_name_the_model(client, registry):
    for name in ("left", "right", "right", "broken"):
        post_chat(client, "hi", model=name)
    result = client.get("/metrics").get_data(as_text=True)
    values = {
        (s.name, s.labels.get("model")): s.value
        for family in text_string_to_metric_families(result)
        for s in family.samples
    }
    assert values["mtmd_requests_total", "right"] == 2
    assert values["mtmd_requests_total", "left"] == 1
    assert values["mtmd_model_loaded", "right"] == 1
    assert values["mtmd_model_loads_total", "left"] == 1
    assert values["mtmd_model_load_failures_total", "broken"] == 1
    assert values["mtmd_model_waiting", "left"] == 0
    registry._entries["left"].waiters.append(Waiter(0.0))
    assert 'mtmd_model_waiting{model="left"} 1.0' in client.get("/metrics").get_data(as_text=True)
    registry._entries["left"].waiters.clear()


def test_the_page_asks_the_model_it_has_chosen(client):
    chat = client.post("/api/conversations", json={}).get_json()["id"]
    sent = client.post(f"/api/conversations/{chat}/messages", json={"text": "hi"}).get_json()
    requested = {"parent": sent["message"]["id"], "options": {"model": "right"}}
    answer = client.post(f"/api/conversations/{chat}/answers", json=requested).get_json()
    assert answer["options"]["model"] == "right"
    events = client.get(f"/api/answers/{answer['id']}/events").get_data(as_text=True)
    end = json.loads(events.strip().rpartition("data: ")[2])
    assert end["message"]["text"].startswith("right says")


def test_two_answers_to_one_message_are_written_beside_each_other(client, registry):
    """And one alone waits for both."""
    chat = client.post("/api/conversations", json={}).get_json()["id"]
    sent = client.post(f"/api/conversations/{chat}/messages", json={"text": "hi"}).get_json()
    parent = sent["message"]["id"]
    for name in ("left", "right"):
        registry.load(name)
        assert until(lambda name=name: registry.find(name).state == "loaded")
        registry.find(name)
        registry._entries[name].served.service.pace_s = 0.2

    def start(side, name):
        body = {"parent": parent, "options": {"model": name}}
        path = f"/api/conversations/{chat}/answers"
        return client.post(path, json=body if side is None else body | {"side": side})

    assert start(0, "left").status_code == 200
    both = start(1, "right")
    assert both.status_code == 200 and both.get_json()["options"]["side"] == 1
    assert start(1, "right").status_code == 409
    assert start(None, "left").status_code == 409
