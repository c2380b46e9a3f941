"""Completions that begin with their prompt, with log probabilities, in the form that OpenAI's had and
lm-evaluation-harness reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import client_for, running

from mtmd import Service, TokenInfo, load
from mtmd.web.interfaces.openai_replies import PlainReply

TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(load(threads=1)) as service:
        yield service


@pytest.fixture(scope="module")
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with (
        running(service, any_model=True) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_prompt_has_log_probabilities_as_its_answer_has(sdk: openai.OpenAI, count: int) -> None:
    requested: Any = {"model": "demo", "max_tokens": count, "temperature": 0}
    plain = sdk.completions.create(prompt=TEXT, **requested).choices[0]
    result = sdk.completions.create(prompt=TEXT, echo=True, logprobs=2, **requested).choices[0]
    assert result.text == TEXT + plain.text and result.finish_reason == plain.finish_reason
    reported = result.logprobs
    assert (
        reported is not None
        and reported.tokens
        and reported.token_logprobs
        and reported.text_offset
    )
    assert len(reported.tokens) == len(reported.token_logprobs) == len(reported.text_offset)
    assert reported.top_logprobs is not None and len(reported.top_logprobs) == len(reported.tokens)
    assert reported.token_logprobs[0] is None and reported.top_logprobs[0] is None
    assert all(logprob < 0 for logprob in reported.token_logprobs[1:])
    assert "".join(reported.tokens) == result.text
    assert all(
        result.text.startswith(t, o)
        for t, o in zip(reported.tokens, reported.text_offset, strict=True)
    )
    for token, own, top in zip(
        reported.tokens[1:], reported.token_logprobs[1:], reported.top_logprobs[1:], strict=True
    ):
        assert top[token] == own and len(top) in (2, 3)
    answer = sdk.completions.create(prompt=TEXT, logprobs=2, **requested).choices[0].logprobs
    if count:
        assert answer is not None and answer.tokens == reported.tokens[-count:]
        assert answer.token_logprobs == pytest.approx(reported.token_logprobs[-count:], abs=1e-4)
        assert answer.text_offset is not None and answer.text_offset[0] == 0


def test_ids_of_tokens_are_scored_one_by_one(sdk: openai.OpenAI, service: Service) -> None:
    """As lm-evaluation-harness asks: prompts of ids, one token more, several at once."""
    first, second = service.tokens_of(TEXT), service.tokens_of("I see a red")
    made = sdk.completions.create(
        model="demo", prompt=[first, second], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    for choice, ids in zip(made.choices, (first, second), strict=True):
        reported = choice.logprobs
        assert reported is not None and reported.token_logprobs is not None
        assert len(reported.token_logprobs) == len(ids) + 1 and reported.token_logprobs[0] is None
    # what a continuation's probability is made of does not depend on how it is asked for
    reported = made.choices[0].logprobs
    whole = sdk.completions.create(
        model="demo", prompt=TEXT, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    expected = whole.choices[0].logprobs
    assert reported is not None and expected is not None and reported.token_logprobs is not None
    assert expected.token_logprobs is not None
    assert reported.token_logprobs[1:] == pytest.approx(expected.token_logprobs[1:], abs=1e-4)


def test_the_token_that_ends_an_answer_is_among_those_of_it(service: Service) -> None:
    """Who asks for one token and leaves it out would else lose one of the prompt's."""
    client = client_for(service, any_model=True)
    body = {"prompt": TEXT, "max_tokens": 1, "temperature": 0}
    (first,) = client.post("/v1/completions", json=body | {"logprobs": 0}).get_json()["choices"]
    ended = body | {"stop_token_ids": service.tokens_of(first["logprobs"]["tokens"][0])[:1]}
    plain = client.post("/v1/completions", json=ended | {"logprobs": 0}).get_json()["choices"][0]
    assert (plain["finish_reason"], plain["logprobs"]["tokens"]) == ("stop", [])
    echo = client.post("/v1/completions", json=ended | {"logprobs": 1, "echo": True}).get_json()
    reported = echo["choices"][0]["logprobs"]
    assert echo["choices"][0]["text"] == TEXT
    assert reported["tokens"][-1] == first["logprobs"]["tokens"][0]
    assert reported["token_logprobs"][-1] == first["logprobs"]["token_logprobs"][0]
    assert len(reported["tokens"]) == len(service.tokens_of(TEXT, around=True)) + 1


def test_several_answers_have_those_of_the_prompt_each(sdk: openai.OpenAI) -> None:
    made = sdk.completions.create(
        model="demo", prompt=TEXT, n=2, max_tokens=1, echo=True, logprobs=0, seed=1, temperature=1
    )
    one, two = (choice.logprobs for choice in made.choices)
    assert one is not None and two is not None
    assert one.token_logprobs is not None and two.token_logprobs is not None
    assert one.token_logprobs[1:-1] == pytest.approx(two.token_logprobs[1:-1], abs=1e-5)


def test_prompt_logprobs_as_vllm_gives_them(service: Service) -> None:
    client = client_for(service, any_model=True)
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 1}
    result = client.post("/v1/completions", json=body).get_json()["choices"][0]
    ids, reported = service.tokens_of(TEXT, around=True), result["prompt_logprobs"]
    assert result["logprobs"] is None and reported[0] is None
    assert [next(iter(one)) for one in reported[1:]] == [str(i) for i in ids[1:]]
    assert all(one[str(i)]["logprob"] < 0 for one, i in zip(reported[1:], ids[1:], strict=True))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "n": 2}
    result = client.post("/v1/chat/completions", json=chat | {"prompt_logprobs": 5}).get_json()
    assert len(result["prompt_logprobs"]) == result["usage"]["prompt_tokens"]
    assert not any("prompt_logprobs" in choice for choice in result["choices"])
    everything = client.post(
        "/v1/chat/completions", json=chat | {"n": 1, "prompt_logprobs": 20}
    ).get_json()["prompt_logprobs"]
    far = 0
    for one, more in zip(result["prompt_logprobs"][1:], everything[1:], strict=True):
        own, *_ = one.values()
        best = sorted(one.values(), key=lambda entry: -entry["logprob"])[:5]
        assert [entry["rank"] for entry in best] == [1, 2, 3, 4, 5]
        assert len(one) == (5 if own["rank"] <= 5 else 6) and own["rank"] >= 1
        assert next(iter(one)) == next(iter(more)) and len(more) in (20, 21)
        assert all(service.spelling_of([int(i)]) == e["decoded_token"] for i, e in one.items())
        far += own["rank"] > 5
    assert far  # ranks beyond the alternatives are known, too
    none = client.post("/v1/chat/completions", json=chat | {"prompt_logprobs": 0}).get_json()
    assert {len(one) for one in none["prompt_logprobs"][1:]} == {1}


def test_each_field_has_as_many_alternatives_as_it_asks_for(service: Service) -> None:
    client = client_for(service, any_model=True)
    body = {"prompt": TEXT, "max_tokens": 1, "echo": True}
    for logprobs, prompt_logprobs in ((1, 4), (4, 1)):
        requested = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        (result,) = client.post("/v1/completions", json=body | requested).get_json()["choices"]
        tops = result["logprobs"]["top_logprobs"][1:]
        assert {len(top) for top in tops} <= {logprobs, logprobs + 1}
        mappings = result["prompt_logprobs"][1:]
        assert {len(one) for one in mappings} <= {prompt_logprobs, prompt_logprobs + 1}


def test_too_many_are_refused_with_the_numbers(service: Service) -> None:
    client = client_for(service, any_model=True)
    before = service.stats().requests
    long = {"prompt": "red " * 400, "max_tokens": 1}
    tokens = len(service.tokens_of(long["prompt"], around=True))
    for path, body, param in (
        ("completions", long | {"n": 64, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("completions", long | {"n": 64, "echo": True, "logprobs": 20}, "prompt_logprobs"),
        (
            "completions",
            {"prompt": [long["prompt"]] * 64, "max_tokens": 1, "echo": True, "logprobs": 20},
            "logprobs",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": long["prompt"]}],
                "n": 64,
                "prompt_logprobs": 20,
            },
            "prompt_logprobs",
        ),
    ):
        result = client.post(f"/v1/{path}", json=body)
        error = result.get_json()["error"]
        assert (result.status_code, error["param"]) == (400, param), error
        assert "x 21 log probabilities" in error["message"] and "131,072" in error["message"]
        if path == "completions" and "n" in body:
            assert f"found {tokens:,} prompt tokens" in error["message"]
            assert f"= {tokens * 21 * 64:,}" in error["message"]
    assert service.stats().requests == before


def test_what_cannot_be_had_is_refused_by_name(service: Service) -> None:
    client = client_for(service, any_model=True)
    body = {"prompt": TEXT, "echo": True, "logprobs": 1}
    result = client.post("/v1/completions", json=body | {"stream": True})
    assert result.status_code == 400 and result.get_json()["error"]["param"] == "stream"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path, requested in (("completions", {"prompt": TEXT}), ("chat/completions", chat)):
        streamed = requested | {"stream": True, "prompt_logprobs": 1}
        result = client.post(f"/v1/{path}", json=streamed)
        assert result.status_code == 400 and result.get_json()["error"]["param"] == "stream"
        assert "prompt_logprobs" in result.get_json()["error"]["message"]
    for wrong in ({"logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}):
        assert client.post("/v1/completions", json=body | wrong).status_code == 400
    streamed = client.post(
        "/v1/completions", json=body | {"stream": True, "logprobs": None}, buffered=True
    )
    assert streamed.status_code == 200 and TEXT in streamed.text


def test_offsets_in_a_stream_go_on(sdk: openai.OpenAI) -> None:
    chunks = sdk.completions.create(
        model="demo", prompt=TEXT, max_tokens=4, logprobs=1, temperature=0, stream=True
    )
    text, offsets = "", []
    for chunk in chunks:
        choice = chunk.choices[0]
        if choice.logprobs is not None and choice.logprobs.tokens:
            assert choice.logprobs.text_offset is not None
            offsets += zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
        text += choice.text
    assert len(offsets) == 4
    assert all(text.startswith(token, offset) for offset, token in offsets)


@pytest.mark.parametrize(
    "text, tokens, offsets",
    [
        ("a b", ["<s>", "a", " b"], [0, 0, 1]),
        ("a b", [" a", " b"], [0, 1]),
        ("x👩y", ["x", "\ufffd", "\ufffd", "y"], [0, 1, 1, 2]),
        ("x👩y", ["x", "\ufffd", "\ufffdy"], [0, 1, 1]),
        ("", ["<s>"], [0]),
        ("abc", ["zz", "abc"], [0, 0]),
    ],
)
def test_where_tokens_begin(text: str, tokens: list[str], offsets: list[int]) -> None:
    reply = PlainReply("cmpl-1", "m", logprobs=True)
    made = reply.text(text, [TokenInfo(1, token, -1.0, ()) for token in tokens])
    assert made["choices"][0]["logprobs"]["text_offset"] == offsets
