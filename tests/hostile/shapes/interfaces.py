"""Bodies of every interface, as its clients send them, and with anything anywhere in them."""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Iterator
from typing import Any

from attempts import picture_part
from damaged_pictures import small_picture
from hostile_schemas import schema

Location = tuple[Any, ...]
ANYTHING: tuple[Any, ...] = (
    None, True, False, 0, -1, 1 << 70, 0.5, -1e308, "", "x" * 3000, "file:///etc/passwd", "file-1",
    "data:,", "data:image/png;base64,", "http://127.0.0.1/", "\ud800", "\x00", "../../x", "é" * 400,
    [], {}, [[]], [None], {"type": "text"}, {"type": ["a"]}, {"type": "image", "source": None},
    {"type": "tool_use"}, {"type": "tool_result", "tool_use_id": 1}, {"$ref": "#"}, [0] * 500,
)  # fmt: skip
NAMES = (
    "look",
    "a",
    "",
    "x" * 64,
    "x" * 200,
    "a b",
    "look",
    "é",
    "<tool_call>",
    "$ref",
    "0",
    "a.b/c",
)
IDS = ("call_1", "", "x" * 300, "a b", "</s>", "call_1", None, 7)
ARGUMENTS: tuple[Any, ...] = (
    "{}", '{"a": 1}', "{", "[]", "null", '{"a": "<|im_end|>"}', '{"a":' * 70 + "1" + "}" * 70, {},
    {"a": [1]}, None, 3, "x" * 50_000,
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 2, 100, -1, 1e308, None),
    "top_p": (0, 0.1, 1, 1.1),
    "top_k": (-1, 0, 1, 50, 1 << 40),
    "min_p": (0, 0.5, 1, -1),
    "repetition_penalty": (0.01, 1.1, 100, 0),
    "repeat_penalty": (1.3, 0),
    "frequency_penalty": (-2, 2, 3),
    "presence_penalty": (-2, 2, "1"),
    "logit_bias": (
        {}, {"5": -100, "6": 100}, {str(i): 1 for i in range(400)}, {"x": 1}, {"99999999": 1}, {"-1": 1}
    ),
    "seed": (0, 1, -1, (1 << 63) - 1, 1 << 63, 1.5),
    "stop": ("a", ["a", "b"], [], ["x"] * 17, "é" * 300, [""], [1]),
    "min_tokens": (0, 1, 2, 99, 1 << 21),
    "stop_token_ids": ([], [1, 2], [1 << 31], [-1], list(range(600))),
    "ignore_eos": (False, "yes"),  # true makes long answers, which are no attack
    "n": (1, 2, 8, 0, 1000),
    "logprobs": (True, False, 5, 21),
    "top_logprobs": (0, 5, 20, 21),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {}, [], {"include_usage": 3}),
    "parallel_tool_calls": (True, False, None),
    "continue_final_message": (True, False),
    "add_generation_prompt": (True, False),
    "max_tokens": (0, 1, 2, 3, -2, "x"),
}  # fmt: skip


def options(rng: random.Random) -> dict[str, Any]:
    """Of an answer: a few, most of them as they may be."""
    names = rng.sample(sorted(OPTIONS), rng.randint(1, 6))
    return {name: rng.choice(OPTIONS[name]) for name in names}


def tool(rng: random.Random) -> dict[str, Any]:
    function: dict[str, Any] = {"name": rng.choice(NAMES)}
    if rng.random() < 0.8:
        made = schema(rng, 2)
        properties = {"type": "object", "properties": {"a": made}, "required": ["a"]}
        function["parameters"] = rng.choice((properties, properties, made, {}, 5))
    if rng.random() < 0.6:
        function["description"] = rng.choice(("Looks closer.", "<|im_start|>" * 50, "x" * 9000, 3))
    if rng.random() < 0.2:
        function["strict"] = rng.choice((True, False, "x"))
    return {"type": rng.choice(("function",) * 9 + ("x",)), "function": function}


def tools(rng: random.Random) -> dict[str, Any]:
    """Tools, and how they may be called."""
    made = [tool(rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 20, 200)))]
    named = {"type": "function", "function": {"name": rng.choice(NAMES)}}
    allowed = {"mode": "required", "tools": [named] * rng.choice((0, 1, 300))}
    choice = rng.choice(
        (
            "none",
            "auto",
            "required",
            named,
            {"type": "allowed_tools", "allowed_tools": allowed},
            "x",
            3,
        )
    )
    return {"tools": made} | ({"tool_choice": choice} if rng.random() < 0.7 else {})


def calls(rng: random.Random) -> list[dict[str, Any]]:
    """Messages in which functions were called, and have answered."""
    made = [
        {
            "id": rng.choice(IDS),
            "type": "function",
            "function": {"name": rng.choice(NAMES), "arguments": rng.choice(ARGUMENTS)},
        }
        for _ in range(rng.choice((0, 1, 1, 2, 300)))
    ]
    results = [
        {
            "role": "tool",
            "tool_call_id": rng.choice(IDS),
            "content": rng.choice(("4", "", "x" * 9000)),
        }
        for _ in range(rng.randint(0, 3))
    ]
    first = {"role": "user", "content": "look"}
    stated = {"role": "assistant", "content": rng.choice((None, "", "I look")), "tool_calls": made}
    return rng.choice(
        ([first, stated, *results], [stated, *results], [first, stated, *results, first])
    )


def bodies(rng: random.Random) -> dict[str, dict[str, Any]]:
    """A body for each address that takes JSON and has a form of its own."""
    data = small_picture(rng)
    encoded = base64.b64encode(data).decode()
    form = {"type": "object", "properties": {"a": {"type": "string"}}}
    text = {"type": "text", "text": "hi"}
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": encoded},
    }
    function = {"name": "look", "description": "x", "parameters": form}
    requested = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [text, {"type": "tool_use", "id": "a", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}],
        },
    ]
    messages: dict[str, Any] = {
        "model": "demo model",
        "max_tokens": 2,
        "system": [text],
        "messages": rng.choice(([{"role": "user", "content": [text, block]}], requested)),
        "stop_sequences": ["x"],
        "stream": rng.random() < 0.5,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": form}},
        "tools": [{"name": "look", "description": "x", "input_schema": form}],
        "tool_choice": {"type": "auto"},
    }
    content = [
        {"type": "input_text", "text": "c"},
        {"type": "input_image", "image_url": picture_part(data)["image_url"]["url"]},
    ]
    return {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": [text, picture_part(data)]}],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": function}],
            **options(rng),
        },
        "/v1/completions": {
            "prompt": rng.choice(("a", ["a", "b"], [5, 6], [[5], [6]])),
            "max_tokens": 2,
            "echo": True,
        },
        "/v1/messages": messages,
        "/v1/messages/count_tokens": {
            k: messages[k] for k in ("model", "system", "messages", "tools")
        },
        "/v1/responses": {
            "model": "demo model",
            "instructions": "a",
            "input": [
                {"role": "developer", "content": "b"},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "4"},
                {"type": "message", "role": "user", "content": content},
            ],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": form}},
            "tools": [{"type": "function", **function}],
            "tool_choice": "auto",
            "metadata": {"a": "b"},
            "max_output_tokens": 2,
            "previous_response_id": rng.choice((None, "resp_0", "../x")),
            "store": rng.random() < 0.5,
            "stream": rng.random() < 0.5,
        },
        "/api/chat": {
            "model": "demo model",
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": "b", "images": [encoded]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
                },
                {"role": "tool", "tool_name": "look", "content": "4"},
            ],
            "format": rng.choice((form, "json")),
            "options": {"num_predict": 2, "temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 1},
            "stream": rng.random() < 0.5,
            "tools": [{"type": "function", "function": function}],
            "think": False,
            "keep_alive": "5m",
        },
        "/api/generate": {
            "model": "demo model",
            "prompt": "a",
            "system": "b",
            "images": [encoded],
            "raw": False,
            "context": [],
            "stream": False,
            "options": {"num_predict": 2, "mirostat": 0},
        },
        "/api/show": {"model": "demo model", "name": "demo model", "verbose": True},
        "/tokenize": {"content": "a", "add_special": True, "with_pieces": True},
        "/detokenize": {"tokens": [97, 98]},
        "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    }


def locations(value: Any, location: Location = ()) -> Iterator[Location]:
    yield location
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from locations(item, (*location, key))


def changed(body: Any, rng: random.Random) -> Any:
    """`body` with anything at one or a few places, a place taken out, or one put many times."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        location = rng.choice(list(locations(body)))
        if not location:
            return copy.deepcopy(rng.choice(ANYTHING))
        inside = body
        for key in location[:-1]:
            inside = inside[key]
        what = rng.random()
        if what < 0.15:
            del inside[location[-1]]
        elif what < 0.25 and isinstance(inside, list):
            inside += copy.deepcopy([inside[location[-1]]] * rng.choice((1, 20)))
        else:
            inside[location[-1]] = copy.deepcopy(rng.choice(ANYTHING))
    return body
