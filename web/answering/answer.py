"""Describes what every interface does with a request once it is read: pictures opened, the service
asked, the answers sent whole or as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from flask import Response, after_this_request, g

from mtmd import ContextError, RawPrompt, Ticket, TokenCount
from mtmd.web import sse
from mtmd.web.access import owner
from mtmd.web.answering.request import AnswerRequest, RawText
from mtmd.web.answering.response_streams import Collected, Delivery, Writer, cancel, until_loaded
from mtmd.web.errors import ApiError, as_api_error, response
from mtmd.web.intake.media import Media, Reference
from mtmd.web.intake.typed_body import Request, json_body
from mtmd.web.models.choice import Models
from mtmd.web.served_model import ServedModel

# of a text that fits the context there are fewer, on average, with any tokenizer
CHARS_PER_TOKEN = 64
IGNORED = "X-Mtmd-Ignored"
IGNORED_CHARS = 1000  # proxies refuse answers with more than some thousand bytes of headers


class Form:
    """Describes how an interface writes the answers to one request. `mimetype` is that of a stream;
    `beat` makes what is sent in one while there is nothing to send, None for a comment.
    """

    mimetype: ClassVar[str] = sse.MIMETYPE
    beat: Callable[[], str] | None = None

    def check(self, model: ServedModel) -> None:
        """Raises MtmdError for a request that this model cannot answer in this form."""

    def whole(self, model: ServedModel, answers: Sequence[Collected]) -> Any:
        """Return the body of a reply that is not streamed."""
        raise NotImplementedError

    def writer(self, model: ServedModel) -> Writer:
        """Return what writes a stream."""
        raise NotImplementedError

    def error(self, error: ApiError) -> Mapping[str, Any]:
        """Return the body of a reply to a request that is refused or fails."""
        return error.body()

    def failure(self, error: ApiError) -> str:
        """Return what ends a stream that has begun and fails."""
        return sse.event(dict(self.error(error)))


Body = TypeVar("Body", bound=Request)


@dataclass(frozen=True)
class Answering:
    """Describes what the routes of every interface work with."""

    models: Models
    media: Media
    unknown_fields: str = "ignore"  # or "refuse"

    def read(self, kind: type[Body], typed: bool = True) -> Body:
        """Return the body of the request that is answered. Fields that nobody knows are named in a
        header of the answer, or refused. Raises as `json_body`.
        """
        body = json_body(kind, typed)
        self.check_unknown(body)
        return body

    def answer(self, request: AnswerRequest, form: Form) -> Response:
        """Raises ApiError and MtmdError for what is wrong with the request."""

        def begin(model: ServedModel) -> Response:
            form.check(model)
            writer = form.writer(model) if request.stream else None
            with ExitStack() as resources:
                tickets = self.submit(model, request, resources)
                delivery = Delivery(tickets, resources.pop_all(), request.custom_tools)
            if writer is not None:
                return delivery.streamed(writer, form.failure, form.mimetype, form.beat)
            return delivery.whole(lambda answers: form.whole(model, answers), form.error)

        return self.when_loaded(request.model, request.stream, begin, form)

    def when_loaded(
        self, name: str | None, stream: bool, begin: Callable[[ServedModel], Response], form: Form
    ) -> Response:
        """Return what `begin` makes of the model called `name`. A stream begins while that is
        loaded.
        """
        if not stream:
            return begin(self.models.choose(name))
        return until_loaded(self.models, name, begin, form.failure, form.beat, form.mimetype)

    def count(self, request: AnswerRequest) -> TokenCount:
        model = self.models.choose(request.model)
        with self._messages(model, request) as messages:
            return model.service.count(
                messages, detail=request.detail, tenant=owner(), **request.prompt_options
            )

    def rendered(self, request: AnswerRequest) -> str:
        """Return the prompt that a conversation becomes, as text."""
        model = self.models.choose(request.model)
        with self._messages(model, request) as messages:
            return model.service.rendered(messages, **request.prompt_options)

    def submit(
        self, model: ServedModel, request: AnswerRequest, resources: ExitStack
    ) -> list[Ticket]:
        """Return the tickets of the answers. `resources` closes what has to live as long as
        they. Raises MtmdError.
        """
        number, tenant = request.number, owner()
        given = {**request.prompt_options, **request.options}
        options = model.options(given, request.detail, request.model)
        prompts: list[Any] = [raw_prompt(model, prompt) for prompt in request.prompts]
        if not prompts:
            prompts.append(resources.enter_context(self._messages(model, request)))
        tickets: list[Ticket] = []
        with ExitStack() as begun:
            for prompt in prompts:
                tickets += (
                    [model.service.submit(prompt, tenant=tenant, **options)]
                    if number == 1
                    else model.service.submit_several(prompt, number, tenant=tenant, **options)
                )
                for ticket in tickets[-number:]:
                    begun.callback(cancel, ticket)
            begun.pop_all()
        return tickets

    @contextmanager
    def _messages(
        self, model: ServedModel, request: AnswerRequest
    ) -> Iterator[list[dict[str, Any]]]:
        """The conversation as `Service.submit` takes it, its pictures decoded."""
        check_length(model, "messages", sum(turn.characters for turn in request.turns))
        references = [p for t in request.turns for p in t.pieces if isinstance(p, Reference)]
        with self.media.shown(references, owner()) as shown:
            pictures = iter(shown)
            messages = [turn.message(pictures) for turn in request.turns]
            yield model.with_system(messages) if request.usual_system else messages

    def check_unknown(self, body: Request) -> list[str]:
        """Return the names of fields that nobody knows, which a header of the answer has, too.
        Raises ApiError (400) for the first one, where those are to be refused.
        """
        unknown = body.unknown
        if unknown and self.unknown_fields == "refuse":
            name = unknown[0]
            raise ApiError(
                400, f"{name:.60}: unknown; leave it out", param=name[:60], code="unknown_parameter"
            )
        if unknown:
            names = ", ".join(ascii(name[:60])[1:-1] for name in unknown[:20])

            @after_this_request
            def name_them(response: Response) -> Response:
                response.headers[IGNORED] = names[:IGNORED_CHARS]
                return response

        return unknown


def check_length(model: ServedModel, field: str, characters: int) -> None:
    """Raises ContextError for a text that cannot fit: it is not tokenized to find that out."""
    if characters > model.context * CHARS_PER_TOKEN:
        raise ContextError(
            f"{field}: found {characters:,} characters, and the context holds "
            f"{model.context:,} tokens; shorten it",
            None,
            model.context,
        )


def raw_prompt(model: ServedModel, prompt: RawText) -> RawPrompt:
    """A text begins as the tokenizer begins one; of a mixed list each text is put in as it is."""
    if isinstance(prompt, str):
        check_length(model, "prompt", len(prompt))
        return RawPrompt(prompt)
    ids: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            ids.append(item)
        else:
            check_length(model, "prompt", len(item))
            ids += model.service.tokens_of(item, special=True, around=not ids)
    return RawPrompt(tuple(ids))


def error_response(error: Exception, form: Callable[[ApiError], Mapping[str, Any]]) -> Response:
    """Return the answer to an error in an interface's own form."""
    return response(as_api_error(error, g.get("request_id", "req")), form)
