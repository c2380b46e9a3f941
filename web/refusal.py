"""Describes what a client gets where the application is not called, in the form that errors have
everywhere else.
"""

from __future__ import annotations

from http import HTTPStatus

from flask import json

from mtmd.web.errors import ApiError

RETRY_S = 1


class Refusal(Exception):
    """The whole response to a request that cannot be taken. The connection is closed after it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self._error = status, ApiError(status, message, code=code)

    def to_bytes(self) -> bytes:
        body = json.dumps(self._error.body()).encode()
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase.upper()}",
            "Content-Type: application/json",
            *([f"Retry-After: {RETRY_S}"] if self.status in (429, 503) else []),
            "Connection: close",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body
