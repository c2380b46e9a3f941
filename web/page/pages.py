"""The pages themselves, and what only they ask for. A page comes without a key; what it shows is
fetched, with one where need be.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Flask, Response, jsonify, render_template

from mtmd import WarmupReport, __version__
from mtmd.web.auth import without_key
from mtmd.web.page import charts
from mtmd.web.page import routes as history
from mtmd.web.page.desk import Desk
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

if TYPE_CHECKING:
    from mtmd.service.service import Service

MAX_TOKENS = 1024  # of an answer, where the context has room for it


def register(
    app: Flask,
    service: Service,
    settings: ServerSettings,
    store: Store | None,
    warmup: WarmupReport | None,
) -> None:
    """`store` None keeps nothing beyond the life of the server."""
    desk = Desk(service, store or Store(None), settings)
    app.register_blueprint(history.blueprint(desk, settings))
    app.register_blueprint(_blueprint(desk, settings, warmup))


def _blueprint(desk: Desk, settings: ServerSettings, warmup: WarmupReport | None) -> Blueprint:
    routes = Blueprint("pages", __name__)
    model, reports = desk.service.model, [warmup] if warmup else []

    @routes.get("/")
    @routes.get("/c/<id_>")
    @without_key
    def chat(id_: str = "") -> str:  # noqa: ARG001  # the page reads it from its address
        return render_template("chat.html", version=__version__)

    @routes.get("/diagnostics")
    @without_key
    def diagnostics() -> str:
        return render_template("diagnostics.html", version=__version__)

    @routes.get("/favicon.ico")
    @without_key
    def icon() -> Response:
        return Response(status=308, headers={"Location": "/static/icon.svg"})

    @routes.get("/api/about")
    def about() -> dict[str, Any]:
        context = model.runner.context
        return {
            "model": model.name,
            "context": context,
            "vision": model.encoder is not None,
            "kept": desk.store.keeps,
            "max_tokens": min(MAX_TOKENS, context // 2),
            "images": settings.media.images,
            "image_bytes": settings.media.bytes,
        }

    @routes.get("/api/stats")
    def stats() -> Response:
        return jsonify(asdict(desk.service.stats()))

    @routes.get("/api/report")
    def report() -> str:
        """The warm-up report as a part of the diagnostics page."""
        if not reports:
            reports.append(model.warmup_report)
        return render_template(
            "report.html",
            report=reports[0],
            charts=charts.of(reports[0]),
            bytes=charts.readable_bytes,
        )

    return routes
