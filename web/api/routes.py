"""OpenAI's routes: completions of chats and of plain prompts, their token counts, the model,
uploaded files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Blueprint, Response, g, jsonify, request

from mtmd import BusyError, MtmdError, Picture, PromptError
from mtmd.events import Answer, Finished, TextPiece, TokenInfo
from mtmd.web.api import sse
from mtmd.web.api.replies import Reply
from mtmd.web.api.requests import ChatRequest, CompletionRequest, FilePart, Generation, ImagePart
from mtmd.web.auth import owner
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.intake.media import Media, Reference
from mtmd.web.intake.watcher import Watcher
from mtmd.web.settings import ServerSettings

if TYPE_CHECKING:
    from mtmd.service.service import Service, Ticket

# of a text that fits the context there are fewer, on average, with any tokenizer
CHARS_PER_TOKEN = 64
_DETAILS = ("low", "auto", "high")
Body = TypeVar("Body", bound=Generation)


@dataclass(frozen=True)
class Api:
    """What the routes work with."""

    service: Service
    settings: ServerSettings
    media: Media
    watcher: Watcher
    places: threading.BoundedSemaphore  # as many as requests can be answered or wait at once

    @property
    def context(self) -> int:
        return self.service.model.runner.context

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one loaded: an answer in its name would
        deceive.
        """
        if name is not None and name != self.service.model.name:
            raise ApiError(
                404,
                f"the model asked for is not here; this server has {self.service.model.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_length(self, field: str, characters: int) -> None:
        """Raises PromptError for a text that cannot fit: it is not tokenized to find that out."""
        if characters > self.context * CHARS_PER_TOKEN:
            raise PromptError(
                f"{field}: found {characters:,} characters, and the context holds {self.context:,} "
                "tokens; shorten it"
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """Raises BusyError before a picture is fetched or decoded for a request that would then be
        turned away.
        """
        if not self.places.acquire(blocking=False):
            raise BusyError("too many requests are being answered or wait; try again later")
        try:
            yield
        finally:
            self.places.release()

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
    def chat() -> Response:
        body = _body(ChatRequest)
        api.check_model(body.model)
        with ExitStack() as stack:
            stack.enter_context(api.place())
            messages = stack.enter_context(api.messages(body))
            ticket = api.service.submit(
                messages, **{"max_tokens": api.context, "detail": _detail(body)} | body.options()
            )
            reply = Reply(f"chatcmpl-{g.request_id}", api.service.model.name, bool(body.logprobs))
            return _answer(api, ticket, reply, body, sse.CHAT, reply.chat, stack)

    @routes.post("/v1/completions")
    def completions() -> Response:
        body = _body(CompletionRequest)
        api.check_model(body.model)
        api.check_length("prompt", len(body.prompt))
        with ExitStack() as stack:
            stack.enter_context(api.place())
            ticket = api.service.submit(
                [{"role": "user", "content": body.prompt}],
                **{"max_tokens": api.context} | body.options(),
            )
            reply = Reply(f"cmpl-{g.request_id}", api.service.model.name, body.logprobs is not None)
            return _answer(api, ticket, reply, body, sse.PLAIN, reply.plain, stack)

    @routes.post("/v1/chat/completions/input_tokens")
    def input_tokens() -> dict[str, Any]:
        body = _body(ChatRequest)
        api.check_model(body.model)
        with api.messages(body) as messages:
            count = api.service.count(messages, detail=_detail(body))
        return {
            "object": "response.input_tokens",
            "input_tokens": count.prompt_tokens,
            "mtmd": {"image_tokens": list(count.image_tokens), "context": count.context},
        }

    @routes.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(api)]}

    @routes.get("/v1/models/<path:name>")
    def model(name: str) -> dict[str, Any]:
        api.check_model(name)
        return _model(api)

    return routes


def _answer(
    api: Api,
    ticket: Ticket,
    reply: Reply,
    body: Generation,
    form: sse.Form,
    whole: Callable[[Answer, Sequence[TokenInfo]], dict[str, Any]],
    held: ExitStack,
) -> Response:
    """The answer streamed or whole. However it ends, and even if it is never begun, the ticket is
    given up and `held` let go.
    """
    finish = ExitStack()
    finish.push(held.pop_all())
    finish.callback(_give_up, ticket)
    gone = request.environ.get("waitress.client_disconnected")
    if gone is not None:
        finish.callback(api.watcher.watch(gone, ticket.cancel))
    if not body.stream:
        with finish:
            return jsonify(whole(*_collect(ticket)))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    tell = partial(as_api_error, request_id=g.request_id)
    response = Response(
        sse.stream(ticket, reply, form, include_usage, tell),
        mimetype="text/event-stream",
        headers=sse.HEADERS,
    )
    response.call_on_close(finish.close)
    return response


def _collect(ticket: Ticket) -> tuple[Answer, list[TokenInfo]]:
    tokens: list[TokenInfo] = []
    for event in ticket:
        if isinstance(event, TextPiece):
            tokens.extend(event.tokens)
        elif isinstance(event, Finished):
            if event.answer.receipt.finish == "cancelled":
                raise sse.ENDED
            return event.answer, tokens
    raise MtmdError("the service ended an answer without saying how")


def _give_up(ticket: Ticket) -> None:
    with suppress(MtmdError):  # the service has been closed
        ticket.cancel()


def _body(kind: type[Body]) -> Body:
    """Raises ValidationError and, for another content type, ApiError: a form on any web page can
    send text/plain.
    """
    if request.mimetype != "application/json":
        raise ApiError(415, "expected the header 'Content-Type: application/json'")
    return kind.model_validate_json(request.get_data(cache=False))


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
        "id": api.service.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "mtmd",
        "mtmd": {"context": api.context, "vision": api.service.model.encoder is not None},
    }
