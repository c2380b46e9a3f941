"""The body of a request as the model that describes it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from mtmd.web.intake.gate import checked_json

Body = TypeVar("Body", bound=BaseModel)


def json_body(kind: type[Body], typed: bool = True) -> Body:
    """`typed` as in `checked_json`. Raises ApiError, and pydantic's ValidationError, which `errors`
    turns into a 400 that names the place.
    """
    body = checked_json(typed)
    return body.read(lambda data: kind.model_validate_json(data, context=body))
