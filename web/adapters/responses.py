"""OpenAI's Responses API: answers whole and streamed, conversations gone on with by the id of a
response.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, g

from mtmd import Answer, Event, Receipt
from mtmd.web import sse
from mtmd.web.adapters.door import Asked, Door, Turn, texts
from mtmd.web.adapters.kept_responses import KeptResponses
from mtmd.web.adapters.responses_requests import ResponsesRequest
from mtmd.web.auth import owner
from mtmd.web.errors import ApiError
from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, Work, takes


def blueprint(door: Door, kept: KeptResponses) -> Blueprint:
    routes = Blueprint("responses", __name__)

    @routes.post("/v1/responses")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def create() -> Response:
        body = json_body(ResponsesRequest)
        door.check_model(body.model)
        body.check()
        turns = (*_before(body, kept), *body.turns())
        instructions = [Turn("system", (body.instructions,))] if body.instructions else []
        writing = _Writing(door, kept, body, turns)
        answering = door.begin(Asked([*instructions, *turns], body.chosen(), body.details()))
        if body.stream:
            return answering.streamed(writing.events, writing.failed, sse.MIMETYPE)
        return answering.whole(writing.finished, ApiError.body)

    @routes.get("/v1/responses/<id_>")
    @takes(Body.NOTHING)
    def show(id_: str) -> dict[str, Any]:
        return kept.get(owner(), id_).body

    @routes.delete("/v1/responses/<id_>")
    @takes(Body.NOTHING)
    def delete(id_: str) -> dict[str, Any]:
        kept.delete(owner(), id_)
        return {"id": id_, "object": "response", "deleted": True}

    return routes


def _before(body: ResponsesRequest, kept: KeptResponses) -> tuple[Turn, ...]:
    if body.previous_response_id is None:
        return ()
    return kept.get(owner(), body.previous_response_id, "previous_response_id").turns


class _Writing:
    """One response as it is made."""

    def __init__(
        self, door: Door, kept: KeptResponses, body: ResponsesRequest, turns: tuple[Turn, ...]
    ) -> None:
        self._kept, self._owner, self._turns = kept, owner(), turns
        self._id, self._message_id = f"resp_{g.own_id}", f"msg_{g.own_id}"
        self._numbers = itertools.count()
        self._head = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": door.model.called(body.model),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.is_kept,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def events(self, events: Iterator[Event | None]) -> Iterator[str]:
        begun = self._body("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        message = self._message("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=message)
        yield self._event("response.content_part.added", **place, part=_part(""))
        finished: list[Answer] = []
        for text in texts(events, finished):
            piece = {**place, "delta": text, "logprobs": []}
            yield self._event("response.output_text.delta", **piece) if text else ""
        answer = finished[0]
        yield self._event("response.output_text.done", **place, text=answer.text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(answer.text))
        whole = self.finished(answer)
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> str:
        told = error.body()["error"]
        code = "server_error" if error.status >= 500 else told["code"] or "invalid_prompt"
        body = self._body("failed", [], None)
        body["error"] = {"code": code, "message": told["message"]}
        return self._event("response.failed", response=body)

    def finished(self, answer: Answer) -> dict[str, Any]:
        status = "incomplete" if answer.receipt.finish == "length" else "completed"
        body = self._body(status, [self._message(status, [_part(answer.text)])], answer.receipt)
        if self._head["store"]:
            turns = (*self._turns, Turn("assistant", (answer.text,)))
            body["store"] = self._kept.add(self._owner, turns, body)
        return body

    def _body(
        self, status: str, output: list[dict[str, Any]], receipt: Receipt | None
    ) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": output,
            "usage": None if receipt is None else _usage(receipt),
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return sse.event(data, name=kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    written = body.text.format if body.text else None
    return written.model_dump(by_alias=True) if written else {"type": "text"}


def _usage(receipt: Receipt) -> dict[str, Any]:
    return {
        "input_tokens": receipt.prompt_tokens,
        "input_tokens_details": {"cached_tokens": receipt.reused_tokens},
        "output_tokens": receipt.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": receipt.prompt_tokens + receipt.output_tokens,
        "mtmd_receipt": receipt.asdict(),
    }
