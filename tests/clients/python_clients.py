"""What Python's clients do first, each cell on its own: run by `run.py`, in an environment of its own.

    python python_clients.py CLIENT DEMO_URL STAND_IN_URL VECTORS_URL

prints a JSON line for each cell: what it is, and how it ended on the demo model and on the
stand-in.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

PICTURE = Path(__file__).parents[2] / "examples" / "shapes.png"
DATA = base64.b64encode(PICTURE.read_bytes()).decode()
URL = f"data:image/png;base64,{DATA}"
ASK = "What is in the picture?"
SHOWN = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": URL}},
            {"type": "text", "text": ASK},
        ],
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["left", "right"]}},
    "required": ["place"],
    "additionalProperties": False,
}
CELLS: dict[str, dict[str, Callable[[str, str], None]]] = {}


class Place(pydantic.BaseModel):
    """Where something is."""

    place: Literal["left", "right"]


def cell(client: str, what: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        CELLS.setdefault(client, {})[what] = function
        return function

    return add


def says(text: Any) -> None:
    assert isinstance(text, str) and text.strip(), text


def look(place: Literal["left", "right"]) -> str:
    """Looks closer at a part of the picture."""
    return f"a circle on the {place}"


# openai


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


FUNCTION = {"name": "look", "description": "Looks closer", "parameters": SCHEMA}


@cell("openai", "image")
def _(url: str, model: str) -> None:
    says(
        _openai(url).chat.completions.create(model=model, messages=SHOWN).choices[0].message.content
    )


@cell("openai", "stream")
def _(url: str, model: str) -> None:
    chunks = list(
        _openai(url).chat.completions.create(
            model=model, messages=SHOWN, stream=True, stream_options={"include_usage": True}
        )
    )
    says("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    assert chunks[-1].usage.total_tokens > 0


@cell("openai", "structured")
def _(url: str, model: str) -> None:
    found = _openai(url).chat.completions.parse(model=model, messages=SHOWN, response_format=Place)
    assert found.choices[0].message.parsed.place in ("left", "right")


@cell("openai", "tools")
def _(url: str, model: str) -> None:
    client = _openai(url)
    tools = [{"type": "function", "function": FUNCTION}]
    asked = {"model": model, "tools": tools, "tool_choice": "required", "max_tokens": 300}
    message = client.chat.completions.create(messages=SHOWN, **asked).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["place"] in ("left", "right")
    result = {"role": "tool", "tool_call_id": call.id, "content": "a circle"}
    said = client.chat.completions.create(
        model=model, messages=[*SHOWN, message, result], tools=tools, tool_choice="none"
    )
    says(said.choices[0].message.content)


@cell("openai", "n")
def _(url: str, model: str) -> None:
    found = _openai(url).chat.completions.create(model=model, messages=SHOWN, n=2, temperature=1)
    assert len(found.choices) == 2


@cell("openai", "responses")
def _(url: str, model: str) -> None:
    client = _openai(url)
    shown = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": ASK},
    ]
    first = client.responses.create(model=model, input=[{"role": "user", "content": shown}])
    says(first.output_text)
    with client.responses.stream(
        model=model, input="And?", previous_response_id=first.id
    ) as stream:
        for _event in stream:
            pass
        says(stream.get_final_response().output_text)
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    called = client.responses.create(
        model=model, input=ASK, tools=tools, tool_choice="required", max_output_tokens=300
    )
    call = next(item for item in called.output if item.type == "function_call")
    assert json.loads(call.arguments)["place"] in ("left", "right")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a circle"}
    says(
        client.responses.create(
            model=model, input=[result], previous_response_id=called.id
        ).output_text
    )


@cell("openai", "files")
def _(url: str, model: str) -> None:
    client = _openai(url)
    file = client.files.create(file=PICTURE, purpose="vision")
    part = {"type": "file", "file": {"file_id": file.id}}
    shown = [{"role": "user", "content": [part, {"type": "text", "text": ASK}]}]
    says(client.chat.completions.create(model=model, messages=shown).choices[0].message.content)


@cell("openai", "embeddings")
def _(url: str, model: str) -> None:  # noqa: ARG001
    vectors = os.environ["MTMD_VECTORS"]
    found = _openai(vectors).embeddings.create(model="tiny clip", input=["a", "b"])
    assert [len(row.embedding) for row in found.data] == [24, 24]


# anthropic, ollama

BLOCKS = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    {"type": "text", "text": ASK},
]


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


@cell("anthropic", "image")
def _(url: str, model: str) -> None:
    asked = [{"role": "user", "content": BLOCKS}]
    client = _anthropic(url)
    says(client.messages.create(model=model, max_tokens=64, messages=asked).content[0].text)
    assert client.messages.count_tokens(model=model, messages=asked).input_tokens > 0


@cell("anthropic", "stream")
def _(url: str, model: str) -> None:
    asked = [{"role": "user", "content": BLOCKS}]
    with _anthropic(url).messages.stream(model=model, max_tokens=64, messages=asked) as stream:
        says("".join(stream.text_stream))
        assert stream.get_final_message().usage.output_tokens > 0


@cell("anthropic", "structured")
def _(url: str, model: str) -> None:
    found = _anthropic(url).messages.create(
        model=model,
        max_tokens=64,
        messages=[{"role": "user", "content": BLOCKS}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    Place.model_validate_json(found.content[0].text)


@cell("anthropic", "tools")
def _(url: str, model: str) -> None:
    client = _anthropic(url)
    tools = [{"name": "look", "description": "Looks closer", "input_schema": SCHEMA}]
    asked = [{"role": "user", "content": BLOCKS}]
    with client.messages.stream(
        model=model, max_tokens=300, messages=asked, tools=tools, tool_choice={"type": "any"}
    ) as stream:
        found = stream.get_final_message()
    used = found.content[-1]
    assert (found.stop_reason, used.type) == ("tool_use", "tool_use"), found
    Place.model_validate(used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": BLOCKS}
    asked += [
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result]},
    ]
    said = client.messages.create(
        model=model, max_tokens=64, messages=asked, tools=tools, tool_choice={"type": "none"}
    )
    says(said.content[0].text)


def _ollama(url: str) -> Any:
    import ollama

    return ollama.Client(url, timeout=60)


@cell("ollama", "image")
def _(url: str, model: str) -> None:
    asked = [{"role": "user", "content": ASK, "images": [PICTURE]}]
    client = _ollama(url)
    says(client.chat(model, asked).message.content)
    says(client.generate(model, ASK, images=[PICTURE]).response)
    assert model in [m.model.removesuffix(":latest") for m in client.list().models]
    assert "vision" in client.show(model).capabilities


@cell("ollama", "stream")
def _(url: str, model: str) -> None:
    asked = [{"role": "user", "content": ASK, "images": [DATA]}]
    says("".join(part.message.content for part in _ollama(url).chat(model, asked, stream=True)))


@cell("ollama", "structured")
def _(url: str, model: str) -> None:
    asked = [{"role": "user", "content": ASK, "images": [DATA]}]
    found = _ollama(url).chat(model, asked, format=Place.model_json_schema())
    Place.model_validate_json(found.message.content)


@cell("ollama", "tools")
def _(url: str, model: str) -> None:
    client, asked = _ollama(url), [{"role": "user", "content": ASK}]
    tools = [{"type": "function", "function": FUNCTION}]
    said = client.chat(model, asked, tools=tools, options={"num_predict": 300}).message
    assert said.tool_calls, "the model did not call the tool, and nothing makes it"
    call = said.tool_calls[0].function
    assert call.name == "look" and call.arguments["place"] in ("left", "right")
    result = {"role": "tool", "content": "a circle", "tool_name": "look"}
    says(client.chat(model, [*asked, said, result]).message.content)


# LangChain


def _langchain(url: str, model: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, **more
    )


@cell("langchain-openai", "image")
def _(url: str, model: str) -> None:
    says(_langchain(url, model).invoke(SHOWN).content)


@cell("langchain-openai", "stream")
def _(url: str, model: str) -> None:
    says("".join(chunk.content for chunk in _langchain(url, model).stream(SHOWN)))


@cell("langchain-openai", "structured")
def _(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        found = _langchain(url, model).with_structured_output(Place, method=method).invoke(SHOWN)
        assert found.place in ("left", "right"), method


@cell("langchain-openai", "tools")
def _(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = _langchain(url, model).bind_tools([look], tool_choice="required")
    asked = [HumanMessage(ASK)]
    called = chat.invoke(asked)
    (call,) = called.tool_calls
    assert call["args"]["place"] in ("left", "right")
    result = ToolMessage("a circle", tool_call_id=call["id"])
    says(_langchain(url, model).invoke([*asked, called, result]).content)


@cell("langchain-openai", "n")
def _(url: str, model: str) -> None:
    chat = _langchain(url, model, n=2, frequency_penalty=0.5, temperature=1)
    from langchain_core.messages import HumanMessage

    assert len(chat.generate([[HumanMessage(ASK)]]).generations[0]) == 2


@cell("langchain-openai", "responses")
def _(url: str, model: str) -> None:
    chat = _langchain(url, model, use_responses_api=True)
    says(chat.invoke(SHOWN).text)
    called = chat.bind_tools([look], tool_choice="required").invoke(ASK)
    assert called.tool_calls[0]["args"]["place"] in ("left", "right")


@cell("langchain-openai", "embeddings")
def _(url: str, model: str) -> None:  # noqa: ARG001
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(
        model="tiny clip",
        base_url=f"{os.environ['MTMD_VECTORS']}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    )
    assert len(made.embed_query("a")) == 24


# LiteLLM


def _litellm(url: str, model: str, kind: str = "openai", **more: Any) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not looked up
    import litellm

    litellm.suppress_debug_info = True
    base = f"{url}/v1" if kind == "openai" else url
    return litellm.completion(
        f"{kind}/{model}", api_base=base, api_key="none", max_tokens=300, num_retries=0, **more
    )


@cell("litellm", "image")
def _(url: str, model: str) -> None:
    for kind in ("openai", "ollama_chat", "anthropic"):
        says(_litellm(url, model, kind, messages=SHOWN).choices[0].message.content)


@cell("litellm", "stream")
def _(url: str, model: str) -> None:
    for kind in ("openai", "ollama_chat", "anthropic"):
        chunks = _litellm(url, model, kind, messages=SHOWN, stream=True)
        says("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@cell("litellm", "structured")
def _(url: str, model: str) -> None:
    found = _litellm(url, model, messages=SHOWN, response_format=Place)
    Place.model_validate_json(found.choices[0].message.content)


@cell("litellm", "tools")
def _(url: str, model: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    for kind in ("openai", "anthropic"):
        found = _litellm(url, model, kind, messages=SHOWN, tools=tools, tool_choice="required")
        (call,) = found.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["place"] in ("left", "right")


@cell("litellm", "responses")
def _(url: str, model: str) -> None:
    import litellm

    found = litellm.responses(
        model=f"openai/{model}", input=ASK, api_base=f"{url}/v1", api_key="none"
    )
    says(found.output_text)


# instructor


@cell("instructor", "structured")
def _(url: str, model: str) -> None:
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(_openai(url), mode=mode)
        asked = {"model": model, "messages": SHOWN, "max_retries": 0, "max_tokens": 300}
        found = client.chat.completions.create(response_model=Place, **asked)
        assert found.place in ("left", "right"), mode


@cell("instructor", "stream")
def _(url: str, model: str) -> None:
    import instructor

    client = instructor.from_openai(_openai(url), mode=instructor.Mode.JSON_SCHEMA)
    asked = {"model": model, "messages": SHOWN, "max_tokens": 300}
    *_, last = client.chat.completions.create_partial(response_model=Place, **asked)
    assert last.place in ("left", "right")


# pydantic-ai


def _agent(url: str, model: str, kind: str = "chat", **more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    made = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return Agent(made(model, provider=provider), retries=0, **more)


def _shown() -> list[Any]:
    from pydantic_ai import BinaryContent

    return [BinaryContent(PICTURE.read_bytes(), media_type="image/png"), ASK]


@cell("pydantic-ai", "image")
def _(url: str, model: str) -> None:
    says(_agent(url, model).run_sync(_shown()).output)


@cell("pydantic-ai", "stream")
def _(url: str, model: str) -> None:
    import asyncio

    async def ask() -> str:
        async with _agent(url, model).run_stream(_shown()) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    says(asyncio.run(ask()))


@cell("pydantic-ai", "structured")
def _(url: str, model: str) -> None:
    from pydantic_ai import NativeOutput

    for kind in (Place, NativeOutput(Place)):
        assert _agent(url, model, output_type=kind).run_sync(_shown()).output.place


@cell("pydantic-ai", "tools")
def _(url: str, model: str) -> None:
    called = []

    def look_closer(place: Literal["left", "right"]) -> str:
        """Looks closer at a part of the picture."""
        called.append(place)
        return "a circle"

    says(_agent(url, model, tools=[look_closer]).run_sync(ASK).output)
    assert called, "the model did not call the tool, and nothing makes it"


@cell("pydantic-ai", "responses")
def _(url: str, model: str) -> None:
    says(_agent(url, model, "responses").run_sync(_shown()).output)


# LlamaIndex, Haystack, DSPy, llm


def _index(url: str, model: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


def _index_messages() -> list[Any]:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    return [ChatMessage(role="user", blocks=[ImageBlock(path=PICTURE), TextBlock(text=ASK)])]


@cell("llama-index", "image")
def _(url: str, model: str) -> None:
    says(_index(url, model).chat(_index_messages()).message.content)


@cell("llama-index", "stream")
def _(url: str, model: str) -> None:
    says("".join(r.delta or "" for r in _index(url, model).stream_chat(_index_messages())))


@cell("llama-index", "structured")
def _(url: str, model: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    made = _index(url, model).structured_predict(Place, PromptTemplate("Where is it?"))
    assert made.place in ("left", "right")


@cell("llama-index", "tools")
def _(url: str, model: str) -> None:
    from llama_index.core.tools import FunctionTool

    llm, tool = _index(url, model), FunctionTool.from_defaults(look, fn_schema=Place)
    found = llm.chat_with_tools([tool], ASK, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(found)
    assert call.tool_kwargs["place"] in ("left", "right")


def _haystack(url: str, model: str, **more: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    return OpenAIChatGenerator(
        model=model, api_base_url=f"{url}/v1", api_key=Secret.from_token("none"), **more
    )


def _haystack_messages() -> list[Any]:
    from haystack.dataclasses import ChatMessage, ImageContent

    return [ChatMessage.from_user(content_parts=[ImageContent.from_file_path(str(PICTURE)), ASK])]


@cell("haystack", "image")
def _(url: str, model: str) -> None:
    says(_haystack(url, model).run(_haystack_messages())["replies"][0].text)


@cell("haystack", "stream")
def _(url: str, model: str) -> None:
    parts: list[str] = []
    made = _haystack(url, model, streaming_callback=lambda chunk: parts.append(chunk.content or ""))
    made.run(_haystack_messages())
    says("".join(parts))


@cell("haystack", "tools")
def _(url: str, model: str) -> None:
    from haystack.tools import Tool

    tool = Tool("look", "Looks closer", SCHEMA, look)
    made = _haystack(url, model, tools=[tool], generation_kwargs={"tool_choice": "required"})
    (call,) = made.run(_haystack_messages())["replies"][0].tool_calls
    assert call.arguments["place"] in ("left", "right")


@cell("haystack", "n")
def _(url: str, model: str) -> None:
    made = _haystack(url, model, generation_kwargs={"n": 2})
    assert len(made.run(_haystack_messages())["replies"]) == 2


@cell("dspy", "image")
def _(url: str, model: str) -> None:
    import dspy

    lm = dspy.LM(
        f"openai/{model}", api_base=f"{url}/v1", api_key="none", cache=False, num_retries=0
    )
    found = lm(messages=SHOWN)[0]
    says(found if isinstance(found, str) else found["text"])


@cell("llm", "image")
def _(url: str, model: str) -> None:
    says(_llm(url, model, "-a", str(PICTURE), ASK))


@cell("llm", "stream")
def _(url: str, model: str) -> None:
    says(_llm(url, model, ASK))


@cell("llm", "structured")
def _(url: str, model: str) -> None:
    text = _llm(url, model, "--no-stream", "--schema", json.dumps(SCHEMA), "-a", str(PICTURE), ASK)
    Place.model_validate_json(text)


@cell("llm", "tools")
def _(url: str, model: str) -> None:
    text = _llm(
        url, model, "--td", "--functions", "def look(place: str) -> str:\n    return place", ASK
    )
    assert "Tool call" in text, "the model did not call the tool, and nothing makes it"


def _llm(url: str, model: str, *arguments: str) -> str:
    import subprocess

    with tempfile.TemporaryDirectory() as home:
        entry = [
            {
                "model_id": "here",
                "model_name": model,
                "api_base": f"{url}/v1",
                "vision": True,
                "supports_schema": True,
                "supports_tools": True,
            }
        ]
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps(entry))  # JSON is YAML
        done = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "here", "--no-log", "--key", "none", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            env=os.environ | {"LLM_USER_PATH": home},
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr[-400:]
        return done.stdout + ("" if not done.stderr else done.stderr)


VERSION_OF = {"llama-index": "llama-index-llms-openai-like", "haystack": "haystack-ai"}
VERSION_OF |= {"pydantic-ai": "pydantic-ai-slim"}


def attempt(function: Callable[[str, str], None], url: str, model: str) -> str:
    """ "" where it works, otherwise why not."""
    try:
        function(url, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
    return ""


def main(client: str, demo: str, stand_in: str, vectors: str) -> None:
    os.environ["MTMD_VECTORS"] = vectors
    version = importlib.import_module("importlib.metadata").version(VERSION_OF.get(client, client))
    for what, function in CELLS[client].items():
        found = {
            "client": f"{client} {version}",
            "cell": what,
            "demo": attempt(function, demo, "demo model"),
        }
        if found["demo"]:
            found["stand_in"] = attempt(function, stand_in, "stand-in")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print("\n".join(CELLS))
    else:
        main(*sys.argv[1:])
