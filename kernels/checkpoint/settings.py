"""Values of a checkpoint's JSON files, checked as they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mtmd.base.errors import ModelError

MAX_BYTES = 16 << 20  # a configuration; tokenizers have a limit of their own
MAX_COUNT = 1 << 24  # no size in a configuration is larger
MAX_LAYERS = 1024  # parameters are named layer by layer before the first is looked up
MAX_WIDTH = 1 << 20  # of a layer or its FFN
MAX_HEADS = 4096  # and as many numbers in each
T = TypeVar("T")


class Settings:
    """A JSON object with its place, for errors that say where. null counts as absent."""

    def __init__(self, values: Any, where: str):
        if not isinstance(values, Mapping):
            raise ModelError(f"{where}: found {type(values).__name__}, expected an object")
        self.values, self.where = values, where

    def get(self, key: str, default: T) -> Any | T:
        value = self.values.get(key)
        return default if value is None else value

    def part(self, key: str) -> Settings:
        """The object under `key`, empty where it is absent."""
        return Settings(self.get(key, {}), f"{self.where}: {key}")

    def count(self, key: str, default: int | None = None, *, maximum: int = MAX_COUNT) -> int:
        """A positive integer up to `maximum`."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value <= maximum:
            raise ModelError(
                f"{self.where}: {key} is {_short(value)}, expected an integer from 1 to {maximum}"
            )
        return value

    def token_id(self, key: str, default: int) -> int:
        """Return a token's id: 0 or more, and below the size of any vocabulary."""
        value = self.get(key, default)
        if not is_token_id(value):
            raise ModelError(
                f"{self.where}: {key} is {_short(value)}, expected a token's id, from 0 to "
                f"{MAX_COUNT - 1}"
            )
        return value

    def token_ids(self, key: str) -> list[int]:
        """Return the ids that are given alone or as a list, none where the key is absent."""
        value = self.get(key, None)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(map(is_token_id, ids)):
            raise ModelError(
                f"{self.where}: {key} is {_short(value)}, expected a token's id or a list of ids, "
                f"each from 0 to {MAX_COUNT - 1}"
            )
        return ids

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.get(key, default)
        if not _is_number(value) or value <= 0:  # type: ignore[operator]
            raise ModelError(f"{self.where}: {key} is {_short(value)}, expected a number above 0")
        return float(value)  # type: ignore[arg-type]

    def numbers(self, key: str, length: int, default: tuple[float, ...]) -> tuple[float, ...]:
        value = self.get(key, default)
        if (
            not isinstance(value, (list, tuple))
            or len(value) != length
            or not all(map(_is_number, value))
        ):
            raise ModelError(f"{self.where}: {key} is {_short(value)}, expected {length} numbers")
        return tuple(float(v) for v in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise ModelError(f"{self.where}: {key} is {_short(value)}, expected true or false")
        return value

    def choice(self, key: str, among: Collection[T], default: T) -> T:
        value = self.get(key, default)
        if not any(type(value) is type(a) and value == a for a in among):
            names = [*map(str, among)]
            if len(names) > 12:
                names[3:-1] = ["..."]
            raise ModelError(
                f"{self.where}: {key} is {_short(value)}, expected one of {', '.join(names)}"
            )
        return value


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file; {} for an absent one that is not required. Raises ModelError
    naming the file.
    """
    if not path.is_file():
        if required:
            raise ModelError(
                f"{path.parent}: {path.name} is missing; expected a checkpoint folder in the "
                "Hugging Face layout"
            )
        return {}
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ModelError(f"{path}: {size} bytes, expected at most {MAX_BYTES}")
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a JSON file"
        ) from error
    except (ValueError, RecursionError) as error:
        at = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ModelError(f"{path}: not valid JSON{at}; fetch the file again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: found a JSON {type(values).__name__}, expected an object")
    return values


def is_token_id(value: Any) -> bool:
    """Return whether a value from a file may be a token's id: libraries take no larger integers."""
    return type(value) is int and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    """A JSON number that a float can hold: no boolean, not infinite, no integer of hundreds of
    digits.
    """
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
