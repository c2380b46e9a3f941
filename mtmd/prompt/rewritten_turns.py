"""Conversations in shapes that a chat template does not take by itself, brought into one that it
does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from mtmd.base.errors import PromptError
from mtmd.tools.history import plain_text

DEVELOPER = "the chat template knows no role 'developer': such messages are those of the system"
SYSTEM_IN_PLACE = (
    "the chat template supports a system message at the beginning only: later ones are part of "
    "the turn before"
)
SYSTEM_GATHERED = "the chat template supports one system message: they are joined at the beginning"
SYSTEM_IN_TURN = "the chat template has no system message: it is at the start of the first turn"
TURNS_JOINED = (
    "the chat template needs alternating roles: neighbouring turns of one role are joined"
)
TEXT_IN_SYSTEM = "the chat template has no text next to audio: it is the system message"
# Stands where the text of the last message ends: a Unicode noncharacter.
_END = "\ufdd2"
_SYSTEM = ("system", "developer")
Arrange = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _system_in_place(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return system messages that come later as the end of the turn before, the user's or a result,
    or as a turn of the user: agents add one with every call, and what was said before it has to
    stay as it was, as it is cached.
    """
    count = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM), len(messages))
    if not any(m["role"] in _SYSTEM for m in messages[count:]):
        return messages
    made: list[dict[str, Any]] = []
    for message in messages[count:]:
        if message["role"] in _SYSTEM:
            message = {**message, "role": "user"}
            if made and made[-1]["role"] == "tool":
                content = _together(made[-1]["content"], message["content"])
                made[-1] = {**made[-1], "content": content}
                continue
        made.append(message)
    return [*with_one_system(messages[:count]), *_turns_joined(made, ("user",))]


def with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one, first, and turns of one role that then meet as one turn. The same
    where there are none to gather.
    """
    system = [m for m in messages if m["role"] in _SYSTEM]
    if not system or (len(system) == 1 and messages[0] is system[0]):
        return messages
    text = "\n\n".join(filter(None, (plain_text(m["content"]) for m in system)))
    others = [m for m in messages if m["role"] not in _SYSTEM]
    return [{"role": "system", "content": text}, *_turns_joined(others, ("user",))]


def _turns_joined(
    messages: list[dict[str, Any]], roles: tuple[str, ...] = ("user", "assistant")
) -> list[dict[str, Any]]:
    """Neighbouring turns of one of these roles as one; calls and their results stay apart."""

    def turn(numbered: tuple[int, dict[str, Any]]) -> tuple[str, int]:
        number, message = numbered
        joins = message["role"] in roles and not message.get("tool_calls")
        return message["role"], -1 if joins else number

    made = []
    for _, run in groupby(enumerate(messages), key=turn):
        first, *others = (message for _, message in run)
        content = _together(first["content"], *(m["content"] for m in others))
        made.append({**first, "content": content} if others else first)
    return made


def _system_in_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the system says as the beginning of the user's first turn, or as a turn of its
    own.
    """
    one = with_one_system(_system_in_place(messages))
    if one[0]["role"] not in _SYSTEM:
        return messages
    text, rest = plain_text(one[0]["content"]), one[1:]
    if rest and rest[0]["role"] == "user":
        content = _together(text, rest[0]["content"])
        return _turns_joined([{**rest[0], "content": content}, *rest[1:]])
    return _turns_joined([{"role": "user", "content": text}, *rest])


def _text_in_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what users write beside audio as a part of the system message."""
    made, texts = [], []
    for message in messages:
        content = message["content"]
        is_heard = message["role"] == "user" and not isinstance(content, str)
        if is_heard and any(part["type"] == "audio" for part in content):
            texts += [part["text"] for part in content if part["type"] == "text"]
            content = [part for part in content if part["type"] != "text"]
        made.append({**message, "content": content})
    if not texts:
        return messages
    return with_one_system([*made, {"role": "system", "content": "\n\n".join(texts)}])


ARRANGEMENTS: tuple[tuple[Arrange, str], ...] = (
    (lambda messages: messages, ""),
    (_developer_as_system, DEVELOPER),
    (_system_in_place, SYSTEM_IN_PLACE),
    (with_one_system, SYSTEM_GATHERED),
    (_turns_joined, TURNS_JOINED),
    (_system_in_turn, SYSTEM_IN_TURN),
    (_text_in_system, TEXT_IN_SYSTEM),
)
"""Ways to arrange a conversation that say the same, the first as it is, each with a note on the
change. One that is not about a conversation returns it as it is.
"""


def _together(*contents: Any) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    return [part for content in contents for part in _parts(content)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def open_ended(
    render: Callable[..., str], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    """The prompt up to the end of the last message, which the answer goes on from: behind what
    begins an answer, in a template that shows no answers. Raises PromptError where that message is
    not the assistant's text.
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
    if _END not in rendered and len(messages) > 1:
        return f"{render(messages[:-1], tools=tools, add_generation_prompt=True)}{text}"
    if rendered.count(_END) != 1:
        raise PromptError(
            "continue_final_message: the chat template does not show the last message"
        )
    return rendered[: rendered.index(_END)]
