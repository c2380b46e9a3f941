"""Reads a request as it comes, and refuses it as soon as it is known that it will be: a long body
from somebody without a key, one that is more than its route takes, one there is no room for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable
from typing import Protocol

from waitress.adjustments import Adjustments
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.receiver import ChunkedReceiver
from waitress.utilities import Error, RequestHeaderFieldsTooLarge

from mtmd.web.api_keys import authorization
from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.connections.refusal import Refusal

SHORT_BODY = 64 << 10  # bytes
HEADERS = 256  # of one request
CHUNK_LINE = 1 << 10  # bytes
TRAILER = 32 << 10  # bytes
CHUNKED = 16 << 10  # bytes beside those of a body in chunks, and half as many as it has
_JUST_BEGUN_S = 0.05
_FIRST_LINE = re.compile(rb"[^ ]+ [^ ]+(?: HTTP/[0-9]\.[0-9])?")
_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BLANKS = b" " * 64


class Rules(Protocol):
    """What a parser asks of its server."""

    bodies: BodyBudget

    def who(self, authorization: str) -> str | None:
        """Whom this header lets in: the owner of its key, "" where no keys are, None for nobody."""

    def route(self, method: str, path: str) -> tuple[int, Hashable]:
        """The most bytes that the route of such a request takes, and its kind of work."""

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""

    def make_room(self, count: int) -> bool:
        """Give the slowest bodies up until there is room for so many bytes."""


class Parser(HTTPRequestParser):  # type: ignore[misc]  # waitress has no types
    """One request. `known`: its client has a key, or needs none; `owner`: of the key. `held`: bytes
    of it in the server's budget. `work`: the kind of threads that answer it, None for quick ones.
    """

    error: Error | None = None
    known = False
    owner = ""
    work: Hashable = None

    def __init__(self, rules: Rules, adj: Adjustments) -> None:
        super().__init__(adj)
        self.began, self.held = time.monotonic(), 0
        self._rules, self._limit, self._looked = rules, 0, False

    def received(self, data: bytes) -> int:
        before = self.body_bytes_received
        count: int = super().received(data)
        if self.headers_finished and not self.empty and not self._looked:
            self._looked = True
            if self.error is None:
                self._look_at_head()
        if self.error is None and self.body_bytes_received > before:
            self._check_chunks()
            self._take(self.body_bytes_received - before)
        if self.error is not None:
            if not isinstance(self.error, Refusal):
                self.error = Refusal(
                    self.error.code, f"the request cannot be read: {self.error.reason.lower()}"
                )
            self.completed = True
            self.expect_continue = False  # waitress would ask for the body all the same
        return count

    def parse_header(self, header_plus: bytes) -> None:
        """As in the base class, whose expressions, as those that read some headers later, try runs
        of blanks in all ways, and addresses that are none: of 32 KiB for seconds, in which nobody
        else has the interpreter. Those are refused before. Nor does it count headers, and what it
        joins of lines it copies with each.
        """
        first, _, headers = header_plus.partition(b"\r\n")
        if headers.count(b"\n") > HEADERS:
            super().parse_header(b"GET / HTTP/1.0\r\n")
            self.error = RequestHeaderFieldsTooLarge(f"more than {HEADERS} headers")
            return
        if _CONTROLS.search(header_plus) or _BLANKS in headers.replace(b"\t", b" "):
            raise ParsingError("A head has characters that stand for nothing")
        if not _FIRST_LINE.fullmatch(first.rstrip()):
            raise ParsingError("Start line is invalid")
        if b"\n " in headers or b"\n\t" in headers:
            raise ParsingError("A header goes on in a second line")
        try:
            super().parse_header(header_plus)
        except ValueError as error:  # what Python cannot read of an address, or as a number
            raise ParsingError(str(error)) from error

    def rate(self, now: float) -> float:
        """Bytes of the body a second so far; one that has just begun to come has a high one."""
        return float(self.body_bytes_received) / max(now - self.began, _JUST_BEGUN_S)

    def close(self) -> None:
        super().close()
        held, self.held = self.held, 0
        self._rules.bodies.give_back(held)

    def _look_at_head(self) -> None:
        rules = self._rules
        if rules.draining:
            self.error = Refusal(503, "the server is shutting down", "shutting_down")
            return
        who = rules.who(
            authorization(self.headers.get("AUTHORIZATION", ""), self.headers.get("X_API_KEY", ""))
        )
        self.known, self.owner = who is not None, who or ""
        self._limit, self.work = rules.route(self.command, self.path)
        if not self.chunked and not self.content_length:
            return
        if not self.known and (self.chunked or self.content_length > SHORT_BODY):
            self.error = Refusal(
                401,
                "expected the header 'Authorization: Bearer KEY' with a key of this server",
                "invalid_api_key",
            )
            return
        self._check_length(self.content_length)

    def _take(self, count: int) -> None:
        """Received bytes into the budget: what is only promised takes no room."""
        self._check_length(self.body_bytes_received)
        if self.error is not None:
            return
        bodies = self._rules.bodies
        if bodies.take(count) or (self._rules.make_room(count) and bodies.take(count)):
            self.held += count
        elif self.error is None:
            self.error = Refusal(
                503, "too many long requests are being received; try again later", "server_busy"
            )

    def _check_chunks(self) -> None:
        """Where the lines of chunks, and what follows them, are most of what comes: to read those
        takes a hundred times as long as a body, and the base class reads one that has not ended
        from its beginning with all that comes of it.
        """
        body = self.body_rcv
        if isinstance(body, ChunkedReceiver) and (
            len(body.control_line) > CHUNK_LINE
            or len(body.trailer) > TRAILER
            or self.body_bytes_received - len(body) > CHUNKED + len(body) // 2
        ):
            self.error = Refusal(
                400, "the body comes in chunks too small, or with too much beside them"
            )

    def _check_length(self, count: int) -> None:
        if count > self._limit:
            self.error = Refusal(
                413,
                f"the body has {count:,} bytes or more, expected at most {self._limit:,} at this "
                "address",
                "body_too_large",
            )
