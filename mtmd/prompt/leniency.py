"""Conversations in shapes that a chat template does not take by itself, brought into one that it
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mtmd.kernels.errors import PromptError
from mtmd.tools.history import plain_text

SYSTEM_GATHERED = "the chat template takes one system message: they stand as one at the beginning"
SYSTEM_IN_TURN = "the chat template takes no system message: it begins the first turn"
# Stands where the text of the last message ends: a Unicode noncharacter.
_END = "\ufdd2"


def system_moved(messages: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Other places for what system messages say, each with what is to be said of it."""
    one = with_one_system(messages)
    if one != messages:
        yield one, SYSTEM_GATHERED
    if one[0]["role"] in ("system", "developer") and len(one) > 1 and one[1]["role"] == "user":
        begins = plain_text(one[0]["content"])
        content = _together(begins, one[1]["content"])
        yield [{"role": "user", "content": content}, *one[2:]], SYSTEM_IN_TURN


def with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one, first, and turns of one role that then meet as one turn. The same
    where there are none to gather.
    """
    system = [m for m in messages if m["role"] in ("system", "developer")]
    if not system or (len(system) == 1 and messages[0] is system[0]):
        return messages
    text = "\n\n".join(filter(None, (plain_text(m["content"]) for m in system)))
    made: list[dict[str, Any]] = [{"role": "system", "content": text}]
    for message in messages:
        if message["role"] in ("system", "developer"):
            continue
        last = made[-1]
        if message["role"] == last["role"] == "user":
            made[-1] = {"role": "user", "content": _together(last["content"], message["content"])}
        else:
            made.append(message)
    return made


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    return [*_parts(one), *_parts(other)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def open_ended(
    render: Callable[..., str], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    """The prompt up to the end of the last message, which the answer goes on from. Raises
    PromptError where that is not the assistant's text.
    """
    last = messages[-1]
    text = plain_text(last["content"])
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise PromptError(
            "continue_final_message: the last message has to be a text of the assistant; the "
            "answer goes on from it"
        )
    marked = [*messages[:-1], {**last, "content": f"{text}{_END}"}]
    rendered = render(marked, tools=tools, add_generation_prompt=False)
    if rendered.count(_END) != 1:
        raise PromptError(
            "continue_final_message: the chat template does not show the last message"
        )
    return rendered[: rendered.index(_END)]
