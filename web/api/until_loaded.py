"""Answers by a model that has to be loaded first: a stream begins meanwhile, and says that somebody
is there. Proxies and clients give up what is silent for a minute; a load may take several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from flask import Response, current_app, g, request

from mtmd.web import sse
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.intake.gate import GatedFlask
from mtmd.web.models.choice import Claim, Models
from mtmd.web.served_model import ServedModel
from mtmd.web.telemetry.record import Record
from mtmd.web.waiting.waits import BEAT_S, CAN_WAIT, WAITS, Waits


def until_loaded(
    models: Models,
    name: str | None,
    begin: Callable[[ServedModel], Response],
    failed: Callable[[ApiError], str],
    beat: Callable[[], str] | None = None,
    mimetype: str = sse.MIMETYPE,
) -> Response:
    """What `begin` makes of the model called `name`. Where that is not in memory within BEAT_S, a
    stream, in which `beat` is sent every BEAT_S, comments with how far it is where that is None;
    then what `begin` made. What goes wrong before is an error with its status, and after it what
    `failed` writes. Raises ApiError, BusyError, DeviceError, LeftError.
    """
    claim = models.claim(name)
    try:
        if claim.wait(BEAT_S):
            return begin(claim.chosen())
    except BaseException:
        claim.give_back()
        raise
    # A thread waits until the model is there; what comes then waits without one.
    if request.environ.get(CAN_WAIT):
        request.environ[WAITS] = Waits()
    goes_on = _Request()
    pieces = goes_on.pieces(claim, begin, failed, beat or (lambda: _told(claim)))
    response = Response(pieces, mimetype=mimetype)
    response.headers.update({"Cache-Control": "no-cache", **sse.UNBUFFERED})
    response.call_on_close(goes_on.end)
    response.call_on_close(claim.give_back)  # if not even the first piece is asked for
    return response


def _told(claim: Claim) -> str:
    far = claim.how_far
    return sse.comment("loading" if far is None else f"loading, {far:.0%}")


class _Request:
    """One whose view has returned, and which is not prepared yet."""

    def __init__(self) -> None:
        self._app = cast("GatedFlask", current_app._get_current_object())  # type: ignore[attr-defined]
        self._environ = request.environ
        self._known = g._get_current_object()
        self._made: Response | None = None

    def pieces(
        self,
        claim: Claim,
        begin: Callable[[ServedModel], Response],
        failed: Callable[[ApiError], str],
        beat: Callable[[], str],
    ) -> Iterator[bytes]:
        try:
            while not self._is_there(claim):
                yield beat().encode()
            with self._at_work():
                self._made = begin(claim.chosen())
        except Exception as error:
            yield failed(self._as_error(error)).encode()
            return
        yield from self._made.iter_encoded()

    def end(self) -> None:
        if self._made is not None:
            self._made.close()

    def _is_there(self, claim: Claim) -> bool:
        with self._at_work():
            return claim.wait(BEAT_S)

    def _as_error(self, error: Exception) -> ApiError:
        told = as_api_error(error, self._known.get("request_id", "req"))
        record: Record | None = self._known.get("record")
        if record is not None:
            record.status = told.status
        return told

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """As in its view: what is known of the request, for whom this thread works, and that all is
        let go of at the end.
        """
        with self._app.request_context(self._environ):
            for name in self._known:
                setattr(g, name, self._known.get(name))
            self._app.gate.resume()
            yield
