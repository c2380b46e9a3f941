"""Conversations with calls and results in them, as the chat template can take them; and tools told
to models whose template cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.tools.probe import ToolTemplate
from mtmd.tools.tool import Toolbox

DESCRIBED = "the chat template cannot show the tools: they are described in a system message"
CALLS_WRITTEN = "the chat template cannot show these tool calls: they are written as text"
RESULTS_WRITTEN = "the chat template cannot show tool results: they are in the user's turns"
BROKEN_ARGUMENTS = "arguments of a tool call are not JSON: the call is shown as the model wrote it"
PICTURES_MOVED = "the chat template supports no pictures in tool results: they are in the next turn"
ID_CHARS = 9  # at least so many have those ids that templates write

# As models were trained on it that have no tokens for calls (NousResearch/Hermes-Function-Calling).
_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Report:
    """`messages` and `tools` are for the template; `notes` say what was done for it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    notes: tuple[str, ...]


def report(
    messages: Sequence[Mapping[str, Any]],
    box: Toolbox,
    template: ToolTemplate,
    seal: Callable[[str], str],
) -> Report:
    """Messages as `read_conversation` made them, sealed already; `seal` is for the tools."""
    notes: list[str] = []
    declared = [sealed(tool.declaration(), seal) for tool in box.tools] if box.callable else None
    made = _calls(messages, template, notes)
    made = _results(made, template, notes)
    described = bool(declared) and not template.declares
    if any(m.get("tool_calls") for m in messages) and not described:
        shown = any(m.get("tool_calls") for m in made)
        notes += [CALLS_WRITTEN] if not shown and BROKEN_ARGUMENTS not in notes else []
    if any(m["role"] == "tool" for m in messages) and not described:
        notes += [RESULTS_WRITTEN] if not template.writes_results else []
    if declared and described:
        text = _TEXT.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in declared))
        made, declared = _with_system(made, text), None
        notes.append(DESCRIBED)
    return Report(made, declared, tuple(notes))


def sealed(value: Any, seal: Callable[[str], str]) -> Any:
    """All texts and names in a value made of JSON types."""
    if isinstance(value, str):
        return seal(value)
    if isinstance(value, Mapping):
        return {seal(str(key)): sealed(item, seal) for key, item in value.items()}
    return [sealed(item, seal) for item in value] if isinstance(value, (list, tuple)) else value


def _calls(
    messages: Sequence[Mapping[str, Any]], template: ToolTemplate, notes: list[str]
) -> list[dict[str, Any]]:
    """Return the messages with calls in the form that the template reads, or written as text."""
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            made.append(dict(message))
            continue
        broken = any(isinstance(call["function"]["arguments"], str) for call in calls)
        if broken and BROKEN_ARGUMENTS not in notes:
            notes.append(BROKEN_ARGUMENTS)
        shows = template.writes_calls and (template.syntax.several or len(calls) == 1)
        if shows and (template.text_arguments or not broken):
            made.append({**message, "tool_calls": [_as_read(call, template) for call in calls]})
        else:
            written = template.syntax.write(
                [(c["function"]["name"], c["function"]["arguments"], _long(c["id"])) for c in calls]
            )
            text = plain_text(message.get("content"))
            content = f"{text}\n{written}" if text else written
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            made.append({**rest, "content": content})
    return made


def _as_read(call: Mapping[str, Any], template: ToolTemplate) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if template.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": _long(call["id"]),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _long(id_: str) -> str:
    return id_.rjust(ID_CHARS, "0")


def _results(
    messages: Sequence[dict[str, Any]], template: ToolTemplate, notes: list[str]
) -> list[dict[str, Any]]:
    """Results in a role that the template has."""
    made: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    was_result = False
    for message in [*messages, {"role": ""}]:
        is_result = message["role"] == "tool"
        if not is_result and pictures:
            made.append({"role": "user", "content": pictures})
            pictures = []
        if is_result and template.writes_results:
            content = message["content"]
            shown = [p for p in _parts(content) if p["type"] == "image"]
            if shown and not template.pictures:
                content = plain_text(content) or "See the picture."
                pictures += shown
                notes += [PICTURES_MOVED] if PICTURES_MOVED not in notes else []
            elif not shown:
                content = plain_text(content)
            id_ = _long(message.get("tool_call_id", ""))
            made.append({**message, "content": content, "tool_call_id": id_})
        elif is_result:
            response = [
                {"type": "text", "text": "<tool_response>\n"},
                *_parts(message["content"]),
                {"type": "text", "text": "\n</tool_response>"},
            ]
            if was_result:
                made[-1]["content"] += [{"type": "text", "text": "\n"}, *response]
            else:
                made.append({"role": "user", "content": response})
        elif was_result and message["role"] == "user" and not template.writes_results:
            made[-1]["content"] += [{"type": "text", "text": "\n"}, *_parts(message["content"])]
        elif message["role"]:
            made.append(dict(message))
        was_result = is_result
    return [_joined(m) if m["role"] == "user" else m for m in made]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return it with neighbouring texts as one, and as a text alone where there are no pictures:
    templates trim parts.
    """
    content = message["content"]
    if isinstance(content, str) or len(content) < 2:
        return message
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text" and parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(dict(part))
    return {**message, "content": parts}


def _with_system(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        begins = plain_text(first["content"])
        return [{**first, "content": f"{begins}\n\n{text}" if begins else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


def plain_text(content: Any) -> str:
    """The texts of a content, one after the other."""
    return "".join(part["text"] for part in _parts(content) if part["type"] == "text")
