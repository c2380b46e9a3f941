"""What is wrong with a field of a request, in our words: what was found and what is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {  # of pydantic's errors about types
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
}
_TAKEN = {  # by the field's name, where several kinds are taken, or one of a known form
    "stop": "a text or a list of texts",
    "image_url": 'an object such as {"url": "data:image/png;base64,..."}',
    "messages": 'a list such as [{"role": "user", "content": "..."}]',
}
_BOUNDS = {  # error -> the bound's name in its context, and words
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
}
HUGE = 10**30  # nobody reads so many digits
_MISSING = "it has to be there"
_LENGTHS = {
    "too_short": ("min_length", "at least", "items"),
    "too_long": ("max_length", "at most", "items"),
    "string_too_short": ("min_length", "at least", "characters"),
    "string_too_long": ("max_length", "at most", "characters"),
}


def words(error: Mapping[str, Any], field: str) -> str:
    """Of one of pydantic's errors, with its input; `field` is its name. The value itself is told
    only where it is a number: it may be a picture.
    """
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind in _KINDS:
        return f"found {_kind_of(value)}, expected {_TAKEN.get(field, _KINDS[kind])}"
    if kind == "missing":
        return f"it has to be there; expected {_TAKEN[field]}" if field in _TAKEN else _MISSING
    if kind in _BOUNDS:
        name, at = _BOUNDS[kind]
        return f"found {_kind_of(value)}, expected {at} {_number(context[name])}"
    if kind in _LENGTHS:
        name, at, what = _LENGTHS[kind]
        found = len(value) if isinstance(value, (str, list, tuple, dict)) else "more or fewer"
        return f"found {found} {what}, expected {at} {context[name]}"
    if kind == "literal_error":
        return f"found {_kind_of(value, 'another text')}, expected {context['expected']}"
    return str(error["msg"])


def _kind_of(value: Any, text: str = "a text") -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= HUGE:
        return "a number of too many digits"
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, str):
        return text
    return "a list" if isinstance(value, (list, tuple)) else "an object"


def _number(value: float) -> str:
    """Whole numbers with every digit, which may be what makes them too large."""
    return str(value) if isinstance(value, int) else f"{value:g}"
