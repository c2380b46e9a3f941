"""The one gate that every request passes before its route is called: how long its body may be, what
JSON in it may hold, and how much may be worked on at once, in all and for one key.

A route says what it takes by `takes`; one that does not cannot be registered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from io import RawIOBase
from mmap import mmap
from typing import Any, TypeVar, cast

from flask import Flask, Response, current_app, g, request
from werkzeug.exceptions import HTTPException

from mtmd import BusyError
from mtmd.base.cancellation import cancel_if
from mtmd.base.turns import Turns, set_owner
from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.bodies.compressed import plain, refused
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.errors import response as as_response
from mtmd.web.intake.json_limits import check_json
from mtmd.web.intake.long_texts import LONG, CutBody, Memory
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.intake.slots import Slots
from mtmd.web.native_threads import in_thread
from mtmd.web.settings import HAS_LEFT, JsonLimits, ServerSettings

FORGIVEN_BYTES = 64 << 10  # of a body at an address that takes none, or is not there
SMALL_VALUES = 4096  # in JSON that the page sends
LONG_RESPONSE = 256 << 10  # bytes; less waits in memory for a client that does not read
SHORT = 64 << 10  # bytes of JSON that are read where they are
READ_AT_ONCE = 1 << 20  # bytes of a long body: whom the system lets run next has not to wait
HISTORY_VALUES = 500_000  # the page sends one conversation at a time
_TAKES = "_takes"
View = TypeVar("View", bound=Callable[..., Any])


class Body(Enum):
    """Describes what may come with a request."""

    NOTHING = "nothing"
    SMALL_JSON = "JSON of the page"
    JSON = "JSON without pictures"
    JSON_WITH_PICTURES = "JSON with pictures"
    HISTORY = "an exported history"
    PICTURE = "the file of a picture"
    FORM = "a form with a file"


_FILES = (Body.PICTURE, Body.FORM)  # which come as they are


class Work(Enum):
    """Describes what is taken up while a request is answered."""

    QUICK = "milliseconds"
    ANSWER = "the model, or pictures that are decoded"
    FOLLOW = "a stream of what is written anyway"
    DOWNLOAD = "more than waits in memory for a client that does not read"


@dataclass(frozen=True)
class Takes:
    body: Body
    work: Work


def takes(body: Body, work: Work = Work.QUICK) -> Callable[[View], View]:
    """Says of a view what it takes."""

    def mark(view: View) -> View:
        setattr(view, _TAKES, Takes(body, work))
        return view

    return mark


def takes_of(view: Callable[..., Any] | None) -> Takes | None:
    return getattr(view, _TAKES, None)


class GatedFlask(Flask):
    """An application whose routes all say what they take. `gate` is set by `Gate`."""

    gate: Gate

    def add_url_rule(
        self,
        rule: str,
        endpoint: str | None = None,
        view_func: Any = None,
        provide_automatic_options: bool | None = None,
        **options: Any,
    ) -> None:
        """Raises TypeError for a view without `takes`."""
        if takes_of(view_func) is None:
            raise TypeError(f"{rule}: found a view without @takes(...), which every route needs")
        super().add_url_rule(rule, endpoint, view_func, provide_automatic_options, **options)


class Gate:
    """`slots`: sequences answered at once. `client`: who has sent the request that is being
    answered; among clients places, pictures and the device are shared out. `budget`: of pixels, the
    one of the whole server.
    """

    def __init__(
        self, app: GatedFlask, settings: ServerSettings, slots: int, client: Callable[[], str]
    ) -> None:
        self._settings, self._client = settings, client
        self._slots = {
            work: Slots(what, maximum)
            for work, what, maximum in (
                (Work.ANSWER, "requests are being answered or wait", slots + settings.queue),
                (Work.FOLLOW, "readers follow answers", settings.followers),
                (Work.DOWNLOAD, "files are being read", settings.downloads),
            )
        }
        self._app, self._urls = app, app.url_map.bind("localhost")
        app.gate = self
        self._entrance = Turns(1)
        self.budget = PictureBudget(settings.media)
        self.plain_bodies = BodyBudget(settings.connections.body_bytes)
        app.before_request(self._enter)
        app.after_request(self._leave_with)
        app.teardown_request(_leave)

    def taken(self, work: Work) -> int:
        """Places of this kind that are not free."""
        return self._slots[work].taken

    def body_limit(self, method: str, path: str) -> int:
        """Return how many bytes may come with such a request. `path` as WSGI has it, in Latin-1."""
        path = path.encode("latin-1").decode("utf-8", "replace")
        root = self._settings.root_path
        try:
            endpoint, _ = self._urls.match(
                path.removeprefix(root) if path.startswith(f"{root}/") else path, method
            )
        except HTTPException:
            return FORGIVEN_BYTES
        return self.bytes_of(takes_of(self._app.view_functions[endpoint]))

    def bytes_of(self, what: Takes | None) -> int:
        settings = self._settings
        if what is None or what.body is Body.NOTHING:
            return FORGIVEN_BYTES
        if what.body in (Body.SMALL_JSON, Body.JSON):
            return settings.json.bytes
        if what.body is Body.PICTURE:
            return settings.media.bytes
        return settings.body_bytes

    def json_of(self, what: Takes) -> JsonLimits:
        limits = self._settings.json
        if what.body is Body.SMALL_JSON:
            return replace(limits, values=min(limits.values, SMALL_VALUES))
        if what.body is Body.HISTORY:
            return replace(limits, bytes=self._settings.body_bytes, values=HISTORY_VALUES)
        return limits

    def _enter(self) -> None:
        what = takes_of(self._app.view_functions.get(request.endpoint or ""))
        limit = self.bytes_of(what)
        request.max_content_length = limit
        if (request.content_length or 0) > limit:
            raise ApiError(
                413,
                f"the body has {request.content_length:,} bytes, expected at "
                f"most {limit:,} on this route",
                code="body_too_large",
            )
        if what is not None and what.body in _FILES and _encoding() not in ("", "identity"):
            raise refused(_encoding(), [])
        client = self._client()
        if what is not None and what.work in self._slots and request.method != "OPTIONS":
            g.give_back = self._slots[what.work].take(client)
        cancel_if(request.environ.get(HAS_LEFT))
        set_owner(client)
        if what is not None and what.work in self._slots:
            with self._entrance.one():  # among the clients in turn
                time.sleep(0)  # others are answered between two that begin

    def _leave_with(self, response: Response) -> Response:
        """The place of what is made while it is sent, or may have to wait for its client, is free
        once the last of it is on its way, or nobody wants it. What turns out to be long takes one
        now.
        """
        give_back = g.pop("give_back", None)
        long = _is_long(response)
        if give_back is None and long:
            try:
                give_back = self._slots[Work.DOWNLOAD].take(self._client())
            except BusyError as busy:
                response.close()
                return as_response(as_api_error(busy, g.get("request_id", "req")))
        if give_back is not None and long:
            response.direct_passthrough = False  # of a file; then nobody would be told of its end
            response.call_on_close(give_back)
        elif give_back is not None:
            give_back()
        return response


CURLS = "application/x-www-form-urlencoded"  # whatever `curl -d` sends, unless it is told otherwise
# A browser asks this server before a page of another origin may send one of these, and is refused.
# Some programs (LiteLLM's proxy) send JSON as the second.
ACCEPTED = ("application/json", "application/octet-stream")


def _encoding() -> str:
    return request.headers.get("Content-Encoding", "")


def _take_plain(count: int) -> None:
    """Reserve bytes of a body that was compressed, until this request is over. Raises ApiError."""
    bodies = cast("GatedFlask", current_app).gate.plain_bodies
    if not bodies.take(count):
        raise ApiError(
            503,
            "too many long requests are being read; try again later",
            code="server_busy",
            headers={"Retry-After": "1"},
        )
    g.plain_bytes = g.get("plain_bytes", 0) + count


def whole_body() -> bytes:
    """Return the whole body of this request, whose length `_enter` has checked. Of one that lies in
    a file it is the only copy, made while other threads run: `get_data` makes two, and none runs
    meanwhile.
    """
    if request.content_length is None:
        return request.get_data(cache=False)
    body: bytes = request.environ["wsgi.input"].read(request.content_length)
    return body


def _in_memory() -> Memory:
    """The body of this request. A long one in memory that is given back while other threads run."""
    count = request.content_length or 0
    if count < LONG:
        return whole_body()
    memory, stream, came = mmap(-1, count), cast("RawIOBase", request.stream), 0
    with memoryview(memory) as view:
        while came < count and (more := stream.readinto(view[came : came + READ_AT_ONCE])):
            came += more
    return memory if came == count else memory[:came]


def checked_json(typed: bool = True) -> CutBody:
    """The body of this request without its long pictures: JSON within the limits of its route, as
    far as that can be told without reading it. Raises ApiError, also for a content type that is not
    in ACCEPTED: a form on any web page can send text/plain. Without `typed` programs may leave the
    type out, or send what `curl -d` says of any body; browsers tell what they are.
    """
    browser = any(name in request.headers for name in ("Origin", "Sec-Fetch-Site", "Referer"))
    untyped = not (typed or browser) and request.mimetype in ("", CURLS)
    if request.mimetype not in ACCEPTED and not untyped:
        raise ApiError(415, "expected the header 'Content-Type: application/json'")
    app = cast("GatedFlask", current_app)
    what = takes_of(app.view_functions[request.endpoint or ""])
    assert what is not None
    limit = app.gate.bytes_of(what)
    limits = app.gate.json_of(what)

    def checked() -> CutBody:
        body = CutBody(plain(_in_memory(), _encoding(), limit, _take_plain))
        check_json(body.data, limits, body.escapes)
        return body

    is_short = (request.content_length or 0) <= SHORT and _encoding() in ("", "identity")
    return checked() if is_short else in_thread(checked)


def keep_slot() -> Callable[[], None]:
    """Keep the slot for work that goes on when this request is answered; the result releases it."""
    give_back: Callable[[], None] = g.pop("give_back")
    return give_back


def _is_long(response: Response) -> bool:
    length = response.headers.get("Content-Length", type=int)
    if length is None and not response.is_streamed:
        length = response.calculate_content_length()
    return length is None or length > LONG_RESPONSE


def _leave(_: BaseException | None) -> None:
    set_owner("")
    cancel_if(None)
    if (give_back := g.pop("give_back", None)) is not None:
        give_back()
    if count := g.pop("plain_bytes", 0):
        cast("GatedFlask", current_app).gate.plain_bodies.give_back(count)
