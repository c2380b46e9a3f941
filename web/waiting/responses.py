"""Responses that are made of answers while these are written: without a thread that waits, where
the connection knows how to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from flask import Response, json

from mtmd.web import sse
from mtmd.web.errors import ApiError
from mtmd.web.waiting.incoming import Incoming
from mtmd.web.waiting.waits import BEAT_S


def _still_there() -> str:
    return sse.comment("still there")


def streamed(
    incoming: Incoming,
    pieces: Iterator[str],
    mimetype: str = sse.MIMETYPE,
    beat: Callable[[], str] = _still_there,
) -> Response:
    """`pieces`: made of the events of `incoming`, empty where there is nothing to send now. There
    is one every BEAT_S, what `beat` makes if nothing else, a comment where server-sent events are
    sent: proxies and clients give up what is silent.
    """
    pieces = _with_beats(pieces, beat)
    headers = {"Cache-Control": "no-cache", **sse.UNBUFFERED}
    response = Response(pieces, mimetype=mimetype, headers=headers)
    response.call_on_close(incoming.close)
    return response


def whole(
    incoming: Incoming, steps: Generator[None, None, Any], failed: Callable[[ApiError], Response]
) -> Response:
    """`steps`: None where there is nothing now, and returns what is sent, as JSON. `failed`: what
    is sent in its place.
    """
    made = _made(incoming, steps, failed)
    waits = incoming.waits
    if waits is None:
        try:
            while True:
                next(made)
        except StopIteration as end:
            response: Response = end.value
            return response
        finally:
            incoming.close()

    def pieces() -> Iterator[bytes]:
        while True:
            try:
                next(made)
            except StopIteration as end:
                waits.response = end.value
                yield end.value.get_data()
                return
            yield b""

    response = Response(pieces(), mimetype="application/json")
    response.call_on_close(incoming.close)
    return response


def _made(
    incoming: Incoming, steps: Generator[None, None, Any], failed: Callable[[ApiError], Response]
) -> Generator[None, None, Response]:
    try:
        body = yield from steps
    except Exception as error:
        return failed(incoming.as_error(error))
    return Response(json.dumps(body), mimetype="application/json")


def _with_beats(pieces: Iterator[str], beat: Callable[[], str]) -> Iterator[str]:
    sent = time.monotonic()
    for piece in pieces:
        now = time.monotonic()
        if piece or now - sent >= BEAT_S:
            sent = now
            yield piece or beat()
        else:
            yield ""
