"""Routes without `/v1`, as clients call them whose base address has none."""

from __future__ import annotations

from flask import Flask

_PREFIX = "/v1/"


def add_routes_without_v1(app: Flask) -> None:
    """Every route of `/v1/` also without it: the same view, within the same limits."""
    for rule in list(app.url_map.iter_rules()):
        if rule.rule.startswith(_PREFIX):
            app.add_url_rule(
                f"/{rule.rule.removeprefix(_PREFIX)}",
                rule.endpoint,
                app.view_functions[rule.endpoint],
                methods=rule.methods,
                provide_automatic_options=False,
            )
