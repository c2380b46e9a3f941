from __future__ import annotations

import json
import re
from dataclasses import fields
from urllib.request import urlopen

from failing_backend import FailingDevice
from fake_service import CONTEXT, FakeService
from prometheus_client.parser import text_string_to_metric_families
from serving import client_for, post_chat, raw_request, running

from mtmd import DeviceError, Model
from mtmd.checkpoint.open import open_checkpoint
from mtmd.loading import DEMO_MODEL
from mtmd.options.load import LoadOptions
from mtmd.service.service import ServiceStats
from mtmd.web.telemetry import metrics


def test_every_number_of_the_service_is_a_metric():
    reported = {*metrics.NOW, *metrics.SINCE_START, *metrics.MILLISECONDS}
    assert reported == {field.name for field in fields(ServiceStats)}


def test_metrics_are_those_of_the_service():
    service = FakeService()
    client = client_for(service)
    post_chat(client, "hi")
    service.waiting = 7
    result = client.get("/metrics")
    assert result.content_type.startswith("text/plain")
    values = {
        s.name: s.value
        for family in text_string_to_metric_families(result.get_data(as_text=True))
        for s in family.samples
    }
    assert (
        values["mtmd_waiting"],
        values["mtmd_requests_total"],
        values["mtmd_decode_seconds_total"],
        values["mtmd_slots"],
        values["mtmd_device_failed"],
        values["mtmd_build_info"],
    ) == (7, 1, 1.5, 4, 0, 1)
    assert values["mtmd_http_responses_total"] == 1 and all(
        name.startswith("mtmd_") for name in values
    )


def test_props_tell_what_the_server_is_and_allows():
    result = client_for(FakeService(), queue=9).get("/props").get_json()
    assert (
        result["model"],
        result["context"],
        result["queue"],
        result["slots"],
        result["vision"],
    ) == ("fake", CONTEXT, 9, 4, True)
    assert result["limits"]["images"] == 32 and result["media"] == {"remote": False, "files": False}


def test_the_warm_up_report_is_told():
    reported = client_for(FakeService()).get("/warmup").get_json()
    assert (reported["model"], reported["device"], reported["checks"]) == ("fake", "cpu", [])


def test_every_documented_route_is_there_and_every_route_for_programs_is_documented():
    client = client_for(FakeService())
    paths = client.get("/openapi.json").get_json()["paths"]
    documented = {
        (path, method.upper())
        for path, item in paths.items()
        for method in item
        if method != "parameters"
    }
    rules = [
        r
        for r in client.application.url_map.iter_rules()
        if r.endpoint.split(".")[0]
        in ("openai", "transcription", "files", "status", "embeddings", "rerank")
        and r.rule not in ("/openapi.json", "/docs")
    ]
    versioned = {r.rule for r in rules if r.rule.startswith("/v1/")}
    rules = [r for r in rules if f"/v1{r.rule}" not in versioned]  # the same, without /v1
    names = {"<path:name>": "{id}", "<id_>": "{id}"}
    there = {
        (path, method)
        for r in rules
        for method in r.methods - {"HEAD", "OPTIONS"}
        for path in [_named(r.rule, names)]
    }
    assert there == documented


def test_the_page_of_the_interface_has_every_operation_and_what_it_takes():
    page = client_for(FakeService()).get("/docs").get_data(as_text=True)
    for words in ("POST /v1/chat/completions", "GET /v1/models/{id}", "DELETE /v1/files/{id}"):
        assert f"<code>{words}</code>" in page
    for field, kind in (("messages", "list of Message"), ("top_p", "number from 0 to 1")):
        assert re.search(rf"<code>{field}</code>[^<]*</dt><dd>{kind}", page), field


def test_a_fault_is_told_and_everything_but_answers_goes_on():
    service = FakeService()
    client = client_for(service)
    service.fault = service.refuses = DeviceError("the device hangs; start the process again")
    result = client.get("/health")
    assert result.status_code == 503 and result.get_json() == {
        "status": "failed",
        "reason": "the device hangs; start the process again",
    }
    for path in ("/metrics", "/props", "/warmup", "/v1/models", "/api/conversations"):
        assert client.get(path).status_code == 200
    assert "mtmd_device_failed 1.0" in client.get("/metrics").get_data(as_text=True)
    for path in ("/api/stats", "/api/about"):
        assert client.get(path).get_json()["fault"] == str(service.fault)
    result = post_chat(client, "hi")
    assert result.status_code == 503 and result.get_json()["error"] == {
        "message": "the device hangs; start the process again",
        "type": "server_error",
        "param": None,
        "code": "device_failed",
    }


def test_a_fault_in_mid_answer_ends_the_stream_with_it():
    service = FakeService()
    service.fails = DeviceError("the device hangs")
    chunks = post_chat(client_for(service), "hi", stream=True).get_data(as_text=True)
    assert '"code": "device_failed"' in chunks and chunks.endswith("data: [DONE]\n\n")


def test_what_needs_no_device_is_answered_while_it_is_stuck():
    """And the answer that was under way is given when it goes on."""
    device = FailingDevice()
    model = Model(open_checkpoint(DEMO_MODEL), LoadOptions(context=256), [device])
    with running(model.service) as server:
        device.hang()
        with raw_request(server, {"messages": [{"role": "user", "content": "hi"}]}) as waiting:
            assert device.entered.wait(20)
            for path in (
                "/health",
                "/metrics",
                "/props",
                "/warmup",
                "/v1/models",
                "/api/stats",
                "/api/report",
                "/api/conversations",
            ):
                with urlopen(f"{server.url}{path}", timeout=20) as result:
                    assert result.status == 200
            with urlopen(f"{server.url}/api/stats", timeout=20) as result:
                assert json.load(result)["running"] == 1
            device.gate.set()
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")


def _named(rule, names):
    for ours, documented in names.items():
        rule = rule.replace(ours, documented)
    return rule
