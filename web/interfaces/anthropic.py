"""Anthropic's Messages API (docs.claude.com/en/api/messages): answers whole and streamed, tokens
counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from flask import Blueprint, Response, g

from mtmd import Answer, Event, Finished, Progress, Receipt, TextPiece, ThinkingPiece, ToolCallPiece
from mtmd.web import sse
from mtmd.web.answering.answer import Answering, Form, error_response
from mtmd.web.answering.response_streams import Collected, Writer
from mtmd.web.answering.tools import arguments_of
from mtmd.web.errors import ApiError, in_anthropics_form
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.interfaces.anthropic_requests import CountRequest, MessagesRequest
from mtmd.web.served_model import ServedModel

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def blueprint(answering: Answering) -> Blueprint:
    routes = Blueprint("anthropic", __name__)
    routes.register_error_handler(Exception, _failed)

    @routes.post("/v1/messages")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def messages() -> Response:
        body = answering.read(MessagesRequest)
        return answering.answer(body.request(), MessageForm(body.model, g.request_id))

    @routes.post("/v1/messages/count_tokens")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def count_tokens() -> dict[str, int]:
        body = answering.read(CountRequest)
        return {"input_tokens": answering.count(body.request()).prompt_tokens}

    @routes.after_request
    def name(response: Response) -> Response:
        response.headers["Request-Id"] = g.request_id
        return response

    return routes


class MessageForm(Form):
    def __init__(self, model: str, request_id: str) -> None:
        self._model, self._request_id = model, request_id

    def whole(self, model: ServedModel, answers: Sequence[Collected]) -> dict[str, Any]:
        answer = answers[0].answer
        content = {"content": list(_blocks(answer)), **_end(answer)}
        return self._head(model) | content | {"usage": _usage(answer.receipt)}

    def writer(self, model: ServedModel) -> Writer:
        return _MessageWriter(self._head(model))

    def error(self, error: ApiError) -> dict[str, Any]:
        return in_anthropics_form(error, self._request_id)

    def failure(self, error: ApiError) -> str:
        return _event(self.error(error))

    def _head(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": model.called(self._model),
        }


def _failed(error: Exception) -> Response:
    return error_response(
        error, lambda known: in_anthropics_form(known, g.get("request_id", "req"))
    )


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    """A call that is cut, as its answer was, has no arguments that could be given."""
    if answer.thinking:
        signature = _signature(answer.thinking)
        yield {"type": "thinking", "thinking": answer.thinking, "signature": signature}
    if answer.text:
        yield {"type": "text", "text": answer.text}
    for call in answer.tool_calls:
        arguments = arguments_of(call)
        if arguments is not None:
            yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


class _MessageWriter(Writer):
    """Writes one message as a stream. The first event has the number of tokens of the prompt, so it
    waits until that is known.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head, self._started, self._block = head, False, _OpenBlock()

    def write(self, _: int, event: Event) -> Iterator[str]:
        if not self._started and not (isinstance(event, Progress) and event.stage == "encode"):
            self._started = True
            yield _begin(self._head, event.total if isinstance(event, Progress) else 0)
        block = self._block
        if isinstance(event, ThinkingPiece) and event.text:
            yield from block.to("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield block.delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, TextPiece) and event.text:
            yield from block.to("text", {"type": "text", "text": ""})
            yield block.delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ToolCallPiece):
            call: dict[str, Any] = {
                "type": "tool_use",
                "id": event.id,
                "name": event.name,
                "input": {},
            }
            yield from block.to(event.index, call)
            if event.arguments:
                yield block.delta({"type": "input_json_delta", "partial_json": event.arguments})
        elif isinstance(event, Finished):
            yield from block.close()
            usage = _usage(event.answer.receipt)
            yield _event({"type": "message_delta", "delta": _end(event.answer), "usage": usage})
            yield _event({"type": "message_stop"})
        elif isinstance(event, Progress):
            yield _event({"type": "ping"})


class _OpenBlock:
    """The block of a stream that is being written: a thought, a text, or a call. One is open at a
    time.
    """

    def __init__(self) -> None:
        self._index = -1
        self._which: str | int | None = None
        self._thought = ""

    def to(self, which: str | int, block: dict[str, Any]) -> Iterator[str]:
        """Another one is begun, where `which` is not the one that is open."""
        if which != self._which:
            yield from self.close()
            self._index, self._which = self._index + 1, which
            yield _event(
                {"type": "content_block_start", "index": self._index, "content_block": block}
            )

    def delta(self, delta: dict[str, Any]) -> str:
        self._thought += delta.get("thinking", "")
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def close(self) -> Iterator[str]:
        if self._which == "thinking":
            signature = _signature(self._thought)
            yield self.delta({"type": "signature_delta", "signature": signature})
        if self._which is not None:
            self._which = None
            yield _event({"type": "content_block_stop", "index": self._index})


def _signature(thought: str) -> str:
    """Clients send it back, and some leave out a thought without one. Nothing depends on it."""
    return f"mtmd-{hashlib.sha256(thought.encode()).hexdigest()[:32]}"


def _begin(head: dict[str, Any], prompt_tokens: int) -> str:
    usage = {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    message = head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return _event({"type": "message_start", "message": message})


def _end(answer: Answer) -> dict[str, Any]:
    reason = _REASONS.get(answer.receipt.finish, "end_turn")
    if answer.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(receipt: Receipt) -> dict[str, Any]:
    """Anthropic counts tokens that were from the cache beside the others, not among them."""
    return {
        "input_tokens": receipt.prompt_tokens - receipt.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": receipt.reused_tokens,
        "output_tokens": receipt.output_tokens,
        "mtmd_receipt": receipt.asdict(),
    }


def _event(data: dict[str, Any]) -> str:
    return sse.event(data, name=data["type"])
