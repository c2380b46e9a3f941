"""Models loaded and unloaded by hand: as llama.cpp's router has it, and for the page."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, jsonify
from pydantic import BaseModel, ConfigDict, Field

from mtmd.web.intake.body import json_body
from mtmd.web.intake.gate import Body, takes
from mtmd.web.models.choice import Listed
from mtmd.web.models.registry import Registry

UNLOADED_S = 30.0  # waited for the end of a model's process


class Named(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: Annotated[str, Field(max_length=512)]


def blueprint(registry: Registry) -> Blueprint:
    routes = Blueprint("models", __name__)

    @routes.get("/api/models")
    @takes(Body.NOTHING)
    def models() -> Any:
        """Return what the page's list of models shows."""
        return jsonify(models=[_shown(m) for m in registry.listed()], memory=registry.room())

    @routes.post("/models/load")
    @takes(Body.SMALL_JSON)
    def load() -> dict[str, bool]:
        """Answered at once; /api/models and /v1/models tell how far it is."""
        registry.load(json_body(Named).model)
        return {"success": True}

    @routes.post("/models/unload")
    @takes(Body.SMALL_JSON)
    def unload() -> dict[str, bool]:
        """Answered once its process has ended, or at once: then it goes once nobody uses it."""
        return {"success": registry.unload(json_body(Named).model, UNLOADED_S)}

    return routes


def _shown(model: Listed) -> dict[str, Any]:
    return {
        "name": model.name,
        "state": model.state,
        "kind": model.kind,
        "file_bytes": model.file_bytes,
        "memory_bytes": max(model.needs_bytes.values(), default=None),
        "context": model.context,
        "vision": model.sees,
        "audio": model.hears,
        "stage": model.stage,
        "progress": model.progress,
        "reason": model.reason,
        "room": model.room,
        "in_use": model.in_use,
    }
