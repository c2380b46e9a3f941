"""Errors in the form of OpenAI's servers: {"error": {"message", "type", "param", "code"}}. Nothing
of the inside goes out.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from flask import Flask, Response, g, json, render_template, request
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from mtmd import (
    AudioError,
    BusyError,
    ContextError,
    DeviceError,
    DeviceMemoryError,
    ImageError,
    MtmdError,
    OptionError,
    PromptError,
    VideoError,
)
from mtmd.base.errors import EngineError, LeftError
from mtmd.base.tracebacks import traceback_text
from mtmd.web.mistakes import words

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger("mtmd.web")
MAX_MISTAKES = 1000
LONGEST = 600  # characters of a message: parts of a request may stand in it
DOCS = "/docs"
ROUTE_CHARS_MAX = 100  # of an address that may be a misspelt one
ROUTE_ALIKE = 0.85  # of its letters; /v1/moderations is no misspelt /v1/completions
# begins the names that requests give to the kinds of a value; they are no part of a place in one
TAG = "="
_WORDS = {
    400: "the request cannot be understood",
    404: "there is no such route",
    405: "this method is not for this address",
    413: "the request is too large",
    415: "found another content type, expected application/json",
}

_ANTHROPICS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Describes what a request is refused with. `param` names the part of the request that is to
    blame; `fields` stand beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = (
            status,
            message,
            param,
            code,
            dict(headers or {}),
        )
        self.fields = dict(fields or {})

    def body(self) -> dict[str, Any]:
        message = self.message if len(self.message) <= LONGEST else f"{self.message[:LONGEST]}..."
        return {
            "error": {
                "message": message,
                "type": _type(self.status),
                "param": self.param,
                "code": self.code,
                **self.fields,
            }
        }


class ContextApiError(ApiError):
    """A prompt that is longer than the context. Clients shorten a conversation where they find the
    words of their interface: the message has OpenAI's, `in_anthropics_form` and the like others.
    """

    def __init__(self, error: ContextError) -> None:
        self.tokens, self.context = error.tokens, error.context
        self.reason = error.advice or str(error)
        minimum = "" if error.tokens is not None else "at least "
        super().__init__(
            400,
            f"This model's maximum context length is {error.context} tokens. However, your prompt "
            f"takes {minimum}{self.at_least} tokens; {self.reason}",
            code="context_length_exceeded",
            fields={"n_prompt_tokens": error.tokens, "n_ctx": error.context},
        )

    @property
    def at_least(self) -> int:
        """The tokens of the prompt; the fewest it may take where it was too long to be counted."""
        return self.context if self.tokens is None else self.tokens

    def anthropics_message(self) -> str:
        """Claude Code reads both numbers, in this order; the answer takes a token at least."""
        longest = self.context - 1
        return f"prompt is too long: {self.at_least} tokens > {longest} maximum; {self.reason}"

    def ollama_cpp_message(self) -> str:
        over = self.at_least - self.context + 1
        return f"prompt too long; exceeded max context length by {over} tokens; {self.reason}"

    def llama_cpp_message(self) -> str:
        return (
            f"request ({self.at_least} tokens) exceeds the available context size ({self.context} "
            f"tokens), try increasing it; {self.reason}"
        )


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """The answer to any error. What is not the client's business is written to the
    log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return invalid(error)
    if isinstance(error, ContextError) and not error.is_short:
        return ContextApiError(error)
    if isinstance(error, (PromptError, ImageError, OptionError)):
        return ApiError(
            400,
            str(error),
            param=_field(str(error)) if isinstance(error, OptionError) else None,
            code="invalid_video"
            if isinstance(error, VideoError)
            else "invalid_audio"
            if isinstance(error, AudioError)
            else "invalid_image"
            if isinstance(error, ImageError)
            else None,
        )
    if isinstance(error, LeftError):
        return ApiError(499, "the client has left")
    if isinstance(error, BusyError):
        wait = {"Retry-After": str(math.ceil(error.retry_after_s))}
        return ApiError(429, str(error), code="server_busy", headers=wait)
    if isinstance(error, DeviceMemoryError):
        return ApiError(413, str(error), code="out_of_memory")
    if isinstance(error, DeviceError):  # what caused it is in the log already
        return ApiError(503, str(error), code="device_failed")
    if isinstance(error, EngineError):
        wait = {"Retry-After": str(math.ceil(error.retry_after_s))}
        return ApiError(503, str(error), code="engine_failed", headers=wait)
    if isinstance(error, HTTPException):
        status = error.code or 500
        headers = {k: v for k, v in error.get_headers() if k in ("Allow", "Retry-After")}
        return ApiError(
            status, _WORDS.get(status, "the request cannot be answered"), headers=headers
        )
    expected = isinstance(error, MtmdError)
    log.error(
        "%s failed: %s%s",
        request_id,
        str(error)[:LONGEST] if expected else type(error).__name__,
        "" if expected and error.__cause__ is None else f"\n{traceback_text(error)}",
    )
    return ApiError(
        500,
        f"the server could not answer; its log has the reason under {request_id}",
        code="internal_error",
    )


def in_anthropics_form(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPICS.get(error.status) or (
        "api_error" if error.status >= 500 else "invalid_request_error"
    )
    if isinstance(error, ContextApiError):
        message = error.anthropics_message()
    else:
        message = error.body()["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def in_ollamas_form(error: ApiError) -> dict[str, Any]:
    if isinstance(error, ContextApiError):
        return {"error": error.ollama_cpp_message()}
    return {"error": error.body()["error"]["message"]}


def in_llama_cpp_form(error: ApiError) -> dict[str, Any]:
    """OpenAI's, but for prompts that are too long."""
    body = error.body()
    if isinstance(error, ContextApiError):
        kind = {"type": "exceed_context_size_error", "code": error.status}
        body["error"] |= {"message": error.llama_cpp_message(), **kind}
    return body


def in_form_of(path: str, error: ApiError, request_id: str) -> dict[str, Any]:
    """Return errors as clients of an address read them."""
    path = path.removeprefix("/v1")
    if path.startswith("/api/"):
        return in_ollamas_form(error)
    if path == "/messages" or path.startswith("/messages/"):
        return in_anthropics_form(error, request_id)
    return error.body()


def invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request's fields, without the value itself: it may be
    a picture.
    """
    if (count := error.error_count()) > MAX_MISTAKES:  # each would be built to tell the first
        return ApiError(400, f"found {count:,} fields that are wrong or unknown")
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    param = context.get("param") or _location(first["loc"])
    message = (
        words(first, re.split(r"[.\[]", param)[-1])
        if first["type"] != "json_invalid"
        else f"the body is not JSON: {context.get('error', 'it cannot be read')}"
    )
    return ApiError(
        400,
        f"{param}: {message}" if param and not context.get("param") else message,
        param=param or None,
        code=context.get("code"),
    )


def register(app: Flask) -> None:
    app.wsgi_app = _Answering(app.wsgi_app)  # type: ignore[method-assign]

    @app.errorhandler(Exception)
    def _answer(error: Exception) -> Response | tuple[str, int]:
        if error is request.routing_exception:
            # the request keeps it, and its frames the request: both, and the body, would wait for
            # the garbage collector
            error.__traceback__ = error.__context__ = None
        if isinstance(error, NotFound) and _is_for_a_person():
            return render_template("missing.html", has_docs=DOCS in _routes(app)), 404
        refused = as_api_error(error, g.get("request_id", "req"))
        if isinstance(error, NotFound) and request.path.startswith("/v1"):
            refused.message += _meant(request.path, app)
        elif isinstance(error, MethodNotAllowed) and error.valid_methods:
            taken = " or ".join(sorted(set(error.valid_methods) - {"HEAD", "OPTIONS"}))
            refused.message += f": found {request.method}, expected {taken}"
        if request.url_rule is None and request.path.startswith(
            "/api/"
        ):  # of Ollama's, or nobody's
            return response(refused, in_ollamas_form)
        return response(refused)


def _routes(app: Flask) -> list[str]:
    """The addresses without names in them."""
    return [rule.rule for rule in app.url_map.iter_rules() if not rule.arguments]


def _meant(path: str, app: Flask) -> str:
    """Return what to do about an address of the interface for programs where nothing is."""
    routes = _routes(app)
    is_short = len(path) <= ROUTE_CHARS_MAX
    near = get_close_matches(path, routes, 1, ROUTE_ALIKE) if is_short else []
    reported = f"did you mean {near[0]}?" if near else ""
    listed = f"{DOCS} lists all" if DOCS in routes else ""  # vectors alone have none
    words = " ".join(word for word in (reported, listed) if word)
    return f"; {words}" if words else ""


def _is_for_a_person() -> bool:
    """A page is wanted, as browsers ask where an address is typed: not JSON, and not just
    anything.
    """
    kinds = request.accept_mimetypes
    return request.method == "GET" and kinds["text/html"] > kinds["application/json"]


class _Answering:
    """Answers also where something is raised that is no Exception, such as a panic of a library in
    Rust: the framework lets it pass, and the connection would stay open without an answer.
    """

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return _Body(self._app(environ, start_response))
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            answer = response(as_api_error(error, "a request"))
            return answer(environ, start_response)


class _Body:
    """Body of an answer. What ends it before its end is an Exception, which closes the
    connection.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._next = pieces, iter(pieces)

    def __iter__(self) -> _Body:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._next)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise RuntimeError(f"an answer ended by {type(error).__name__}") from error

    def close(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()


def response(
    error: ApiError, form: Callable[[ApiError], Mapping[str, Any]] = ApiError.body
) -> Response:
    """`form`: the body, as the clients of an interface read it."""
    return Response(
        json.dumps(form(error)), error.status, error.headers, mimetype="application/json"
    )


def _location(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") as messages[0].content."""
    position = ""
    for part in location:
        if isinstance(part, int):
            position += f"[{part}]"
        elif not part.startswith(TAG):
            position += f".{part}" if position else part
    return position


def _field(message: str) -> str | None:
    """Return what an option's error is about: "tools[0].type: found ...", "n is 3, expected
    ...".
    """
    result = re.match(r"([a-z_][a-z_.\[\]\d]*):? ", message[:80])
    return result[1] if result and ("found" in message or "expected" in message) else None


def _type(status: int) -> str:
    known = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return known.get(status, "invalid_request_error" if status < 500 else "server_error")
