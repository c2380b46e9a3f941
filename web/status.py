"""Describes how the server is: whether it lives, what it is and allows, its warm-up report, its
counters.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, request

from mtmd import __version__
from mtmd.web.access import without_key
from mtmd.web.intake.request_limits import Body, takes
from mtmd.web.models.choice import Models, in_memory, state_of
from mtmd.web.settings import ServerSettings
from mtmd.web.telemetry import metrics


def blueprint(models: Models, settings: ServerSettings, counters: metrics.Metrics) -> Blueprint:
    routes = Blueprint("status", __name__)

    @routes.get("/health")
    @takes(Body.NOTHING)
    @without_key
    def health() -> tuple[dict[str, Any], int]:
        """Return it without the device, which may hang."""
        return state_of(models, "ok")

    @routes.get("/props")
    @takes(Body.NOTHING)
    def props() -> dict[str, Any]:
        media, slots = settings.media, models.slots
        model = models.find(request.args.get("model"))
        there = models.at_hand(model.name)
        return {
            # as llama.cpp's clients look for it
            "default_generation_settings": {"n_ctx": model.context, "params": model.usual_sampling},
            "total_slots": slots,
            "model_alias": model.name,
            "modalities": {"vision": model.sees, "video": model.sees, "audio": model.hears},
            "build_info": f"mtmd {__version__}",
            "chat_template": there.service.chat_template if there else "",
            "version": __version__,
            "model": model.name,
            "context": model.context,
            "vision": model.sees,
            **({"models": [m.name for m in models.listed()]} if models.many else {}),
            "slots": slots,
            "queue": settings.queue,
            "limits": {
                "images": media.images,
                "image_bytes": media.bytes,
                "image_pixels": media.pixels,
                "body_bytes": settings.body_bytes,
            },
            "media": {
                "remote": settings.allow_remote_media,
                "files": settings.media_path is not None,
            },
        }

    @routes.get("/warmup")
    @takes(Body.NOTHING)
    def warmup_report() -> dict[str, Any]:
        return in_memory(models).warmup_report.asdict()

    @routes.get("/metrics")
    @takes(Body.NOTHING)
    def prometheus() -> Response:
        return Response(counters.text(), content_type=metrics.CONTENT_TYPE)

    return routes
