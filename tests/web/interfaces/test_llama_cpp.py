from __future__ import annotations

import pytest
from fake_service import CONTEXT, FakeService
from serving import client_for, data_url, image_part, png, user

from mtmd import DeviceError


@pytest.fixture
def client():
    return client_for(FakeService())


def test_text_and_tokens(client):
    def tokens(**body):
        return client.post("/tokenize", json=body).get_json()["tokens"]

    assert tokens(content="ab") == [2, 97, 98]
    assert tokens(content="ab", add_special=True, parse_special=False) == [1, 3, 97, 98]
    assert tokens(content="b", with_pieces=True)[1] == {"id": 98, "piece": "b"}
    result = client.post("/detokenize", json={"tokens": [97, 98]}).get_json()
    assert result == {"content": "ab", "prompt": "ab"}
    for path, body in (
        ("/tokenize", {"content": "x" * (CONTEXT * 64 + 1)}),
        ("/tokenize", {"content": 3}),
        ("/tokenize", {"prompt": "x" * (CONTEXT * 64 + 1)}),
        ("/tokenize", {"content": "a", "prompt": "a"}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"] * 100}),
    ):
        assert client.post(path, json=body).status_code == 400


def test_what_lm_evaluation_harness_asks_about_a_tokenizer(client):
    """As lm_eval 0.4.13 does with `tokenizer_backend=remote`."""
    info = client.get("/tokenizer_info").get_json()
    assert (info["eos_token"], info["bos_token"]) == ("</s>", None)
    assert info["chat_template"] == "{{ messages }}" and info["max_model_len"] == CONTEXT
    body = {"prompt": "ab", "add_special_tokens": False}
    result = client.post("/tokenize", json=body).get_json()
    assert result == {"tokens": [2, 97, 98], "count": 3, "max_model_len": CONTEXT}
    whole = client.post("/tokenize", json={"prompt": "ab"}).get_json()
    assert whole["tokens"] == [1, 2, 97, 98]


def test_the_prompt_as_the_template_writes_it(client):
    messages = [{"role": "system", "content": "a"}, user("b", image_part(data_url(png())))]
    result = client.post("/apply-template", json={"messages": messages}).get_json()
    assert result == {"prompt": "<system>a<user>b"}
    result = client.post("/apply-template", json={"messages": messages, "model": "other"})
    assert result.status_code == 404


def test_slots_and_properties():
    service = FakeService()
    client = client_for(service)
    slots = client.get("/slots").get_json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert slots[0]["n_ctx"] == CONTEXT and not any(slot["is_processing"] for slot in slots)
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200
    service.running = 4
    assert all(slot["is_processing"] for slot in client.get("/slots").get_json())
    assert client.get("/slots?fail_on_no_slot=1").status_code == 503
    result = client.get("/props").get_json()
    assert result["default_generation_settings"]["n_ctx"] == CONTEXT
    assert result["modalities"]["vision"] and result["total_slots"] == 4
    assert result["chat_template"] == "{{ messages }}"


def test_whether_it_is_ready_is_told_without_a_key():
    service = FakeService()
    client = client_for(service, api_keys=("a-long-enough-key",))
    assert client.get("/ready").get_json() == {"status": "ready"}
    assert client.get("/version").status_code == 200
    assert client.get("/slots").status_code == 401
    service.fail(DeviceError("the device hangs"))
    result = client.get("/ready")
    assert result.status_code == 503 and result.get_json()["reason"] == "the device hangs"
