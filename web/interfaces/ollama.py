"""Ollama's interface (docs/api.md of github.com/ollama/ollama): chats and prompts answered, as
lines of JSON where they are streamed, and the model listed and shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from time import perf_counter_ns
from typing import Any

from flask import Blueprint, Response, jsonify

from mtmd import Answer, Event, Finished, TextPiece, ThinkingPiece, ToolCall, __version__
from mtmd.checkpoint.file_names import type_of
from mtmd.web.answering.answer import Answering, Form, error_response
from mtmd.web.answering.response_streams import Collected, Writer
from mtmd.web.answering.tools import CallReader, arguments_of
from mtmd.web.errors import ApiError, in_ollamas_form
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.typed_body import json_body
from mtmd.web.interfaces.embeddings import no_vectors
from mtmd.web.interfaces.ollama_requests import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    ShowRequest,
)
from mtmd.web.models.choice import Listed
from mtmd.web.served_model import ServedModel

# Whose interface this follows: clients refuse versions that they hold for too old.
INTERFACE = "0.12.6"
_FINISH = {"stop": "stop", "length": "length", "tool_calls": "stop"}
_NS = 1_000_000  # in a millisecond
_GGUF = "GGUF"  # the kind of a file that was not opened


def blueprint(answering: Answering) -> Blueprint:
    routes = Blueprint("ollama", __name__)
    routes.register_error_handler(Exception, lambda error: error_response(error, in_ollamas_form))
    _answer_routes(routes, answering)
    _model_routes(routes, answering)
    return routes


def _answer_routes(routes: Blueprint, answering: Answering) -> None:
    @routes.post("/api/chat")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def chat() -> Response:
        body = answering.read(ChatRequest, typed=False)
        return _answered(answering, body, LineForm(body.model, message))

    @routes.post("/api/generate")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def generate() -> Response:
        body = answering.read(GenerateRequest, typed=False)
        return _answered(answering, body, LineForm(body.model, response))

    @routes.post("/api/embed")
    @routes.post("/api/embeddings")
    @takes(Body.JSON)
    def embed() -> Response:
        name = json_body(EmbedRequest, typed=False).model
        raise no_vectors(answering.models, name and _known(answering, name))


def _model_routes(routes: Blueprint, answering: Answering) -> None:
    def described(name: str, model: Listed) -> dict[str, Any]:
        there = answering.models.at_hand(model.name)
        report = there.warmup_report if there else None
        weights = [sum(g.weight_bytes.values()) for g in report.graphs] if report else []
        return {
            "name": _tagged(name),
            "model": _tagged(name),
            "modified_at": _time(datetime.fromtimestamp(model.since, timezone.utc)),
            "size": sum(weights) if report else model.file_bytes or 0,
            "digest": hashlib.sha256(model.name.encode()).hexdigest(),
            "details": _details(model),
        }

    @routes.get("/api/version")
    @takes(Body.NOTHING)
    def version() -> dict[str, str]:
        return {"version": INTERFACE, "mtmd": __version__}

    @routes.get("/api/tags")
    @takes(Body.NOTHING)
    def tags() -> dict[str, Any]:
        listed = answering.models.listed()
        return {"models": [described(name, model) for model in listed for name in model.names]}

    @routes.get("/api/ps")
    @takes(Body.NOTHING)
    def running() -> dict[str, Any]:
        return {"models": [one for model in answering.models.listed() for one in _running(model)]}

    def _running(model: Listed) -> Iterator[dict[str, Any]]:
        there = answering.models.at_hand(model.name)
        if there is not None:
            one = described(model.name, model)
            del one["modified_at"]
            yield one | {
                "expires_at": _time(datetime.now(timezone.utc) + timedelta(days=3650)),
                "size_vram": 0 if there.warmup_report.device == "cpu" else one["size"],
                "context_length": there.context,
            }

    @routes.post("/api/show")
    @takes(Body.JSON)
    def show() -> dict[str, Any]:
        body = json_body(ShowRequest, typed=False)
        name = body.model or body.name
        if not name:
            raise ApiError(400, "model: missing; name one of /api/tags", param="model")
        model = answering.models.find(_known(answering, name))
        there = answering.models.at_hand(model.name)
        return {
            "modelfile": "",
            "parameters": _parameters(model.usual_sampling),
            "template": there.service.chat_template if there else "",
            "license": "",
            "details": _details(model),
            "model_info": _info(model),
            "capabilities": _can(model, bool(there and there.service.thinks)),
            "modified_at": _time(datetime.fromtimestamp(model.since, timezone.utc)),
        }


def _answered(
    answering: Answering, body: ChatRequest | GenerateRequest, form: LineForm
) -> Response:
    name = _known(answering, body.model)
    if body.says:
        return answering.answer(body.request(name), form)
    if body.unloads and answering.models.unload(name):
        return jsonify(form.line() | {"done_reason": "unload", "done": True})

    def loaded(_: ServedModel) -> Response:
        return jsonify(form.line() | {"done_reason": "load", "done": True})

    return answering.when_loaded(name, body.streams, loaded, form)


class LineForm(Form):
    """Lines of JSON. `part`: a text, calls of tools, and a thought, in the form of the route."""

    mimetype = "application/x-ndjson"

    def __init__(
        self, model: str, part: Callable[[str, Sequence[ToolCall], str], dict[str, Any]]
    ) -> None:
        self._model, self._part, self._began = model, part, perf_counter_ns()
        # Lines of JSON have no comments, and clients read an empty line as broken JSON; a piece
        # without text is what Ollama itself sends now and then.
        self.beat = lambda: _dumped(self.line() | {"done": False})

    def line(
        self, text: str = "", calls: Sequence[ToolCall] = (), thought: str = ""
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": _time(datetime.now(timezone.utc))}
        return head | self._part(text, calls, thought)

    def whole(self, _: ServedModel, answers: Sequence[Collected]) -> dict[str, Any]:
        answer = answers[0].answer
        line = self.line(answer.text, answer.tool_calls, answer.thinking)
        return line | _end(answer, self._began)

    def writer(self, _: ServedModel) -> Writer:
        return _LineWriter(self.line, self._began)

    def error(self, error: ApiError) -> dict[str, Any]:
        return in_ollamas_form(error)

    def failure(self, error: ApiError) -> str:
        return _dumped(in_ollamas_form(error))


class _LineWriter(Writer):
    def __init__(self, line: Callable[..., dict[str, Any]], began: int) -> None:
        self._line, self._began, self._calls = line, began, CallReader()

    def write(self, _: int, event: Event) -> Iterator[str]:
        for call in self._calls.read(event):
            yield _dumped(self._line(calls=[call]) | {"done": False})
        if isinstance(event, ThinkingPiece) and event.text:
            yield _dumped(self._line(thought=event.text) | {"done": False})
        elif isinstance(event, TextPiece) and event.text:
            yield _dumped(self._line(event.text) | {"done": False})
        elif isinstance(event, Finished):
            yield _dumped(self._line() | _end(event.answer, self._began))


def message(text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, Any]:
    """A call that is cut, as its answer was, has no arguments that could be given."""
    result = [(call, arguments_of(call)) for call in calls]
    made = [
        {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
        for call, arguments in result
        if arguments is not None
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"thinking": thought} if thought else {}
    return {"message": message | ({"tool_calls": made} if made else {})}


def response(text: str, _: Sequence[ToolCall], thought: str) -> dict[str, Any]:
    return {"response": text} | ({"thinking": thought} if thought else {})


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
        "mtmd_receipt": receipt.asdict(),
    }


def _known(answering: Answering, name: str) -> str:
    """Ollama's clients write the tag that stands for none."""
    names = {known for model in answering.models.listed() for known in model.names}
    return name if name in names else name.removesuffix(":latest")


def _can(model: Listed, thinks: bool) -> list[str]:
    """Return what clients offer their users."""
    more = {"vision": model.sees, "audio": model.hears, "thinking": thinks}
    return ["completion", "tools", *(name for name, there in more.items() if there)]


def _details(model: Listed) -> dict[str, Any]:
    """`clip` among the families is how older clients tell that a model sees."""
    facts, family = model.checkpoint, _family(model)
    return {
        "parent_model": "",
        "format": facts.format if facts else "gguf" if model.kind == _GGUF else "",
        "family": family,
        "families": [family, *(["clip"] if model.sees else [])],
        "parameter_size": _parameter_size(facts.parameters) if facts else "",
        "quantization_level": facts.weight_type if facts else type_of(model.name),
    }


def _info(model: Listed) -> dict[str, Any]:
    """Return what a GGUF's metadata has; what is not known of a model is left out."""
    facts, family = model.checkpoint, _family(model)
    known = {
        "general.architecture": family,
        "general.basename": model.name,
        "general.parameter_count": facts and facts.parameters,
        f"{family}.context_length": model.context,
        f"{family}.embedding_length": facts and facts.width,
    }
    return {name: value for name, value in known.items() if value is not None}


def _family(model: Listed) -> str:
    """Return the family of a GGUF that was not opened yet, nothing says it."""
    kind = "" if model.kind == _GGUF else model.kind
    return (model.checkpoint.architecture if model.checkpoint else kind) or "unknown"


def _parameters(sampling: Mapping[str, float]) -> str:
    """Return parameters as a Modelfile has them, a line each."""
    names = {"repetition_penalty": "repeat_penalty"}
    return "\n".join(f"{names.get(name, name)} {value:g}" for name, value in sampling.items())


def _parameter_size(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _tagged(name: str) -> str:
    """Clients put the tag to a name that has none, and then look for it in the list."""
    return name if ":" in name else f"{name}:latest"


def _time(when: datetime) -> str:
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _dumped(line: dict[str, Any]) -> str:
    return f"{json.dumps(line)}\n"
