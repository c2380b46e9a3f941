"""Server-sent events (WHATWG HTML, section 9.2): what a stream of either product is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flask import Response

MIMETYPE = "text/event-stream"
UNBUFFERED = {"X-Accel-Buffering": "no"}  # nginx would hold events back


def event(data: dict[str, Any], id_: int | None = None, name: str | None = None) -> str:
    """`id_`: what a client that comes back sends as Last-Event-ID. `name`: the event's."""
    head = ("" if id_ is None else f"id: {id_}\n") + ("" if name is None else f"event: {name}\n")
    return f"{head}data: {json.dumps(data)}\n\n"


def comment(text: str) -> str:
    """A sign of life, which clients leave aside."""
    return f": {text}\n\n"


def response(events: Iterator[str], cache_control: str) -> Response:
    headers = {"Cache-Control": cache_control, **UNBUFFERED}
    return Response(events, mimetype=MIMETYPE, headers=headers)
