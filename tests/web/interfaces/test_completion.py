"""llama.cpp's own form of completions, with the demo model."""

from __future__ import annotations

import json

import pytest
from serving import client_for

from mtmd import Service, load


@pytest.fixture(scope="module")
def service():
    service = Service(load(threads=1, parallel=4))
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service):
    return client_for(service)


def ask(client, **body):
    result = client.post("/completion", json={"prompt": "What is", "n_predict": 6} | body)
    assert result.status_code == 200, result.text
    return result.get_json()


def test_a_text_is_gone_on_from(client, service):
    result = ask(client, return_tokens=True)
    assert service.text_of(result["tokens"]) == result["content"] and len(result["tokens"]) == 6
    assert (result["stop"], result["stop_type"], result["truncated"]) == (True, "limit", False)
    assert (result["tokens_predicted"], result["prompt"]) == (6, "What is")
    assert (result["timings"]["predicted_n"], result["generation_settings"]["n_predict"]) == (6, 6)
    assert (
        result["timings"]["prompt_n"] + result["timings"]["cache_n"] == result["tokens_evaluated"]
    )
    assert ask(client)["tokens"] == []


def test_streamed_pieces_join_to_the_whole(client):
    result = client.post(
        "/completion", json={"prompt": "What is", "n_predict": 6, "stream": True}, buffered=True
    )
    events = [json.loads(line[6:]) for line in result.text.splitlines() if line]
    whole = ask(client, return_tokens=True)
    assert "".join(e["content"] for e in events) == whole["content"]
    assert [token for e in events for token in e["tokens"]] == whole["tokens"]
    assert [e["stop"] for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "limit" and events[-1]["timings"]["predicted_n"] == 6


def test_prompts_of_every_kind(client):
    tokens = client.post("/tokenize", json={"content": "What is"}).get_json()["tokens"]
    expected = ask(client)["content"]
    assert ask(client, prompt=tokens)["content"] == expected
    assert [f["content"] for f in ask(client, prompt=[tokens, tokens])] == [expected] * 2
    mixed = ask(client, prompt=[tokens, "What is"])
    assert [(f["index"], f["content"]) for f in mixed] == [(0, expected), (1, expected)]
    assert isinstance(ask(client, prompt=[97, 98, "What is", 99])["content"], str)


def test_probabilities(client):
    result = ask(client, n_probs=3)["completion_probabilities"]
    assert len(result) == 6
    for token in result:
        assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 3
        assert bytes(token["bytes"]).decode() == token["token"]


def test_fields_that_are_asked_for(client):
    result = ask(client, response_fields=["content", "generation_settings/n_predict", "nothing"])
    assert set(result) == {"content", "generation_settings/n_predict"}
    assert result["generation_settings/n_predict"] == 6


def test_where_it_ends(client):
    text = ask(client, n_predict=20)["content"]
    stop = text[4:7]
    result = ask(client, n_predict=20, stop=[stop])
    assert (result["stop_type"], result["stopping_word"]) == ("word", stop)
    assert result["content"] == text[: text.index(stop)]
    result = ask(client, n_predict=-1, json_schema={"const": "x"})
    assert (result["content"], result["stop_type"]) == ('"x"', "eos")
    assert ask(client, grammar='root ::= "a"{5,5}', n_predict=9)["content"] == "aaaaa"


def test_sampling(client):
    hot = {"temperature": 1.0, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "n_predict": 12}
    assert ask(client, **hot)["content"] == ask(client, **hot)["content"]
    first = ask(client, return_tokens=True)["tokens"][0]
    for bias in ({str(first): -100}, [[first, False]]):
        assert ask(client, return_tokens=True, logit_bias=bias)["tokens"][0] != first


@pytest.mark.parametrize(
    "body, named",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"mirostat": 2}, "mirostat"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"image_data": [{"data": ""}]}, "image_data"),
        ({"n_probs": 21}, "n_probs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(client, body, named):
    result = client.post("/completion", json={"prompt": "a", "n_predict": 2} | body)
    assert result.status_code == 400
    assert result.get_json()["error"]["param"].startswith(named), result.text


def test_a_prompt_that_is_too_long_is_refused(client):
    result = client.post("/completion", json={"prompt": "What is " * 3000})
    assert result.status_code == 400 and "context" in result.get_json()["error"]["message"]
