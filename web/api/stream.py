"""An answer as a stream of chunks, in the order in which OpenAI's servers send them; several, as
their parts come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd import Event, Finished, Progress, Receipt, TextPiece, ThinkingPiece, ToolCallPiece
from mtmd.web.api.replies import Reply, progress
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
    thought: Callable[[Reply, str], dict[str, Any]]
    call: Callable[[Reply, ToolCallPiece], dict[str, Any]]
    end: Callable[[Reply, str], dict[str, Any]]


CHAT = Form(
    lambda r: r.chat_chunk({"role": "assistant", "content": ""}),
    lambda r: r.chat_chunk({}),
    Reply.chat_text,
    Reply.chat_thought,
    Reply.chat_call,
    Reply.chat_end,
)
PLAIN = Form(
    lambda _: None,
    lambda r: r.plain_text("", ()),
    Reply.plain_text,
    lambda r, _: r.plain_text("", ()),  # nor thoughts
    lambda r, _: r.plain_text("", ()),  # plain completions have no tools
    Reply.plain_end,
)


def failure(error: ApiError) -> str:
    """The end of a stream that comes to nothing."""
    return event(error.body()) + DONE


def stream(
    events: Iterable[tuple[int, Event] | None],
    replies: Sequence[Reply],
    form: Form,
    include_usage: bool,
    as_error: Callable[[Exception], ApiError],
    usage: Callable[[dict[int, Receipt]], dict[str, Any]],
    echo: Sequence[str] = (),
    tells_progress: bool = False,
) -> Iterator[str]:
    """`events` with the place of their answer among `replies`; for None, an empty piece.
    `as_error`: what is sent for an exception, whose status cannot be sent any more; `usage` of the
    answers' receipts; `echo`: what each answer begins with; `tells_progress`: with chunks that say
    how far the prompt is.
    """
    receipts: dict[int, Receipt] = {}
    written = Counter[int]()  # characters of each answer
    for reply in replies:
        if first := form.first(reply):
            yield event(first)
    try:
        for index, text in enumerate(echo):
            yield event(form.text(replies[index], text, ()))
            written[index] += len(text)
        for come in events:
            if come is None:
                yield ""
                continue
            index, item = come
            reply = replies[index]
            if isinstance(item, Progress) and tells_progress:
                yield event(progress(form.quiet(reply), item))
            elif isinstance(item, ThinkingPiece):
                if item.text and reply.thoughts:
                    yield event(form.thought(reply, item.text))
            elif isinstance(item, TextPiece):
                yield event(_placed(form.text(reply, item.text, item.tokens), written[index]))
                written[index] += len(item.text)
            elif isinstance(item, ToolCallPiece):
                yield event(form.call(reply, item))
            elif isinstance(item, Finished):
                receipt = receipts[index] = item.answer.receipt
                if receipt.finish == "cancelled":
                    # and yet somebody listens: the service is being closed
                    raise SHUTTING_DOWN
                yield event(form.end(reply, receipt.finish))
        if include_usage:
            yield event(form.quiet(replies[0]) | {"choices": [], "usage": usage(receipts)})
    except Exception as error:
        yield event(as_error(error).body())
    yield DONE


def _placed(chunk: dict[str, Any], before: int) -> dict[str, Any]:
    """A chunk after so many characters of its answer."""
    for choice in chunk["choices"]:
        found = choice["logprobs"]
        if found and "text_offset" in found:
            found["text_offset"] = [offset + before for offset in found["text_offset"]]
    return chunk
