"""The server of a model that gives vectors of texts and pictures, or scores of documents, and a
clear no to whatever wants answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from flask import Response

from mtmd import WarmupReport, __version__
from mtmd.web import access, status
from mtmd.web.access import without_key
from mtmd.web.answering.answer import Answering
from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch_media import Fetcher
from mtmd.web.intake.media import Media
from mtmd.web.intake.request_limits import Body, GatedFlask, takes
from mtmd.web.intake.uploads import Uploads
from mtmd.web.interfaces import embeddings, files, rerank
from mtmd.web.interfaces.without_v1 import add_routes_without_v1
from mtmd.web.models.choice import OneModel, state_of
from mtmd.web.served_model import ServedModel
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.parts import in_its_form, new_app, notice
from mtmd.web.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from mtmd import Service
    from mtmd.embedding.service import RetrievalService

WRITES = (
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/apply-template",
)
OLLAMAS = ("/api/embed", "/api/embeddings")


def create_retrieval_app(
    service: RetrievalService, settings: ServerSettings, warmup: WarmupReport | None = None
) -> GatedFlask:
    """`warmup`: the report to show, None for one that is made without a run."""
    seen = cast("Service", service)  # as far as model, status and metrics ask
    model = ServedModel(seen, warmup, settings.aliases, any_name=settings.any_model)
    models = OneModel(model)
    counters = Metrics(models)
    app = new_app(settings, service.stats().slots, counters.count)
    keys, budget = access.keys_of(app), app.gate.budget
    uploads = Uploads(settings.upload_bytes, owners=lambda: keys.owners)
    counters.add_stored("pictures under way", lambda: budget.stored_bytes)
    fetcher = Fetcher() if settings.allow_remote_media else None
    media = Media(budget, uploads, fetcher, settings.media_path)
    answering = Answering(models, media, settings.unknown_fields)
    vectors = service.gives == "vectors"
    app.register_blueprint(embeddings.blueprint(answering, service if vectors else None))
    app.register_blueprint(rerank.blueprint(answering, service if service.ranks else None))
    app.register_blueprint(files.blueprint(uploads, budget))
    app.register_blueprint(status.blueprint(models, settings, counters))
    _model_routes(app, service, model)
    _refusals(app, model, service.gives)
    add_routes_without_v1(app)
    return app


def _model_routes(app: GatedFlask, service: RetrievalService, model: ServedModel) -> None:
    def described(name: str) -> dict[str, Any]:
        own: dict[str, Any] = {"context": model.context, "vision": model.sees}
        own |= {"gives": service.gives}
        if service.width is not None:
            own["embedding_width"] = service.width
        return {
            "id": name,
            "object": "model",
            "created": int(model.since),
            "owned_by": "mtmd",
            "mtmd": own,
        }

    @app.get("/v1/models")
    @takes(Body.NOTHING)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in model.names]}

    @app.get("/v1/models/<path:name>")
    @takes(Body.NOTHING)
    def one_model(name: str) -> dict[str, Any]:
        if not model.answers_to(name):
            raise ApiError(404, "there is no such model", param="model", code="model_not_found")
        return described(model.called(name))

    @app.get("/version")
    @takes(Body.NOTHING)
    @without_key
    def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/ready")
    @takes(Body.NOTHING)
    @without_key
    def ready() -> tuple[dict[str, Any], int]:
        return state_of(OneModel(model), "ready")

    @app.get("/")
    @takes(Body.NOTHING)
    @without_key
    def page() -> str:
        if service.gives == "scores":
            return notice(
                "This server gives scores",
                (
                    f"{model.name} is a reranker: it says how relevant documents are to a query. "
                    "It gives no answers, so there is no chat.",
                    'POST /v1/rerank takes {"query": "a text", "documents": ["a text", {"image": '
                    '"data:image/png;base64,..."}]}; docs/api.md says more.',
                ),
            )
        return notice(
            "This server gives vectors",
            (
                f"{model.name} is a dual encoder: pictures and texts become "
                f"vectors of {service.width} numbers in one space. It gives no "
                "answers, so there is no chat.",
                'POST /v1/embeddings takes {"input": ["a text", {"image": "data:image/png;base64,'
                '..."}]}; docs/api.md says more.',
            ),
        )


def _refusals(app: GatedFlask, model: ServedModel, gives: str) -> None:
    route = "/v1/embeddings" if gives == "vectors" else "/v1/rerank"

    @takes(Body.JSON_WITH_PICTURES)
    def refuse() -> Response:
        return in_its_form(
            ApiError(
                400,
                f"{model.name!r} gives {gives} (POST {route}), not answers; serve a model that "
                "answers",
                param="model",
                code="no_answers",
            )
        )

    @takes(Body.JSON_WITH_PICTURES)
    def refuse_ollamas() -> Response:
        return in_its_form(
            ApiError(
                400,
                f"{model.name!r} gives {gives} at POST {route}, for texts and pictures; Ollama's "
                "form is not supported",
                code="no_ollama_embeddings",
            )
        )

    for path in OLLAMAS:
        app.add_url_rule(path, f"refused {path}", refuse_ollamas, methods=["POST"])
    for path in WRITES:
        app.add_url_rule(path, f"refused {path}", refuse, methods=["POST"])
