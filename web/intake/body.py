"""The body of a request as the model that describes it."""

from __future__ import annotations

from typing import TypeVar

from flask import request
from pydantic import BaseModel

Body = TypeVar("Body", bound=BaseModel)


def json_body(kind: type[Body]) -> Body:
    """Raises pydantic's ValidationError, which `errors` turns into a 400 that names the place."""
    return kind.model_validate_json(request.get_data(cache=False))
