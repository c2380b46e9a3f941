"""What a client is told where the application is not asked, in the form that errors have everywhere
else.
"""

from __future__ import annotations

from http import HTTPStatus

from flask import json
from waitress.utilities import Error

from mtmd.web.errors import ApiError

RETRY_S = 1


class Refusal(Error):  # type: ignore[misc]  # waitress has no types
    """A response of waitress's own, sent before the connection is closed."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self._word = status, HTTPStatus(status).phrase, code

    def to_response(self, ident: str | None = None) -> tuple[str, list[tuple[str, str]], bytes]:  # noqa: ARG002
        error = ApiError(self.code, self.body, code=self._word)
        headers = [("Content-Type", "application/json")]
        if self.code in (429, 503):
            headers.append(("Retry-After", str(RETRY_S)))
        return f"{self.code} {self.reason}", headers, json.dumps(error.body()).encode()

    def to_bytes(self) -> bytes:
        """The whole response, for a connection that nothing is kept of."""
        status, headers, body = self.to_response()
        headers += [("Connection", "close"), ("Content-Length", str(len(body)))]
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode() + body
