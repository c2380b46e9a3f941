"""Describes what the small applications are made of: an application that lets in and refuses as the
large one does, a page with a few words, errors in the form of the interface that was asked. Loads
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flask import Response, g, json, render_template, request

from mtmd import __version__
from mtmd.web import access, errors, headers
from mtmd.web.errors import ApiError, in_form_of
from mtmd.web.intake.proxies import Proxies
from mtmd.web.intake.request_limits import Gate, GatedFlask
from mtmd.web.page import assets
from mtmd.web.settings import ServerSettings
from mtmd.web.telemetry import record

# of a form, beside its files; werkzeug reads 64 KiB at once, files too, and counts what is left
FORM_FIELD_BYTES = 128 << 10


def new_app(
    settings: ServerSettings, slots: int, count: Callable[[int, str | None], None] = lambda *_: None
) -> GatedFlask:
    """`slots`: what is answered at once; `count`: is told of each response. `app.gate` is its
    gate.
    """
    app = GatedFlask("mtmd.web", static_folder=None)
    app.config.update(
        MAX_CONTENT_LENGTH=settings.body_bytes,
        MAX_FORM_MEMORY_SIZE=FORM_FIELD_BYTES,
        MAX_FORM_PARTS=32,
    )
    app.json.sort_keys = False  # type: ignore[attr-defined]  # of flask's own provider
    headers.register(app, settings)
    record.register(app, count)
    access.register(app, settings)
    Gate(app, settings, slots, access.owner)
    errors.register(app)
    app.register_blueprint(assets.blueprint(assets.shipped()))
    app.wsgi_app = Proxies(app.wsgi_app, settings)  # type: ignore[method-assign]
    return app


def notice(title: str, lines: Sequence[str], again_s: int = 0) -> str:
    """A page. `again_s`: seconds until a browser asks again, 0 for never."""
    return render_template(
        "notice.html", version=__version__, title=title, lines=lines, again_s=again_s
    )


def in_its_form(error: ApiError) -> Response:
    """Return the error as clients of the requested address read errors."""
    body = in_form_of(request.path, error, g.request_id)
    return Response(json.dumps(body), error.status, error.headers, mimetype="application/json")
