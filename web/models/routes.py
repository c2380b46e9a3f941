"""Models loaded and unloaded by hand: as llama.cpp's router has it, and for the page."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, jsonify
from pydantic import BaseModel, ConfigDict, Field

from mtmd import ModelError
from mtmd.checkpoint.collection import source_on_hub
from mtmd.web.errors import ApiError
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.typed_body import json_body
from mtmd.web.models.choice import Listed
from mtmd.web.models.registry import Registry

UNLOADED_S = 30.0  # waited for the end of a model's process


class Named(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: Annotated[str, Field(max_length=512)]


def blueprint(registry: Registry, may_add: bool) -> Blueprint:
    """`may_add`: clients may have models fetched that nobody has named at the start."""
    routes = Blueprint("models", __name__)

    @routes.get("/api/models")
    @takes(Body.NOTHING)
    def models() -> Any:
        """Return what the page's list of models shows."""
        listed = [_shown(m) for m in registry.listed()]
        return jsonify(models=listed, memory=registry.room(), may_add=may_add)

    @routes.post("/models/add")
    @takes(Body.SMALL_JSON, Work.ANSWER)
    def add() -> dict[str, bool]:
        """Answered once the hub has said that there is such a model, which is fetched then."""
        name = json_body(Named).model
        if not may_add:
            reason = "this server adds no models; its option --add-models lets clients do so"
            raise ApiError(403, reason, code="adding_denied")
        try:
            source = source_on_hub(name)
        except ModelError as error:
            raise ApiError(400, str(error), param="model", code="not_added") from error
        registry.add(source)
        return {"success": True}

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
