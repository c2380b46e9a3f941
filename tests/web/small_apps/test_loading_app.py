"""The server before its model is there: bound, answering how far it is, then the model's."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from fake_service import FakeService

from mtmd.web.app import create_app
from mtmd.web.models.progress import OPENING, READING, WARMING, Loading
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.loading_app import create_loading_app


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def loading(clock):
    return Loading(lambda: clock[0])


@pytest.fixture
def client(loading):
    return create_loading_app(loading, ServerSettings()).test_client()


def test_how_far_it_is(client, loading, clock):
    for path in ("/ready", "/health"):
        result = client.get(path)
        assert (result.status_code, result.headers["Retry-After"]) == (503, "2")
        assert result.get_json() == {"status": "loading", "stage": OPENING, "progress": 0.0}
    read = [300]
    loading.warming(lambda: (read[0], 1000))
    clock[0] += 6
    result = client.get("/ready")
    assert result.get_json() == {"status": "loading", "stage": READING, "progress": 0.3}
    assert result.headers["Retry-After"] == "14"
    read[0] = 1  # it would take long; clients ask again before
    assert client.get("/ready").headers["Retry-After"] == "30"
    read[0] = 2000
    assert client.get("/ready").get_json() == {"status": "loading", "stage": WARMING, "progress": 1}
    refused = client.get("/v1/models").get_json()["error"]["message"]
    assert refused == "the model is being loaded (warming up); try again in 5 s"
    assert loading.share is None
    assert client.get("/version").status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/api/chat", "/v1/messages", "/metrics", "/x"]
)
def test_what_needs_the_model_is_told_to_try_again(client, path):
    for ask in (client.get, client.post, client.delete):
        result = ask(path, json={}) if ask is client.post else ask(path)
        assert result.status_code == 503 and result.headers["Retry-After"] == "2"
        body = result.get_json()
        if path.startswith("/api"):
            message = body["error"]
        else:
            message = body["error"]["message"]
            code = "overloaded_error" if path == "/v1/messages" else "server_error"
            assert body["error"]["type"] == code
        assert message == f"the model is being loaded ({OPENING}, 0%); try again in 2 s"


def test_a_browser_sees_it_and_asks_again(client):
    result = client.get("/c/1", headers={"Accept": "text/html"})
    assert result.status_code == 503 and "The model is being loaded" in result.text
    assert '<meta http-equiv="refresh" content="2">' in result.text


def test_other_hosts_and_pages_are_refused_as_ever(client):
    assert client.get("/version", headers={"Host": "evil.example"}).status_code == 403
    assert client.post("/x", headers={"Origin": "https://evil.example"}).status_code == 403


def test_it_answers_before_torch_is_read():
    code = (
        "import sys; from mtmd.web.server import Server; from mtmd.web.small_apps import loading_app;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_server_changes_from_one_to_the_other(loading):
    """On one connection: nobody is refused, nobody is told of the model too late."""
    settings, service = ServerSettings(port=0), FakeService()
    server = Server(create_loading_app(loading, settings), settings, bind(settings))
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    ask = Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with server.answering():
        with pytest.raises(HTTPError) as early:
            urlopen(ask)
        with early.value as refused:
            assert refused.code == 503
        server.use(create_app(service, settings))
        with urlopen(ask) as result:
            assert json.load(result)["object"] == "chat.completion"
    thread = threading.Thread(target=server.serve, args=(service.close,), daemon=True)
    thread.start()
    with urlopen(ask) as result, urlopen(f"{server.url}/ready") as ready:
        assert result.status == ready.status == 200
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
