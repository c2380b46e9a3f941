"""Describes what every response carries: an id, the client's own where it gave one, what browsers
may do with it, and, where allowed, for which other origins it is.
"""

from __future__ import annotations

import re
import secrets

from flask import Flask, Response, g, request

from mtmd.web.settings import ServerSettings

_API_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; "
    "connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'"
)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/=@-]{0,127}")  # what else is given is not taken up
# In the chat no text can become HTML, whatever a model writes: the browser refuses it.
_CHAT_POLICY = f"{_PAGE_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), geolocation=(), microphone=(self)",
}


def register(app: Flask, settings: ServerSettings) -> None:
    tag = f"{settings.tag}-" if settings.tag else ""

    @app.before_request
    def _begin() -> None:
        g.own_id = f"req-{tag}{secrets.token_hex(12)}"
        given = request.headers.get("X-Request-Id", "")
        g.request_id = given if _ID.fullmatch(given) else g.own_id

    @app.context_processor
    def _links() -> dict[str, str]:
        """Return the links of pages, relative to them: a proxy may have put all of it under a
        path.
        """
        return {"root": "../" * (request.path.count("/") - 1) or "./"}

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
    headers.extend(allowing(origin, settings))
    if request.method == "OPTIONS":
        private = request.headers.get("Access-Control-Request-Private-Network") == "true"
        headers.extend(preflight(private))


def allowing(origin: str, settings: ServerSettings) -> dict[str, str]:
    """Return the headers of an answer to a page of another origin that is allowed."""
    return {
        "Access-Control-Allow-Origin": "*" if "*" in settings.cors_origins else origin,
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After, X-Mtmd-Ignored",
        "Vary": "Origin",
    }


def preflight(private: bool) -> dict[str, str]:
    """Return what a browser is told, beside those, before it sends the request itself. `private`:
    it asks whether a page from elsewhere may reach this network.
    """
    return {
        "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE",
        "Access-Control-Allow-Headers": "Authorization, *",
        "Access-Control-Max-Age": "600",
        **({"Access-Control-Allow-Private-Network": "true"} if private else {}),
    }
