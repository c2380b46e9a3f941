"""What every response carries: an id, what browsers may do with it, and, where allowed, for which
other origins it is.
"""

from __future__ import annotations

import secrets

from flask import Flask, Response, g, request

from mtmd.web.settings import ServerSettings

_API_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'"
)
# In the chat no text can become HTML, whatever a model writes: the browser refuses it.
_CHAT_POLICY = f"{_PAGE_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), geolocation=(), microphone=()",
}


def register(app: Flask, settings: ServerSettings) -> None:
    @app.before_request
    def _begin() -> None:
        g.request_id = f"req-{secrets.token_hex(12)}"

    @app.after_request
    def _finish(response: Response) -> Response:
        headers = response.headers
        headers["X-Request-Id"] = g.request_id
        headers["Content-Security-Policy"] = _policy(response)
        headers.update(_ALWAYS)
        headers.setdefault("Cache-Control", "no-store")
        _allow_origin(response, settings)
        return response


def _policy(response: Response) -> str:
    if response.mimetype != "text/html":
        return _API_POLICY
    return _CHAT_POLICY if request.endpoint == "page.chat_page" else _PAGE_POLICY


def _allow_origin(response: Response, settings: ServerSettings) -> None:
    headers = response.headers
    origin = request.headers.get("Origin")
    if origin is None or not settings.allows_origin(origin):
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return
    headers["Access-Control-Allow-Origin"] = "*" if "*" in settings.cors_origins else origin
    headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
    headers.add("Vary", "Origin")
    if request.method == "OPTIONS":
        headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
        headers["Access-Control-Allow-Headers"] = "Authorization, *"
        headers["Access-Control-Max-Age"] = "600"
