"""The OpenAPI document in words, for the page that people open: each operation with its fields."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mtmd.web.interfaces.openapi import document

METHODS = ("get", "post", "delete")


@dataclass(frozen=True)
class Field:
    """Field of a request's body. `kind` is what it takes, with its limits."""

    name: str
    kind: str
    required: bool


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    summary: str
    fields: tuple[Field, ...]


@cache
def operations() -> tuple[Operation, ...]:
    """Return it in the document's order."""
    return tuple(
        Operation(method.upper(), path, item[method]["summary"], _fields(item[method]))
        for path, item in document()["paths"].items()
        for method in METHODS
        if method in item
    )


def _fields(operation: dict[str, Any]) -> tuple[Field, ...]:
    content = operation.get("requestBody", {}).get("content", {})
    schema: dict[str, Any] = next((kind["schema"] for kind in content.values()), {})
    if reference := schema.get("$ref"):
        schema = document()["components"]["schemas"][_last(reference)]
    required = schema.get("required", ())
    return tuple(
        Field(name, _kind(field), name in required)
        for name, field in schema.get("properties", {}).items()
    )


def _kind(schema: dict[str, Any]) -> str:
    if reference := schema.get("$ref"):
        return _last(reference)
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(_kind(c) for c in choices if c.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
    limits = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
    return " ".join([str(schema.get("type", "anything")), *filter(None, limits)])


def _last(reference: str) -> str:
    return reference.rsplit("/", 1)[-1]
