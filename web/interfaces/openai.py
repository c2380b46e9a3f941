"""OpenAI's routes: completions of chats and of plain prompts, their token counts, the models; and
the document that describes them.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from flask import Blueprint, Response, g, render_template

from mtmd.checkpoint.hub import DEMO_NAMES
from mtmd.web.access import without_key
from mtmd.web.answering.answer import Answering
from mtmd.web.errors import ApiError
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.interfaces import openapi
from mtmd.web.interfaces.openai_replies import ChatReply, CompletionForm, PlainReply
from mtmd.web.interfaces.openai_requests import MAX_CHOICES, ChatRequest, CompletionRequest
from mtmd.web.interfaces.reference import operations
from mtmd.web.models.choice import FAILED, LOADING, UNLOADED, Listed


def blueprint(answering: Answering) -> Blueprint:
    routes = Blueprint("openai", __name__)

    @routes.post("/v1/chat/completions")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def chat() -> Response:
        body = answering.read(ChatRequest)
        reply = ChatReply(
            f"chatcmpl-{g.request_id}",
            body.model or "",
            bool(body.logprobs),
            body.warnings(),
            prompt_logprobs=body.prompt_logprobs,
            thoughts=body.shows_thoughts,
            calls_old_way=body.calls_old_way,
        )
        return answering.answer(body.request(), CompletionForm(body, reply))

    @routes.post("/v1/completions")
    @takes(Body.JSON, Work.ANSWER)
    def completions() -> Response:
        body = answering.read(CompletionRequest)
        if (body.n or 1) * len(body.prompt) > MAX_CHOICES:
            raise ApiError(400, f"n: expected at most {MAX_CHOICES} answers in all", param="n")
        reply = PlainReply(
            f"cmpl-{g.request_id}",
            body.model or "",
            body.logprobs is not None,
            body.warnings(),
            prompt_logprobs=body.prompt_logprobs,
        )
        return answering.answer(body.request(), CompletionForm(body, reply))

    @routes.post("/v1/chat/completions/input_tokens")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def input_tokens() -> dict[str, Any]:
        count = answering.count(answering.read(ChatRequest).request())
        return {
            "object": "response.input_tokens",
            "input_tokens": count.prompt_tokens,
            "mtmd": {
                "image_tokens": list(count.image_tokens),
                "video_tokens": list(count.video_tokens),
                "audio_tokens": list(count.audio_tokens),
                "context": count.context,
            },
        }

    @routes.get("/v1/models")
    @takes(Body.NOTHING)
    def models() -> dict[str, Any]:
        called = [(name, model) for model in answering.models.listed() for name in _names(model)]
        return {
            "object": "list",
            "data": [_model(name, model, answering.models.many) for name, model in called],
            # as Anthropic's clients look for it, who read lists page by page
            "has_more": False,
            "first_id": called[0][0] if called else None,
            "last_id": called[-1][0] if called else None,
            # as llama.cpp's clients look for it
            "models": [
                {"name": name, "model": name, "capabilities": _can(model)} for name, model in called
            ],
        }

    @routes.get("/v1/models/<path:name>")
    @takes(Body.NOTHING)
    def model(name: str) -> dict[str, Any]:
        result = answering.models.find(name)
        is_known = name in _names(result) or {name, result.name} <= DEMO_NAMES
        return _model(name if is_known else result.name, result, answering.models.many)

    @routes.get("/docs")
    @takes(Body.NOTHING)
    @without_key
    def reference() -> str:
        """The document, to be read by people."""
        return render_template("api.html", operations=operations())

    @routes.get("/openapi.json")
    @takes(Body.NOTHING)
    @without_key
    def document() -> dict[str, Any]:
        return openapi.document()

    return routes


def _names(model: Listed) -> list[str]:
    """Return its names, and those of its adapters, each of which is a model to a client."""
    return list(dict.fromkeys((*model.names, *(one.name for one in model.adapters))))


def _can(model: Listed) -> list[str]:
    return ["completion", *(["multimodal"] if model.sees or model.hears else [])]


def _model(name: str, model: Listed, many: bool) -> dict[str, Any]:
    """`many`: where it may be in memory or not, as llama.cpp's router says so."""
    known: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": int(model.since),
        "owned_by": "mtmd",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(model.since), timezone.utc).isoformat(),
        "mtmd": {
            "context": model.context,
            "vision": model.sees,
            "video": model.sees,
            "audio": model.hears,
        },
    }
    if name not in model.names and any(one.name == name for one in model.adapters):
        known["parent"] = model.name
    if many:
        failed = {"failed": True, "reason": model.reason} if model.reason else {}
        loading = {"progress": model.progress} if model.state == LOADING else {}
        value = UNLOADED if model.state == FAILED else model.state
        known["status"] = {"value": value} | loading | failed
        known["mtmd"] |= {"file_bytes": model.file_bytes, "memory_bytes": model.needs_bytes}
    return known
