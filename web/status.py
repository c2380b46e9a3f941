"""How the server is: whether it lives, what it is, what its warm-up found, its counters, and what
it can be asked.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response

from mtmd import WarmupReport, __version__
from mtmd.web import metrics
from mtmd.web.api.openapi import document
from mtmd.web.api.routes import Api
from mtmd.web.auth import without_key


def blueprint(api: Api, warmup: WarmupReport | None) -> Blueprint:
    """`warmup`: the report of the warm-up that ran before the server began, None where none ran."""
    routes = Blueprint("status", __name__)
    counted, reports = metrics.Metrics(api.service), [warmup] if warmup else []

    @routes.get("/health")
    @without_key
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/props")
    def props() -> dict[str, Any]:
        return _props(api)

    @routes.get("/warmup")
    def warmup_report() -> dict[str, Any]:
        if not reports:
            reports.append(api.service.model.warmup_report)
        return reports[0].asdict()

    @routes.get("/metrics")
    def counters() -> Response:
        return Response(counted.text(), content_type=metrics.CONTENT_TYPE)

    @routes.after_app_request
    def count(response: Response) -> Response:
        counted.count(response.status_code)
        return response

    @routes.get("/openapi.json")
    @without_key
    def openapi() -> dict[str, Any]:
        return document()

    return routes


def _props(api: Api) -> dict[str, Any]:
    media, settings = api.settings.media, api.settings
    return {
        "version": __version__,
        "model": api.service.model.name,
        "context": api.context,
        "vision": api.service.model.encoder is not None,
        "slots": api.service.stats().slots,
        "queue": settings.queue,
        "limits": {
            "images": media.images,
            "image_bytes": media.bytes,
            "image_pixels": media.pixels,
            "body_bytes": settings.body_bytes,
        },
        "media": {"remote": settings.allow_remote_media, "files": settings.media_path is not None},
    }
