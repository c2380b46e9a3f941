"""Answers as a stream of chunks, in the order in which OpenAI's servers send them; several, as
their parts come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd import Event, Finished, Progress, Receipt, TextPiece, ThinkingPiece, ToolCallPiece
from mtmd.web.interfaces.openai_replies import Reply, progress
from mtmd.web.errors import ApiError
from mtmd.web.sse import event

DONE = "data: [DONE]\n\n"


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


class ChunkWriter:
    """Writes a stream of chunks. `usage` of the answers' receipts, None to leave it out; `echo`:
    what each answer begins with; `reports_progress`: with chunks that say how far the prompt is.
    """

    def __init__(
        self,
        replies: Sequence[Reply],
        form: Form,
        usage: Callable[[dict[int, Receipt]], dict[str, Any]] | None,
        echo: Sequence[str] = (),
        reports_progress: bool = False,
    ) -> None:
        self._replies, self._form, self._usage = replies, form, usage
        self._echo, self._reports_progress = echo, reports_progress
        self._receipts: dict[int, Receipt] = {}
        self._written = Counter[int]()  # characters of each answer

    def begin(self) -> Iterator[str]:
        for reply in self._replies:
            if first := self._form.first(reply):
                yield event(first)
        for index, text in enumerate(self._echo):
            yield event(self._form.text(self._replies[index], text, ()))
            self._written[index] += len(text)

    def write(self, index: int, item: Event) -> Iterator[str]:
        form, reply = self._form, self._replies[index]
        if isinstance(item, Progress) and self._reports_progress:
            yield event(progress(form.quiet(reply), item))
        elif isinstance(item, ThinkingPiece):
            if item.text and reply.thoughts:
                yield event(form.thought(reply, item.text))
        elif isinstance(item, TextPiece):
            chunk = form.text(reply, item.text, item.tokens)
            yield event(_placed(chunk, self._written[index]))
            self._written[index] += len(item.text)
        elif isinstance(item, ToolCallPiece):
            yield event(form.call(reply, item))
        elif isinstance(item, Finished):
            receipt = self._receipts[index] = item.answer.receipt
            yield event(form.end(reply, receipt.finish))

    def end(self) -> Iterator[str]:
        if self._usage is not None:
            usage = self._usage(self._receipts)
            yield event(self._form.quiet(self._replies[0]) | {"choices": [], "usage": usage})
        yield DONE


def _placed(chunk: dict[str, Any], before: int) -> dict[str, Any]:
    """A chunk after so many characters of its answer."""
    for choice in chunk["choices"]:
        found = choice["logprobs"]
        if found and "text_offset" in found:
            found["text_offset"] = [offset + before for offset in found["text_offset"]]
    return chunk
