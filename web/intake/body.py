"""The body of a request as the model that describes it."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator

from mtmd.web.intake.gate import SHORT, checked_json
from mtmd.web.native_threads import in_thread

Body = TypeVar("Body", bound=BaseModel)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# beside an int, last of what is said of it: also as 60.0 and 6e1, as programs write it that know
# one kind of number
WHOLE = BeforeValidator(_whole)


def json_body(kind: type[Body], typed: bool = True) -> Body:
    """`typed` as in `checked_json`. Raises ApiError, and pydantic's ValidationError, which `errors`
    turns into a 400 that names the place.
    """
    body = checked_json(typed)

    def read() -> Body:
        return body.read(lambda data: kind.model_validate_json(data, context=body))

    return read() if len(body.data) <= SHORT else in_thread(read)
