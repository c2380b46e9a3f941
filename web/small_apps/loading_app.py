"""What is answered while the model is loaded: how far that is, and to whatever needs the model,
when to try again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from flask import Response, request

from mtmd import __version__
from mtmd.web.auth import without_key
from mtmd.web.errors import ApiError
from mtmd.web.intake.gate import Body, GatedFlask, takes
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.parts import in_its_form, new_app, notice

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
OPENING, WARMING = "opening the checkpoint", "reading weights and warming up"
SOON_S, LATE_S = 2, 30  # between which clients are told to try again


class Loading:
    """How far a model is. Set by the thread that loads it, read by others. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._stage = OPENING
        self._read: Callable[[], tuple[int, int]] | None = None

    def warming(self, read: Callable[[], tuple[int, int]]) -> None:
        """`read` gives the bytes of weights that have been read, and of all."""
        self._stage, self._read = WARMING, read

    @property
    def progress(self) -> float:
        """From 0 to 1: the part of the weights that has been read."""
        done, total = self._read() if self._read else (0, 0)
        return min(done / total, 1.0) if total else 0.0

    def asdict(self) -> dict[str, Any]:
        return {"status": "loading", "stage": self._stage, "progress": round(self.progress, 3)}

    @property
    def retry_s(self) -> int:
        """In how many seconds it may be done, if it goes on like this."""
        progress = self.progress
        left = (self._clock() - self._began) * (1 - progress) / progress if progress else SOON_S
        return max(SOON_S, min(LATE_S, math.ceil(left)))


def create_loading_app(loading: Loading, settings: ServerSettings) -> GatedFlask:
    """No route asks for a key: nothing is told that /ready does not tell."""
    app = new_app(settings, slots=1)

    def state() -> Response:
        told = app.json.dumps(loading.asdict())
        wait = {"Retry-After": str(loading.retry_s)}
        return Response(told, 503, wait, mimetype="application/json")

    @app.get("/ready")
    @takes(Body.NOTHING)
    @without_key
    def ready() -> Response:
        return state()

    @app.get("/health")
    @takes(Body.NOTHING)
    @without_key
    def health() -> Response:
        return state()

    @app.get("/version")
    @takes(Body.NOTHING)
    @without_key
    def version() -> dict[str, str]:
        return {"version": __version__}

    @app.route("/", methods=METHODS)
    @app.route("/<path:_rest>", methods=METHODS)
    @takes(Body.JSON_WITH_PICTURES)
    @without_key
    def anything(_rest: str = "") -> Response:
        told, wait = loading.asdict(), loading.retry_s
        how_far = f"{told['stage']}, {told['progress']:.0%}"
        kinds = request.accept_mimetypes
        if request.method == "GET" and kinds["text/html"] > kinds["application/json"]:
            page = notice("The model is being loaded", (f"{how_far}.",), again_s=SOON_S)
            return Response(page, 503, {"Retry-After": str(wait)}, mimetype="text/html")
        return in_its_form(
            ApiError(
                503,
                f"the model is being loaded ({how_far}); try again in {wait} s",
                code="model_loading",
                headers={"Retry-After": str(wait)},
            )
        )

    return app
