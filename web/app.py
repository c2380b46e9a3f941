"""Puts the application together: both products, the adapters beside them, and what every request
passes through.
"""

from __future__ import annotations

from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from flask import Request, g, request

from mtmd import WarmupReport
from mtmd.web import access, errors, headers, status
from mtmd.web.answering.answer import Answering
from mtmd.web.clients import group_of
from mtmd.web.intake.fetch_media import Fetcher
from mtmd.web.intake.media import Media
from mtmd.web.intake.proxies import Proxies
from mtmd.web.intake.request_limits import Gate, GatedFlask
from mtmd.web.intake.uploads import Uploads
from mtmd.web.interfaces import (
    anthropic,
    embeddings,
    files,
    llama_cpp,
    ollama,
    openai,
    rerank,
    responses,
    transcription,
)
from mtmd.web.interfaces.stored_responses import StoredResponses
from mtmd.web.interfaces.without_v1 import add_routes_without_v1
from mtmd.web.models import routes as several
from mtmd.web.models.choice import Models, OneModel
from mtmd.web.models.registry import Registry
from mtmd.web.page import assets, diagnostics
from mtmd.web.page import routes as page
from mtmd.web.page.chat import Chat
from mtmd.web.served_model import ServedModel
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store
from mtmd.web.telemetry import record
from mtmd.web.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from mtmd import Service

# of a form, beside its files; werkzeug reads 64 KiB at once, files too, and counts what is left
FORM_FIELD_BYTES = 128 << 10


def _client() -> str:
    """Return the client that has sent this request: the owner of its key, or, where no key is, an
    address.
    """
    caller = g.get("caller")
    return caller.owner if caller else group_of(request.remote_addr or "")


class _Request(Request):
    def _get_file_stream(self, *_: Any, **__: Any) -> IO[bytes]:
        """Uploads are read into memory anyway; werkzeug's temporary files stay open where a form is
        refused half-read.
        """
        return BytesIO()


def create_app(
    service: Service,
    settings: ServerSettings,
    store: Store | None = None,
    *,
    warmup: WarmupReport | None = None,
) -> GatedFlask:
    """`store`: of conversations, None to keep them no longer than the server lives. `warmup`: the
    report to show, None for one that is made without a run.
    """
    model = ServedModel(
        service, warmup, settings.aliases, any_name=settings.any_model, preset=settings.answers
    )
    return _create(OneModel(model), settings, store)


def create_app_of_many(
    registry: Registry, settings: ServerSettings, store: Store | None = None
) -> GatedFlask:
    """Do what `create_app` does, for several models."""
    app = _create(registry, settings, store)
    registry.register(app)
    app.register_blueprint(several.blueprint(registry, settings.may_add_models))
    return app


def _create(models: Models, settings: ServerSettings, store: Store | None) -> GatedFlask:
    app = GatedFlask("mtmd.web", static_folder=None)
    app.request_class = _Request
    app.config.update(
        MAX_CONTENT_LENGTH=settings.body_bytes,
        MAX_FORM_MEMORY_SIZE=FORM_FIELD_BYTES,
        MAX_FORM_PARTS=32,
    )
    app.json.sort_keys = False  # type: ignore[attr-defined]  # of flask's own provider
    headers.register(app, settings)
    counters = Metrics(models)
    record.register(app, counters.count)
    access.register(app, settings)
    gate = Gate(app, settings, models.slots, _client)
    errors.register(app)
    budget = gate.budget
    keys = access.keys_of(app)
    uploads = Uploads(settings.upload_bytes, owners=lambda: keys.owners, tag=settings.tag)
    fetcher = Fetcher() if settings.allow_remote_media else None
    media = Media(budget, uploads, fetcher, settings.media_path)
    answering = Answering(models, media, settings.unknown_fields)
    for interface in (openai, transcription, embeddings, rerank, ollama, anthropic, llama_cpp):
        app.register_blueprint(interface.blueprint(answering))
    app.register_blueprint(files.blueprint(uploads, budget))
    stored = StoredResponses(lambda: keys.owners)
    app.register_blueprint(responses.blueprint(answering, stored))
    app.register_blueprint(status.blueprint(models, settings, counters))
    app.register_blueprint(assets.blueprint(assets.shipped()))
    store = store or Store(None)
    chat = Chat(answering, store, settings, budget)
    app.register_blueprint(page.blueprint(chat))
    app.register_blueprint(diagnostics.blueprint(models))
    add_routes_without_v1(app)
    counters.add_stored("pictures under way", lambda: budget.stored_bytes)
    counters.add_stored("responses", lambda: stored.stored_bytes)
    counters.add_stored("page pictures", lambda: chat.pictures.stored_bytes)
    if not store.keeps:
        counters.add_stored("conversations", lambda: store.picture_totals().bytes)
    app.wsgi_app = Proxies(app.wsgi_app, settings)  # type: ignore[method-assign]
    return app
