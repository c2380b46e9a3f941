"""What the log and the metrics have of a request."""

from __future__ import annotations

import json
import logging
import re
from urllib.request import urlopen

import pytest
from fake_service import FakeService, until
from serving import client_for, post_chat, raw_request, running, user

from mtmd import MtmdError
from mtmd.web.telemetry.logs import JsonLines
from mtmd.web.telemetry.record import log

SECRET = "words-of-a-person"


@pytest.fixture
def lines(caplog):
    """The fields of each line of the access log."""
    caplog.set_level(logging.INFO, logger=log.name)

    def read():
        return [r.fields for r in caplog.records if r.name == log.name]

    return read


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_noted_at_its_end(lines, caplog, stream):
    client = client_for(FakeService())
    with post_chat(client, SECRET, stream=stream) as result:
        assert result.get_data()
    (line,) = lines()
    assert (line["status"], line["route"]) == (200, "/v1/chat/completions")
    assert (line["prompt_tokens"], line["output_tokens"], line["finish"]) == (7, 5, "stop")
    assert 0 <= line["first_token_ms"] <= line["duration_ms"]
    assert SECRET not in caplog.text and SECRET not in str(line)


def test_an_error_within_a_stream_is_noted_as_what_it_is(lines):
    service = FakeService()
    service.fails = MtmdError("a defect")
    client = client_for(service)
    with post_chat(client, "hi", stream=True) as result:
        assert result.status_code == 200 and b"internal_error" in result.get_data()
    (line,) = lines()
    assert line["status"] == 500 and "finish" not in line
    assert b'mtmd_http_responses_total{status="500"} 1.0' in client.get("/metrics").data


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_before_the_answer_is_499(lines, stream):
    service = FakeService(pace_s=60)
    with running(service) as server:
        sock = raw_request(server, {"messages": [user("hi")], "stream": stream})
        assert until(lambda: service.tickets)
        sock.close()
        assert until(lines)
        assert lines()[0]["status"] == 499 and service.tickets[0].cancelled.wait(10)
        with urlopen(f"{server.url}/metrics", timeout=10) as reported:
            assert b'mtmd_http_responses_total{status="499"} 1.0' in reported.read()


@pytest.mark.parametrize(
    "given, saved",
    [
        ("trace-01/abc:7", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("two words", False),
        ("<script>", False),
        ('"quoted"', False),
        ("", False),
    ],
)
def test_the_id_that_a_client_gives_is_kept_where_it_is_one(given, saved, lines):
    result = client_for(FakeService()).get("/v1/models", headers={"X-Request-Id": given})
    id_ = result.headers["X-Request-Id"]
    assert id_ == lines()[0]["request_id"]
    assert id_ == given if saved else re.fullmatch(r"req-[0-9a-f]{24}", id_)


def test_responses_are_kept_under_ids_of_their_own():
    client = client_for(FakeService())
    ask = {"json": {"input": "hi"}, "headers": {"X-Request-Id": "the-same"}}
    first, second = (client.post("/v1/responses", **ask).get_json()["id"] for _ in range(2))
    assert first != second and client.get(f"/v1/responses/{first}").status_code == 200


def test_paths_that_clients_choose_stand_in_no_log(lines, caplog):
    client = client_for(FakeService())
    for path in (f"/{SECRET}", f"/c/{SECRET}", f"/v1/files/{SECRET}", f"/v1/models?x={SECRET}"):
        client.get(path)
    assert SECRET not in caplog.text and SECRET not in str(lines())


def test_a_line_of_json_has_its_fields():
    record = logging.makeLogRecord(
        {"name": "mtmd.access", "levelname": "INFO", "msg": "a\nb", "fields": {"status": 200}}
    )
    line = JsonLines().format(record)
    reported = json.loads(line)
    assert "\n" not in line and reported.pop("time").endswith("Z")
    assert reported == {"level": "info", "logger": "mtmd.access", "message": "a\nb", "status": 200}
