"""Describes what is answered while the model is loaded: how far that is, and to whatever needs the
model, when to try again.
"""

from __future__ import annotations

from flask import Response, request

from mtmd import __version__
from mtmd.web.access import without_key
from mtmd.web.errors import ApiError
from mtmd.web.intake.request_limits import Body, GatedFlask, takes
from mtmd.web.models.progress import SOON_S, Loading
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.parts import in_its_form, new_app, notice

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def create_loading_app(loading: Loading, settings: ServerSettings) -> GatedFlask:
    """No route asks for a key: nothing is told that /ready does not tell."""
    app = new_app(settings, slots=1)

    def state() -> Response:
        reported = app.json.dumps(loading.asdict())
        wait = {"Retry-After": str(loading.retry_s)}
        return Response(reported, 503, wait, mimetype="application/json")

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
        how_far, wait = loading.words, loading.retry_s
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
