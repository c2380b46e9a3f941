"""Requests as coding agents and chat pages send them (Codex, Claude Code, Cline, Continue,
OpenCode, Open WebUI), each with all that it has beside what it needs. What is left out is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from fake_service import FakeService
from serving import client_for, running

from mtmd import Service, TextPiece, ToolCall, ToolCallPiece, load
from mtmd.web.answering.tools import CustomCalls

PATCH = '*** Begin Patch\n*** Add File: é.txt\n+"hi" \\ 😀\n*** End Patch'
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<p>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Success"},
        {"type": "local_shell_call", "id": "x", "call_id": "c2", "status": "completed"},
        {
            "type": "function_call",
            "call_id": "c3",
            "name": "mix",
            "namespace": "mcp__colors",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c3", "output": "orange"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
    "tools": [
        SHELL,
        {"type": "web_search", "external_web_access": True},
        APPLY_PATCH,
        {"type": "local_shell"},
        {"type": "tool_search"},
        {
            "type": "namespace",
            "name": "mcp__colors",
            "description": "Tools in the mcp__colors namespace.",
            "tools": [{**SHELL, "name": "mix"}, {"type": "mcp", "name": "y"}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "service_tier": "auto",
    "prompt_cache_key": "0199",
    "truncation": "auto",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x": "y"},
    "metadata": {"a": "b"},
    "safety_identifier": "me",
    "max_tool_calls": 5,
}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
CLAUDE_CODE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hey", "cache_control": EPHEMERAL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"q": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "tool_reference", "tool_name": "Bash"}],
                    "cache_control": EPHEMERAL,
                },
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "a file"},
                    "title": "a.txt",
                },
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
            "cache_control": EPHEMERAL,
            "eager_input_streaming": True,
            "defer_loading": True,
        },
        {"name": "ToolSearch", "input_schema": {"type": "object"}, "type": "custom"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "metadata": {"user_id": "u"},
    "betas": ["claude-code-20250219"],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "speed": "fast",
}
SAY = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


def test_codex() -> None:
    service = FakeService()
    result = client_for(service).post("/v1/responses", json=CODEX)
    assert result.status_code == 200, result.text
    assert result.headers["X-Mtmd-Ignored"] == (
        "tools[1] (web_search), tools[3] (local_shell), tools[4] (tool_search), "
        "tools[5].tools[1] (mcp), input[2] (web_search_call), input[5] (local_shell_call)"
    )
    ticket = service.tickets[0]
    named = ["shell", "apply_patch", "mcp__colors__mix"]
    assert [tool.name for tool in ticket.settings.toolbox.tools] == named
    assert 'start: "*** Begin Patch" LF' in ticket.settings.toolbox.tools[1].description
    mix = ticket.settings.toolbox.tools[2].description
    assert mix == "All tools of mcp__colors: Tools in the mcp__colors namespace.\n\nRuns a command"
    (call,) = ticket.messages[2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"input": PATCH}
    roles = ["assistant", "tool", "assistant", "tool", "user"]
    assert [m["role"] for m in ticket.messages][-5:] == roles
    (call,) = ticket.messages[4]["tool_calls"]
    assert call["function"]["name"] == "mcp__colors__mix"


def test_codex_finds_the_tool_of_a_namespace_that_was_called() -> None:
    service = FakeService()
    service.calls = (
        ToolCall("call_1", "mcp__colors__mix", "{}"),
        ToolCall("call_2", "shell", "{}"),
    )
    client = client_for(service)
    mixed, shell = client.post("/v1/responses", json=CODEX).get_json()["output"]
    assert (mixed["name"], mixed["namespace"], mixed["call_id"]) == ("mix", "mcp__colors", "call_1")
    assert shell["name"] == "shell" and "namespace" not in shell
    streamed = client.post("/v1/responses", json=CODEX | {"stream": True}, buffered=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    items = [e["item"] for e in events if e["type"].startswith("response.output_item")]
    assert [(i["name"], i.get("namespace")) for i in items] == [
        *[("mix", "mcp__colors")] * 2,
        *[("shell", None)] * 2,
    ]


COLORS = {
    "type": "namespace",
    "name": "colors",
    "description": "Mixes paint.",
    "tools": [{"type": "web_search"}, {"name": "mix"}, {**APPLY_PATCH, "name": "patch"}],
}
IN_COLORS = ("colors__mix", "colors__patch")


def test_the_description_of_a_namespace_is_shown_once() -> None:
    service = FakeService()
    others = [{**COLORS, "name": name, "description": None} for name in ("a", "b")]
    body = {"input": "hi", "tools": [COLORS, *others]}
    assert client_for(service).post("/v1/responses", json=body).status_code == 200
    tools = service.tickets[0].settings.toolbox.tools
    shown = [tool.name for tool in tools if "All tools of" in tool.description]
    assert shown == ["colors__mix"]
    assert tools[0].description == "All tools of colors: Mixes paint."


@pytest.mark.parametrize(
    "choice, mode, names",
    [
        ({"type": "namespace", "name": "colors"}, "required", IN_COLORS),
        ({"type": "function", "name": "mix", "namespace": "colors"}, "required", IN_COLORS[:1]),
        ({"type": "function", "name": "colors__mix"}, "required", IN_COLORS[:1]),
        ({"type": "custom", "name": "patch", "namespace": "colors"}, "required", IN_COLORS[1:]),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "namespace", "name": "colors"}, SHELL],
            },
            "auto",
            (*IN_COLORS, "shell"),
        ),
    ],
)
def test_a_choice_may_name_a_namespace(choice: Any, mode: str, names: tuple[str, ...]) -> None:
    service = FakeService()
    body = {"input": "hi", "tools": [SHELL, COLORS], "tool_choice": choice}
    result = client_for(service).post("/v1/responses", json=body)
    assert result.status_code == 200, result.text
    chosen = service.tickets[0].settings.toolbox.choice
    assert (chosen.mode, chosen.names) == (mode, names)


@pytest.mark.parametrize(
    "choice, error",
    [
        (
            {"type": "namespace", "name": "x"},
            "tool_choice.name: expected the name of a namespace: ",
        ),
        ({"type": "namespace"}, "tool_choice.name: expected the name of a namespace: colors"),
        (
            {"type": "allowed_tools", "tools": [{"type": "namespace", "name": ["x"]}]},
            "tool_choice.allowed_tools.tools[0].name: expected the name of a namespace: colors",
        ),
        (
            {"type": "function", "name": "mix", "namespace": "x"},
            "tool_choice.name: found 'x__mix', expected the name of a tool: colors__mix, ",
        ),
    ],
)
def test_a_choice_of_a_namespace_that_is_not_there_is_refused(choice: Any, error: str) -> None:
    body = {"input": "hi", "tools": [SHELL, COLORS], "tool_choice": choice}
    result = client_for(FakeService()).post("/v1/responses", json=body)
    message = result.get_json()["error"]["message"]
    assert (result.status_code, message[: len(error)]) == (400, error)
    assert "\n" not in message


def test_claude_code() -> None:
    service = FakeService()
    client = client_for(service)
    result = client.post("/v1/messages?beta=true", json=CLAUDE_CODE)
    assert result.status_code == 200, result.text
    ignored = result.headers["X-Mtmd-Ignored"].split(", ")
    assert set(ignored) == {
        "context_management",
        "tools[2] (web_search_20250305)",
        "tools[3] (bash_20250124)",
        "tools[4] (text_editor_20250728)",
        "messages[1].content[1] (server_tool_use)",
        "messages[1].content[2] (web_search_tool_result)",
    }
    ticket = service.tickets[0]
    assert [tool.name for tool in ticket.settings.toolbox.tools] == ["Bash", "ToolSearch"]
    stated = [(m["role"], m["content"]) for m in ticket.messages]
    assert stated[0] == ("system", "You are Claude Code.")
    assert stated[-2:] == [("tool", "Bash"), ("user", "a.txt\na file")]
    counted = {k: CLAUDE_CODE[k] for k in ("model", "system", "messages", "tools", "thinking")}
    assert client.post("/v1/messages/count_tokens?beta=true", json=counted).status_code == 200
    quota = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    assert client.post("/v1/messages", json=quota).status_code == 200


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Cline": (
        "/v1/chat/completions",
        {
            "model": "fake",
            "messages": [{"role": "system", "content": "be"}, *SAY],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 8192,
            "tools": [{"type": "function", "function": {"name": "look", "strict": False}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
    ),
    "Continue, chat": (
        "/v1/chat/completions",
        {"model": "fake", "messages": SAY, "stream": True, "max_tokens": 4096, "stop": None},
    ),
    "Continue, completion by Ollama": (
        "/api/generate",
        {
            "model": "fake",
            "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>",
            "raw": True,
            "keep_alive": 1800,
            "options": {"num_predict": 20, "num_ctx": 4096, "stop": ["<fim_prefix>"], "mmap": True},
        },
    ),
    "Continue, llama.cpp": (
        "/completion",
        {"prompt": "hi", "stream": True, "n_predict": 20, "cache_prompt": True, "stop": ["x"]},
    ),
    "OpenCode": (
        "/v1/chat/completions",
        {
            "model": "fake",
            "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
            "max_tokens": 32000,
            "top_p": 1,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "bash",
                        "parameters": {
                            "$schema": "http://json-schema.org/draft-07/schema#",
                            "type": "object",
                            "properties": {"command": {"type": "string"}},
                        },
                    },
                }
            ],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "Open WebUI, OpenAI's": (
        "/v1/chat/completions",
        {"model": "fake", "messages": SAY, "stream": True, "user": "me", "metadata": {"a": "b"}},
    ),
    "Open WebUI, Ollama's": (
        "/api/chat",
        {
            "model": "fake:latest",
            "messages": [{"role": "user", "content": "hi", "images": []}],
            "options": {"temperature": 0.8, "num_ctx": 2048, "mirostat": 0, "num_keep": 5},
            "stream": True,
            "keep_alive": "5m",
        },
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_agents(name: str) -> None:
    path, body = OTHERS[name]
    service = FakeService()
    result = client_for(service).post(path, json=body, buffered=True)
    assert result.status_code == 200, result.text
    assert "error" not in result.text and len(service.ended) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/api/version",
        "/api/tags",
        "/api/ps",
        "/v1/models",
        "/models",
        "/props",
        "/slots",
        "/health",
    ],
)
def test_what_open_webui_and_others_look_for_is_there(path: str) -> None:
    assert client_for(FakeService()).get(path).status_code == 200


def test_anthropics_client_lists_models() -> None:
    with (
        running(FakeService()) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        page = client.models.list(limit=1000)
        (model,) = page.data
        assert (model.id, model.display_name, model.type) == ("fake", "fake", "model")
        assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")
        assert model.created_at.year >= 2024
        assert client.models.retrieve("fake").display_name == "fake"


# A text as it comes in a call's arguments, streamed and not, whole and cut.


@pytest.fixture
def service() -> FakeService:
    service = FakeService()
    service.calls = (
        ToolCall("call_1", "shell", '{"command": "ls"}'),
        ToolCall("call_2", "apply_patch", json.dumps({"input": PATCH})),
    )
    return service


@pytest.fixture
def sdk(service: FakeService) -> Iterator[openai.OpenAI]:
    with (
        running(service) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_custom_tools_in_responses(sdk: openai.OpenAI, service: FakeService) -> None:
    tools: Any = [SHELL, APPLY_PATCH]
    match = sdk.responses.create(model="fake", input="hi", tools=tools)
    function, custom = match.output
    assert (function.type, function.arguments) == ("function_call", '{"command": "ls"}')
    assert (custom.type, custom.call_id, custom.name) == (
        "custom_tool_call",
        "call_2",
        "apply_patch",
    )
    assert custom.input == PATCH
    events = list(sdk.responses.create(model="fake", input="hi", tools=tools, stream=True))
    kinds = [event.type for event in events]
    at = kinds.index("response.custom_tool_call_input.delta")
    assert kinds[at - 1 : at + 3] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert (events[at].delta, events[at + 1].input, events[at + 2].item.input) == (PATCH,) * 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    result: Any = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"}
    sdk.responses.create(model="fake", previous_response_id=match.id, input=[result], tools=tools)
    calls = next(m for m in service.tickets[-1].messages if m.get("tool_calls"))["tool_calls"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"input": PATCH}
    chosen: Any = {"type": "custom", "name": "apply_patch"}
    sdk.responses.create(model="fake", input="hi", tools=tools, tool_choice=chosen)
    assert service.tickets[-1].settings.toolbox.choice.names == ("apply_patch",)


def test_custom_tools_in_chats(sdk: openai.OpenAI, service: FakeService) -> None:
    reported = {k: v for k, v in APPLY_PATCH.items() if k in ("name", "description")}
    grammar = {"syntax": "regex", "definition": "[a-z]+"}
    custom = {**reported, "format": {"type": "grammar", "grammar": grammar}}
    tools: Any = [
        {"type": "function", "function": {"name": "shell"}},
        {"type": "custom", "custom": custom},
    ]
    say: Any = [{"role": "user", "content": "hi"}]
    result = sdk.chat.completions.create(model="fake", messages=say, tools=tools)
    function, call = result.choices[0].message.tool_calls
    assert function.type == "function" and function.function.name == "shell"
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCH)
    schema = service.tickets[0].settings.toolbox.tools[1].schema
    assert schema["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"
    pieces = [
        piece.choices[0].delta.tool_calls[0]
        for piece in sdk.chat.completions.create(
            model="fake", messages=say, tools=tools, stream=True
        )
        if piece.choices and piece.choices[0].delta.tool_calls
    ]
    last = pieces[-1].model_dump()
    assert (last["index"], last["id"], last["type"]) == (1, "call_2", "custom")
    assert last["custom"] == {"name": "apply_patch", "input": PATCH}
    history: Any = [
        *say,
        result.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
        {"role": "tool", "tool_call_id": "call_2", "content": "b"},
    ]
    sdk.chat.completions.create(model="fake", messages=history, tools=tools)
    calls = service.tickets[-1].messages[1]["tool_calls"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"input": PATCH}


@pytest.mark.parametrize(
    "arguments, text",
    [
        ('{"input": "a\\n\\"b', 'a\n"b'),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\ud83d\\ude0', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a"', "a"),
        ('{"inp', ""),
        ("", ""),
        ("[" * 100_000, ""),
        ('{"input": 5}', ""),
    ],
)
def test_a_text_that_was_cut(arguments: str, text: str) -> None:
    service = FakeService()
    service.calls, service.calls_finish = (ToolCall("call_1", "apply_patch", arguments),), "length"
    body = {"model": "fake", "input": "hi", "tools": [APPLY_PATCH]}
    result = client_for(service).post("/v1/responses", json=body).get_json()
    assert (result["status"], result["output"][0]["input"]) == ("incomplete", text)


def test_functions_as_before_there_were_tools(sdk: openai.OpenAI, service: FakeService) -> None:
    service.calls = service.calls[:1]
    say: Any = [{"role": "user", "content": "hi"}]
    functions: Any = [{"name": "shell", "parameters": {"type": "object", "properties": {}}}]
    result = sdk.chat.completions.create(
        model="fake", messages=say, functions=functions, function_call={"name": "shell"}
    )
    message = result.choices[0].message
    assert result.choices[0].finish_reason == "function_call" and message.tool_calls is None
    assert (message.function_call.name, message.function_call.arguments) == (
        "shell",
        '{"command": "ls"}',
    )
    box = service.tickets[0].settings.toolbox
    assert (box.choice.mode, box.choice.names, box.several) == ("required", ("shell",), False)
    pieces = list(
        sdk.chat.completions.create(model="fake", messages=say, functions=functions, stream=True)
    )
    deltas = [p.choices[0].delta.function_call for p in pieces if p.choices[0].delta.function_call]
    assert deltas[0].name == "shell" and "".join(d.arguments for d in deltas) == '{"command": "ls"}'
    assert pieces[-1].choices[0].finish_reason == "function_call"
    history: Any = [
        *say,
        message.model_dump(exclude_none=True),
        {"role": "function", "name": "shell", "content": "a"},
    ]
    sdk.chat.completions.create(model="fake", messages=history, functions=functions)
    none: Any = "none"
    sdk.chat.completions.create(model="fake", messages=say, functions=functions, function_call=none)
    assert service.tickets[-1].settings.toolbox.choice.mode == "none"


@pytest.mark.parametrize(
    "choice, names",
    [
        ({"type": "custom", "custom": {"name": "x"}}, ("x",)),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}],
                },
            },
            ("x",),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ()),
    ],
)
def test_tools_that_are_left_out_are_no_choice(choice: Any, names: tuple[str, ...]) -> None:
    service = FakeService()
    body = {
        "messages": SAY,
        "tools": [{"type": "custom", "custom": {"name": "x"}}, {"type": "web_search"}],
        "tool_choice": choice,
    }
    result = client_for(service).post("/v1/chat/completions", json=body)
    assert result.status_code == 200, result.text
    box = service.tickets[0].settings.toolbox
    assert box.choice.names == names and (names or box.choice.mode == "none")
    warnings = result.get_json()["usage"]["mtmd_receipt"]["warnings"]
    assert any("tools[1] (web_search)" in warning for warning in warnings)


HOSTILE: list[dict[str, Any]] = [
    {"tools": [{"type": "custom", "custom": 5}]},
    {"tools": [{"type": "custom", "custom": {"name": "x" * 10_000}}]},
    {"tools": [{"type": ["custom"]}]},
    {"tools": [{"type": "custom", "name": "x", "format": [1]}], "tool_choice": {"type": 5}},
    {
        "tools": [
            {"type": "custom", "name": "x", "format": {"type": "grammar", "definition": "(" * 9000}}
        ]
    },
    {"tools": [{"type": "x" * 10_000}] * 256},
    {"tools": [{"type": "namespace", "name": 5, "tools": []}]},
    {"tools": [{"type": "namespace", "name": "x", "tools": [5]}]},
    {"tools": [{"type": "namespace", "name": "x", "tools": [{"function": 5}, {"name": [1]}]}]},
    {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}]},
    {"tools": [{"type": "namespace", "name": "x", "description": [5], "tools": [{"name": "y"}]}]},
    {"tool_choice": {"type": "namespace", "name": {"x": "\n" * 9000}}},
    {"tool_choice": {"type": "function", "name": [1], "namespace": {"x": "\n" * 9000}}},
    {"tools": [{"type": "namespace", "name": "x", "tools": [{"name": "y"}] * 300}]},
    {"tools": [{"type": "\x00\r\nSet-Cookie: a"}]},
    {"tool_choice": {"type": "allowed_tools", "tools": [[]]}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": {}}}},
    {"functions": [[]]},
    {"functions": [{"name": "x"}], "function_call": {"name": 5}},
    {"functions": [{"name": "x"}], "function_call": "y"},
]


@pytest.mark.parametrize("more", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_tools(more: dict[str, Any]) -> None:
    for path, stated in (
        ("/v1/chat/completions", {"messages": SAY}),
        ("/v1/responses", {"input": "a"}),
    ):
        result = client_for(FakeService()).post(path, json=stated | more)
        assert result.status_code in (200, 400), result.text
        assert "\n" not in result.headers.get("X-Mtmd-Ignored", "")
        assert len(result.headers.get("X-Mtmd-Ignored", "")) < 4096


def test_the_model_calls_a_custom_tool() -> None:
    """Held to a regular expression, as there is no other way to know what it writes."""
    service = Service(load(threads=1))
    form = {"type": "grammar", "syntax": "regex", "definition": "say (yes|no)\\."}
    tool = {"type": "custom", "name": "say", "format": form}
    body = {"input": "hi", "tools": [tool], "tool_choice": "required"}
    result = client_for(service).post("/v1/responses", json=body).get_json()
    service.close()
    assert result["output"][0]["type"] == "custom_tool_call"
    assert result["output"][0]["input"] in ("say yes.", "say no.")


@pytest.mark.parametrize("definition", ["(", "a{2,1}", "(?<=a)b"])
def test_what_is_no_regular_expression_is_refused(definition: str) -> None:
    service = Service(load(threads=1))
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    for path, stated, tool in (
        ("/v1/responses", {"input": "hi"}, {"name": "say", "format": form}),
        (
            "/v1/chat/completions",
            {"messages": SAY},
            {"custom": {"name": "say", "format": {"type": "grammar", "grammar": form}}},
        ),
    ):
        body = stated | {"tools": [{"type": "custom"} | tool]}
        result = client_for(service).post(path, json=body)
        message = result.get_json()["error"]["message"]
        assert result.status_code == 400 and "'say'" in message and "regex" in message
    service.close()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (r'{"input": "\d+"}', r"\d+"),
        (r'{"input": "\\d\n\q\u0041\/', "\\d\n\\qA/"),
        ('{"input": "a\\', "a"),
        (r'{"input": "a\uZZ"}', "a"),
        ('{"input": "a\\\nb"}', "a\\\nb"),
    ],
)
def test_escapes_that_are_not_those_of_json(arguments: str, text: str) -> None:
    calls = CustomCalls(frozenset(("say",)))
    assert not list(calls.read(ToolCallPiece(0, "call_1", "say", arguments)))
    result, _ = calls.read(TextPiece("x"))
    assert isinstance(result, ToolCallPiece) and result.arguments == text


@pytest.mark.parametrize(
    "more, param",
    [
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
        ({"function_call": {"name": "f"}, "tools": [{"function": {"name": "f"}}]}, "function_call"),
        ({"functions": [{"name": "f"}], "tools": [{"function": {"name": "g"}}]}, "functions"),
        (
            {"functions": [{"name": "f"}], "function_call": "auto", "tool_choice": "none"},
            "function_call",
        ),
    ],
)
def test_old_and_new_fields_of_calls_are_not_mixed(more: dict[str, Any], param: str) -> None:
    result = client_for(FakeService()).post("/v1/chat/completions", json={"messages": SAY} | more)
    assert result.status_code == 400, result.text
    assert result.get_json()["error"]["param"] == param
    harmless = {"messages": SAY, "functions": [], "function_call": "auto", "tools": None}
    assert client_for(FakeService()).post("/v1/chat/completions", json=harmless).status_code == 200


def test_raw_prompts_of_ollama() -> None:
    service = FakeService()
    client, body = client_for(service), {"model": "fake", "prompt": "a<b>", "raw": True}
    assert client.post("/api/generate", json=body | {"stream": False}).get_json()["response"]
    assert service.tickets[0].messages == [{"role": "user", "content": "a<b>"}]
    assert "continue_final_message" not in service.tickets[0].chosen
    for more in (
        {"images": ["aGk="]}, {"system": "x"}, {"template": "x"}, {"context": [1]},
        {"think": True}, {"think": "low"}, {"options": {"think_budget": 5}},
    ):  # fmt: skip
        result = client.post("/api/generate", json=body | more)
        assert result.status_code == 400 and next(iter(more)) in result.get_json()["error"]
    off = client.post("/api/generate", json=body | {"stream": False, "think": False})
    assert off.status_code == 200, "which asks for nothing"
