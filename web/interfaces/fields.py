"""What the requests of all adapters are made of. Fields that are not known are left aside; what is
known and cannot be done is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, to_json

from mtmd.options.answer import STOP_CHARS_MAX, STOPS_MAX
from mtmd.web.errors import TAG, ApiError
from mtmd.web.intake.body import WHOLE

MOST_MESSAGES = 4096
MOST_PARTS = 1 << 14  # of one message
LONGEST_SCHEMA = 64 << 10  # in characters of JSON: it is compiled before the answer begins
MOST_TOKENS = 1 << 20


class Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class Request(Loose):
    """A whole body. `harmless` are fields that its interface knows and that change no answer
    here.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nobody knows."""
        return [name for name in self.model_extra or {} if name not in self.harmless]


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    if len(to_json(value)) > LONGEST_SCHEMA:
        raise PydanticCustomError(
            "schema", "expected a schema of at most {most} characters", {"most": LONGEST_SCHEMA}
        )
    return value


ModelName = Annotated[str, Field(max_length=512)]
Schema = Annotated[dict[str, Any], AfterValidator(_schema)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=0, lt=1 << 31), WHOLE]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=0.01, le=100)]
Additive = Annotated[float, Field(ge=-2, le=2)]  # of a penalty taken off a logit
MaxTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
    Field(max_length=STOPS_MAX, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


def text_or_list(value: Any) -> str | None:
    """For a Discriminator: which of the two a content is."""
    if isinstance(value, str):
        return f"{TAG}text"
    return f"{TAG}parts" if isinstance(value, (list, tuple)) else None


def kind(value: Any) -> str | None:
    """For a Discriminator: the type that an object names."""
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{TAG}{name}" if isinstance(name, str) else None


def given(**options: Any) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_unsupported(values: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """`harmless`: of fields that ask for what cannot be done, the values that ask for nothing; None
    always does. Raises ApiError.
    """
    for name, nothing in harmless.items():
        value = values.get(name)
        if value is not None and value not in nothing:
            raise ApiError(
                400,
                f"{name}: not supported here; leave it out",
                param=name,
                code="unsupported_parameter",
            )
