from __future__ import annotations

import hmac
import json
import socket
from pathlib import Path

import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, png, post_chat, running

from mtmd import OptionError
from mtmd.web import api_keys as keys
from mtmd.web.rate_limit import RateLimit
from mtmd.web.settings import ServerSettings, is_loopback

KEY, OTHER = "a-long-enough-key", "another-such-key"
HI = '{"model": "fake", "messages": [{"role": "user", "content": "hi"}]}'


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "192.168.1.5",
        "example.org",
        "127.0.0.1.example.org",
        "localhost.example.org",
        "",
    ],
)
def test_others_are_let_in_only_with_a_key_or_in_so_many_words(host):
    with pytest.raises(OptionError, match="--api-key-file"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, api_keys=(KEY,)) and ServerSettings(
        host=host, insecure_no_auth=True
    )


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST.", "::1", "[::1]"]
)
def test_this_machine_needs_no_key(host):
    assert is_loopback(host) and ServerSettings(host=host).loopback


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"port": -1},
        {"queue": 0},
        {"rate_limit": -1},
        {"api_keys": ("short",)},
        {"api_keys": ("15-characters-.",)},
        {"api_keys": ("",)},
        {"api_keys": ("with a space in it",)},
        {"api_keys": ("ümlauts-in-it",)},
        {"cors_origins": ("example.org",)},
        {"cors_origins": ("https://example.org/",)},
        {"cors_origins": ("app://",)},
        {"cors_origins": ("https://*.example.org",)},
        {"allowed_hosts": ("example.org:8080",)},
        {"allowed_hosts": ("https://example.org",)},
        {"allowed_hosts": ("*example.org",)},
        {"allowed_hosts": ("",)},
        {"root_path": "mtmd"},
        {"root_path": "/mtmd/"},
        {"root_path": "//evil.example"},
        {"root_path": "/a b"},
        {"trusted_proxy": ("10.0.0.1/8",)},
        {"trusted_proxy": ("proxy.example",)},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(OptionError) as error:
        ServerSettings(**wrong)
    assert not any(key and key in str(error.value) for key in wrong.get("api_keys", ()))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {OTHER} {KEY}",
        "Bearer \udcff\udcfe",
        "Bearer " + "x" * 10000,
        f"bearer: {KEY}",
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/models",
        "/v1/files",
        "/v1/files/file-1",
        "/metrics",
        "/props",
        "/warmup",
        "/no/such/route",
        "/v1/chat/completions/input_tokens",
        "/api/conversations",
    ],
)
def test_without_a_key_of_the_server_there_is_nothing(header, path):
    client = client_for(FakeService(), api_keys=(KEY, OTHER))
    result = client.open(
        path,
        method="POST" if "completions" in path else "GET",
        headers={} if header is None else {"Authorization": header},
    )
    assert (result.status_code, result.get_json()["error"]["type"]) == (401, "authentication_error")
    assert result.headers["WWW-Authenticate"] == "Bearer"


def test_each_key_lets_in():
    client = client_for(FakeService(), api_keys=(KEY, OTHER))
    for key in (KEY, OTHER):
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        assert (
            client.get("/v1/models", headers={"Authorization": f"bearer  {key} "}).status_code
            == 200
        )


def test_the_page_and_the_sign_of_life_need_no_key():
    client = client_for(FakeService(), api_keys=(KEY,))
    assert client.get("/health").get_json() == {"status": "ok"}
    assert client.get("/openapi.json").status_code == 200


def test_keys_are_compared_in_constant_time_all_of_them(monkeypatch):
    compared = []
    monkeypatch.setattr(
        keys.hmac, "compare_digest", lambda a, b: compared.append(len(a)) or real(a, b)
    )
    client = client_for(FakeService(), api_keys=(KEY, OTHER))
    assert client.get("/v1/models", headers=bearer(KEY)).status_code == 200
    assert compared == [32, 32]


real = hmac.compare_digest


def test_what_one_key_uploads_another_does_not_see():
    client = client_for(FakeService(), api_keys=(KEY, OTHER))
    with (Path(__file__).parents[2] / "examples" / "shapes.png").open("rb") as file:
        id_ = client.post(
            "/v1/files", data={"purpose": "vision", "file": (file, "x.png")}, headers=bearer(KEY)
        ).get_json()["id"]
    assert client.get(f"/v1/files/{id_}", headers=bearer(KEY)).status_code == 200
    assert client.get(f"/v1/files/{id_}", headers=bearer(OTHER)).status_code == 404
    assert client.get("/v1/files", headers=bearer(OTHER)).get_json()["data"] == []
    ask = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, image_part(id_)]}]
    }
    assert client.post("/v1/chat/completions", json=ask, headers=bearer(OTHER)).status_code == 404
    assert client.post("/v1/chat/completions", json=ask, headers=bearer(KEY)).status_code == 200


def test_a_key_has_so_many_requests_a_minute():
    now = [100.0]
    limit = RateLimit(120, clock=lambda: now[0])
    assert [limit.take("a") for _ in range(12)] == [0.0] * 12
    assert limit.take("a") == pytest.approx(0.5)
    assert limit.take("b") == 0.0
    now[0] += 0.25
    assert limit.take("a") == pytest.approx(0.25)
    now[0] += 0.25
    assert limit.take("a") == 0.0 and limit.take("a") > 0
    now[0] += 3600
    assert [limit.take("a") > 0 for _ in range(13)] == [False] * 12 + [True]
    assert all(RateLimit(0).take("a") == 0.0 for _ in range(1000))
    few = RateLimit(3, clock=lambda: now[0])
    assert [few.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(20.0)]


def test_too_many_requests_are_told_when_to_come_again():
    client = client_for(FakeService(), api_keys=(KEY, OTHER), rate_limit=60)
    answers = [client.get("/v1/models", headers=bearer(KEY)) for _ in range(11)]
    assert [a.status_code for a in answers] == [200] * 10 + [429]
    assert (
        int(answers[-1].headers["Retry-After"]) == 1
        and answers[-1].get_json()["error"]["type"] == "rate_limit_error"
    )
    assert client.get("/v1/models", headers=bearer(OTHER)).status_code == 200


@pytest.mark.parametrize(
    "host, status",
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("localhost:1", 200),
        ("[::1]:8080", 200),
        ("127.0.0.2", 200),
        ("example.org", 403),
        ("127.0.0.1.example.org", 403),
        ("localhost.example.org:8080", 403),
        ("10.0.0.1", 403),
        ("0.0.0.0", 403),
        ("[::", 403),
        ("", 403),
        ("user@example.org", 403),
        ("localhost@example.org", 403),
        ("example.org#localhost", 403),
        ("[::ffff:10.0.0.1]", 403),
    ],
)
def test_a_name_that_only_resolves_to_this_machine_is_refused(host, status):
    client = client_for(FakeService())
    result = client.get("/v1/models", headers={"Host": host})
    assert result.status_code in ((status, 400) if status == 403 else (status,))


@pytest.mark.parametrize(
    "listens, allowed, host, status",
    [
        ("127.0.0.1", ("chat.example.org",), "chat.example.org", 200),
        ("127.0.0.1", ("chat.example.org",), "Chat.Example.org.:8443", 200),
        ("127.0.0.1", ("chat.example.org",), "localhost:8080", 200),
        ("127.0.0.1", ("chat.example.org",), "example.org", 403),
        ("127.0.0.1", ("chat.example.org",), "chat.example.org.evil", 403),
        ("127.0.0.1", ("*.example.org",), "a.b.example.org", 200),
        ("127.0.0.1", ("*.example.org",), "example.org", 403),
        ("127.0.0.1", ("*.example.org",), "evilexample.org", 403),
        ("127.0.0.1", ("*",), "anything", 200),
        ("127.0.0.1", ("host.docker.internal",), "host.docker.internal:8080", 200),
        ("0.0.0.0", ("chat.example.org",), "chat.example.org", 200),
        ("0.0.0.0", ("chat.example.org",), "10.0.0.7:8080", 403),
        ("0.0.0.0", ("chat.example.org",), "host.docker.internal", 403),
        ("127.0.0.1", (), "host.docker.internal:8080", 200),
        ("127.0.0.1", (), f"{socket.gethostname().partition('.')[0].upper()}.local.", 200),
        ("127.0.0.1", (), "evil.local", 403),
        ("127.0.0.1", (), f"evil.{socket.gethostname().partition('.')[0]}.local", 403),
        ("127.0.0.1", (), "metadata.google.internal", 403),
        ("127.0.0.1", (), "evil.host.docker.internal", 403),
        ("127.0.0.1", ("*.local",), "ollama.local", 200),
        ("127.0.0.1", (), "chat.localhost", 200),
        ("127.0.0.1", (), socket.gethostname(), 200),
        ("127.0.0.1", (), "internal", 403),
        ("127.0.0.1", (), "evilinternal", 403),
        ("127.0.0.1", (), "host.internal.example.org", 403),
        ("0.0.0.0", ("chat.example.org",), "127.0.0.1", 200),
    ],
)
def test_names_that_are_allowed_are_answered_to(listens, allowed, host, status):
    client = client_for(FakeService(), host=listens, allowed_hosts=allowed, insecure_no_auth=True)
    assert client.get("/v1/models", headers={"Host": host}).status_code == status
    assert client.get("/health", headers={"Host": host}).status_code == 200


def test_a_server_for_others_is_called_by_any_name():
    client = client_for(FakeService(), host="0.0.0.0", api_keys=(KEY,))
    assert (
        client.get("/v1/models", headers=bearer(KEY) | {"Host": "vision.example.org"}).status_code
        == 200
    )


@pytest.mark.parametrize(
    "origin, allowed, status",
    [
        (None, (), 200),
        ("http://localhost", (), 200),
        ("https://evil.example", (), 403),
        ("null", (), 403),
        ("http://localhost:9999", (), 403),
        ("localhost", (), 403),
        ("http://localhost.evil.example", (), 403),
        ("https://ok.example", ("https://ok.example",), 200),
        ("https://evil.example", ("https://ok.example",), 403),
        ("https://ok.example.evil", ("https://ok.example",), 403),
        ("https://evil.example", ("*",), 200),
        ("null", ("null",), 200),
        ("app://obsidian.md", ("app://obsidian.md",), 200),
        ("app://evil", ("app://obsidian.md",), 403),
        ("chrome-extension://abcdef", ("chrome-extension://abcdef",), 200),
        ("vscode-webview://1ab", ("vscode-webview://*",), 200),
        ("vscode-webviewer://1ab", ("vscode-webview://*",), 403),
    ],
)
def test_pages_of_other_origins_are_refused_unless_allowed(origin, allowed, status):
    service = FakeService()
    client = client_for(service, cors_origins=allowed)
    headers = {} if origin is None else {"Origin": origin}
    result = client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}]},
        headers=headers,
    )
    assert (result.status_code, len(service.tickets)) == (status, int(status == 200))
    granted = result.headers.get("Access-Control-Allow-Origin")
    assert granted == (None if status == 403 or not allowed else "*" if "*" in allowed else origin)
    assert "Access-Control-Allow-Credentials" not in result.headers


IMG = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    "site, how, path, status",
    [
        ("cross-site", IMG, "/api/export", 403),
        ("cross-site", IMG, "/metrics", 403),
        ("same-site", IMG, "/api/export", 403),  # another port of this machine
        ("cross-site", LINK, "/api/export", 403),
        ("cross-site", {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, "/", 403),
        ("cross-site", LINK, "/", 200),
        ("cross-site", LINK, "/c/0123", 200),
        ("same-origin", IMG, "/api/export", 200),
        ("none", LINK, "/api/export", 200),  # typed into the address bar
        (None, {}, "/api/export", 200),
    ],
)
def test_a_page_elsewhere_has_no_work_done_blindly(site, how, path, status):
    headers = how | ({"Sec-Fetch-Site": site} if site else {})
    assert client_for(FakeService()).get(path, headers=headers).status_code == status
    allowed = client_for(FakeService(), cors_origins=("https://ok.example",))
    origin = headers | {"Origin": "https://ok.example"}
    assert allowed.get(path, headers=origin).status_code == 200


def test_a_browser_may_ask_first_without_a_key():
    client = client_for(FakeService(), api_keys=(KEY,), cors_origins=("https://ok.example",))
    requested = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    result = client.options(
        "/v1/chat/completions", headers={"Origin": "https://ok.example"} | requested
    )
    assert (result.status_code, result.headers["Access-Control-Allow-Origin"]) == (
        204,
        "https://ok.example",
    )
    assert (
        "Authorization" in result.headers["Access-Control-Allow-Headers"]
        and "POST" in result.headers["Access-Control-Allow-Methods"]
    )
    assert (
        client.options(
            "/v1/chat/completions", headers={"Origin": "https://evil.example"} | requested
        ).status_code
        == 401
    )


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "application/jsonx",
        # browsers take each for its first part, which needs no preflight
        "text/plain; application/octet-stream",
        "text/plain;charset=application/json",
        "text/plain, application/octet-stream",
        "application/octet-stream, text/plain",
    ],
)
def test_what_a_form_can_send_is_no_request(kind):
    service = FakeService()
    result = client_for(service).post("/v1/chat/completions", data=HI, content_type=kind)
    assert (result.status_code, service.tickets) == (415, [])


BYTES = "application/octet-stream"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
@pytest.mark.parametrize("kind", ["application/json", BYTES, "Application/Octet-Stream; x=y"])
def test_a_program_may_send_json_as_bytes(path, kind):
    """LiteLLM's proxy does, with `ollama_chat/`."""
    service = FakeService()
    result = client_for(service).post(path, data=HI, content_type=kind, buffered=True)
    assert (result.status_code, len(service.tickets)) == (200, 1), result.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_page_of_another_origin_may_not_send_json_as_bytes(path):
    """Browsers ask first, and are told that they may not; one that did not ask is refused too."""
    service = FakeService()
    client = client_for(service)
    evil = {"Origin": "https://evil.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    asked = client.options(path, headers=evil | preflight)
    assert "Access-Control-Allow-Origin" not in asked.headers
    for sent in (evil, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}):
        assert client.post(path, data=HI, content_type=BYTES, headers=sent).status_code == 403
    assert service.tickets == []


def test_every_answer_carries_the_headers_that_browsers_heed():
    client = client_for(FakeService())
    answers = [
        client.get("/health"),
        client.get("/nothing"),
        post_chat(client, "hi"),
        post_chat(client, "hi", stream=True),
        client.post("/v1/files"),
        post_chat(client, "hi", image_part(data_url(png()))),
    ]
    for result in answers:
        assert result.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert (result.headers["X-Content-Type-Options"], result.headers["X-Frame-Options"]) == (
            "nosniff",
            "DENY",
        )
        assert (
            result.headers["Referrer-Policy"] == "no-referrer"
            and result.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        )
        assert "no-" in result.headers["Cache-Control"]
    assert len({result.headers["X-Request-Id"] for result in answers}) == len(answers)


@pytest.mark.parametrize("framing", ["Content-Length: 50000000", "Transfer-Encoding: chunked"])
def test_a_long_body_is_not_read_for_who_has_no_key(framing):
    with running(FakeService(), api_keys=(KEY,)) as server:
        for header, status in ((f"Bearer {KEY}x", 401), ("", 401), (f"Bearer {KEY}", 100)):
            lines = [
                "POST /v1/files HTTP/1.1",
                "Host: localhost",
                "Expect: 100-continue",
                f"Authorization: {header}",
                framing,
                "",
                "",
            ]
            with socket.create_connection((server.host, server.port), timeout=10) as sock:
                sock.sendall("\r\n".join(lines).encode())
                head, _, body = sock.recv(4096).decode().partition("\r\n\r\n")
                assert head.startswith(f"HTTP/1.1 {status}")
                assert (
                    status == 100
                    or json.loads(body or sock.recv(4096))["error"]["type"]
                    == "authentication_error"
                )


def test_a_body_over_the_limit_is_not_asked_for():
    with (
        running(FakeService()) as server,
        socket.create_connection((server.host, server.port), 10) as sock,
    ):
        sock.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nExpect: "
            b"100-continue\r\nContent-Length: 999999999\r\n\r\n"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
