"""Ollama's interface (docs/api.md of github.com/ollama/ollama): chats and prompts answered, as
lines of JSON where they are streamed, and the model listed and shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from time import perf_counter_ns
from typing import Any

from flask import Blueprint, Response, jsonify

from mtmd import Answer, Event, Finished, TextPiece, ToolCall, __version__
from mtmd.web.adapters.door import Door, error_response
from mtmd.web.adapters.ollama_requests import ChatRequest, GenerateRequest, ShowRequest
from mtmd.web.adapters.tools import CallReader, arguments_of
from mtmd.web.errors import ApiError, in_ollamas_form
from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, Work, takes

# Whose interface this follows: clients refuse versions that they hold for too old.
INTERFACE = "0.12.6"
LINES = "application/x-ndjson"
_FINISH = {"stop": "stop", "length": "length", "tool_calls": "stop"}
_NS = 1_000_000  # in a millisecond


def blueprint(door: Door) -> Blueprint:
    routes = Blueprint("ollama", __name__)
    routes.register_error_handler(Exception, lambda error: error_response(error, in_ollamas_form))
    _answer_routes(routes, door)
    _model_routes(routes, door)
    return routes


def _answer_routes(routes: Blueprint, door: Door) -> None:
    @routes.post("/api/chat")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def chat() -> Response:
        body = json_body(ChatRequest, typed=False)
        _check_model(door, body.model)
        door.check_fields(body)
        return _answered(door, body, bool(body.messages), _message)

    @routes.post("/api/generate")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def generate() -> Response:
        body = json_body(GenerateRequest, typed=False)
        _check_model(door, body.model)
        door.check_fields(body)
        return _answered(door, body, bool(body.prompt or body.images), _response)


def _model_routes(routes: Blueprint, door: Door) -> None:
    started = datetime.now(timezone.utc)

    def described(name: str) -> dict[str, Any]:
        report = door.model.warmup_report
        return {
            "name": _tagged(name),
            "model": _tagged(name),
            "modified_at": _time(started),
            "size": sum(sum(graph.weight_bytes.values()) for graph in report.graphs),
            "digest": hashlib.sha256(door.model.name.encode()).hexdigest(),
            "details": _details(door, report.dtype),
        }

    @routes.get("/api/version")
    @takes(Body.NOTHING)
    def version() -> dict[str, str]:
        return {"version": INTERFACE, "mtmd": __version__}

    @routes.get("/api/tags")
    @takes(Body.NOTHING)
    def tags() -> dict[str, Any]:
        return {"models": [described(name) for name in door.model.names]}

    @routes.get("/api/ps")
    @takes(Body.NOTHING)
    def running() -> dict[str, Any]:
        one = described(door.model.name)
        del one["modified_at"]
        on_device = 0 if door.model.warmup_report.device == "cpu" else one["size"]
        stays = {
            "expires_at": _time(datetime.now(timezone.utc) + timedelta(days=3650)),
            "size_vram": on_device,
            "context_length": door.model.context,
        }
        return {"models": [one | stays]}

    @routes.post("/api/show")
    @takes(Body.JSON)
    def show() -> dict[str, Any]:
        body = json_body(ShowRequest, typed=False)
        name = body.model or body.name
        if not name:
            raise ApiError(400, "model: missing; name one of /api/tags", param="model")
        _check_model(door, name)
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "license": "",
            "details": _details(door, door.model.warmup_report.dtype),
            "model_info": {
                "general.architecture": "mtmd",
                "general.basename": door.model.name,
                "mtmd.context_length": door.model.context,
            },
            "capabilities": ["completion", "tools", *(["vision"] if door.model.sees else [])],
            "modified_at": _time(started),
        }


def _answered(
    door: Door,
    body: ChatRequest | GenerateRequest,
    says: bool,
    part: Callable[[str, Sequence[ToolCall]], dict[str, Any]],
) -> Response:
    """`says`: whether there is anything to answer; a request without it loads a model, of others.
    `part`: a text, and calls of tools, in the form of the route.
    """
    began = perf_counter_ns()
    if not says:
        loaded = {"done_reason": "load", "done": True}
        return jsonify(_line(body.model, part("", ())) | loaded)
    answering = door.begin(body.asked())
    if not body.streams:
        return answering.whole(
            lambda a: _line(body.model, part(a.text, a.tool_calls)) | _end(a, began),
            in_ollamas_form,
        )

    def lines(events: Iterator[Event | None]) -> Iterator[str]:
        calls = CallReader()
        for event in events:
            if event is None:
                yield ""
                continue
            for call in calls.read(event):
                yield _dumped(_line(body.model, part("", (call,))) | {"done": False})
            if isinstance(event, TextPiece) and event.text:
                yield _dumped(_line(body.model, part(event.text, ())) | {"done": False})
            elif isinstance(event, Finished):
                yield _dumped(_line(body.model, part("", ())) | _end(event.answer, began))

    return answering.streamed(lines, lambda error: _dumped(in_ollamas_form(error)), LINES)


def _message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A call that is cut, as its answer was, has no arguments that could be given."""
    found = [(call, arguments_of(call)) for call in calls]
    made = [
        {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
        for call, arguments in found
        if arguments is not None
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {"message": message | ({"tool_calls": made} if made else {})}


def _response(text: str, _: Sequence[ToolCall]) -> dict[str, Any]:
    return {"response": text}


def _line(model: str, part: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "created_at": _time(datetime.now(timezone.utc))} | part


def _end(answer: Answer, began: int) -> dict[str, Any]:
    """Times in nanoseconds. `prompt_eval_duration` counts the pictures in."""
    receipt = answer.receipt
    return {
        "done": True,
        "done_reason": _FINISH.get(receipt.finish, receipt.finish),
        "total_duration": perf_counter_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": receipt.prompt_tokens,
        "prompt_eval_duration": int((receipt.encode_ms + receipt.prefill_ms) * _NS),
        "eval_count": receipt.output_tokens,
        "eval_duration": int(receipt.decode_ms * _NS),
    }


def _check_model(door: Door, name: str) -> None:
    """Ollama's clients write the tag that stands for none. Raises ApiError."""
    door.check_model(name if door.model.answers_to(name) else name.removesuffix(":latest"))


def _details(door: Door, dtype: str) -> dict[str, Any]:
    """`clip` among the families is how older clients tell that a model sees."""
    return {
        "parent_model": "",
        "format": "mtmd",
        "family": "mtmd",
        "families": ["mtmd", *(["clip"] if door.model.sees else [])],
        "parameter_size": "",
        "quantization_level": dtype.upper(),
    }


def _tagged(name: str) -> str:
    """Clients put the tag to a name that has none, and then look for it in the list."""
    return name if ":" in name else f"{name}:latest"


def _time(when: datetime) -> str:
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _dumped(line: dict[str, Any]) -> str:
    return f"{json.dumps(line)}\n"
