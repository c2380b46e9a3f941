"""Routes of llama.cpp's server (tools/server/README.md of github.com/ggml-org/llama.cpp) that have
no counterpart in OpenAI's interface: a prompt's text and its tokens, slots, whether it is ready.
"""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, jsonify, request
from pydantic import Field

from mtmd import __version__
from mtmd.web.adapters.door import Door
from mtmd.web.adapters.fields import Loose
from mtmd.web.api.requests import ChatRequest
from mtmd.web.auth import without_key
from mtmd.web.errors import ApiError
from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, Work, takes


class Tokenize(Loose):
    """`add_special`: with what the tokenizer puts around a prompt; `parse_special`: spellings of
    special tokens become those tokens.
    """

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(Loose):
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(
        max_length=1 << 17, fail_fast=True
    )


def blueprint(door: Door) -> Blueprint:
    routes = Blueprint("llama_cpp", __name__)

    @routes.post("/tokenize")
    @takes(Body.JSON, Work.ANSWER)
    def tokenize() -> dict[str, Any]:
        body = json_body(Tokenize)
        door.check_length("content", len(body.content))
        tokens = door.service.tokens_of(
            body.content, special=body.parse_special, around=body.add_special
        )
        if not body.with_pieces:
            return {"tokens": tokens}
        spell = door.service.spelling_of
        return {"tokens": [{"id": token, "piece": spell([token])} for token in tokens]}

    @routes.post("/detokenize")
    @takes(Body.JSON, Work.ANSWER)
    def detokenize() -> dict[str, str]:
        return {"content": door.service.spelling_of(json_body(Detokenize).tokens)}

    @routes.post("/apply-template")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def apply_template() -> dict[str, str]:
        """Pictures stand in the text as the template writes them."""
        body = json_body(ChatRequest)
        door.check_model(body.model)
        with door.api.messages(body) as messages:
            return {"prompt": door.service.rendered(messages)}

    @routes.get("/slots")
    @takes(Body.NOTHING)
    def slots() -> Any:
        """Answers belong to no slot by number: as many as are computed are shown as busy."""
        stats = door.service.stats()
        if "fail_on_no_slot" in request.args and stats.running >= stats.slots:
            raise ApiError(503, "no slot is free", code="server_busy", headers={"Retry-After": "1"})
        return jsonify(
            [
                {
                    "id": number,
                    "n_ctx": door.model.context,
                    "speculative": False,
                    "is_processing": number < stats.running,
                }
                for number in range(stats.slots)
            ]
        )

    @routes.get("/version")
    @takes(Body.NOTHING)
    @without_key
    def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/ready")
    @takes(Body.NOTHING, Work.AT_ONCE)
    @without_key
    def ready() -> tuple[dict[str, str], int]:
        """Answered from when the model is in memory, without the device, which may hang."""
        fault = door.service.fault
        if fault is not None:
            return {"status": "failed", "reason": str(fault)}, 503
        return {"status": "ready"}, 200

    return routes
