"""OpenAI's routes: completions of chats and of plain prompts, their token counts, the model; and
the document that describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, g, jsonify, request

from mtmd import Answer, Finished, MtmdError, Picture, PromptError, TextPiece, Ticket, TokenInfo
from mtmd.web import sse
from mtmd.web.api import openapi
from mtmd.web.api.replies import Reply
from mtmd.web.api.requests import ChatRequest, CompletionRequest, FilePart, Generation, ImagePart
from mtmd.web.api.stream import CHAT, PLAIN, SHUTTING_DOWN, Form, stream
from mtmd.web.auth import owner, without_key
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, Work, takes
from mtmd.web.intake.media import Media, Reference
from mtmd.web.intake.watcher import Watcher, give_up
from mtmd.web.served_model import ServedModel

if TYPE_CHECKING:
    from mtmd import Service

# of a text that fits the context there are fewer, on average, with any tokenizer
CHARS_PER_TOKEN = 64
_DETAILS = ("low", "auto", "high")


@dataclass(frozen=True)
class Api:
    """What the routes work with."""

    service: Service
    model: ServedModel
    media: Media
    watcher: Watcher

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one loaded: an answer in its name would
        deceive.
        """
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"the model asked for is not here; this server has {self.model.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_length(self, field: str, characters: int) -> None:
        """Raises PromptError for a text that cannot fit: it is not tokenized to find that out."""
        if characters > self.model.context * CHARS_PER_TOKEN:
            raise PromptError(
                f"{field}: found {characters:,} characters, and the context holds "
                f"{self.model.context:,} tokens; shorten it"
            )

    @contextmanager
    def messages(self, body: ChatRequest) -> Iterator[list[dict[str, Any]]]:
        """The conversation as `Service.submit` takes it, its pictures decoded."""
        self.check_length("messages", body.text_length())
        references = [Reference(place, url) for place, url, _ in body.images()]
        with self.media.opened(references, owner()) as pictures:
            yield _messages(body, pictures)


def blueprint(api: Api) -> Blueprint:
    routes = Blueprint("openai", __name__)

    @routes.post("/v1/chat/completions")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def chat() -> Response:
        body = json_body(ChatRequest)
        api.check_model(body.model)
        with ExitStack() as stack:
            messages = stack.enter_context(api.messages(body))
            usual = {"max_tokens": api.model.context, "detail": _detail(body)}
            ticket = api.service.submit(messages, tenant=owner(), **usual | body.options())
            reply = Reply(f"chatcmpl-{g.request_id}", api.model.name, bool(body.logprobs))
            return _answer(api, ticket, reply, body, CHAT, reply.chat, stack)

    @routes.post("/v1/completions")
    @takes(Body.JSON, Work.ANSWER)
    def completions() -> Response:
        body = json_body(CompletionRequest)
        api.check_model(body.model)
        api.check_length("prompt", len(body.prompt))
        with ExitStack() as stack:
            ticket = api.service.submit(
                [{"role": "user", "content": body.prompt}],
                tenant=owner(),
                **{"max_tokens": api.model.context} | body.options(),
            )
            reply = Reply(f"cmpl-{g.request_id}", api.model.name, body.logprobs is not None)
            return _answer(api, ticket, reply, body, PLAIN, reply.plain, stack)

    @routes.post("/v1/chat/completions/input_tokens")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def input_tokens() -> dict[str, Any]:
        body = json_body(ChatRequest)
        api.check_model(body.model)
        with api.messages(body) as messages:
            count = api.service.count(messages, detail=_detail(body), tenant=owner())
        return {
            "object": "response.input_tokens",
            "input_tokens": count.prompt_tokens,
            "mtmd": {"image_tokens": list(count.image_tokens), "context": count.context},
        }

    @routes.get("/v1/models")
    @takes(Body.NOTHING)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(api)]}

    @routes.get("/v1/models/<path:name>")
    @takes(Body.NOTHING)
    def model(name: str) -> dict[str, Any]:
        api.check_model(name)
        return _model(api)

    @routes.get("/openapi.json")
    @takes(Body.NOTHING)
    @without_key
    def document() -> dict[str, Any]:
        return openapi.document()

    return routes


def _answer(
    api: Api,
    ticket: Ticket,
    reply: Reply,
    body: Generation,
    form: Form,
    whole: Callable[[Answer, Sequence[TokenInfo]], dict[str, Any]],
    held: ExitStack,
) -> Response:
    """The answer streamed or whole. However it ends, and even if it is never begun, the ticket is
    given up and `held` let go.
    """
    finish = ExitStack()
    finish.push(held.pop_all())
    finish.callback(give_up, ticket)
    is_gone = request.environ.get("waitress.client_disconnected")
    if is_gone is not None:
        finish.callback(api.watcher.watch(is_gone, ticket))
    if not body.stream:
        with finish:
            return jsonify(whole(*_collect(ticket)))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    as_error = partial(as_api_error, request_id=g.request_id)
    chunks = stream(ticket, reply, form, include_usage, as_error)
    response = sse.response(chunks, cache_control="no-cache")
    response.call_on_close(finish.close)
    return response


def _collect(ticket: Ticket) -> tuple[Answer, list[TokenInfo]]:
    tokens: list[TokenInfo] = []
    for event in ticket:
        if isinstance(event, TextPiece):
            tokens.extend(event.tokens)
        elif isinstance(event, Finished):
            if event.answer.receipt.finish == "cancelled":
                raise SHUTTING_DOWN
            return event.answer, tokens
    raise MtmdError("the service ended an answer without saying how")


def _detail(body: ChatRequest) -> str:
    """One for all pictures: the closest look that any of them asks for."""
    return max((detail for *_, detail in body.images()), key=_DETAILS.index, default="auto")


def _messages(body: ChatRequest, pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    left = iter(pictures)
    made: list[dict[str, Any]] = []
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        content = (
            message.content
            if isinstance(message.content, str)
            else [
                {"type": "image", "image": next(left)}
                if isinstance(part, (ImagePart, FilePart))
                else {"type": "text", "text": part.text}
                for part in message.content
            ]
        )
        made.append({"role": role, "content": content})
    return made


def _model(api: Api) -> dict[str, Any]:
    return {
        "id": api.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "mtmd",
        "mtmd": {"context": api.model.context, "vision": api.model.sees},
    }
