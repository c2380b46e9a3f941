"""The pages themselves, and what only they ask for. A page comes without a key; what it shows is
fetched, with one where need be.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Flask, Response, jsonify, render_template

from mtmd import __version__
from mtmd.web.auth import without_key
from mtmd.web.intake.budget import PictureBudget
from mtmd.web.page import charts
from mtmd.web.page import routes as history
from mtmd.web.page.desk import Desk
from mtmd.web.served_model import ServedModel
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

if TYPE_CHECKING:
    from mtmd import Service

MAX_TOKENS = 1024  # of an answer, where the context has room for it


def register(
    app: Flask,
    service: Service,
    settings: ServerSettings,
    store: Store,
    model: ServedModel,
    budget: PictureBudget,
) -> None:
    desk = Desk(service, store, settings, budget)
    app.register_blueprint(history.blueprint(desk))
    app.register_blueprint(_blueprint(desk, model))


def _blueprint(desk: Desk, model: ServedModel) -> Blueprint:
    routes = Blueprint("pages", __name__)

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
        return {
            "model": model.name,
            "context": model.context,
            "vision": model.sees,
            "kept": desk.store.keeps,
            "max_tokens": min(MAX_TOKENS, model.context // 2),
            "images": desk.budget.limits.images,
            "image_bytes": desk.budget.limits.bytes,
        }

    @routes.get("/api/stats")
    def stats() -> Response:
        return jsonify(asdict(desk.service.stats()))

    @routes.get("/api/report")
    def warmup_report() -> str:
        """The warm-up report as a part of the diagnostics page."""
        report = model.warmup_report
        return render_template(
            "report.html", report=report, charts=charts.of(report), bytes=charts.readable_bytes
        )

    return routes
