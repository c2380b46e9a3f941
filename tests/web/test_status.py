from __future__ import annotations

from dataclasses import fields

from fake_service import CONTEXT, FakeService
from prometheus_client.parser import text_string_to_metric_families
from serving import client_for, post_chat

from mtmd.service.service import ServiceStats
from mtmd.web import metrics


def test_every_number_of_the_service_is_a_metric():
    told = {*metrics.NOW, *metrics.SINCE_START, *metrics.MILLISECONDS}
    assert told == {field.name for field in fields(ServiceStats)}


def test_metrics_are_those_of_the_service():
    service = FakeService()
    client = client_for(service)
    post_chat(client, "hi")
    service.waiting = 7
    found = client.get("/metrics")
    assert found.content_type.startswith("text/plain")
    values = {
        s.name: s.value
        for family in text_string_to_metric_families(found.get_data(as_text=True))
        for s in family.samples
    }
    assert (
        values["mtmd_waiting"],
        values["mtmd_requests_total"],
        values["mtmd_decode_seconds_total"],
        values["mtmd_slots"],
    ) == (7, 1, 1.5, 4)
    assert values["mtmd_http_responses_total"] == 1 and all(
        name.startswith("mtmd_") for name in values
    )


def test_props_tell_what_the_server_is_and_allows():
    found = client_for(FakeService(), queue=9).get("/props").get_json()
    assert (found["model"], found["context"], found["queue"], found["slots"], found["vision"]) == (
        "fake",
        CONTEXT,
        9,
        4,
        True,
    )
    assert found["limits"]["images"] == 32 and found["media"] == {"remote": False, "files": False}


def test_the_warm_up_report_is_told():
    assert client_for(FakeService()).get("/warmup").get_json() == {"model": "fake", "device": "cpu"}


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
        if r.endpoint.split(".")[0] in ("openai", "files", "status") and r.rule != "/openapi.json"
    ]
    names = {"<path:name>": "{id}", "<id_>": "{id}"}
    there = {
        (path, method)
        for r in rules
        for method in r.methods - {"HEAD", "OPTIONS"}
        for path in [_named(r.rule, names)]
    }
    assert there == documented


def _named(rule, names):
    for ours, documented in names.items():
        rule = rule.replace(ours, documented)
    return rule
