"""Tools that a model may call, as requests describe them: functions with a JSON schema of their
arguments. Loads without torch.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mtmd.base.errors import OptionError
from mtmd.base.text import one_line

TOOLS_MAX = 256
TOOLS_BYTES_MAX = 512 << 10  # of all of them together, as JSON
# Names stand in grammars and prompts as they are.
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
DEEP_MAX = 100  # of objects and lists in one another
Mode = Literal["none", "auto", "required"]
MODES = ("none", "auto", "required")
_SCHEMAS = ("parameters", "input_schema")  # what interfaces call the schema of the arguments


@dataclass(frozen=True)
class Tool:
    """A function. `parameters` is the JSON schema of its arguments as JSON text; `strict`: a schema
    that cannot be followed wholly is refused, else it is followed as far as that goes.
    """

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = json.loads(self.parameters)
        return schema

    def declaration(self) -> dict[str, Any]:
        """Return the declaration as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Describes whether tools are called: "none", "auto" as the model likes, "required" at least
    one. `names` are those that may be called, empty for all.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote; `arguments` are JSON text, cut where the answer was."""

    id: str
    name: str
    arguments: str

    def asdict(self) -> dict[str, Any]:
        """Return the dictionary that OpenAI's interface has."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Toolbox:
    """The tools of one request, and how they may be used. `several`: more than one call in one
    answer.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    several: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Return those that the answer may call."""
        if self.choice.mode == "none":
            return ()
        names = self.choice.names
        return tuple(tool for tool in self.tools if not names or tool.name in names)


def new_id() -> str:
    """Return an id for a call. The last nine characters are letters and digits alone: some chat
    templates write them.
    """
    return f"call_{secrets.token_hex(12)}"


def read_toolbox(tools: object, choice: object = None, several: object = None) -> Toolbox:
    """Read it from the three options of OpenAI's interface; None stands for what is usual.

    Raises OptionError naming the place.
    """
    if isinstance(tools, Toolbox):
        return tools
    result = tuple(_read_all(tools))
    chosen = _choice(choice, {tool.name for tool in result})
    if several is not None and type(several) is not bool:
        raise _wrong("parallel_tool_calls", several, "true or false")
    one = (
        isinstance(choice, (str, Mapping)) and chosen.mode == "required" and len(chosen.names) == 1
    )
    return Toolbox(result, chosen, several is not False and not one)


def _read_all(value: object) -> Iterator[Tool]:
    if value is None:
        return
    if not isinstance(value, (list, tuple)):
        raise _wrong("tools", value, "a list of tools")
    if len(value) > TOOLS_MAX:
        raise OptionError(f"tools: found {len(value)}, expected at most {TOOLS_MAX}")
    names: set[str] = set()
    size = 0
    for number, item in enumerate(value):
        tool = item if isinstance(item, Tool) else _read(item, f"tools[{number}]")
        size += len(tool.parameters) + len(tool.description)
        if tool.name in names:
            raise OptionError(
                f"tools[{number}]: found a second {tool.name!r}, expected other names"
            )
        if size > TOOLS_BYTES_MAX:
            raise OptionError(
                f"tools: found more than {TOOLS_BYTES_MAX} characters, expected at most so many"
            )
        names.add(tool.name)
        yield tool


def _read(item: object, where: str) -> Tool:
    if callable(item):
        name = getattr(item, "__name__", type(item).__name__)
        raise OptionError(
            f"{where}: found the Python object {name:.60}, expected its description: "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": '
            "{JSON schema}}}"
        )
    if not isinstance(item, Mapping):
        raise _wrong(where, item, "an object of type function")
    if item.get("type", "function") != "function":
        raise OptionError(
            f"{where}.type: found {item['type']!r:.60}, expected 'function'; other kinds of tools "
            "are not run here"
        )
    function, where = _inner(item, where)
    if not isinstance(function, Mapping):
        raise _wrong(where, function, "an object with 'name' and 'parameters'")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{where}.name", name, "up to 128 letters, digits and any of _ - . : /")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.description", description, "a text")
    strict = function.get("strict")
    if strict is not None and type(strict) is not bool:
        raise _wrong(f"{where}.strict", strict, "true or false")
    key = next((key for key in _SCHEMAS if key in function), _SCHEMAS[0])
    schema = _schema(function.get(key), f"{where}.{key}")
    return Tool(name, description or "", schema, bool(strict))


def _inner(item: Mapping[str, Any], where: str) -> tuple[Any, str]:
    """Return what says of a function which it is, and its place: some interfaces have no object for
    it.
    """
    flat = "function" not in item and any(key in item for key in ("name", *_SCHEMAS))
    return (item, where) if flat else (item.get("function", item), f"{where}.function")


def _schema(value: object, where: str) -> str:
    """JSON text of a schema of objects; without one the tool takes no arguments."""
    if value is None:
        return Tool.parameters
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a JSON schema of an object")
    kind = value.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise _wrong(f"{where}.type", kind, "'object': arguments have names")
    try:
        text = json.dumps({**value, "type": "object"}, ensure_ascii=False, allow_nan=False)
        text.encode()  # no halves of surrogate pairs
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"{where}: found what JSON cannot represent ({one_line(error)[:160]}), "
            "expected JSON values"
        ) from error
    if is_deep(value):
        raise OptionError(f"{where}: found more than {DEEP_MAX} levels, expected at most so many")
    return text


def is_deep(value: object) -> bool:
    """Return whether a value made of JSON types has more than `DEEP_MAX` levels."""
    level = [value]
    for _ in range(DEEP_MAX):
        level = [inner for part in level for inner in _parts_of(part)]
        if not level:
            return False
    return any(isinstance(part, (Mapping, list, tuple)) for part in level)


def _parts_of(value: object) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _choice(value: object, names: set[str]) -> ToolChoice:
    if value is None:
        return ToolChoice()
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value not in MODES and value in names:
            return ToolChoice("required", (value,))
        if value not in MODES:
            raise _wrong("tool_choice", value, f"one of {', '.join(MODES)}, or a function's name")
        if value == "required" and not names:
            raise OptionError("tool_choice: found 'required' without tools, expected some in tools")
        return ToolChoice(value)  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise _wrong("tool_choice", value, f"one of {', '.join(MODES)}, or an object")
    if value.get("type") == "allowed_tools":
        return _allowed(value, names)
    function, where = _inner(value, "tool_choice")
    name = function.get("name") if isinstance(function, Mapping) else None
    return ToolChoice("required", (_known(name, f"{where}.name", names),))


def _allowed(value: Mapping[str, Any], names: set[str]) -> ToolChoice:
    """OpenAI's way to offer a part of the tools only."""
    allowed = value.get("allowed_tools", value)
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, (list, tuple)) or not tools:
        raise _wrong("tool_choice.allowed_tools", allowed, "a mode, auto or required, and tools")
    result = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        result.append(_known(name, f"tool_choice.allowed_tools.tools[{number}]", names))
    return ToolChoice(mode, tuple(result))


def _known(name: object, where: str, names: set[str]) -> str:
    if not isinstance(name, str) or name not in names:
        expected = ", ".join(sorted(names))[:200] or "a name that is in tools, which are missing"
        raise _wrong(where, name, f"the name of a tool: {expected}")
    return name


def _wrong(where: str, result: object, expected: str) -> OptionError:
    return OptionError(f"{where}: found {one_line(repr(result))[:80]}, expected {expected}")
