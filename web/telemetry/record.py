"""Describes what is noted of each request: by the log, if there is one of requests, and by the
metrics. Its route, and not its path, which a client chooses; nothing of its body.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flask import Flask, Response, g, request

from mtmd import Receipt
from mtmd.web.settings import HAS_LEFT

GONE = 499  # as nginx has it: the client left before its answer was there
log = logging.getLogger("mtmd.access")


class Record:
    """Record of one request. `status` is what its client was told in the end, also within a
    stream.
    """

    def __init__(self, request_id: str, client: str, method: str, route: str) -> None:
        self.request_id, self.client = request_id, client
        self.method, self.route = method, route
        self.key: str | None = None
        self.status = 0
        self.began = time.monotonic()
        self.first_token_ms: float | None = None
        self.receipts: list[Receipt] = []

    @property
    def ms(self) -> float:
        return (time.monotonic() - self.began) * 1e3

    def has_token(self) -> None:
        if self.first_token_ms is None:
            self.first_token_ms = self.ms

    def fields(self) -> dict[str, Any]:
        noted: dict[str, Any] = {
            "request_id": self.request_id,
            "client": self.client,
            "key": self.key,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "duration_ms": round(self.ms, 1),
        }
        if self.first_token_ms is not None:
            noted["first_token_ms"] = round(self.first_token_ms, 1)
        if self.receipts:
            noted |= {
                "queued_ms": round(self.receipts[0].queued_ms, 1),
                "prompt_tokens": self.receipts[0].prompt_tokens,
                "output_tokens": sum(r.output_tokens for r in self.receipts),
                "finish": self.receipts[0].finish,
            }
        return noted

    def __str__(self) -> str:
        line = (
            f"{self.request_id} {self.key or '-'} {self.method} {self.route} {self.status} "
            f"{self.ms:.0f} ms"
        )
        if self.receipts:
            output = sum(r.output_tokens for r in self.receipts)
            line += f", {self.receipts[0].prompt_tokens} + {output} tokens"
        if self.first_token_ms is not None:
            line += f", the first after {self.first_token_ms:.0f} ms"
        return f"{line} [{self.client}]"


class _Watched:
    """The pieces of a response; `whole` once all of them were taken."""

    whole = False

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._pieces, self._next = pieces, iter(pieces)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._next)
        except StopIteration:
            self.whole = True
            raise

    def close(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()


def register(app: Flask, count: Callable[[int, str | None], None]) -> None:
    """After `headers.register`, which gives requests their ids. `count`: is told status and name of
    the key of each.
    """

    @app.before_request
    def _begin() -> None:
        route = request.url_rule.rule if request.url_rule else "no route"
        g.record = Record(g.request_id, request.remote_addr or "", request.method, route)

    @app.after_request
    def _finish(response: Response) -> Response:
        record: Record = g.record
        record.status = response.status_code
        record.key = caller.name if (caller := g.get("caller")) else None
        if not response.is_streamed:
            _end(record, count)
            return response
        watched = response.response = _Watched(response.response)
        is_gone = request.environ.get(HAS_LEFT, lambda: False)

        def end() -> None:
            if not watched.whole and is_gone():
                record.status = GONE
            _end(record, count)

        response.call_on_close(end)
        return response


def _end(record: Record, count: Callable[[int, str | None], None]) -> None:
    count(record.status, record.key)
    if log.isEnabledFor(logging.INFO):
        log.info("%s", record, extra={"fields": record.fields()})
