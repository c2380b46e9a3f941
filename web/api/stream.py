"""An answer as a stream of chunks, in the order in which OpenAI's servers send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mtmd import Event, Finished, Progress, TextPiece
from mtmd.web.api.replies import Reply, progress, usage_chunk
from mtmd.web.errors import ApiError
from mtmd.web.sse import event

DONE = "data: [DONE]\n\n"
SHUTTING_DOWN = ApiError(503, "the server is shutting down", code="shutting_down")


@dataclass(frozen=True)
class Form:
    """How a kind of completion writes the parts of a stream. `first` opens it, `quiet` is a chunk
    without text.
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


def stream(
    events: Iterable[Event],
    reply: Reply,
    form: Form,
    include_usage: bool,
    as_error: Callable[[Exception], ApiError],
) -> Iterator[str]:
    """`as_error`: what is sent for an exception, whose status cannot be sent any more."""
    if first := form.first(reply):
        yield event(first)
    try:
        for item in events:
            if isinstance(item, Progress):
                yield event(progress(form.quiet(reply), item))
            elif isinstance(item, TextPiece):
                yield event(form.text(reply, item.text, item.tokens))
            elif isinstance(item, Finished):
                yield from _end(item, reply, form, include_usage)
    except Exception as error:
        yield event(as_error(error).body())
    yield DONE


def _end(finished: Finished, reply: Reply, form: Form, include_usage: bool) -> Iterator[str]:
    receipt = finished.answer.receipt
    if receipt.finish == "cancelled":  # and yet somebody listens: the service is being closed
        yield event(SHUTTING_DOWN.body())
        return
    yield event(form.end(reply, receipt.finish))
    if include_usage:
        yield event(usage_chunk(form.quiet(reply), receipt))
