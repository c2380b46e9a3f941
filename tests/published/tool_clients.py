"""Client libraries that run tools themselves, in an environment of their own.

    python tool_clients.py CLIENT URL MODEL [--stream]

asks for the weather in a city, and prints JSON: the cities that were looked up, and the text in the
end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "What is the weather in Lisbon right now?"
WEATHER = "It is 18 degrees and sunny in Lisbon."
# Without it the model, a small one, calls the tool again.
FOLLOW_UP = "Thanks. What is it like? Answer in one sentence, without calling a function."
CALLS: list[str] = []


def get_weather(city: str) -> Any:
    """Returns the current weather in a city."""
    CALLS.append(city)
    return WEATHER


def langchain(url: str, model: str) -> tuple[Callable[[], str], Callable[[], str]]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(
        base_url=f"{url}/v1", model=model, api_key="none", temperature=0, max_tokens=128
    ).bind_tools([get_weather])

    def converse(say: Callable[[Any], Any]) -> str:
        messages: list[Any] = [HumanMessage(QUESTION)]
        messages.append(stated := say(messages))
        for call in stated.tool_calls:
            result = get_weather(**call["args"])
            messages.append(ToolMessage(result, tool_call_id=call["id"]))
        messages.append(HumanMessage(FOLLOW_UP))
        return str(say(messages).content)

    def streamed(messages: Any) -> Any:
        first, *rest = client.stream(messages)
        for chunk in rest:
            first += chunk
        return first

    return lambda: converse(client.invoke), lambda: converse(streamed)


def pydantic_ai(url: str, model: str) -> tuple[Callable[[], str], Callable[[], str]]:
    from pydantic_ai import Agent, ToolReturn
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        OpenAIChatModel(model, provider=provider),
        model_settings={"temperature": 0, "max_tokens": 128},
    )

    @agent.tool_plain(name="get_weather")
    def _(city: str) -> Any:
        """Returns the current weather in a city."""
        return ToolReturn(get_weather(city), content=FOLLOW_UP)

    def streamed() -> str:
        with agent.run_stream_sync(QUESTION) as result:
            return "".join(result.stream_text(delta=True))

    return lambda: str(agent.run_sync(QUESTION).output), streamed


CLIENTS = {"langchain-openai": langchain, "pydantic-ai": pydantic_ai}


def main(name: str, url: str, model: str, stream: str = "") -> None:
    whole, streamed = CLIENTS[name](url, model)
    text = streamed() if stream else whole()
    print(json.dumps({"calls": CALLS, "text": text}))


if __name__ == "__main__":
    main(*sys.argv[1:])
