"""Describes what the requests of all interfaces are made of. Fields that are not known are ignored;
what is known and cannot be done is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, to_json

from mtmd.base.options import options_of
from mtmd.options.adapters import MAX_ADAPTERS, MAX_SCALE
from mtmd.options.answer import STOP_CHARS_MAX, STOPS_MAX, AnswerOptions
from mtmd.tools.tool import TOOLS_MAX
from mtmd.web.answering.request import Piece
from mtmd.web.errors import TAG
from mtmd.web.intake.long_texts import CutText, as_data_url, beginning
from mtmd.web.intake.typed_body import WHOLE, Loose

MAX_MESSAGES = 4096
MAX_PARTS = 1 << 14  # of one message
MAX_CALLS = 256  # of one message
MAX_PROMPTS = 128
MAX_TOKENS = 1 << 20
LONGEST_GRAMMAR = 1 << 20
LONGEST_SCHEMA = 64 << 10  # in characters of JSON: it is compiled before the answer begins


def within(name: str, low: float | None = None) -> Any:
    """Return the range that an option of answers is declared with; `low` holds in its place where
    an interface has smaller numbers for none.
    """
    kind = options_of(AnswerOptions)[name].kind
    return Field(ge=kind.low if low is None else low, le=kind.high)


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    if len(to_json(value)) > LONGEST_SCHEMA:
        raise PydanticCustomError(
            "schema", "expected a schema of at most {most} characters", {"most": LONGEST_SCHEMA}
        )
    return value


ModelName = Annotated[str, Field(max_length=512)]
AdapterName = Annotated[str, Field(min_length=1, max_length=80)]
AdapterScale = Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)]
Task = Literal["markdown", "text", "table", "formula", "layout"]
Adapters = (
    AdapterName
    | Annotated[list[AdapterName], Field(max_length=MAX_ADAPTERS)]
    | Annotated[dict[AdapterName, AdapterScale], Field(max_length=MAX_ADAPTERS)]
)
Schema = Annotated[dict[str, Any], AfterValidator(_schema)]
Temperature = Annotated[float, within("temperature")]
Fraction = Annotated[float, within("top_p")]  # min_p, too
TopK = Annotated[int, within("top_k"), WHOLE]
Seed = Annotated[int, within("seed"), WHOLE]
Penalty = Annotated[float, within("repetition_penalty")]
Additive = Annotated[float, within("frequency_penalty")]  # presence_penalty, too
Logprobs = Annotated[int, within("logprobs"), WHOLE]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
    Field(max_length=STOPS_MAX, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Tools = Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX)]
FramesPerSecond = Annotated[float, Field(gt=0, le=240)]
FrameCount = Annotated[int, Field(ge=1, le=1 << 20), WHOLE]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]


class LoraScale(Loose):
    """llama.cpp's choice of an adapter, by its place among those that were loaded."""

    id: Annotated[int, Field(ge=0, lt=MAX_ADAPTERS), WHOLE]
    scale: AdapterScale = 1.0


LoraScales = Annotated[list[LoraScale], Field(max_length=MAX_ADAPTERS)]


def scales(lora: list[LoraScale] | None) -> list[tuple[int, float]] | None:
    """Return what `ServedModel.options` takes."""
    return None if lora is None else [(one.id, one.scale) for one in lora]


def by_type(error: str, message: str) -> Discriminator:
    """Return what chooses among objects by the type that each names."""
    return Discriminator(kind, custom_error_type=error, custom_error_message=message)


def kind(value: Any) -> str | None:
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{TAG}{name}" if isinstance(name, str) else None


def text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return f"{TAG}text"
    return f"{TAG}parts" if isinstance(value, (list, tuple)) else None


def text_or(things: str, error: str = "content") -> Discriminator:
    """Return what chooses between a text and a list of such things."""
    return Discriminator(
        text_or_list,
        custom_error_type=error,
        custom_error_message=f"expected a text or a list of {things}",
    )


One = TypeVar("One")
Text: TypeAlias = Annotated[str, Tag(f"{TAG}text")]
Several: TypeAlias = Annotated[
    list[One], Tag(f"{TAG}parts"), Field(max_length=MAX_PARTS, fail_fast=True)
]


class Part(Protocol):
    """Part of a message. `piece`: what it says or shows; `location` names it."""

    def piece(self, location: str) -> Piece: ...


def pieces(content: str | Sequence[Part] | None, location: str) -> tuple[Piece, ...]:
    if isinstance(content, str):
        return (content,)
    return tuple(part.piece(f"{location}[{i}]") for i, part in enumerate(content or ()))


def given(**options: Any) -> dict[str, Any]:
    """Return the options without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def of_file_data(data: str | CutText) -> str | CutText:
    """Return a data URL, whose kind the first bytes show."""
    is_url = beginning(data).startswith("data:")
    return data if is_url else as_data_url(data, "application/octet-stream")


def promised(schema: Any, strict: bool | None = None) -> Any:
    """A schema as `AnswerOptions` takes it: unless it is `strict`, what cannot be promised of it is
    passed over, and the receipt says so.
    """
    if isinstance(schema, str) and len(schema) <= LONGEST_SCHEMA:
        with suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    return {"schema": schema, "strict": strict is True} if isinstance(schema, dict) else schema


def none_for_minus_one(value: Any) -> Any:
    """-1 is how some clients leave an option out."""
    return None if type(value) in (int, float) and value == -1 else value
