"""OpenAI's Responses API: answers whole and streamed, conversations gone on with by the id of a
response.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flask import Blueprint, Response, g

from mtmd import Answer, Event, Finished, Receipt, TextPiece, ThinkingPiece, ToolCall, ToolCallPiece
from mtmd.web import sse
from mtmd.web.access import owner
from mtmd.web.answering.answer import Answering, Form
from mtmd.web.answering.request import Turn
from mtmd.web.answering.response_streams import Collected, Writer
from mtmd.web.answering.tools import CustomCall, CustomCallPiece
from mtmd.web.errors import ApiError
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.interfaces.responses_requests import ResponsesRequest, sealed_thought
from mtmd.web.interfaces.stored_responses import StoredResponses
from mtmd.web.served_model import ServedModel

_ARGUMENTS = "response.function_call_arguments"
_CUSTOM_INPUT = "response.custom_tool_call_input"
_THOUGHT = "thought"


def blueprint(answering: Answering, stored: StoredResponses) -> Blueprint:
    routes = Blueprint("responses", __name__)

    @routes.post("/v1/responses")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def create() -> Response:
        body = answering.read(ResponsesRequest)
        previous = body.previous_response_id
        before = (
            () if previous is None else stored.get(owner(), previous, "previous_response_id").turns
        )
        turns = (*before, *body.turns())
        form = ResponseForm(body, turns, g.own_id, partial(stored.add, owner()))
        return answering.answer(body.request(turns), form)

    @routes.get("/v1/responses/<id_>")
    @takes(Body.NOTHING)
    def show(id_: str) -> dict[str, Any]:
        return stored.get(owner(), id_).body

    @routes.delete("/v1/responses/<id_>")
    @takes(Body.NOTHING)
    def delete(id_: str) -> dict[str, Any]:
        stored.delete(owner(), id_)
        return {"id": id_, "object": "response", "deleted": True}

    return routes


class ResponseForm(Form):
    """One response as it is made. `store` takes the conversation with its answer, and the response;
    it returns False where there is no room for them.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        turns: tuple[Turn, ...],
        id_: str,
        store: Callable[[tuple[Turn, ...], dict[str, Any]], bool],
    ) -> None:
        self._turns, self._id, self._store = turns, id_, store
        self._needs_encoded, self._tools = body.needs_encoded, body.given_tools
        self._numbers = itertools.count()
        self._head: dict[str, Any] = {
            "id": f"resp_{id_}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or "",
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": body.is_saved,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def whole(self, model: ServedModel, answers: Sequence[Collected]) -> dict[str, Any]:
        self._name(model)
        return self.finished(answers[0].answer)

    def writer(self, model: ServedModel) -> Writer:
        self._name(model)
        return _ItemWriter(self)

    def _name(self, model: ServedModel) -> None:
        self._head["model"] = model.called(self._head["model"] or None)

    def failure(self, error: ApiError) -> str:
        reported = error.body()["error"]
        code = "server_error" if error.status >= 500 else reported["code"] or "invalid_prompt"
        body = self.body("failed", [], None)
        body["error"] = {"code": code, "message": reported["message"]}
        return self.event("response.failed", response=body)

    def finished(self, answer: Answer) -> dict[str, Any]:
        status = "incomplete" if answer.receipt.finish == "length" else "completed"
        body = self.body(status, self._output(answer, status), answer.receipt)
        if self._head["store"]:
            calls = tuple(
                call.as_function() if isinstance(call, CustomCall) else call
                for call in answer.tool_calls
            )
            turns = (
                *self._turns,
                Turn("assistant", (answer.text,), calls, thought=answer.thinking),
            )
            body["store"] = self._store(turns, body)
        return body

    def _output(self, answer: Answer, status: str) -> list[dict[str, Any]]:
        """The last of it is what an answer that was cut did not come to the end of."""
        calls, output = answer.tool_calls, list[dict[str, Any]]()
        if answer.thinking:
            output.append(self.reasoned("completed", answer.thinking))
        if answer.text or not calls:
            stated = "completed" if calls else status
            output.append(self.message(stated, [_part(answer.text)]))
        for call in calls:
            output.append(self.called("completed" if call is not calls[-1] else status, call))
        return output

    def body(
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

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def reasoned(self, status: str, thought: str) -> dict[str, Any]:
        return {
            "id": f"rs_{self._id}",
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [_thought(thought)] if thought else [],
            "encrypted_content": sealed_thought(thought)
            if self._needs_encoded and thought
            else None,
        }

    def called(self, status: str, call: ToolCall) -> dict[str, Any]:
        if isinstance(call, CustomCall):
            return {
                "id": f"ctc_{call.id.removeprefix('call_')}",
                "type": "custom_tool_call",
                "status": status,
                "call_id": call.id,
                **self._tools.spelled(call.name),
                "input": call.arguments,
            }
        return {
            "id": f"fc_{call.id.removeprefix('call_')}",
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            **self._tools.spelled(call.name),
            "arguments": call.arguments,
        }

    def event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return sse.event(data, name=kind)


class _ItemWriter(Writer):
    """Writes a response as a stream: one item after the other is open, the thought, the message, or
    a call, in the order of the whole response's output.
    """

    def __init__(self, response: ResponseForm) -> None:
        self._response, self._index = response, -1
        self._which: int | str | None = None  # of the calls; None for the message
        self._item: dict[str, Any] = {}
        self._written: list[str] = []

    def begin(self) -> Iterator[str]:
        begun = self._response.body("in_progress", [], None)
        yield self._response.event("response.created", response=begun)
        yield self._response.event("response.in_progress", response=begun)

    def write(self, _: int, event: Event) -> Iterator[str]:
        if isinstance(event, ThinkingPiece) and event.text:
            yield from self._thought(event.text)
        elif isinstance(event, TextPiece) and event.text:
            yield from self._text(event.text)
        elif isinstance(event, ToolCallPiece):
            yield from self._call(event)
        elif isinstance(event, Finished):
            if self._index < 0 or self._which == _THOUGHT:  # nothing is said yet
                yield from self._text("")
            whole = self._response.finished(event.answer)
            yield from self._close(whole["output"])
            yield self._response.event(f"response.{whole['status']}", response=whole)

    def _thought(self, text: str) -> Iterator[str]:
        event = self._response.event
        if self._which != _THOUGHT:
            yield from self._begin(_THOUGHT, self._response.reasoned("in_progress", ""))
            yield event("response.content_part.added", **self._location, part=_thought(""))
        self._written.append(text)
        yield event("response.reasoning_text.delta", **self._location, delta=text)

    def _text(self, text: str) -> Iterator[str]:
        event = self._response.event
        if self._which is not None or self._index < 0:
            yield from self._begin(None, self._response.message("in_progress", []))
            yield event("response.content_part.added", **self._location, part=_part(""))
        self._written.append(text)
        if text:
            yield event("response.output_text.delta", **self._location, delta=text, logprobs=[])

    def _call(self, piece: ToolCallPiece) -> Iterator[str]:
        if self._which != piece.index:
            made = CustomCall if isinstance(piece, CustomCallPiece) else ToolCall
            call = made(piece.id or "", piece.name or "", "")
            yield from self._begin(piece.index, self._response.called("in_progress", call))
        self._written.append(piece.arguments)
        if piece.arguments:
            kind = _CUSTOM_INPUT if "input" in self._item else _ARGUMENTS
            yield self._response.event(f"{kind}.delta", **self._location, delta=piece.arguments)

    def _close(self, output: list[dict[str, Any]] | None = None) -> Iterator[str]:
        """`output`: of the whole response, at its end."""
        if self._index < 0:
            return
        event, text = self._response.event, "".join(self._written)
        if self._which is None:
            yield event("response.output_text.done", **self._location, text=text, logprobs=[])
            yield event("response.content_part.done", **self._location, part=_part(text))
            done = {"status": "completed", "content": [_part(text)]}
        elif "input" in self._item:
            yield event(f"{_CUSTOM_INPUT}.done", **self._location, input=text)
            done = {"status": "completed", "input": text}
        elif self._which == _THOUGHT:
            yield event("response.reasoning_text.done", **self._location, text=text)
            yield event("response.content_part.done", **self._location, part=_thought(text))
            done = self._response.reasoned("completed", text)
        else:
            name = self._item["name"]
            yield event(f"{_ARGUMENTS}.done", **self._location, name=name, arguments=text)
            done = {"status": "completed", "arguments": text}
        item = output[-1] if output else self._item | done
        yield event("response.output_item.done", output_index=self._index, item=item)

    def _begin(self, which: int | str | None, item: dict[str, Any]) -> Iterator[str]:
        yield from self._close()
        self._index, self._which, self._item, self._written = self._index + 1, which, item, []
        yield self._response.event(
            "response.output_item.added", output_index=self._index, item=item
        )

    @property
    def _location(self) -> dict[str, Any]:
        location = {"item_id": self._item["id"], "output_index": self._index}
        return location | ({"content_index": 0} if self._which in (None, _THOUGHT) else {})


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


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
        "output_tokens_details": {"reasoning_tokens": receipt.thinking_tokens},
        "total_tokens": receipt.prompt_tokens + receipt.output_tokens,
        "mtmd_receipt": receipt.asdict(),
    }
