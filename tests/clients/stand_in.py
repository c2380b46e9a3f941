"""A model that writes what is asked: JSON that follows the schema, a call of the tool that is
offered, and, once a tool has answered, what it said. Behind the real server.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from fake_service import FakeService

from mtmd import ToolCall

TEXTS = {"date": "2024-02-29", "date-time": "2024-02-29T12:00:00Z", "uuid": "0" * 8 + "-0000-4000-8000-" + "0" * 12}  # fmt: skip


class StandIn(FakeService):
    def __init__(self) -> None:
        super().__init__()
        self.name = "stand-in"

    def submit(self, messages: Any, **chosen: Any) -> Any:
        ticket = super().submit(messages, **chosen)
        ticket.service = writer = copy.copy(self)  # what follows is of this request alone
        box, last = ticket.settings.toolbox, ticket.messages[-1]
        if box.callable and last["role"] != "tool":
            tool = box.callable[0]
            arguments = json.dumps(instance(tool.schema, tool.schema))
            writer.calls = (ToolCall("call_000000001", tool.name, arguments),)
            return ticket
        writer.calls = ()
        ticket.settings.__dict__["tools"] = type(box)()  # nothing is called any more
        schema = chosen.get("json_schema")
        if schema is not None:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            writer.words = json.dumps(instance(schema, schema))
        elif last["role"] == "tool":
            writer.words = f"The tool said: {last['content']}"
        return ticket


def instance(schema: Any, root: dict[str, Any]) -> Any:
    """The smallest value that follows a schema, as far as schemas of clients go."""
    while isinstance(schema, dict) and "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].split("/")[1:]:
            found = found[part]
        schema = found
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return instance(schema[key][0], root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: instance(value, root) for name, value in properties.items()}
    if kind == "array":
        return [instance(schema.get("items", {}), root)] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 2) + 1)
    if kind in ("boolean", "null"):
        return True if kind == "boolean" else None
    text = TEXTS.get(schema.get("format", ""), "red")
    return text.ljust(schema.get("minLength", 0), "d")
