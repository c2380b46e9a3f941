"""The diagnostics page: what the service does now, and the warm-up report."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

from flask import Blueprint, Response, jsonify, render_template

from mtmd import Service, WarmupReport
from mtmd.bench.measure import resident_bytes
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
        now = {"fault": str(fault) if fault else None, **_machine(model.warmup_report)}
        return jsonify(asdict(service.stats()) | now)

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


def _machine(report: WarmupReport) -> dict[str, Any]:
    """What this process takes of the machine, and `alone_tokens_s`: what one answer gets where it
    has all of it, as the warm-up measured; None where it ran nothing.
    """
    alone = [1e3 / c.steady_ms for c in report.checks if c.graph == "decoder" and c.steady_ms > 0]
    return {
        "resident_bytes": resident_bytes(),
        "cpu_seconds": time.process_time(),
        "cpus": os.cpu_count(),
        "alone_tokens_s": max(alone, default=None),
    }
