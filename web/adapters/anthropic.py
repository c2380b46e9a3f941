"""Anthropic's Messages API (docs.claude.com/en/api/messages): answers whole and streamed, tokens
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, g

from mtmd import Answer, Event, Finished, Progress, Receipt, TextPiece
from mtmd.web import sse
from mtmd.web.adapters.anthropic_requests import CountRequest, MessagesRequest
from mtmd.web.adapters.door import Door, error_response
from mtmd.web.errors import ApiError
from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, Work, takes

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def blueprint(door: Door) -> Blueprint:
    routes = Blueprint("anthropic", __name__)
    routes.register_error_handler(Exception, _failed)

    @routes.post("/v1/messages")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def messages() -> Response:
        body = json_body(MessagesRequest)
        door.check_model(body.model)
        answering = door.begin(body.asked())
        request_id = g.request_id
        head = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": door.model.called(body.model),
        }
        if body.stream:
            return answering.streamed(
                lambda events: _written(events, head),
                lambda error: _event(_error(error, request_id)),
                sse.MIMETYPE,
            )
        return answering.whole(
            lambda answer: head | _content(answer) | {"usage": _usage(answer.receipt)},
            lambda error: _error(error, request_id),
        )

    @routes.post("/v1/messages/count_tokens")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def count_tokens() -> dict[str, int]:
        body = json_body(CountRequest)
        door.check_model(body.model)
        return {"input_tokens": door.count(body.asked()).prompt_tokens}

    @routes.after_request
    def name(response: Response) -> Response:
        response.headers["Request-Id"] = g.request_id
        return response

    return routes


def _content(answer: Answer) -> dict[str, Any]:
    content = [{"type": "text", "text": answer.text}] if answer.text else []
    return {"content": content, **_end(answer)}


def _failed(error: Exception) -> Response:
    return error_response(error, lambda known: _error(known, g.get("request_id", "req")))


def _written(events: Iterator[Event | None], head: dict[str, Any]) -> Iterator[str]:
    """The first event has the number of tokens of the prompt, so it waits until that is known."""
    started = False
    for event in events:
        if event is None:
            yield ""
            continue
        if not started and not (isinstance(event, Progress) and event.stage == "encode"):
            started = True
            tokens = event.total if isinstance(event, Progress) else 0
            yield from _begin(head, tokens)
        if isinstance(event, TextPiece) and event.text:
            delta = {"type": "text_delta", "text": event.text}
            yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
        elif isinstance(event, Finished):
            yield _event({"type": "content_block_stop", "index": 0})
            usage = _usage(event.answer.receipt)
            yield _event({"type": "message_delta", "delta": _end(event.answer), "usage": usage})
            yield _event({"type": "message_stop"})
        elif isinstance(event, Progress):
            yield _event({"type": "ping"})


def _begin(head: dict[str, Any], prompt_tokens: int) -> Iterator[str]:
    usage = {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    message = head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event({"type": "message_start", "message": message})
    block = {"type": "text", "text": ""}
    yield _event({"type": "content_block_start", "index": 0, "content_block": block})


def _end(answer: Answer) -> dict[str, Any]:
    if answer.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if answer.receipt.finish == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(receipt: Receipt) -> dict[str, Any]:
    """Anthropic counts tokens that were known from before beside the others, not among them."""
    return {
        "input_tokens": receipt.prompt_tokens - receipt.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": receipt.reused_tokens,
        "output_tokens": receipt.output_tokens,
    }


def _event(data: dict[str, Any]) -> str:
    return sse.event(data, name=data["type"])


def _error(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _ERRORS.get(error.status) or (
        "api_error" if error.status >= 500 else "invalid_request_error"
    )
    return {
        "type": "error",
        "error": {"type": kind, "message": error.body()["error"]["message"]},
        "request_id": request_id,
    }
