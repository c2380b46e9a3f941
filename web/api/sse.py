"""An answer as server-sent events (WHATWG HTML, section 9.2), in the order in which OpenAI's
servers send them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flask import json

from mtmd.events import Event, Finished, Progress, TextPiece
from mtmd.web.api.replies import Reply, progress, usage_chunk
from mtmd.web.errors import ApiError

DONE = "data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # the second: nginx would hold events back
ENDED = ApiError(503, "the server is shutting down", code="shutting_down")


@dataclass(frozen=True)
class Form:
    """How a kind of completion writes the parts of a stream. `first` opens it, `quiet` is a chunk
    that says nothing.
    """

    first: Callable[[Reply], dict[str, Any] | None]
    quiet: Callable[[Reply], dict[str, Any]]
    text: Callable[[Reply, str, Any], dict[str, Any]]
    end: Callable[[Reply, str], dict[str, Any]]


CHAT = Form(
    lambda r: r.chat_chunk({"role": "assistant", "content": ""}),
    lambda r: r.chat_chunk({}),
    Reply.chat_text,
    Reply.chat_end,
)
PLAIN = Form(lambda _: None, lambda r: r.plain_text("", ()), Reply.plain_text, Reply.plain_end)


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def stream(
    events: Iterable[Event],
    reply: Reply,
    form: Form,
    include_usage: bool,
    tell: Callable[[Exception], ApiError],
) -> Iterator[str]:
    """`tell`: what a client is told of an error that comes when the status has long been sent."""
    if first := form.first(reply):
        yield event(first)
    try:
        for found in events:
            if isinstance(found, Progress):
                yield event(progress(form.quiet(reply), found))
            elif isinstance(found, TextPiece):
                yield event(form.text(reply, found.text, found.tokens))
            elif isinstance(found, Finished):
                yield from _end(found, reply, form, include_usage)
    except Exception as error:
        yield event(tell(error).body())
    yield DONE


def _end(found: Finished, reply: Reply, form: Form, include_usage: bool) -> Iterator[str]:
    receipt = found.answer.receipt
    if receipt.finish == "cancelled":  # and yet somebody listens: the service is being closed
        yield event(ENDED.body())
        return
    yield event(form.end(reply, receipt.finish))
    if include_usage:
        yield event(usage_chunk(form.quiet(reply), receipt))
