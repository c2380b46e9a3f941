"""Answers on their way to a client: their events awaited, and sent whole or as a stream."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from flask import Response, g, json, request, stream_with_context

from mtmd import Answer, Event, Finished, MtmdError, Progress, TextPiece, Ticket, TokenInfo
from mtmd.base.cancellation import left
from mtmd.web import sse
from mtmd.web.answering.tools import CustomCalls
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.errors import response as error_response
from mtmd.web.models.choice import Claim, Models
from mtmd.web.served_model import ServedModel
from mtmd.web.settings import HAS_LEFT
from mtmd.web.telemetry.record import Record

BEAT_S = 10.0  # of silence in a stream
MANY = 16 << 10  # characters, beyond which nothing more is added to a piece
LOOK_S = 1.0  # between two looks whether the client is still there
SHUTTING_DOWN = ApiError(503, "the server is shutting down", code="shutting_down")


@dataclass
class Collected:
    """One whole answer. `tokens` are those of its text, where `logprobs` were requested."""

    answer: Answer
    tokens: list[TokenInfo] = field(default_factory=list)


class Writer:
    """Writes the answers to one request as a stream, in the form of an interface. `index` is the
    number of an answer among several. What a method yields is sent at once.
    """

    def begin(self) -> Iterator[str]:
        yield from ()

    def write(self, index: int, event: Event) -> Iterator[str]:
        raise NotImplementedError

    def end(self) -> Iterator[str]:
        yield from ()


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Delivery:
    """The answers of `tickets`, sent `whole` or `streamed`. However that ends, and even if it never
    begins, the tickets are cancelled and `resources` is closed.

    `custom`: names of tools that take a text in place of arguments. `later`: further tickets, of
    which one is taken whenever an answer is there. Made where a request is answered.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        resources: ExitStack,
        custom: frozenset[str] = frozenset(),
        later: Iterable[Ticket] = (),
    ) -> None:
        self._tickets, self._resources, self._running = list[Ticket](), resources, 0
        self._later, self._custom = iter(later), custom
        self._readers: list[CustomCalls] = []
        self._events: queue.SimpleQueue[tuple[int, Event | BaseException]] = queue.SimpleQueue()
        self._record: Record | None = g.get("record")
        self._request_id = g.get("request_id", "req")
        self._has_left: Callable[[], bool] = request.environ.get(HAS_LEFT, _never)
        for ticket in tickets:
            self._add(ticket)

    def _add(self, ticket: Ticket) -> None:
        index = len(self._tickets)
        self._tickets.append(ticket)
        self._readers.append(CustomCalls(self._custom))
        self._running += 1
        ticket.redirect(partial(self._put, index))

    def whole(
        self,
        write: Callable[[Sequence[Collected]], Any],
        form: Callable[[ApiError], Mapping[str, Any]] = ApiError.body,
    ) -> Response:
        """Return what `write` makes of all answers, as JSON where that is no response yet; `form`
        makes the body for an error.
        """
        try:
            answers: dict[int, Collected] = {}
            tokens = defaultdict[int, list[TokenInfo]](list)
            for come in self._incoming():
                if come is None:
                    continue
                index, event = come
                if isinstance(event, TextPiece):
                    tokens[index].extend(event.tokens)
                elif isinstance(event, Finished):
                    answers[index] = Collected(event.answer, tokens[index])
            body = write([answers[index] for index in sorted(answers)])
        except Exception as error:
            return error_response(self._as_error(error), form)
        finally:
            self._close()
        if isinstance(body, Response):
            return body
        return Response(json.dumps(body), mimetype="application/json")

    def streamed(
        self,
        writer: Writer,
        failure: Callable[[ApiError], str],
        mimetype: str = sse.MIMETYPE,
        beat: Callable[[], str] | None = None,
    ) -> Response:
        """Return what `writer` makes of the events. `failure` writes an error, whose status cannot
        be sent any more. After BEAT_S of silence comes what `beat` makes, a comment of server-sent
        events where that is None: proxies and clients give up what is silent.
        """
        pieces = self._pieces(writer, failure, beat or _still_there)
        headers = {"Cache-Control": "no-cache", **sse.UNBUFFERED}
        response = Response(pieces, mimetype=mimetype, headers=headers)
        response.call_on_close(self._close)
        return response

    def _pieces(
        self, writer: Writer, failure: Callable[[ApiError], str], beat: Callable[[], str]
    ) -> Iterator[str]:
        """Pieces that are there at the same time are one, and those of the end: each that is sent
        wakes the client.
        """
        sent, pieces = time.monotonic(), list[str]()
        try:
            yield "".join(writer.begin())
            for come in self._incoming():
                pieces += () if come is None else writer.write(*come)
                if not pieces and time.monotonic() - sent >= BEAT_S:
                    pieces = [beat()]
                is_short = sum(map(len, pieces)) < MANY
                more_is_here = not self._running or (is_short and not self._events.empty())
                if pieces and not more_is_here:
                    sent, piece = time.monotonic(), "".join(pieces)
                    pieces.clear()
                    yield piece
            pieces += writer.end()
        except Exception as error:
            pieces.append(failure(self._as_error(error)))
        yield "".join(pieces)

    def _incoming(self) -> Iterator[tuple[int, Event] | None]:
        """Yield the events of all answers, each with the index of its answer; None after LOOK_S
        without one that was yielded. Raises the error of the first that fails, LeftError where the
        client has left, and ApiError where the server itself cancelled an answer. Leaving the loop
        cancels all.
        """
        looked = time.monotonic()
        try:
            while self._running:
                if time.monotonic() - looked >= LOOK_S:
                    if self._has_left():
                        raise left()
                    looked = time.monotonic()
                    yield None
                try:
                    index, event = self._events.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                if isinstance(event, BaseException):
                    raise event
                if self._record is not None and not isinstance(event, Progress):
                    self._record.has_token()
                if isinstance(event, Finished):
                    self._running -= 1
                    if self._record is not None:
                        self._record.receipts.append(event.answer.receipt)
                    if event.answer.receipt.finish == "cancelled":
                        raise SHUTTING_DOWN  # somebody still listens
                    if (ticket := next(self._later, None)) is not None:
                        self._add(ticket)
                for one in self._readers[index].read(event):
                    yield index, one
        finally:
            self._cancel()

    def _as_error(self, error: BaseException) -> ApiError:
        """Return what the client is sent, and the record notes."""
        known = as_api_error(error, self._request_id)
        if self._record is not None:
            self._record.status = known.status
        return known

    def _close(self) -> None:
        self._cancel()
        self._resources.close()

    def _cancel(self) -> None:
        if self._running:
            self._running = 0
            for ticket in self._tickets:
                cancel(ticket)

    def _put(self, index: int, event: Event | BaseException) -> None:
        self._events.put((index, event))


def cancel(ticket: Cancellable) -> None:
    """End an answer that nobody reads any more."""
    with suppress(MtmdError):  # the service is closed, which has ended it
        ticket.cancel()


def _never() -> bool:
    return False


def _still_there() -> str:
    return sse.comment("still there")


def until_loaded(
    models: Models,
    name: str | None,
    begin: Callable[[ServedModel], Response],
    failed: Callable[[ApiError], str],
    beat: Callable[[], str] | None = None,
    mimetype: str = sse.MIMETYPE,
) -> Response:
    """Return what `begin` makes of the model called `name`. Where that is not in memory within
    BEAT_S, a stream, in which `beat` is sent every BEAT_S, comments with how far it is where that
    is None; then what `begin` made. What goes wrong before is an error with its status, and after
    it what `failed` writes. Raises ApiError, BusyError, DeviceError, LeftError.
    """
    claim = models.claim(name)
    try:
        if claim.wait(BEAT_S):
            return begin(claim.chosen())
    except BaseException:
        claim.give_back()
        raise

    def pieces() -> Iterator[bytes]:
        try:
            while not claim.wait(BEAT_S):
                yield (_how_far(claim) if beat is None else beat()).encode()
            made = begin(claim.chosen())
        except Exception as error:
            known = as_api_error(error, g.get("request_id", "req"))
            if (record := g.get("record")) is not None:
                record.status = known.status
            yield failed(known).encode()
            return
        with closing(made):
            yield from made.iter_encoded()

    response = Response(stream_with_context(pieces()), mimetype=mimetype)
    response.headers.update({"Cache-Control": "no-cache", **sse.UNBUFFERED})
    response.call_on_close(claim.give_back)  # if not even the first piece is asked for
    return response


def _how_far(claim: Claim) -> str:
    far = claim.how_far
    return sse.comment("loading" if far is None else f"loading, {far:.0%}")
