"""The diagnostics page: what the service does now, and the warm-up report."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict
from typing import Any

from flask import Blueprint, Response, jsonify, render_template, request

from mtmd import DeviceError, MtmdError, ServiceStats, WarmupReport
from mtmd.base.cores import usable_cores
from mtmd.base.process_memory import resident_bytes
from mtmd.service.decode_speed import decode_speed, step_bytes
from mtmd.web.access import without_key
from mtmd.web.intake.request_limits import Body, takes
from mtmd.web.models.choice import Models, in_memory
from mtmd.web.page import charts
from mtmd.web.page.verdict import verdict
from mtmd.web.served_model import ServedModel

log = logging.getLogger("mtmd.web")
NO_MODEL = {
    "state": "none",
    "title": "No model is in memory",
    "summary": "The first question to one loads it; so does the list of models on the chat page.",
    "findings": [],
    "checked": False,
    "speed": "",
}


class _Ceiling:
    """Describes how fast memory is read, by device, with nothing else going on in this process."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[str, float | None] = {}
        self._measuring = threading.Lock()

    def of(self, model: ServedModel, measure: bool) -> float | None:
        """Bytes/s; None where nobody has measured it, or it says nothing about this model. Raises
        DeviceError.
        """
        report = model.warmup_report
        if not step_bytes(report):
            return None
        with self._measuring:
            if measure and report.device not in self._known:
                self._measure(model, report.device)
            return self._known.get(report.device)

    def _measure(self, model: ServedModel, device: str) -> None:
        """Measure a model. What another model was doing meanwhile would be taken for a slow memory:
        then it is measured another time.
        """
        before = self._work()
        if before is None:
            return
        try:
            rate = model.service.read_rate(device)
        except DeviceError:
            raise
        except MtmdError as error:
            if self._models.at_hand(model.name) is not model:  # it was unloaded meanwhile
                return
            log.warning("how fast the memory of %s is cannot be measured: %s", device, error)
            self._known[device] = None  # each try takes the device from those who are answered
            return
        if self._work() == before:
            self._known[device] = rate

    def _work(self) -> tuple[int, int] | None:
        """Requests and loads that this process has begun; None while any of them goes on."""
        models = self._models
        if models.busy or models.loading() is not None:
            return None
        requests = sum(measured.stats.requests for measured in models.measured())
        return requests, sum(life.loads + life.failures for life in models.lives().values())


def blueprint(models: Models) -> Blueprint:
    routes, ceiling = Blueprint("diagnostics", __name__), _Ceiling(models)

    @routes.get("/diagnostics")
    @takes(Body.NOTHING)
    @without_key
    def diagnostics_page() -> str:
        return render_template("diagnostics.html")

    @routes.get("/api/stats")
    @takes(Body.NOTHING)
    def stats() -> Response:
        """Return the counters, of several models those of the one that was used last, or
        `?model=NAME`.
        """
        fault, model = models.fault, models.at_hand(request.args.get("model"))
        counted = model.service.stats() if model else ServiceStats(slots=models.slots)
        reported = {"fault": str(fault) if fault else None, "model": model.name if model else None}
        machine = _machine(model.warmup_report if model else None, counted)
        return jsonify(asdict(counted) | reported | machine)

    @routes.get("/api/verdict")
    @takes(Body.NOTHING)
    def show_verdict() -> Response:
        """Return where no model is in memory, there is nothing to judge: `state` is "none". With
        `?speed=1` the machine's memory is measured, once, where nobody is being answered.
        """
        fault, model = models.fault, models.at_hand(request.args.get("model"))
        if model is None:
            return jsonify(NO_MODEL)
        rate = ceiling.of(model, bool(request.args.get("speed")) and fault is None)
        report = model.warmup_report
        speed = decode_speed(report, rate) if rate else None
        return jsonify(verdict(report, str(fault) if fault else None, speed).asdict())

    @routes.get("/api/report.txt")
    @takes(Body.NOTHING)
    def report_text() -> Response:
        """Return the report as `mtmd warmup` prints it, to be copied."""
        return Response(str(in_memory(models).warmup_report), mimetype="text/plain")

    @routes.get("/api/report")
    @takes(Body.NOTHING)
    def report() -> str:
        """The warm-up report as a part of the page."""
        report = in_memory(models).warmup_report
        return render_template(
            "report.html", report=report, charts=charts.of(report), bytes=charts.readable_bytes
        )

    return routes


def _machine(report: WarmupReport | None, counted: ServiceStats) -> dict[str, Any]:
    """Return what this process and the engine's take of the machine, and `alone_tokens_s`: what one
    answer gets where it has all of it, as the warm-up measured; None where it ran nothing.
    """
    checks = report.checks if report else ()
    alone = [1e3 / c.best_ms for c in checks if c.graph == "decoder" and c.best_ms > 0]
    own = resident_bytes()
    return {
        "resident_bytes": None if own is None else own + counted.engine_bytes,
        "cpu_seconds": time.process_time() + counted.engine_cpu_seconds,
        "cpus": usable_cores().usable,
        "alone_tokens_s": max(alone, default=None),
    }
