"""What proxies say is believed where they are named, and paths are taken off."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import pytest
from fake_service import FakeService, until
from serving import client_for, raw_request, running, user

from mtmd.web.intake.proxies import client_of
from mtmd.web.settings import ConnectionLimits, ServerSettings

PROXY = ServerSettings(trusted_proxy=("10.0.0.0/8", "::1")).trusted_proxies
ASK = {"messages": [user("hi")]}


@pytest.mark.parametrize(
    ("given", "client"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("6.6.6.6, 203.0.113.7", "203.0.113.7"),
        ("203.0.113.7, 10.1.2.3", "203.0.113.7"),
        ("203.0.113.7:5555 , ::1", "203.0.113.7"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("::ffff:10.0.0.1", ""),
        ("10.0.0.1", ""),
        ("", ""),
        ("unknown", ""),
        ("203.0.113.7, <script>", ""),
    ],
)
def test_the_last_address_that_is_no_proxys_is_the_clients(given, client):
    assert client_of(given, PROXY) == client


@pytest.mark.parametrize("trusted", [True, False])
def test_what_proxies_say_is_believed_of_those_that_are_named(trusted, caplog):
    client = client_for(
        FakeService(), trusted_proxy=("10.0.0.9",), allowed_hosts=("chat.example.org",)
    )
    headers = {
        "X-Forwarded-For": "6.6.6.6, 203.0.113.7",
        "X-Forwarded-Host": "chat.example.org",
        "X-Forwarded-Proto": "https",
        "Origin": "https://chat.example.org",
        "Host": "127.0.0.1:8080",
    }
    with caplog.at_level(logging.INFO, "mtmd.access"):
        result = client.post(
            "/v1/chat/completions",
            json=ASK,
            headers=headers,
            environ_overrides={"REMOTE_ADDR": "10.0.0.9" if trusted else "10.0.0.8"},
        )
    assert result.status_code == (200 if trusted else 403)
    (record,) = caplog.records
    assert record.fields["client"] == ("203.0.113.7" if trusted else "10.0.0.8")


def test_a_name_that_a_proxy_passes_on_has_to_be_allowed():
    client = client_for(FakeService(), trusted_proxy=("127.0.0.1",))
    for name in ("evil.example", "evil.example, chat.example"):
        result = client.get("/v1/models", headers={"X-Forwarded-Host": name})
        assert result.get_json()["error"]["code"] == "unknown_host"


@pytest.mark.parametrize("prefix", ["/mtmd", ""])
def test_a_proxy_may_leave_the_path_or_take_it_off(prefix):
    client = client_for(FakeService(), root_path="/mtmd")
    assert client.get(f"{prefix}/v1/models").get_json()["data"][0]["id"] == "fake"
    assert client.post(f"{prefix}/v1/chat/completions", json=ASK).status_code == 200
    page = client.get(f"{prefix}/c/0123abcd").get_data(as_text=True)
    assert 'href="../static/' in page
    assert client.get("/mtmdx/v1/models").status_code == 404
    assert client.get(f"{prefix}/openapi.json").get_json()["servers"] == [{"url": "./"}]


@pytest.mark.parametrize("reported", [{"X-Forwarded-Prefix": "/mtmd"}, {}])
def test_the_path_alone_is_moved_to_where_links_are_right(reported):
    client = client_for(
        FakeService(), root_path="" if reported else "/mtmd", trusted_proxy=("::/0", "0.0.0.0/0")
    )
    result = client.get("/mtmd?a=b", headers=reported)
    assert (result.status_code, result.headers["Location"]) == (308, "/mtmd/?a=b")
    for hostile in ("//evil.example", "/\\evil", "https://evil.example", "/a\tb"):
        result = client.get("//evil.example", headers={"X-Forwarded-Prefix": hostile})
        assert "Location" not in result.headers or "evil" not in result.headers["Location"]


def test_a_body_is_held_to_its_routes_limit_under_a_path_too():
    with running(FakeService(), root_path="/mtmd") as server:
        long = {"messages": [user("x" * (1 << 17))]}
        with raw_request(server, long, "/mtmd/v1/chat/completions") as sock:
            assert sock.recv(12) == b"HTTP/1.1 400"  # more than the context holds
        with raw_request(server, long, "/mtmd/no/such") as sock:
            assert sock.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(("trusted", "saved"), [(("127.0.0.1",), 3), ((), 1)])
def test_a_trusted_proxy_has_as_many_connections_as_there_are(trusted, saved, monkeypatch):
    monkeypatch.setattr("mtmd.web.server.is_here", lambda _: False)
    limits = replace(ConnectionLimits(), per_address=1)
    with running(FakeService(), trusted_proxy=trusted, connections=limits) as server:
        address = server.host, server.port
        socks = [socket.create_connection(address, timeout=10) for _ in range(3)]
        assert until(lambda: len(server.connections) == saved)
        for sock in socks:
            sock.close()
