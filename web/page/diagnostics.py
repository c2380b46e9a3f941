"""The diagnostics page: what the service does now, and the warm-up report."""

from __future__ import annotations

from dataclasses import asdict

from flask import Blueprint, Response, jsonify, render_template

from mtmd import Service
from mtmd.web.auth import without_key
from mtmd.web.intake.gate import Body, takes
from mtmd.web.page import charts
from mtmd.web.page.verdict import verdict
from mtmd.web.served_model import ServedModel


def blueprint(service: Service, model: ServedModel) -> Blueprint:
    routes = Blueprint("diagnostics", __name__)

    @routes.get("/diagnostics")
    @takes(Body.NOTHING)
    @without_key
    def diagnostics_page() -> str:
        return render_template("diagnostics.html")

    @routes.get("/api/stats")
    @takes(Body.NOTHING)
    def stats() -> Response:
        fault = service.fault
        return jsonify(asdict(service.stats()) | {"fault": str(fault) if fault else None})

    @routes.get("/api/verdict")
    @takes(Body.NOTHING)
    def show_verdict() -> Response:
        fault = service.fault
        return jsonify(verdict(model.warmup_report, str(fault) if fault else None).asdict())

    @routes.get("/api/report.txt")
    @takes(Body.NOTHING)
    def report_text() -> Response:
        """As `mtmd warmup` prints it, to be copied."""
        return Response(str(model.warmup_report), mimetype="text/plain")

    @routes.get("/api/report")
    @takes(Body.NOTHING)
    def report() -> str:
        """The warm-up report as a part of the page."""
        report = model.warmup_report
        return render_template(
            "report.html", report=report, charts=charts.of(report), bytes=charts.readable_bytes
        )

    return routes
