"""Grammars of argument values that are not written as JSON, from their JSON schemas.

What a form has no way of its own to keep to (patterns, keywords over several parts) is written as
JSON there, which readers of the form understand as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtmd.tools.lark import Lark, pattern_of
from mtmd.tools.schemas import ANNOTATIONS, definitions, resolve, type_of, types_of
from mtmd.tools.values import ValueForm, write_value

# Keywords that are followed in the form itself, by the type they speak of.
KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": set[str](),
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
}
CHOICES_MAX = 1000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DEEP_MAX = 40
_HAS_END = re.compile(r"(?<!\\)(?:\\\\)*\$$")  # a last "$" that stands for the end
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")  # one that is not escaped, as JavaScript writes it


class ValueGrammar:
    """Values in one form, of one root schema, in which references are looked up."""

    def __init__(self, lark: Lark, form: ValueForm, root: Mapping[str, Any], lenient: bool):
        self._lark, self._form, self._root, self._lenient = lark, form, root, lenient
        self._references: dict[str, str] = {}

    def value(self, schema: Any, deep: int = 0) -> str:
        """An expression for the values of a schema."""
        if (
            isinstance(schema, dict)
            and "$ref" in schema
            and not set(schema) - {"$ref", *ANNOTATIONS}
        ):
            return self._reference(schema["$ref"], deep)
        if not isinstance(schema, dict) or deep > _DEEP_MAX:
            return self.json(schema)
        keys = set(schema) - ANNOTATIONS
        for key in ("const", "enum"):
            if key in keys:
                return self._choice(schema, keys, key)
        for key in ("anyOf", "oneOf"):
            # The first of oneOf that fits is no promise that no other does.
            if keys == {key} and (key == "anyOf" or self._separate(schema[key])):
                return self._any(schema[key], deep)
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        known = {"type"}.union(*(KEYWORDS.get(kind, ()) for kind in kinds if isinstance(kind, str)))
        if not keys <= known or not all(kind in KEYWORDS for kind in kinds):
            return self.json(schema)
        return self._group([self._typed(kind, schema, deep) for kind in kinds])

    def json(self, schema: Any) -> str:
        """The same as JSON."""
        schema = {"not": {}} if schema is False else schema if isinstance(schema, dict) else {}
        return self._lark.json({**definitions(self._root, schema), **schema}, self._lenient)

    def key(self, name: str) -> str | None:
        """A name inside an object, None where it cannot be written."""
        if self._form.quoted_keys:
            return write_value(name, self._form)
        return name if _NAME.fullmatch(name) else None

    def _reference(self, reference: Any, deep: int) -> str:
        if reference not in self._references:
            target = resolve({"$ref": reference}, self._root)
            if target is None:
                return self.json({"$ref": reference})
            name = self._references[reference] = self._lark.name()
            self._lark.rule(self.value(target, deep + 1), name=name)
        return self._references[reference]

    def _choice(self, schema: Mapping[str, Any], keys: set[str], key: str) -> str:
        values = [schema[key]] if key == "const" else schema[key]
        kind = schema.get("type")
        if keys - {key, "type"} or not isinstance(values, list) or len(values) > CHOICES_MAX:
            return self.json(schema)
        if kind is not None:
            kinds = {kind} if isinstance(kind, str) else set(kind)
            kinds |= {"integer"} if "number" in kinds else set()
            values = [value for value in values if type_of(value) in kinds]
        if not values or any(not self._writable(value) for value in values):
            return self.json(schema)
        return self._group([self._lark.text(write_value(value, self._form)) for value in values])

    def _writable(self, value: Any) -> bool:
        """Return whether texts in it can stand between their marks, and names are names."""
        if isinstance(value, str):
            return self._form.escapes or self._form.close not in value
        if isinstance(value, dict):
            return all(
                self.key(k) and self._writable(k) and self._writable(v) for k, v in value.items()
            )
        return not isinstance(value, list) or all(map(self._writable, value))

    def _separate(self, schemas: Any) -> bool:
        """Return whether no value can fit two of them, by their types alone."""
        kinds = [_numbers_alike(types_of(one, self._root, self._lark.look)) for one in schemas]
        return sum(map(len, kinds)) == len(set().union(*kinds))

    def _any(self, schemas: Any, deep: int) -> str:
        if not isinstance(schemas, list) or not schemas:
            return self.json({"anyOf": schemas})
        return self._group([self.value(schema, deep + 1) for schema in schemas])

    def _group(self, options: Sequence[str]) -> str:
        options = list(dict.fromkeys(options))
        return options[0] if len(options) == 1 else self._lark.rule(" | ".join(options))

    def _typed(self, kind: str, schema: Mapping[str, Any], deep: int) -> str:
        form = self._form
        if kind == "boolean":
            return self._lark.rule(f"{self._lark.text(form.true)} | {self._lark.text(form.false)}")
        if kind == "null":
            return self._lark.text(form.null)
        if kind == "string":
            return self._text(schema)
        if kind == "array":
            return self._list(schema, deep)
        if kind == "object":
            return self._object(schema, deep)
        return self.json({"type": kind})

    def _text(self, schema: Mapping[str, Any]) -> str:
        form, lark = self._form, self._lark
        minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
        count = (
            f"{{{minimum},{'' if maximum is None else maximum}}}"
            if minimum or maximum is not None
            else "*"
        )
        if form.escapes:
            # One spelling for each text, as in JSON.
            chars = rf"([^{form.open}\\\x00-\x1f\x7f]|\\[{form.open}\\nrtbf]){count}"
            return lark.terminal(f"/{form.open}{chars}{form.close}/")
        if lark.is_special(form.close):
            chars = lark.terminal(f"/(?s:.{count})/")
            return f"{lark.text(form.open)} {chars} {lark.text(form.close)}"
        if count != "*":
            return self.json({"type": "string", **schema})
        return f"{lark.text(form.open)} {lark.until(form.close)}"

    def _list(self, schema: Mapping[str, Any], deep: int) -> str:
        item = self.value(schema.get("items", {}), deep + 1)
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        if maximum == 0:
            return '"[" "]"'
        more = f"{{{max(minimum - 1, 0)},{'' if maximum is None else maximum - 1}}}"
        items = f'{item} ("," {item}){more}'
        return self._lark.rule(f'"[" {items} "]"' if minimum else f'"[" ({items})? "]"')

    def _object(self, schema: Mapping[str, Any], deep: int) -> str:
        pairs = self.pairs(schema, ":", ",", deep, nested=True)
        if pairs is None:
            return self.json({"type": "object", **schema})
        some, may_be_empty = pairs
        return self._lark.rule(f'"{{" {some} "}}"' + (' | "{" "}"' if may_be_empty else ""))

    def pairs(
        self,
        schema: Mapping[str, Any],
        assign: str,
        separator: str,
        deep: int = 0,
        *,
        nested: bool = False,
    ) -> tuple[str, bool] | None:
        """An expression for at least one of an object's properties, in order, and whether there may
        be none. None where they have to be written as JSON: names that cannot be written, names
        that are not known before, keywords over several of them.
        """
        keys = set(schema) - ANNOTATIONS - {"$schema", "$defs", "definitions", "$id"}
        properties, required = schema.get("properties"), schema.get("required", [])
        if keys - {"type", *KEYWORDS["object"]} or not isinstance(properties, dict):
            return None
        if not properties or not isinstance(required, list):
            return None
        if any(not isinstance(name, str) or name not in properties for name in required):
            return None
        if isinstance(schema.get("additionalProperties"), dict):
            return None
        required = frozenset(required)
        written = {
            name: self.key(name) if nested else _argument(name, assign) for name in properties
        }
        if not all(written.values()):
            return None
        rest = ""  # what may follow once one has been written, the last first
        first: list[str] = []
        for name, value in reversed(properties.items()):
            pair = f"{self._lark.text(f'{written[name]}{assign}')} {self.value(value, deep + 1)}"
            pair = self._lark.rule(pair)
            if name in required:
                first = [f"{pair} {rest}"]
            else:
                first.insert(0, f"{pair} {rest}")
            next_one = f"{self._lark.text(separator)} {pair}"
            rest = self._lark.rule(
                f"{next_one} {rest}" if name in required else f"({next_one})? {rest}".rstrip()
            )
        return self._lark.rule(" | ".join(part.rstrip() for part in first)), not required


def _numbers_alike(kinds: set[str]) -> set[str]:
    """Each integer is a number, too."""
    return kinds - {"integer"} | {"number"} if "integer" in kinds else kinds


def _argument(name: str, assign: str) -> str | None:
    """An argument's name as it stands there, None where it could not be told from what follows."""
    fits = re.fullmatch(r"[^\s=(){}\[\],'\"<>:|*&\\]+", name) and assign not in name
    return name if fits else None


def raw_pattern(schema: Mapping[str, Any], end: str) -> str | None:
    """A regular expression for texts without any marks, of which `end` may be no part; None where
    any other will do.
    """
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    pattern = schema.get("pattern")
    if not minimum and maximum is None and not isinstance(pattern, str):
        return None
    both = f"/(?s:.){{{minimum},{'' if maximum is None else maximum}}}/"
    both += f" & ~/(?s:.*){pattern_of(end)}(?s:.*)/"
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        closes = "" if _HAS_END.search(pattern) else "(?s:.*)"
        core = pattern.removeprefix("^")
        core = _SLASH.sub(r"\1\\/", core[:-1] if not closes else core)
        both += f" & /{begin}({core}){closes}/"
    return both
