"""Texts of others in messages of ours, and the JSON that files hold. Loads without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtmd.kernels.errors import ModelError


def one_line(text: object, most: int | None = None) -> str:
    """The words of `text` with single blanks between them, at most `most` characters: libraries'
    messages have line breaks.
    """
    return " ".join(str(text).split())[:most]


def json_object(data: str | bytes, path: Path) -> dict[str, Any]:
    """What the file at `path`, which holds `data`, says. Raises ModelError naming it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = one_line(error, 200)
        raise ModelError(f"{path} is not JSON: {reason}; download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value
