"""Tools as requests have them: functions; those that take a text in place of arguments; those that
a server would run, which are left out. And calls of them, put together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from mtmd import Event, Finished, TextPiece, ToolCall, ToolCallPiece
from mtmd.web.errors import ApiError

CUSTOM = "custom"
NAMESPACE = "namespace"
_OWN = (None, "function")
_JOIN = "__"  # between the name of a namespace and that of a tool in it
_INPUT = "input"  # the argument that has the text
_SHOWN = 60  # characters of the name of a kind
# The text of a call that was cut, up to its last whole escape.
_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*)')
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_OF_JSON = '"\\/bfnrtu'


@dataclass(frozen=True)
class GivenTools:
    """The tools of a request that a model may call, as functions. `custom`: names of those that
    take a text; `namespaces`: of each that is in one, the name of that and its own; `left_out`:
    places and kinds of those that a server would run, as "tools[1] (web_search)".
    """

    tools: tuple[Mapping[str, Any], ...]
    custom: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def spelled(self, name: str) -> dict[str, str]:
        """Return the name of a tool as calls of the Responses API have it."""
        if name not in self.namespaces:
            return {"name": name}
        namespace, own = self.namespaces[name]
        return {"name": own, "namespace": namespace}


def in_namespace(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool: the namespace is a part of it."""
    return f"{namespace}{_JOIN}{name}" if namespace else name


def given_tools(
    tools: Sequence[Mapping[str, Any]] | None, own: str | None = None, location: str = "tools"
) -> GivenTools:
    """`own`: what an interface calls functions beside "function"; without one, tools of the kind
    "custom" take a text. The model reads the description of a namespace with its first tool.
    """
    saved, custom, left_out = list[Mapping[str, Any]](), set[str](), list[str]()
    namespaces: dict[str, tuple[str, str]] = {}
    described: Mapping[str, Any] | None = None
    for at, tool, namespace in _flat(tools, location):
        kind = tool.get("type")
        if kind in _OWN:
            function = tool
        elif kind == own:
            function = {key: value for key, value in tool.items() if key != "type"}
        elif kind == CUSTOM:
            function = _as_function(tool)
        else:
            left_out.append(f"{at} ({str(kind)[:_SHOWN]})")
            continue
        if namespace is not None:
            inner, group = _inner(function, "function"), str(namespace["name"])
            name = str(inner.get("name"))
            function = {**inner, "type": "function", "name": in_namespace(group, name)}
            if namespace is not described:
                function["description"] = _with_namespace(namespace, inner.get("description"))
                described = namespace
            namespaces[function["name"]] = group, name
        saved.append(function)
        if kind == CUSTOM:
            custom.add(str(function["name"]))
    return GivenTools(tuple(saved), frozenset(custom), tuple(left_out), namespaces)


def _flat(
    tools: Sequence[Mapping[str, Any]] | None, location: str
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Yield each tool with its location and its namespace, None where it is in none. Raises
    ApiError for a namespace without a name or a list of tools, and for a wrong description.
    """
    for i, tool in enumerate(tools or ()):
        at = f"{location}[{i}]"
        if tool.get("type") != NAMESPACE:
            yield at, tool, None
            continue
        name, members = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise _wrong_namespace(f"{at}.name", "a text")
        if not isinstance(members, list) or not all(isinstance(m, Mapping) for m in members):
            raise _wrong_namespace(f"{at}.tools", "a list of tools")
        if not isinstance(tool.get("description"), (str, NoneType)):
            raise _wrong_namespace(f"{at}.description", "a text")
        for j, member in enumerate(members):
            yield f"{at}.tools[{j}]", member, tool


def _with_namespace(namespace: Mapping[str, Any], description: Any) -> Any:
    """Return the description of a tool after that of its namespace."""
    text = namespace.get("description")
    if not text or not isinstance(description, (str, NoneType)):
        return description  # what is no text is refused where tools are read
    return f"All tools of {namespace['name']}: {text}\n\n{description or ''}".rstrip()


def _wrong_namespace(location: str, expected: str) -> ApiError:
    return ApiError(400, f"{location}: expected {expected}", param=location)


def chosen_tool(choice: Any, given: GivenTools) -> Any:
    """A `tool_choice` in which tools that take a text, and those in namespaces, are functions; a
    namespace stands for each of its tools. Raises ApiError for one that asks for what a server
    would run, and for a namespace that is not in `given`.
    """
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(choice, given)
    if kind == NAMESPACE:
        return _allow("required", _names(choice, "tool_choice", given))
    if kind == CUSTOM or (kind in _OWN and _inner(choice, "function").get(NAMESPACE)):
        return {"type": "function", "name": _names(choice, "tool_choice", given)[0]}
    if kind not in _OWN:
        raise ApiError(
            400,
            f"tool_choice.type: found {str(kind)[:_SHOWN]!r}, a tool that a server runs, and none "
            "is run here; expected auto, none, required or a function",
            param="tool_choice.type",
            code="unsupported_parameter",
        )
    return choice


def _allowed(choice: Mapping[str, Any], given: GivenTools) -> Any:
    inner = _inner(choice, "allowed_tools")
    tools = inner.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return choice  # which is refused where options are read
    location = "tool_choice.allowed_tools.tools"
    names = [n for i, tool in enumerate(tools) for n in _names(tool, f"{location}[{i}]", given)]
    if not names and tools and inner.get("mode") != "required":
        return "none"
    return _allow(inner.get("mode", "auto"), names)


def _allow(mode: Any, names: Sequence[Any]) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def _names(choice: Mapping[str, Any], location: str, given: GivenTools) -> list[Any]:
    """Return the names by which the model knows what is chosen: none for what a server would run.
    Raises ApiError for a namespace that is not in `given`.
    """
    kind = choice.get("type")
    if kind == NAMESPACE:
        requested = choice.get("name")
        names = [name for name, (group, _) in given.namespaces.items() if group == requested]
        if not names:
            expected = ", ".join(sorted({group for group, _ in given.namespaces.values()}))[:200]
            raise _wrong_namespace(
                f"{location}.name", f"the name of a namespace: {expected or 'none is in tools'}"
            )
        return names
    if kind not in (*_OWN, CUSTOM):
        return []
    inner = _inner(choice, CUSTOM if kind == CUSTOM else "function")
    name, group = inner.get("name"), inner.get(NAMESPACE)
    return [in_namespace(str(group), str(name)) if group else name]


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that takes a text: a function of one. A regular expression is followed, or refused; a
    grammar in Lark's notation is shown to the model.
    """
    reported = _inner(tool, CUSTOM)
    form = reported.get("format")
    form = form if isinstance(form, Mapping) else {}
    grammar = _inner(form, "grammar")
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    text: dict[str, Any] = {"type": "string"}
    description = reported.get("description") or ""
    if form.get("type") == "grammar" and isinstance(definition, str):
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        elif isinstance(description, str):
            description = f"{description}\n\nThe input follows this grammar:\n{definition}".lstrip()
    parameters = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": reported.get("name"),
        "description": description,
        "parameters": parameters,
        "strict": "pattern" in text,
    }


def _inner(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return what chat completions have in an object of its own, and Responses beside the type."""
    inner = value.get(key)
    return inner if isinstance(inner, Mapping) else value


def text_arguments(text: str) -> str:
    """Return what a call says in place of a text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def called_function(call: Any) -> Any:
    """A call in the history, of a tool that takes a text, as one of a function."""
    if not isinstance(call, Mapping) or call.get("type") != CUSTOM or "function" in call:
        return call
    custom = call.get(CUSTOM)
    if not isinstance(custom, Mapping) or not isinstance(custom.get(_INPUT), str):
        return call
    function = {"name": custom.get("name"), "arguments": text_arguments(custom[_INPUT])}
    return {"id": call.get("id"), "function": function}


@dataclass(frozen=True)
class CustomCall(ToolCall):
    """A call of a tool that takes a text, which are its `arguments`."""

    def asdict(self) -> dict[str, Any]:
        custom = {"name": self.name, _INPUT: self.arguments}
        return {"id": self.id, "type": CUSTOM, CUSTOM: custom}

    def as_function(self) -> ToolCall:
        return ToolCall(self.id, self.name, text_arguments(self.arguments))


@dataclass(frozen=True)
class CustomCallPiece(ToolCallPiece):
    """A whole call of a tool that takes a text."""


class CustomCalls:
    """Reads the events of one answer: calls of the tools of these `names` come whole, with their
    text for arguments.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: tuple[ToolCallPiece, list[str]] | None = None

    def read(self, event: Event) -> Iterator[Event]:
        if isinstance(event, ToolCallPiece):
            if event.name is None and self._open and self._open[0].index == event.index:
                self._open[1].append(event.arguments)
                return
            yield from self._close()
            if event.name in self._names:
                self._open = event, [event.arguments]
            else:
                yield event
            return
        if isinstance(event, Finished):
            yield from self._close()
            calls = tuple(self._custom(call) for call in event.answer.tool_calls)
            event = replace(event, answer=replace(event.answer, tool_calls=calls))
        elif isinstance(event, TextPiece) and event.text:
            yield from self._close()
        yield event

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            first, arguments = self._open
            self._open = None
            text = _text_of("".join(arguments))
            yield CustomCallPiece(first.index, first.id, first.name, text)

    def _custom(self, call: ToolCall) -> ToolCall:
        if call.name not in self._names:
            return call
        return CustomCall(call.id, call.name, _text_of(call.arguments))


def _text_of(arguments: str) -> str:
    """Return what there is of a call that was cut. An escape that is not JSON's, as in a regular
    expression, stands for itself.
    """
    with suppress(ValueError, RecursionError):
        result = json.loads(arguments)
        if isinstance(result, dict) and isinstance(result.get(_INPUT), str):
            return str(result[_INPUT])
    begun = _BEGUN.match(arguments)
    if begun is None:
        return ""
    escaped = _ESCAPE.sub(lambda m: m[0] if m[1] in _OF_JSON else f"\\{m[0]}", begun[1])
    text: str = json.loads(f'"{escaped}"', strict=False)
    return text.encode("utf-8", "ignore").decode()  # without half of a pair


def tool_options(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any = None, several: bool | None = None
) -> dict[str, Any]:
    """Fields of AnswerOptions. `tools` and `choice` are read, and refused, where options are."""
    if tools:
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": several}
    return {} if choice in (None, "auto", "none") else {"tool_choice": choice}


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments as an object; None for a call that is cut, as the answer was."""
    try:
        result = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


class CallReader:
    """Puts the pieces of calls together: of each event, what is whole with it."""

    def __init__(self) -> None:
        self._open: tuple[int, str, str, list[str]] | None = None

    def read(self, event: Event) -> Iterator[ToolCall]:
        if isinstance(event, ToolCallPiece):
            if self._open is None or self._open[0] != event.index:
                yield from self._close()
                self._open = (event.index, event.id or "", event.name or "", [])
            self._open[3].append(event.arguments)
        elif isinstance(event, (TextPiece, Finished)):
            yield from self._close()

    def _close(self) -> Iterator[ToolCall]:
        if self._open is not None:
            _, id_, name, parts = self._open
            self._open = None
            yield ToolCall(id_, name, "".join(parts))
