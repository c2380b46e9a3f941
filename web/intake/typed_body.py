"""The body of a request as the model that describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from mtmd.web.intake.request_limits import checked_json

if TYPE_CHECKING:
    from typing_extensions import Self

Body = TypeVar("Body", bound=BaseModel)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# beside an int, last of what is said of it: also as 60.0 and 6e1, as programs write it that know
# one kind of number
WHOLE = BeforeValidator(_whole)


class Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class Request(BaseModel):
    """A whole body. `harmless` are fields that its interface knows and that change no answer here;
    `unsupported`: those that ask for what cannot be done, with the values, beside None, that ask
    for nothing.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nobody knows here."""
        given = self.model_extra or {}
        return [n for n in given if n not in self.harmless and n not in self.unsupported]

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        given = self.model_extra or {}
        for name, nothing in self.unsupported.items():
            if given.get(name) is not None and given[name] not in nothing:
                raise PydanticCustomError(
                    "unsupported",
                    "{param}: not supported here; leave it out",
                    {"param": name, "code": "unsupported_parameter"},
                )
        return self


def json_body(kind: type[Body], typed: bool = True) -> Body:
    """`typed` as in `checked_json`. Raises ApiError, and pydantic's ValidationError, which `errors`
    turns into a 400 that names the place.
    """
    body = checked_json(typed)
    return body.read(lambda data: kind.model_validate_json(data, context=body))
