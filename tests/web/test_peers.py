"""What the server tests of llama.cpp and vLLM ask of a server, asked of this one with the demo model.
Each row is named after the peer's test; what it asks for and we do not do has its reason, and a
row that shows that it is refused or left out in the open. docs/clients.md lists those.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from serving import client_for, data_url, image_part, png, user

from mtmd import Service, load

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "clients.md").read_text()
RED = image_part(data_url(png(20, 10)))
HI = [user("What is the best book")]
BOOK = [{"role": "system", "content": "Book"}, *HI]
KEY = "a-long-enough-key"
CHAT, COMPLETION, RAW = "/chat/completions", "/completion", "/v1/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/responses"
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data_url(png()).partition(",")[2]}}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["left", "right"]}},
            "required": ["at"],
        },
    },
}
OWN = {"name": "look", "input_schema": TOOL["function"]["parameters"]}
USED = {"type": "tool_use", "id": "test123", "name": "look", "input": {"at": "left"}}
RESULT = {"type": "tool_result", "tool_use_id": "test123", "content": "a circle"}


def stated(body: Any) -> str:
    return body["choices"][0]["message"]["content"]


def raw(body: Any) -> str:
    return body["choices"][0]["text"]


def with_results(*blocks: Any) -> dict[str, Any]:
    return {
        "messages": [
            *HI,
            {"role": "assistant", "content": [USED]},
            {"role": "user", "content": [*blocks]},
        ],
        "max_tokens": 20,
    }


def schema(kind: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 20, "response_format": kind}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages) or BOOK, "max_tokens": 8, **more}


def message(**more: Any) -> dict[str, Any]:
    return {"model": "test", "max_tokens": 20, "messages": HI, **more}


def deltas(chunks: Any) -> list[Any]:
    return [c["choices"][0] for c in chunks if c["choices"]]


def text_of(chunks: Any) -> str:
    return "".join(c["delta"].get("content") or "" for c in deltas(chunks))


# the peer's test -> path, body (None for GET), what is expected of status or of body
STORED: dict[str, tuple[str, Any, Any]] = {
    "llama chat: a system message and a question": (
        CHAT,
        chat(),
        lambda b: b["id"].startswith("chatcmpl") and b["usage"]["completion_tokens"] == 8 and b["choices"][0]["finish_reason"] == "length" and b["system_fingerprint"],
    ),
    "llama chat: several texts in one message": (CHAT, chat(user("What is", "the best book")), stated),
    "llama chat: streamed, one id, role first, end without content": (
        CHAT,
        chat(stream=True),
        lambda c: len({x["id"] for x in c}) == 1 and c[0]["choices"][0]["delta"]["role"] == "assistant" and all("role" not in x["delta"] for x in deltas(c)[1:]) and "content" not in deltas(c)[-1]["delta"],
    ),
    "llama chat: another model's name, with --any-model": (CHAT, chat(model="gpt-3.5-turbo"), stated),
    "llama chat: an assistant's text is gone on from": (CHAT, chat(*BOOK, {"role": "assistant", "content": "I see"}), stated),
    "llama chat: an assistant's parts are gone on from": (CHAT, chat(*BOOK, {"role": "assistant", "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "see"}]}), stated),
    "llama chat: /apply-template": ("/apply-template", {"messages": BOOK}, lambda b: "Book" in b["prompt"]),
    "llama chat: json_object with a constant": (CHAT, schema({"type": "json_object", "schema": {"const": "42"}}), lambda b: stated(b) == '"42"'),
    "llama chat: json_object with items": (CHAT, schema({"type": "json_object", "schema": {"items": [{"type": "integer"}]}}), stated),
    "llama chat: json_schema": (CHAT, schema({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}), lambda b: stated(b) == '"foooooo"'),
    "llama chat: json_object": (CHAT, schema({"type": "json_object"}), lambda b: stated(b).startswith("{")),
    "llama chat: an unknown format": (CHAT, schema({"type": "sound"}), 400),
    "llama chat: a schema that is a number": (CHAT, schema({"type": "json_object", "schema": 123}), 400),
    "llama chat: a type that is a number": (CHAT, schema({"type": "json_object", "schema": {"type": 123}}), 400),
    "llama chat: a type that is none": (CHAT, schema({"type": "json_object", "schema": {"type": "hiccup"}}), 400),
    "llama chat: json_schema beside the messages": (CHAT, chat(json_schema={"const": "42"}), lambda b: stated(b) == '"42"'),
    "llama chat: a grammar in GBNF": (CHAT, chat(grammar='root ::= "a"{5,5}'), lambda b: stated(b) == "aaaaa"),
    "llama chat: no messages": (CHAT, {"messages": None}, 400),
    "llama chat: a text for messages": (CHAT, {"messages": "string"}, 400),
    "llama chat: a number for a message": (CHAT, {"messages": [123]}, 400),
    "llama chat: an empty message": (CHAT, {"messages": [{}]}, 400),
    "llama chat: a number for a role": (CHAT, {"messages": [{"role": 123}]}, 400),
    "llama chat: a number for a content": (CHAT, {"messages": [{"role": "system", "content": 123}]}, 400),
    "llama chat: an empty message after another": (CHAT, {"messages": [{"role": "system", "content": "test"}, {}]}, 400),
    "llama chat: logprobs join to the text": (
        CHAT,
        chat(logprobs=True, top_logprobs=10),
        lambda b: "".join(t["token"] for t in b["choices"][0]["logprobs"]["content"]) == stated(b) and all(t["logprob"] <= 0 and t["top_logprobs"] for t in b["choices"][0]["logprobs"]["content"]),
    ),
    "llama chat: streamed logprobs in every chunk": (
        CHAT,
        chat(logprobs=True, top_logprobs=10, stream=True),
        lambda c: all(x["logprobs"]["content"] for x in deltas(c)[1:-1]) and "".join(t["token"] for x in deltas(c)[1:-1] for t in x["logprobs"]["content"]) == text_of(c),
    ),
    "llama chat: logit_bias": (CHAT, chat(logit_bias={str(i): -100 for i in range(97, 123)}), stated),
    "llama chat: a conversation beyond the context": (CHAT, chat(user("What is " * 3000)), 400),
    "llama chat: streamed, beyond the context": (CHAT, chat(user("What is " * 3000), stream=True), 400),
    "llama chat: progress where it is asked for": (
        CHAT,
        chat(stream=True, return_progress=True),
        lambda c: any("mtmd" in x for x in c),
    ),
    "llama chat: two choices": (CHAT, chat(n=2), lambda b: [c["index"] for c in b["choices"]] == [0, 1]),
    "llama completion: a text": (COMPLETION, {"prompt": "I believe", "n_predict": 8}, lambda b: b["timings"]["predicted_n"] == 8 and b["tokens"] == [] and b["truncated"] is False),
    "llama completion: with tokens": (COMPLETION, {"prompt": "I believe", "n_predict": 8, "return_tokens": True}, lambda b: len(b["tokens"]) == 8),
    "llama completion: streamed": (COMPLETION, {"prompt": "I believe", "n_predict": 8, "stream": True}, lambda c: c[-1]["stop"] and c[-1]["stop_type"] == "limit" and all(x["tokens"] for x in c[:-1])),
    "llama completion: OpenAI's": (RAW, {"prompt": "I believe", "max_tokens": 8}, lambda b: raw(b) and b["choices"][0]["finish_reason"] == "length"),
    "llama completion: OpenAI's, streamed": (RAW, {"prompt": "I believe", "max_tokens": 8, "stream": True}, lambda c: "".join(x["choices"][0]["text"] for x in c)),
    "llama completion: a prompt beyond the context": (COMPLETION, {"prompt": "I believe the meaning " * 999}, 400),
    "llama completion: tokens for a prompt": (COMPLETION, {"prompt": [97, 98], "n_predict": 4}, lambda b: isinstance(b["content"], str)),
    "llama completion: several prompts": (COMPLETION, {"prompt": [[97, 98], [97, 98]], "n_predict": 4}, lambda b: len(b) == 2 and b[0]["content"] == b[1]["content"]),
    "llama completion: texts and tokens for prompts": (COMPLETION, {"prompt": [[97, 98], "ab"], "n_predict": 4}, lambda b: len(b) == 2),
    "llama completion: texts and tokens in one prompt": (COMPLETION, {"prompt": [97, "ab", 98], "n_predict": 4}, lambda b: isinstance(b["content"], str)),
    "llama completion: the fields that are asked for": (COMPLETION, {"prompt": "ab", "n_predict": 4, "response_fields": ["content", "generation_settings/n_predict", "prompt"]}, lambda b: len(b) == 3 and b["generation_settings/n_predict"] == 4),
    "llama completion: n_probs": (COMPLETION, {"prompt": "ab", "n_predict": 5, "n_probs": 10}, lambda b: len(b["completion_probabilities"]) == 5 and all(len(t["top_logprobs"]) == 10 and t["id"] > 0 for t in b["completion_probabilities"])),
    "llama completion: n_probs, streamed": (COMPLETION, {"prompt": "ab", "n_predict": 5, "n_probs": 10, "stream": True}, lambda c: all(len(x["completion_probabilities"]) == 1 for x in c[:-1])),
    "llama completion: the same seed": (COMPLETION, {"prompt": ["ab", "ab"], "n_predict": 9, "seed": 42, "temperature": 1.0}, lambda b: b[0]["content"] == b[1]["content"]),
    "llama ctx_shift: a short prompt": (COMPLETION, {"prompt": "Hi", "n_predict": 64, "ignore_eos": True}, lambda b: b["timings"]["predicted_n"] == 64 and b["truncated"] is False),
    "llama ctx_shift: a long prompt": (COMPLETION, {"prompt": "Lorem ipsum dolor " * 999, "n_predict": 64}, 400),
    "llama ctx_shift: streamed to the limit": (RAW, {"prompt": "Once", "max_tokens": 32, "stream": True}, lambda c: c[-1]["choices"][0]["finish_reason"] in ("length", "stop")),
    "llama tokenize: there and back": ("/tokenize", {"content": "What is the capital"}, lambda b: len(b["tokens"]) > 3),
    "llama tokenize: with what begins a prompt": ("/tokenize", {"content": "What", "add_special": True}, lambda b: b["tokens"]),
    "llama tokenize: with pieces": ("/tokenize", {"content": "test 媽 🤗", "with_pieces": True}, lambda b: all("id" in t and t["piece"] for t in b["tokens"])),
    "llama basic: /health": ("/health", None, 200),
    "llama basic: /props": ("/props", None, lambda b: b["total_slots"] and b["default_generation_settings"]["n_ctx"]),
    "llama basic: /models": ("/models", None, lambda b: b["data"][0]["id"] == "demo model"),
    "llama basic: /slots": ("/slots", None, lambda b: b[0]["n_ctx"] > 0),
    "llama basic: a page": ("/", None, 200),
    "llama vision: /models tells that it sees": ("/models", None, lambda b: "multimodal" in b["models"][0]["capabilities"]),
    "llama vision: /v1/models tells that it sees": ("/v1/models", None, lambda b: "completion" in b["models"][0]["capabilities"]),
    "llama vision: a picture in a data URL": (CHAT, chat(user("What is this:\n", RED)), stated),
    "llama vision: a URL that is none": (CHAT, chat(user("What", image_part("malformed"))), 400),
    "llama vision: an address that is not fetched": (CHAT, chat(user("What", image_part("https://example.com/404"))), 400),
    "llama vision: a file that may not be read": (CHAT, chat(user("What", image_part("file:///etc/hostname"))), 400),
    "llama security: /health without a key": ("/health", None, 200),
    "llama anthropic: a message": (MESSAGES, message(), lambda b: b["type"] == "message" and b["role"] == "assistant" and b["content"][0]["type"] == "text" and b["usage"]["output_tokens"] > 0 and "cache_read_input_tokens" in b["usage"] and "timings" not in b),
    "llama anthropic: a system text": (MESSAGES, message(system="Book"), lambda b: b["content"]),
    "llama anthropic: several blocks": (MESSAGES, message(messages=[{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]}]), lambda b: b["type"] == "message"),
    "llama anthropic: a conversation": (MESSAGES, message(messages=[*HI, {"role": "assistant", "content": "Hi"}, *HI]), lambda b: b["type"] == "message"),
    "llama anthropic: streamed": (
        MESSAGES,
        message(stream=True),
        lambda c: [x["type"] for x in c if x["type"] != "ping"][:2] == ["message_start", "content_block_start"] and c[0]["message"]["usage"]["input_tokens"] > 0 and c[-1]["type"] == "message_stop" and c[-2]["usage"]["output_tokens"] > 0,
    ),
    "llama anthropic: tokens counted": (COUNT, {"model": "test", "messages": HI}, lambda b: set(b) == {"input_tokens"} and b["input_tokens"] > 0),
    "llama anthropic: tokens counted with a system text": (COUNT, {"model": "test", "messages": HI, "system": "Book"}, lambda b: b["input_tokens"] > 0),
    "llama anthropic: a tool": (MESSAGES, message(tools=[OWN], tool_choice={"type": "any"}, max_tokens=200), lambda b: b["stop_reason"] == "tool_use" and b["content"][-1]["name"] == "look" and b["content"][-1]["input"]["at"]),
    "llama anthropic: a result": (MESSAGES, {"model": "t", **with_results(RESULT)}, lambda b: b["content"][0]["type"] == "text"),
    "llama anthropic: a result after a text": (MESSAGES, {"model": "t", **with_results({"type": "text", "text": "Here:"}, RESULT)}, 200),
    "llama anthropic: a result that failed": (MESSAGES, {"model": "t", **with_results({**RESULT, "is_error": True})}, 200),
    "llama anthropic: a tool, streamed": (MESSAGES, message(tools=[OWN], tool_choice={"type": "any"}, max_tokens=200, stream=True), lambda c: any(x["type"] == "content_block_start" and x["content_block"]["type"] == "tool_use" for x in c)),
    "llama anthropic: blocks in order": (MESSAGES, message(tools=[OWN], max_tokens=30, stream=True), lambda c: [x["index"] for x in c if x["type"] == "content_block_start"] == [x["index"] for x in c if x["type"] == "content_block_stop"] == list(range(sum(x["type"] == "content_block_stop" for x in c)))),
    "llama anthropic: a picture": (MESSAGES, message(messages=[{"role": "user", "content": [BLOCK, {"type": "text", "text": "What"}]}]), lambda b: b["content"][0]["text"]),
    "llama anthropic: stop_sequences": (MESSAGES, message(stop_sequences=["\n", "END"]), 200),
    "llama anthropic: temperature": (MESSAGES, message(temperature=0.5), 200),
    "llama anthropic: top_p": (MESSAGES, message(top_p=0.9), 200),
    "llama anthropic: top_k": (MESSAGES, message(top_k=40), 200),
    "llama anthropic: no messages": (MESSAGES, {"model": "t", "max_tokens": 5}, 400),
    "llama anthropic: metadata": (MESSAGES, message(metadata={"user_id": "u"}), 200),
    "llama responses: a schema": (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "t", "schema": {"const": "foooooo"}}}}, lambda b: b["output"][0]["content"][0]["text"] == '"foooooo"'),
    "llama responses: json_object": (RESPONSES, {"input": "Hi", "max_output_tokens": 10, "text": {"format": {"type": "json_object"}}}, lambda b: b["output"][0]["content"][0]["text"].startswith("{")),
    "llama responses: text": (RESPONSES, {"input": "Hi", "max_output_tokens": 10, "text": {"format": {"type": "text"}}}, 200),
    "llama responses: json_schema without one": (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "t"}}}, 400),
    "llama responses: an answer": (RESPONSES, {"input": BOOK, "max_output_tokens": 8}, lambda b: b["id"].startswith("resp_") and b["output"][0]["id"].startswith("msg_")),
    "llama responses: streamed": (RESPONSES, {"input": BOOK, "max_output_tokens": 8, "stream": True}, lambda c: "".join(x["delta"] for x in c if x["type"] == "response.output_text.delta") == c[-1]["response"]["output"][0]["content"][0]["text"]),
    "llama tools: required": (CHAT, chat(tools=[TOOL], tool_choice="required", max_tokens=200), lambda b: b["choices"][0]["finish_reason"] == "tool_calls" and json.loads(b["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["at"] in ("left", "right")),
    "llama tools: required, streamed": (CHAT, chat(tools=[TOOL], tool_choice="required", max_tokens=200, stream=True), lambda c: "at" in json.loads("".join(t["function"]["arguments"] for x in deltas(c) for t in x["delta"].get("tool_calls", [])))),
    "llama tools: none": (CHAT, chat(tools=[TOOL], tool_choice="none"), stated),
    "llama metrics: tokens that were known": ("/metrics", None, 200),
    "vllm vision: one picture, logprobs, the limit": (CHAT, chat(user(RED, "What's in this image?"), max_completion_tokens=3, logprobs=True, top_logprobs=5), lambda b: b["choices"][0]["finish_reason"] == "length" and b["usage"]["completion_tokens"] == 3),
    "vllm vision: a second question": (CHAT, chat(user(RED, "What?"), {"role": "assistant", "content": "red"}, user("in json")), stated),
    "vllm vision: image_url as a text": (CHAT, chat(user({"type": "image_url", "image_url": data_url(png())}, "What?")), 400),
    "vllm vision: streamed as whole": (CHAT, chat(user(RED, "What?"), stream=True), text_of),
    "vllm vision: two pictures": (CHAT, chat(user(RED, RED, "What?")), stated),
    "vllm vision: too many pictures": (CHAT, chat(user(*[RED] * 33, "What?")), 413),
    "vllm vision: a text before the picture": (CHAT, chat({"role": "system", "content": "You are a helpful assistant."}, user("Describe", RED)), stated),
    "vllm vision: an id that is not known, without its picture": (CHAT, chat(user("Describe", {"type": "image_url", "image_url": {}, "uuid": "x"})), 400),
    "vllm vision: other keys beside a picture": (CHAT, chat(user("Describe", {**RED, "also": "x"})), stated),
    "vllm chat: no logprobs": (CHAT, chat(logprobs=False), lambda b: b["choices"][0]["logprobs"] is None),
    "vllm chat: logprobs without others": (CHAT, chat(logprobs=True, top_logprobs=0), lambda b: b["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []),
    "vllm chat: five logprobs": (CHAT, chat(logprobs=True, top_logprobs=5), lambda b: len(b["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 5),
    "vllm chat: too many logprobs": (CHAT, chat(logprobs=True, top_logprobs=21), 400),
    "vllm chat: too many logprobs, streamed": (CHAT, chat(logprobs=True, top_logprobs=21, stream=True), 400),
    "vllm chat: a conversation": (CHAT, chat(*BOOK, {"role": "assistant", "content": "It"}, user("in json")), stated),
    "vllm chat: the end in the last chunk alone": (CHAT, chat(stream=True), lambda c: sum(x["finish_reason"] is not None for x in deltas(c)) == 1 and deltas(c)[-1]["finish_reason"]),
    "vllm chat: no usage unless asked for": (CHAT, chat(stream=True, stream_options={"include_usage": False}), lambda c: not any(x.get("usage") for x in c)),
    "vllm chat: usage at the end": (CHAT, chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}), lambda c: c[-1]["choices"] == [] and c[-1]["usage"]["completion_tokens"] == 8),
    "vllm chat: one of several answers": (CHAT, chat(structured_outputs={"choice": ["Python", "C++"]}), lambda b: stated(b) in ("Python", "C++")),
    "vllm chat: a schema in structured_outputs": (CHAT, chat(structured_outputs={"json": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}, max_tokens=60), lambda b: json.loads(stated(b))["n"] in (1, 2)),
    "vllm chat: a regular expression": (CHAT, chat(structured_outputs={"regex": "[a-c]{3}"}), lambda b: re.fullmatch("[a-c]{3}", stated(b))),
    "vllm chat: a regular expression that is none": (CHAT, chat(structured_outputs={"regex": {"1": "Python"}}), 400),
    "vllm chat: logprobs of one of several answers": (CHAT, chat(structured_outputs={"choice": ["Python", "C++"]}, logprobs=True, top_logprobs=5), lambda b: all(t["logprob"] >= -9999 for x in b["choices"][0]["logprobs"]["content"] for t in x["top_logprobs"])),
    "vllm chat: prompt_logprobs": (CHAT, chat(prompt_logprobs=1), lambda b: len(b["prompt_logprobs"]) == b["usage"]["prompt_tokens"]),
    "vllm chat: json_object": (CHAT, schema({"type": "json_object"}), lambda b: stated(b).startswith("{")),
    "vllm chat: json_schema": (CHAT, schema({"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "object", "properties": {"r": {"const": 2}}, "required": ["r"], "additionalProperties": False}}}), lambda b: json.loads(stated(b))["r"] == 2),
    "vllm chat: text": (CHAT, schema({"type": "text"}), stated),
    "vllm chat: other keys in a message": (CHAT, chat({**HI[0], "extra_field": "0"}), stated),
    "vllm chat: parts for a text": (CHAT, chat(user("What is it?")), stated),
    "vllm chat: a seed beyond 64 bits": (CHAT, chat(seed=1 << 63), 400),
    "vllm chat: three answers": (CHAT, chat(n=3, temperature=0.7), lambda b: [c["index"] for c in b["choices"]] == [0, 1, 2]),
    "vllm chat: two answers, streamed": (CHAT, chat(n=2, temperature=0.7, stream=True), lambda c: {x["choices"][0]["index"] for x in c} == {0, 1}),
    "vllm chat: several answers by a seed": (CHAT, chat(n=2, seed=42, temperature=0.8), lambda b: len(b["choices"]) == 2),
    "vllm chat: one answer": (CHAT, chat(n=1), lambda b: len(b["choices"]) == 1),
    "vllm basic: /version": ("/version", None, lambda b: set(b) == {"version"}),
    "vllm basic: /health": ("/health", None, 200),
    "vllm basic: /load": ("/load", None, lambda b: b == {"server_load": 0}),
    "vllm basic: min_tokens": (CHAT, chat(max_tokens=20, min_tokens=20), lambda b: b["usage"]["completion_tokens"] == 20),
    "llama anthropic: thinking": (MESSAGES, message(thinking={"type": "enabled", "budget_tokens": 50}), lambda b: b["content"]),
    "vllm body: a list": (CHAT, ["not", "an", "object"], 400),
    "vllm body: a number": (CHAT, 42, 400),
    "vllm body: a text": (CHAT, "no object", 400),
}  # fmt: skip
# what differs here: the response, and the reason
OTHERWISE: dict[str, tuple[str, Any, int, str]] = {
    "llama chat: timings in chunks": (CHAT, chat(timings_per_token=True), 200, "times are in `usage.mtmd_receipt`, and the field is listed there as ignored"),
    "llama completion: post_sampling_probs": (COMPLETION, {"prompt": "a", "post_sampling_probs": True}, 400, "probabilities are the model's own, before sampling"),
    "llama security: /models without a key": ("/v1/models", None, 401, "model names require a key"),
    "llama chat: two answers in a row": (CHAT, chat(*HI, *[{"role": "assistant", "content": "t"}] * 2), 200, "they are joined, as in Anthropic's own API"),
    "vllm chat: usage in every chunk": (CHAT, chat(stream=True, stream_options={"continuous_usage_stats": True}), 400, "usage is sent once, at the end"),
}  # fmt: skip
# what does not apply, in the same form
NOT_FOR_US: dict[str, tuple[str, Any, int, str]] = {
    "llama vision: multimodal_data in a plain prompt": (RAW, {"prompt": {"prompt_string": "x", "multimodal_data": []}}, 400, "llama.cpp's own placeholders for pictures; mtmd takes pictures in messages"),
    "llama anthropic: an empty list of messages": (MESSAGES, message(messages=[]), 400, "Anthropic's own API refuses it too"),
    "vllm chat: a custom role": (CHAT, chat({"role": "my-custom-role", "content": "x"}), 400, "needs a chat template that takes any role"),
    "vllm vision: beam search": (CHAT, chat(use_beam_search=True, n=2), 400, "answers are sampled"),
}  # fmt: skip
# what other tests show, more closely
ELSEWHERE = {
    "llama security: the page without a key": "tests/web/test_access.py::test_the_page_and_the_sign_of_life_need_no_key",
    "llama security: files below the media folder": "tests/web/intake/test_media.py::test_files_below_the_media_folder_are_read",
    "llama security: files outside it": "tests/web/intake/test_media.py::test_files_outside_it_are_refused_in_the_same_words_as_missing_ones",
    "llama security: no media folder": "tests/web/intake/test_media.py::test_files_are_off_unless_a_folder_is_given",
    "llama vision: a file that is too large": "tests/web/intake/test_media.py::test_too_many_bytes_are_refused_before_anything_is_fetched_or_decoded",
    "llama tools: results in the history": "tests/web/interfaces/test_tools.py::test_the_official_client_gets_calls",
    "vllm basic: who leaves is given up": "tests/mtmd/service/test_service.py::test_cancelling",
    "vllm basic: /health with a dead engine": "tests/web/test_status.py::test_a_fault_is_told_and_everything_but_answers_goes_on",
    "vllm basic: another content type": "tests/web/test_access.py::test_what_a_form_can_send_is_no_request",
}


@pytest.fixture(scope="module")
def clients():
    """Without and with keys."""
    service = Service(load(threads=1, parallel=4))
    yield [client_for(service, any_model=True, api_keys=keys) for keys in ((), (KEY,))]
    service.close()


def requested(client: Any, path: str, body: Any) -> Any:
    if body is None:
        return client.get(path, buffered=True)
    return client.post(path, data=json.dumps(body), content_type="application/json", buffered=True)


def read(result: Any) -> Any:
    if result.mimetype != "text/event-stream":
        return result.get_json()
    lines = [line[6:] for line in result.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("behaviour", STORED)
def test_it_holds(clients, behaviour):
    path, body, expected = STORED[behaviour]
    actual = requested(clients[0], path, body)
    if isinstance(expected, int):
        assert actual.status_code == expected, actual.text[:300]
        return
    assert actual.status_code == 200, actual.text[:300]
    assert expected(read(actual)), actual.text[:600]


@pytest.mark.parametrize("behaviour", [*OTHERWISE, *NOT_FOR_US])
def test_it_is_told_that_it_is_otherwise(clients, behaviour):
    path, body, status, reason = (OTHERWISE | NOT_FOR_US)[behaviour]
    result = requested(clients["without a key" in behaviour], path, body)
    assert result.status_code == status, result.text[:300]
    if "timings" in behaviour:
        assert "ignored: timings_per_token" in result.text
    assert f"| {behaviour} | {reason} |" in GUIDE


def test_what_other_tests_show_is_there():
    for location in ELSEWHERE.values():
        file, name = location.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), location


def test_keys_as_the_peers_send_them(clients):
    """llama security: a wrong key, a right one, and one as X-Api-Key."""
    ask = clients[1].post
    body = {"prompt": "I believe", "max_tokens": 2}
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer invalid-key"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"X-Api-Key": KEY}, 200),
    ):
        assert ask("/completions", json=body, headers=headers).status_code == status


def test_at_least_95_percent_of_what_applies_hold():
    stored = len(STORED) + len(ELSEWHERE) + 4  # of keys
    applies = stored + len(OTHERWISE)
    assert f"{stored} of {applies}" in GUIDE
    assert stored >= 0.95 * applies
