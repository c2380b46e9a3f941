"""One line of log for each request."""

from __future__ import annotations

import logging
import time

from flask import Flask, Response, g, request

log = logging.getLogger("mtmd.web")


def register(app: Flask) -> None:
    """After `headers.register`, which gives requests their ids."""

    @app.before_request
    def _begin() -> None:
        g.began = time.monotonic()

    @app.after_request
    def _finish(response: Response) -> Response:
        # The route and not the path, which a client chooses; nothing of the body.
        route = request.url_rule.rule if request.url_rule else "no route"
        log.info(
            "%s %s %s %s %d %.0f ms",
            g.request_id,
            caller.name if (caller := g.get("caller")) else "-",
            request.method,
            route,
            response.status_code,
            (time.monotonic() - g.began) * 1e3,
        )
        return response
