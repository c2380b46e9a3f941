"""Access control: who asks, the names of this machine, and allowed web pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Response, current_app, g, request
from werkzeug.datastructures import Headers

from mtmd.web.api_keys import ANYBODY, Caller, Keys, authorization
from mtmd.web.errors import ApiError
from mtmd.web.rate_limit import RateLimit
from mtmd.web.settings import ServerSettings

_SAFE = ("GET", "HEAD", "OPTIONS")
_OPEN = "_open_without_key"
_KEYS = "mtmd.keys"
_PROBES = ("/health", "/ready")
View = TypeVar("View", bound=Callable[..., Any])


def without_key(view: View) -> View:
    """Marks a view that answers without an API key: the page itself, whether the server lives."""
    setattr(view, _OPEN, True)
    return view


def owner() -> str:
    """Return whose request this is: what belongs to one is not shown to another. Not the key
    itself.
    """
    caller: Caller | None = g.get("caller")
    return caller.owner if caller else ANYBODY


def keys_of(app: Flask) -> Keys:
    """Return those that `register` checks requests of an application against."""
    keys: Keys = app.extensions[_KEYS]
    return keys


class Access:
    """The keys of a server, and how often each may ask. Knows nothing of Flask."""

    def __init__(self, settings: ServerSettings) -> None:
        self.keys, self._limit = settings.make_keys(), RateLimit(settings.rate_limit)

    def caller(self, header: str, api_key: str) -> Caller:
        """Return who asks, by the headers Authorization and X-Api-Key. Raises ApiError for a key
        that is missing or unknown.
        """
        caller = self.keys.find(authorization(header, api_key))
        if caller is None:
            raise ApiError(
                401,
                "expected the header 'Authorization: Bearer KEY' with a key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller

    def check_rate(self, caller: Caller) -> None:
        """Raises ApiError for one who has asked too often."""
        self._limit.check(caller.owner)


def register(app: Flask, settings: ServerSettings) -> None:
    """Every request is checked before its view is called, and before its body is read: keys too, of
    which some may have been taken back since the last. What was begun with one goes on to its end.
    """
    access = Access(settings)
    keys = app.extensions[_KEYS] = access.keys

    @app.before_request
    def _check() -> Response | None:
        _check_host(settings)
        _check_origin(settings)
        if request.method == "OPTIONS" and settings.allows_origin(request.headers.get("Origin")):
            return Response(status=204)  # a preflight comes without a key
        view = app.view_functions.get(request.endpoint or "")
        if (
            keys.needed
            and not (request.endpoint or "").endswith("static")
            and not getattr(view, _OPEN, False)
        ):
            headers = request.headers
            g.caller = access.caller(headers.get("Authorization", ""), headers.get("X-Api-Key", ""))
            access.check_rate(g.caller)  # whose refusal is logged with the name
        return None


def _check_host(settings: ServerSettings) -> None:
    """A page on the web can have its own name resolve to 127.0.0.1 and would then be same-origin
    with us (DNS rebinding). Probes call by an address, and learn nothing.
    """
    rule = request.url_rule
    if rule is not None and rule.rule in _PROBES:
        return
    if not settings.answers_to(_host_of(f"//{request.host}")):
        raise ApiError(
            403,
            "this server does not answer to this name; start it with --allowed-host NAME",
            code="unknown_host",
        )


def _check_origin(settings: ServerSettings) -> None:
    """A page of another origin may not have a browser send us what changes or costs something,
    unless it was allowed.
    """
    origin = request.headers.get("Origin")
    if settings.allows_origin(origin):
        return
    if _is_blind(request.headers) and not settings.allows_any_origin:
        raise _denied()
    if origin is None or request.method in _SAFE:
        return
    if origin.partition("://")[2] != request.host:
        raise _denied()


def _denied() -> ApiError:
    return ApiError(
        403,
        "pages of this origin may not use this server; start it with --cors-origin to allow them",
        code="origin_denied",
    )


def _is_blind(headers: Headers) -> bool:
    """Return whether a page elsewhere makes a browser ask without being let see the answer, by an
    <img> or no-cors: it would cost us work all the same. Browsers say so by themselves. To follow a
    link to one of our pages is fine.
    """
    site = headers.get("Sec-Fetch-Site", "none")
    follows_link = (
        headers.get("Sec-Fetch-Mode") == "navigate"
        and headers.get("Sec-Fetch-Dest") == "document"
        and request.method in _SAFE
        and getattr(current_app.view_functions.get(request.endpoint or ""), _OPEN, False)
    )
    return site not in ("same-origin", "none") and not follows_link


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
