"""OpenAI's routes: completions of chats and of plain prompts, their token counts, the model; and
the document that describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from flask import Blueprint, Response, g, render_template

from mtmd import Answer, ContextError, PromptTokenInfo, RawPrompt, Receipt, Ticket, TokenInfo
from mtmd.checkpoint.hub import DEMO_NAMES
from mtmd.prompt_logprobs import check_prompt_logprobs
from mtmd.web import sse
from mtmd.web.answering.delivery import Collected, Delivery, cancel, until_loaded
from mtmd.web.interfaces import openapi
from mtmd.web.interfaces.reference import operations
from mtmd.web.interfaces.openai_replies import Reply, together
from mtmd.web.interfaces.openai_requests import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    MessageCall,
    TextPart,
)
from mtmd.web.interfaces.openai_stream import CHAT, PLAIN, ChunkWriter, Form, failure
from mtmd.web.auth import owner, without_key
from mtmd.web.errors import ApiError
from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, Work, takes
from mtmd.web.intake.media import Media, Shown
from mtmd.web.models.choice import FAILED, LOADING, UNLOADED, Listed, Models
from mtmd.web.served_model import ServedModel

if TYPE_CHECKING:
    from mtmd import Service

# of a text that fits the context there are fewer, on average, with any tokenizer
CHARS_PER_TOKEN = 64
_DETAILS = ("low", "auto", "high")


class Asking(Protocol):
    """A request for an answer, in any interface's form."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...


@dataclass(frozen=True)
class Api:
    """What the routes work with, before they know which model is asked for."""

    models: Models
    media: Media
    unknown_fields: str = "ignore"  # or "refuse"

    def of(self, name: str | None) -> ModelApi:
        """For the request that is being answered. Raises ApiError for a model that is not here: an
        answer in its name would deceive.
        """
        return ModelApi(self.models.choose(name), self.media)

    def answered(
        self,
        body: Asking,
        begin: Callable[[ModelApi], Response],
        failed: Callable[[ApiError], str],
        beat: Callable[[], str] | None = None,
        mimetype: str = sse.MIMETYPE,
    ) -> Response:
        """What `begin` makes of the model that `body` names; of a stream as `until_loaded`."""
        if not body.stream:
            return begin(self.of(body.model))
        return until_loaded(
            self.models,
            body.model,
            lambda model: begin(ModelApi(model, self.media)),
            failed,
            beat,
            mimetype,
        )

    def warnings(self, body: Generation) -> tuple[str, ...]:
        """Raises ApiError for fields that nobody knows, where those are to be refused."""
        if body.unknown and self.unknown_fields == "refuse":
            raise unknown_field(body.unknown[0])
        return body.warnings()


@dataclass(frozen=True)
class ModelApi:
    """What a request works with, once its model is in memory."""

    model: ServedModel
    media: Media

    @property
    def service(self) -> Service:
        return self.model.service

    def submit(
        self, messages: Sequence[dict[str, Any]] | RawPrompt, number: int, options: dict[str, Any]
    ) -> list[Ticket]:
        if number == 1:
            return [self.service.submit(messages, tenant=owner(), **options)]
        return self.service.submit_several(messages, number, tenant=owner(), **options)

    def echo(self, prompt: str | list[int]) -> str:
        """A prompt as text."""
        return prompt if isinstance(prompt, str) else self.service.text_of(prompt)

    def check_length(self, field: str, characters: int) -> None:
        """Raises ContextError for a text that cannot fit: it is not tokenized to find that out."""
        if characters > self.model.context * CHARS_PER_TOKEN:
            raise ContextError(
                f"{field}: found {characters:,} characters, and the context holds "
                f"{self.model.context:,} tokens; shorten it",
                None,
                self.model.context,
            )

    def check_scores(self, body: CompletionRequest, number: int) -> None:
        """Raise OptionError where the prompts together have too many log probabilities. Those of
        one prompt are counted when it is submitted.
        """
        alternatives = body.options().get("prompt_logprobs")
        if alternatives is None or len(body.prompt) == 1:
            return
        tokens = sum(
            len(self.service.tokens_of(one, around=True) if isinstance(one, str) else one)
            for one in body.prompt
        )
        field = "logprobs" if body.scores_prompt else "prompt_logprobs"
        check_prompt_logprobs(field, tokens, alternatives, number)

    @contextmanager
    def messages(self, body: ChatRequest) -> Iterator[list[dict[str, Any]]]:
        """The conversation as `Service.submit` takes it, its pictures decoded."""
        self.check_length("messages", body.text_length())
        with self.media.shown([*body.media()], owner()) as shown:
            yield self.model.with_system(_messages(body, shown))


def unknown_field(name: str) -> ApiError:
    return ApiError(
        400, f"{name:.60}: not known here; leave it out", param=name[:60], code="unknown_parameter"
    )


def blueprint(api: Api) -> Blueprint:
    routes = Blueprint("openai", __name__)

    @routes.post("/v1/chat/completions")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def chat() -> Response:
        body = json_body(ChatRequest)
        warnings, options = api.warnings(body), body.options()

        def begin(asked: ModelApi) -> Response:
            with ExitStack() as stack:
                messages = stack.enter_context(asked.messages(body))
                name = asked.model.called(body.model)
                tickets = asked.submit(
                    messages, body.n or 1, asked.model.options(options, _detail(body))
                )
                reply = Reply(f"chatcmpl-{g.request_id}", name, bool(body.logprobs), warnings)
                reply = replace(
                    reply,
                    calls_old_way=body.calls_old_way,
                    thoughts=body.shows_thoughts,
                    prompt_logprobs=body.prompt_logprobs,
                )
                answering = Answering(
                    tickets, reply, CHAT, Reply.chat, custom=body.given_tools.custom
                )
                return _answer(answering, body, stack)

        return api.answered(body, begin, failure)

    @routes.post("/v1/completions")
    @takes(Body.JSON, Work.ANSWER)
    def completions() -> Response:
        body = json_body(CompletionRequest)
        warnings, number, chosen = api.warnings(body), body.n or 1, body.options()
        if number * len(body.prompt) > MOST_CHOICES:
            raise ApiError(400, f"n: expected at most {MOST_CHOICES} answers in all", param="n")

        def begin(asked: ModelApi) -> Response:
            asked.check_length("prompt", sum(map(len, body.prompt)))
            asked.check_scores(body, number)
            with ExitStack() as stack:
                options = asked.model.options(chosen)
                tickets: list[Ticket] = []
                with ExitStack() as begun:
                    for text in body.prompt:
                        prompt = RawPrompt(text if isinstance(text, str) else tuple(text))
                        tickets += asked.submit(prompt, number, options)
                        for ticket in tickets[-number:]:
                            begun.callback(cancel, ticket)
                    begun.pop_all()
                reply = Reply(
                    f"cmpl-{g.request_id}",
                    asked.model.called(body.model),
                    body.logprobs is not None,
                    warnings,
                )
                reply = replace(reply, prompt_logprobs=body.prompt_logprobs)
                texts = [asked.echo(text) for text in body.prompt for _ in range(number)]
                answering = Answering(
                    *(tickets, reply, PLAIN, Reply.plain, number, texts if body.echo else []),
                    scored=body.logprobs if body.scores_prompt else None,
                )
                return _answer(answering, body, stack)

        return api.answered(body, begin, failure)

    @routes.post("/v1/chat/completions/input_tokens")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def input_tokens() -> dict[str, Any]:
        body = json_body(ChatRequest)
        asked = api.of(body.model)
        with asked.messages(body) as messages:
            count = asked.service.count(
                messages, detail=_detail(body), tenant=owner(), **body.prompt_options()
            )
        return {
            "object": "response.input_tokens",
            "input_tokens": count.prompt_tokens,
            "mtmd": {
                "image_tokens": list(count.image_tokens),
                "video_tokens": list(count.video_tokens),
                "context": count.context,
            },
        }

    @routes.get("/v1/models")
    @takes(Body.NOTHING)
    def models() -> dict[str, Any]:
        called = [(name, model) for model in api.models.listed() for name in model.names]
        return {
            "object": "list",
            "data": [_model(name, model, api.models.many) for name, model in called],
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
        found = api.models.find(name)
        is_known = name in found.names or {name, found.name} <= DEMO_NAMES
        return _model(name if is_known else found.name, found, api.models.many)

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


@dataclass(frozen=True)
class Answering:
    """The answers under way to one request, `each` for every prompt; `echo` is what they begin
    with; `custom` are the names of tools that take a text; `scored` is how many alternatives each
    token of the prompt has among the log probabilities of the answer, None where it is not there.
    """

    tickets: Sequence[Ticket]
    reply: Reply
    form: Form
    whole: Callable[[Reply, Answer, Sequence[Any]], dict[str, Any]]
    each: int = 0
    echo: Sequence[str] = ()
    custom: frozenset[str] = frozenset()
    scored: int | None = None

    @property
    def replies(self) -> list[Reply]:
        return [replace(self.reply, index=index) for index in range(len(self.tickets))]

    def usage(self, receipts: Mapping[int, Receipt]) -> dict[str, Any]:
        """Of all answers: each prompt counts once."""
        ordered = [receipts[index] for index in sorted(receipts)]
        each = self.each or len(ordered)
        firsts = ordered[::each]
        usage = self.reply.usage(*ordered)
        usage["prompt_tokens"] = sum(receipt.prompt_tokens for receipt in firsts)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return usage


def _answer(answering: Answering, body: Generation, held: ExitStack) -> Response:
    delivery = Delivery(answering.tickets, held.pop_all(), answering.custom)
    if not body.stream:
        return delivery.whole(partial(_together, answering))
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    writer = ChunkWriter(
        answering.replies,
        answering.form,
        answering.usage if include_usage else None,
        answering.echo,
        bool(body.return_progress),
    )
    return delivery.streamed(writer, failure)


def _together(answering: Answering, answers: Sequence[Collected]) -> dict[str, Any]:
    parts = []
    for index, (reply, collected) in enumerate(zip(answering.replies, answers, strict=True)):
        answer = collected.answer
        found: list[TokenInfo | PromptTokenInfo] = [*collected.tokens]
        if answering.echo:
            answer = replace(answer, text=answering.echo[index] + answer.text)
        if answering.scored is not None:
            # so that an answer of one token has one whatever it is: clients leave it out
            end = [answer.end] if answer.end else []
            most = answering.scored
            scored = [replace(one, top=one.top[:most]) for one in answer.prompt_logprobs]
            found = [*scored, *found, *end]
        parts.append(answering.whole(reply, answer, found))
    receipts = {index: one.answer.receipt for index, one in enumerate(answers)}
    return together(parts, answering.usage(receipts))


def _detail(body: ChatRequest) -> str:
    """One for all pictures: the closest look that any of them asks for."""
    return max(body.details(), key=_DETAILS.index, default="auto")


def _messages(body: ChatRequest, shown: Sequence[Shown]) -> list[dict[str, Any]]:
    left = iter(shown)
    made: list[dict[str, Any]] = []
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        content = (
            message.content
            if message.content is None or isinstance(message.content, str)
            else [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else next(left).part
                for part in message.content
            ]
        )
        made.append({"role": role, "content": content, **_other_fields(message)})
    return made


def _other_fields(message: Message) -> dict[str, Any]:
    """What thoughts, calls and results have beside a text; nothing where there is none of it."""
    calls: Sequence[MessageCall] = message.tool_calls or ()
    if message.function_call is not None and not calls:
        calls = (MessageCall(function=message.function_call),)
    given: dict[str, Any] = {"reasoning_content": message.thought} if message.thought else {}
    if calls:
        given["tool_calls"] = [
            {"id": c.id, "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in calls
        ]
    if message.role in ("tool", "function"):
        given |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return given


def _can(model: Listed) -> list[str]:
    return ["completion", *(["multimodal"] if model.sees else [])]


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
        "mtmd": {"context": model.context, "vision": model.sees, "video": model.sees},
    }
    if many:
        failed = {"failed": True, "reason": model.reason} if model.reason else {}
        loading = {"progress": model.progress} if model.state == LOADING else {}
        value = UNLOADED if model.state == FAILED else model.state
        known["status"] = {"value": value} | loading | failed
        known["mtmd"] |= {"file_bytes": model.file_bytes, "memory_bytes": model.needs_bytes}
    return known
