"""Describes what is wrong with a field of a request, in our words: what was found and what is
taken.
"""

from __future__ import annotations

import re
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
    "file": 'an object such as {"file_data": "data:image/png;base64,..."}',
    "input_audio": 'an object such as {"data": "...", "format": "wav"}, data in base64',
    "audio_url": 'an object such as {"url": "data:audio/wav;base64,..."}',
    "messages": 'a list such as [{"role": "user", "content": "..."}]',
}
_FILES = {  # as _PICTURES, of files
    "file": '{"type": "file", "file": {"file_data": "data:image/png;base64,..."}}',
    "input_file": '{"type": "input_file", "file_data": "data:image/png;base64,..."}',
}
_PICTURES = {  # types of parts that show one, of several interfaces
    "image_url": '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
    "input_image": '{"type": "input_image", "image_url": "data:image/png;base64,..."}',
    "image": "",
}
_AUDIO = {
    "input_audio": '{"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}',
    "audio_url": '{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}',
    "audio": "",
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
    """Return the words of one of pydantic's errors, with its input; `field` is its name. The value
    itself is told only where it is a number: it may be a picture.
    """
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "string_type" and field == "image_url":  # as OpenAI's Responses have it
        return f'found {_kind_of(value)}, expected a text such as "data:image/png;base64,..."'
    if kind in _KINDS:
        return f"found {_kind_of(value)}, expected {_TAKEN.get(field, _KINDS[kind])}"
    if kind == "part":
        return f"{error['msg']}{_about_part(str(error['msg']), value)}"
    if kind == "missing":
        return f"it has to be there; expected {_TAKEN[field]}" if field in _TAKEN else _MISSING
    if kind in _BOUNDS:
        name, at = _BOUNDS[kind]
        return f"found {_kind_of(value)}, expected {at} {_number(context[name])}"
    if kind in _LENGTHS:
        name, at, what = _LENGTHS[kind]
        result = len(value) if isinstance(value, (str, list, tuple, dict)) else "more or fewer"
        return f"found {result} {what}, expected {at} {context[name]}"
    if kind == "literal_error":
        return f"found {_kind_of(value, 'another text')}, expected {context['expected']}"
    return str(error["msg"])


def _about_part(taken: str, part: Any) -> str:
    """Return what was found in place of a part whose type is one of those `taken`, and what to
    do.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return f"; found {_kind_of(part)} without a type" if part is not None else ""
    if not re.fullmatch(r"[a-z_]{1,32}", kind):
        return ""
    reported = f"; found {kind!r}"
    for what, forms in (("a picture", _PICTURES), ("a file", _FILES), ("audio", _AUDIO)):
        if kind in forms:
            words = re.findall(r"\w+", taken)
            other = next((form for name, form in forms.items() if name in words), "")
            return f"{reported}: {what} is {other}" if other else reported
    return reported


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
