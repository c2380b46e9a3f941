"""Thoughts in five interfaces, by the clients that their makers publish and in Python, whole and
streamed, where the prompt opens the thought and where the model does.
"""

from __future__ import annotations

import json
import warnings
from contextlib import closing

import pytest
from scripted import writes
from serving import running
from thinking_templates import TEMPLATES

from mtmd import Finished, TextPiece, ThinkingPiece, ToolCallPiece, load

TEXTS = {"opened": "Hm.\n</think>\n\nHello.", "written": "<think>\nHm.\n</think>\n\nHello."}
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["q"]}},
    "required": ["a"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>'

FUNCTIONS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
# What each interface says of tools, a schema, no thinking, and a budget.
WAYS = {
    "Chat": {
        "tools": FUNCTIONS,
        "schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        "off": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "budget": {"extra_body": {"think_budget": 2}},
    },
    "Messages": {
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
        "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "off": {"thinking": {"type": "disabled"}},
        "budget": {"thinking": {"type": "enabled", "budget_tokens": 2}},
    },
    "Responses": {
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
        "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "off": {"reasoning": {"effort": "none"}},
        "budget": {"extra_body": {"reasoning": {"max_tokens": 2}}},
    },
    "Ollama": {
        "tools": FUNCTIONS,
        "schema": {"format": SCHEMA},
        "off": {"think": False},
        "budget": {"options": {"think_budget": 2}},
    },
    "Python": {
        "tools": FUNCTIONS,
        "schema": {"json_schema": SCHEMA},
        "off": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
        "budget": {"think_budget": 2},
    },
}


@pytest.fixture(scope="module", params=TEXTS)
def served(request, tmp_path_factory):
    """A model, its server, and the kind of its template."""
    path = tmp_path_factory.mktemp("templates") / "chat.jinja"
    path.write_text(TEMPLATES[request.param])
    model = load(chat_template=path, context=2048)
    with running(model.service) as server:
        yield model, server, request.param


def way(interface, name):
    return WAYS[type(interface).__name__][name]


class Interface:
    """One interface by its client: the thought, the text, and the calls of an answer."""

    def __init__(self, server):
        self.url = server.url

    def close(self):
        getattr(self.sdk, "close", lambda: self.sdk._client.close())()

    def ask(self, streams, **chosen):
        return (self.streamed if streams else self.whole)(**chosen)


class Chat(Interface):
    def __init__(self, server):
        super().__init__(server)
        import openai

        self.sdk = openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0)
        self.make = self.sdk.chat.completions.create

    def whole(self, messages=HI, **chosen):
        answer = self.make(model="demo", messages=messages, **chosen)
        message, self.usage = answer.choices[0].message, answer.usage
        self.thoughts = self.usage.completion_tokens_details.reasoning_tokens
        calls = [c.function.name for c in message.tool_calls or ()]
        return getattr(message, "reasoning_content", ""), message.content or "", calls

    def streamed(self, messages=HI, **chosen):
        thought, text, calls = "", "", []
        options = {"include_usage": True}
        for chunk in self.make(
            model="demo", messages=messages, stream=True, stream_options=options, **chosen
        ):
            if chunk.usage:
                self.thoughts = chunk.usage.completion_tokens_details.reasoning_tokens
            for choice in chunk.choices:
                new = getattr(choice.delta, "reasoning_content", None) or ""
                assert not (new and text), "the thought comes first"
                thought, text = thought + new, text + (choice.delta.content or "")
                calls += [c.function.name for c in choice.delta.tool_calls or () if c.function.name]
        return thought, text, calls

    def history(self, thought, text):
        return [*HI, {"role": "assistant", "content": text, "reasoning_content": thought}, *HI]


class Messages(Interface):
    def __init__(self, server):
        super().__init__(server)
        import anthropic

        self.sdk = anthropic.Anthropic(base_url=self.url, api_key="x", max_retries=0)

    def read(self, message):
        receipt = getattr(message.usage, "mtmd_receipt", None)  # not put together by the client
        self.thoughts = receipt["thinking_tokens"] if receipt else 9
        thoughts = [b for b in message.content if b.type == "thinking"]
        assert all(b.signature for b in thoughts)
        kinds = [b.type for b in message.content]
        assert kinds == sorted(kinds, key=["thinking", "text", "tool_use"].index)
        self.blocks = [b.model_dump() for b in message.content]
        texts = [b.text for b in message.content if b.type == "text"]
        calls = [b.name for b in message.content if b.type == "tool_use"]
        return "".join(b.thinking for b in thoughts), "".join(texts), calls

    def whole(self, messages=HI, **chosen):
        made = self.sdk.messages.create(model="demo", messages=messages, max_tokens=300, **chosen)
        return self.read(made)

    def streamed(self, messages=HI, **chosen):
        kinds = []
        with self.sdk.messages.stream(
            model="demo", messages=messages, max_tokens=300, **chosen
        ) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    kinds.append(event.delta.type)
        if "thinking_delta" in kinds:
            assert kinds.count("signature_delta") == 1
            assert kinds.index("signature_delta") > kinds.index("thinking_delta")
        return self.read(stream.get_final_message())

    def history(self, *_):
        self.whole()
        return [*HI, {"role": "assistant", "content": self.blocks}, *HI]


class Responses(Interface):
    def __init__(self, server):
        super().__init__(server)
        import openai

        self.sdk = openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0)

    def read(self, response):
        self.thoughts = response.usage.output_tokens_details.reasoning_tokens
        self.items = [item.model_dump(exclude_none=True) for item in response.output]
        reasoned = [item for item in response.output if item.type == "reasoning"]
        thought = "".join(part.text for item in reasoned for part in item.content or ())
        calls = [item.name for item in response.output if item.type == "function_call"]
        self.encoded = [item.encrypted_content for item in reasoned]
        return thought, response.output_text, calls

    def whole(self, messages=HI, **chosen):
        return self.read(self.sdk.responses.create(model="demo", input=messages, **chosen))

    def streamed(self, messages=HI, **chosen):
        deltas, items, done = [], {}, None
        for event in self.sdk.responses.create(model="demo", input=messages, stream=True, **chosen):
            if event.type == "response.reasoning_text.delta":
                deltas.append(event.delta)
            elif event.type == "response.output_item.added":
                items[event.output_index] = event.item.type
            elif event.type == "response.output_item.done":
                assert items[event.output_index] == event.item.type
            elif event.type == "response.completed":
                done = event.response
        assert [item.type for item in done.output] == [items[i] for i in sorted(items)]
        result = self.read(done)
        assert result[0] == "".join(deltas)
        return result

    def history(self, *_):
        self.whole()
        return [*HI, *self.items, *HI]


class Ollama(Interface):
    def __init__(self, server):
        super().__init__(server)
        import ollama

        self.sdk = ollama.Client(self.url, trust_env=False)

    def whole(self, messages=HI, **chosen):
        answer = self.sdk.chat("demo", messages, **chosen)
        message = answer.message
        calls = [c.function.name for c in message.tool_calls or ()]
        return message.thinking or "", message.content or "", calls

    def streamed(self, messages=HI, **chosen):
        parts = list(self.sdk.chat("demo", messages, stream=True, **chosen))
        thought = "".join(part.message.thinking or "" for part in parts)
        text = "".join(part.message.content or "" for part in parts)
        called = [c.function.name for p in parts for c in p.message.tool_calls or ()]
        return thought, text, called

    def history(self, thought, text):
        return [*HI, {"role": "assistant", "content": text, "thinking": thought}, *HI]


class Python:
    def __init__(self, model):
        self.model = model

    def ask(self, streams, messages=HI, **chosen):
        *events, last = self.model.stream(messages, **chosen)
        assert isinstance(last, Finished)
        answer = last.answer
        self.thoughts = answer.receipt.thinking_tokens
        if streams:
            thought = "".join(e.text for e in events if isinstance(e, ThinkingPiece))
            text = "".join(e.text for e in events if isinstance(e, TextPiece))
            return (
                thought,
                text,
                [e.name for e in events if isinstance(e, ToolCallPiece) and e.name],
            )
        return answer.thinking, answer.text, [call.name for call in answer.tool_calls]

    def history(self, thought, text):
        return [*HI, {"role": "assistant", "content": text, "reasoning_content": thought}, *HI]


@pytest.fixture(params=[Chat, Messages, Responses, Ollama, Python])
def interface(request, served):
    model, server, _ = served
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the clients, about themselves
        made = request.param(model if request.param is Python else server)
        yield made
        if isinstance(made, Interface):
            made.close()


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streams(request):
    return request.param


def test_thought_and_answer_are_parts_of_their_own(served, interface, streams):
    model, _, kind = served
    with writes(model, TEXTS[kind]):
        assert interface.ask(streams) == ("Hm.", "Hello.", [])
    if not isinstance(interface, Ollama):
        assert interface.thoughts > 3


def test_thinking_can_be_turned_off(served, interface, streams):
    with writes(served[0], "Hello."):
        thought, text, calls = interface.ask(streams, **way(interface, "off"))
    assert (thought or "", text, calls) == ("", "Hello.", [])


def test_a_schema_is_followed_after_the_thought(served, interface, streams):
    model, _, kind = served
    with writes(model, TEXTS[kind]):
        thought, text, _ = interface.ask(streams, **way(interface, "schema"))
    assert (thought, json.loads(text)) == ("Hm.", {"a": "q"})


def test_tools_are_called_after_the_thought(served, interface, streams):
    model, _, kind = served
    with writes(model, TEXTS[kind].replace("Hello.", CALL).replace("Hm.", f"Maybe {CALL}.")):
        thought, text, calls = interface.ask(streams, tools=way(interface, "tools"))
    assert (thought, text.strip(), calls) == (f"Maybe {CALL}.", "", ["look"])


def test_a_budget_closes_the_thought(served, interface, streams):
    model, _, kind = served
    begin = TEXTS[kind].partition("Hm.")[0]
    with writes(model, f"{begin}one two three four"):
        thought, text, _ = interface.ask(streams, **way(interface, "budget"))
    assert "one two three four".startswith(thought) and thought
    assert text and "</think>" not in text


def test_thoughts_of_earlier_turns_come_back(served, interface, streams):
    model, _, kind = served
    with writes(model, TEXTS[kind]):
        messages = interface.history("Hm.", "Hello.")
        prompts = []
        write = model.prompts.text.write

        def noted(messages, box, read, *more):
            return write(messages, box, lambda text: (prompts.append(text), read(text))[1], *more)

        model.prompts.text.write = noted
        try:
            assert interface.ask(streams, messages=messages)[0] == "Hm."
        finally:
            del model.prompts.text.write
    assert "<think>\nHm.\n</think>\n\nHello." in prompts[-1]


def test_every_way_in_which_clients_turn_thinking_off(served):
    model, server, _ = served
    ways = (
        {"reasoning_effort": "none"},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"think": False}},
        {"extra_body": {"reasoning": {"enabled": False}}},
        {"extra_body": {"reasoning": {"effort": "none"}}},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"think_budget": 0}},
        {"extra_body": {"enable_thinking": False, "reasoning_effort": "high"}},
    )
    with closing(Chat(server)) as chat:
        for chosen in ways:
            with writes(model, "Hello."):
                assert chat.whole(**chosen) == ("", "Hello.", []), chosen
                reported = chat.usage.mtmd_receipt["warnings"]
                assert not [w for w in reported if "think" in w], chosen


def test_what_has_no_effect_is_named(served):
    model, server, kind = served
    with closing(Chat(server)) as chat, writes(model, TEXTS[kind]):
        chat.whole(
            reasoning_effort="low",
            extra_body={"reasoning_format": "none", "chat_template_kwargs": {"colour": 1}},
        )
    reported = " ".join(chat.usage.mtmd_receipt["warnings"])
    assert all(w in reported for w in ("reasoning_effort", "reasoning_format", "colour"))


def test_a_thought_can_be_left_out_of_what_is_sent(served, streams):
    model, server, kind = served
    for chosen in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        with writes(model, TEXTS[kind]), closing(Chat(server)) as chat:
            assert chat.ask(streams, extra_body=chosen) == ("", "Hello.", [])


def test_encoded_thoughts_come_back_from_clients_that_keep_nothing_else(served):
    model, server, kind = served
    with writes(model, TEXTS[kind]), closing(Responses(server)) as responses:
        responses.whole(include=["reasoning.encrypted_content"], store=False)
        (encoded,) = responses.encoded
        item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encoded}
        stated = {"role": "assistant", "content": "Hello."}
        full = model.service.count([*HI, {**stated, "reasoning": "Hm."}, *HI]).prompt_tokens
        made = responses.sdk.responses.create(model="demo", input=[*HI, item, stated, *HI])
        assert made.usage.input_tokens == full
        later = responses.sdk.responses.create(
            model="demo", input="so?", previous_response_id=made.id
        )
        assert later.usage.input_tokens > full


def test_other_routes_show_what_the_model_reads_and_writes(served):
    from urllib.request import Request, urlopen

    model, server, kind = served
    url = server.url

    def post(path, body):
        data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return json.load(urlopen(Request(f"{url}{path}", data, head)))

    off = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    assert post("/apply-template", off)["prompt"].endswith("<think>\n\n</think>\n\n")
    opened = post("/apply-template", {"messages": HI})["prompt"].endswith("<think>\n")
    assert opened == (kind == "opened")
    with writes(model, TEXTS[kind]):
        assert post("/completion", {"prompt": "hi"})["content"] == TEXTS[kind]
        made = post("/api/generate", {"model": "demo", "prompt": "hi", "stream": False})
    assert (made["thinking"], made["response"]) == ("Hm.", "Hello.")
    assert "thinking" in post("/api/show", {"model": "demo"})["capabilities"]
