from __future__ import annotations

import http.server
import itertools
import socket
import threading
import time

import pytest
from fake_service import FakeService
from serving import client_for, image_part, png, post_chat

from mtmd.prompt import fetch_url as fetch
from mtmd.prompt.fetch_url import check_url, is_public
from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch_media import Fetcher

PICTURE = png(30, 20)
PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.1.1",
    "100.64.0.1",
    "100.127.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:8.8.8.8",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001::1",
    "2001:db8::1",
    "100::1",
    "::ffff:0:8.8.8.8",
    "::ffff:0:127.0.0.1",
    "3fff::1",
    "2002:a9fe:a9fe::1",
    "not an address",
    "",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_the_internets_are_denied(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "93.184.216.34",
        "172.15.0.1",
        "172.32.0.1",
        "100.63.0.1",
        "100.128.0.1",
        "2606:4700::1111",
        "2a00:1450:4001::1",
    ],
)
def test_addresses_of_the_internet_are_allowed(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "localhost",
        "LOCALHOST",
        "3232235777",
        "0xA9FEA9FE",
        "[64:ff9b::7f00:1]",
    ],
)
def test_no_way_to_write_an_inner_address_is_connected_to(host, monkeypatch):
    monkeypatch.setattr(fetch, "_connect", None)
    with pytest.raises(ApiError, match="could not be fetched"):
        Fetcher().fetch(f"http://{host}/", "here", 1000, time.monotonic() + 5)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.test/x",
        "file:///etc/passwd",
        "gopher://a.test/",
        "http://",
        "http:///x",
        "http://user@a.test/",
        "http://user:pass@a.test/",
        "http://a.test:22/",
        "http://a.test:8080/",
        "https://a.test:80/",
        "http://a.test:443/",
        "http://a.test:0/",
        "http://a.test:99999/",
        "http://a.test:x/",
        "http://a.test:/",
        "http://a.test\\@b.test/",
        "http://a.test\t/",
        "http://a.test/\r\nHost: b",
        "http://a b.test/",
        "http://ä.test/",
        "http://①②⑦.⓪.⓪.①/",
        "http://a_b.test/",
        "http://[::1/",
        "http://[fe80::1%25eth0]/",
        "http://a.test%00.b/",
        "http://a.test#@b.test:1/x",
        "http://" + "a" * 3000,
        "//a.test/x",
        "HTTP",
        "",
        "http://a.test,b.test/",
        "http://127.0.0.1:80@a.test/",
    ],
)
def test_addresses_of_a_strange_form_are_not_asked(url, monkeypatch):
    requested = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: requested.append(host) or [])
    with pytest.raises(ApiError):
        Fetcher().fetch(url, "here", 1000, time.monotonic() + 5)
    assert requested in ([], ["a.test"]) and (not requested or "#" in url)


def test_usual_addresses_are_taken_apart():
    assert check_url("https://a.test/x?y=1").hostname == "a.test"
    assert check_url("HTTP://A.test:80/").hostname == "a.test"


class Site(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    log: list[tuple[str, str]]
    stop: threading.Event

    def do_GET(self):
        self.log.append((self.headers["Host"], self.path))
        getattr(self, "at_" + self.path.partition("?")[0].strip("/").partition("/")[0])()

    def send(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in (
            {"Content-Length": str(len(body))}
            | {k.replace("_", "-"): v for k, v in headers.items()}
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def at_picture(self):
        self.send(PICTURE, Content_Type="text/html")

    def at_page(self):
        self.send(b"<html>" + b"secret of the inside " * 1000, Content_Type="image/png")

    def at_missing(self):
        self.send(PICTURE, 404)

    def at_packed(self):
        self.send(PICTURE, Content_Encoding="gzip")

    def at_short(self):
        self.send(PICTURE, Content_Length=str(len(PICTURE) + 10))

    def at_empty(self):
        self.send(b"")

    def at_to(self):
        self.send(b"", 302, Location=self.path.partition("?")[2])

    def at_again(self):
        self.send(b"", 307, Location=f"/again/{len(self.log)}")

    def at_nowhere(self):
        self.send(b"", 301)

    def at_endless(self):
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(PICTURE)
            while not self.stop.is_set():
                self.wfile.write(bytes(1 << 16))
        except OSError:
            self.log.append(("", "hung up"))

    def at_slow(self):
        self.send_response(200)
        self.end_headers()
        self.trickle(lambda: self.wfile.write(PICTURE[:1]))

    def at_headers(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.trickle(lambda: self.wfile.write(b"X: y\r\n"))

    def trickle(self, write):
        try:
            while not self.stop.wait(0.05):
                write()
        except OSError:
            self.log.append(("", "hung up"))

    def log_message(self, *_):
        pass


@pytest.fixture
def site(monkeypatch):
    """A server that stands for the public ones: its loopback address counts as public here, and
    names ending in .test lead to it.
    """
    handler = type("Handler", (Site,), {"log": [], "stop": threading.Event()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    names = {
        "inside.test": "10.0.0.5",
        "metadata.test": "169.254.169.254",
        "mapped.test": "::ffff:127.0.0.1",
        "shared.test": "100.64.3.4",
    }
    connect, connected, looked_up = fetch._connect, [], []

    def lookup(host, port, **_):
        looked_up.append(host)
        addresses = (
            ["127.0.0.1", "10.0.0.5"]
            if host == "both.test"
            else [names.get(host, "127.0.0.1" if host.endswith(".test") else host)]
        )
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses
        ]

    def watched(address, *rest):
        connected.append(address)
        return connect(address, *rest)

    monkeypatch.setattr(
        fetch, "is_public", lambda address: address == "127.0.0.1" or is_public(address)
    )
    monkeypatch.setattr(fetch, "_PORTS", {"http": server.server_port, "https": server.server_port})
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(fetch, "_connect", watched)
    server.connected, server.looked_up, server.handler = connected, looked_up, handler
    yield server
    handler.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


def get(path, host="public.test", max_bytes=1 << 20, limit_s=20.0, scheme="http"):
    return Fetcher(limit_s).fetch(
        f"{scheme}://{host}{path}", "messages[0]", max_bytes, time.monotonic() + limit_s
    )


def refused(path, **more):
    with pytest.raises(ApiError) as error:
        get(path, **more)
    assert error.value.status == 400 and error.value.param == "messages[0]"
    return error.value.message


def test_a_picture_is_fetched_whatever_its_type_claims(site):
    assert get("/picture") == PICTURE
    assert (
        site.handler.log == [("public.test:" + str(site.server_port), "/picture")]
        or site.handler.log[0][1] == "/picture"
    )
    assert site.looked_up == ["public.test"]


@pytest.mark.parametrize(
    "path", ["/page", "/missing", "/packed", "/short", "/empty", "/nowhere", "/again"]
)
@pytest.mark.usefixtures("site")
def test_what_is_no_whole_picture_is_refused_in_the_same_words(path):
    assert (
        refused(path)
        == refused("/picture", host="inside.test")
        == refused("/picture", scheme="https")
    )


@pytest.mark.parametrize(
    "host", ["inside.test", "metadata.test", "mapped.test", "shared.test", "both.test"]
)
def test_names_of_inner_addresses_are_refused_before_anything_is_sent(site, host):
    refused("/picture", host=host)
    assert (site.connected, site.handler.log) == ([], [])


@pytest.mark.parametrize(
    "host",
    [
        "inside.test",
        "metadata.test",
        "both.test",
        "10.0.0.1",
        "[::1]",
        "2130706433.test@10.0.0.1",
        "169.254.169.254",
    ],
)
def test_redirects_to_inner_addresses_are_not_followed(site, host):
    refused(f"/to?http://{host}:{site.server_port}/picture")
    refused(f"/to?//{host}/picture")
    assert set(site.connected) == {"127.0.0.1"} and {path[:3] for _, path in site.handler.log} == {
        "/to"
    }


def test_redirects_to_other_schemes_and_ports_are_not_followed(site):
    for target in (
        "file:///etc/passwd",
        "ftp://public.test/picture",
        f"http://public.test:{site.server_port + 1}/picture",
        "data:image/png;base64,AA==",
    ):
        refused(f"/to?{target}")
    assert all(path.startswith("/to") for _, path in site.handler.log)


def test_three_redirects_are_followed_and_not_a_fourth(site):
    three = "/to?/to?/to?/picture"
    assert get(three) == PICTURE
    before = len(site.handler.log)
    refused(f"/to?{three}")
    assert len(site.handler.log) - before == 4
    assert len(site.looked_up) == 8  # once for each hop


def test_https_is_not_left_for_http(monkeypatch):
    requested = []
    monkeypatch.setattr(
        fetch,
        "_get",
        lambda url, *_: requested.append(url) or fetch.Fetched("http://public.test/x", b""),
    )
    refused("/x", scheme="https")
    assert requested == ["https://public.test/x"]


def test_the_address_that_was_connected_to_is_checked(site, monkeypatch):
    """Even if the socket ended elsewhere than asked for, nothing would be sent."""
    monkeypatch.setattr(fetch, "public_addresses", lambda *_: ["127.0.0.1"])
    monkeypatch.setattr(fetch, "is_public", is_public)
    refused("/picture")
    assert site.connected == ["127.0.0.1"] and site.handler.log == []


def test_a_name_that_changes_its_address_is_looked_up_once(site, monkeypatch):
    answers = itertools.chain(["127.0.0.1"], itertools.repeat("10.0.0.5"))
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _, port, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))],
    )
    assert get("/picture") == PICTURE
    assert site.connected == ["127.0.0.1"]


@pytest.mark.usefixtures("site")
def test_a_body_over_the_budget_is_not_read_to_its_end():
    assert "more than 50,000 bytes" in refused("/endless", max_bytes=50_000)
    assert "more than 10 bytes" in refused("/picture", max_bytes=10)


@pytest.mark.usefixtures("site")
def test_a_video_is_called_one():
    def reported(path, maximum=1 << 20):
        with pytest.raises(ApiError) as error:
            url = f"http://public.test{path}"
            Fetcher().fetch(url, "x", maximum, time.monotonic() + 20, kind="video")
        return error.value.message, error.value.code

    message, code = reported("/page")
    assert message.startswith("x: the video could not be fetched") and code == "video_not_fetched"
    message, code = reported("/picture", 10)
    assert message.endswith("cut the video or encode it smaller") and code == "invalid_video"


@pytest.mark.parametrize("path", ["/slow", "/headers"])
@pytest.mark.usefixtures("site")
def test_whoever_answers_drop_by_drop_is_left_at_the_deadline(path):
    refused(path, limit_s=0.5)


@pytest.mark.usefixtures("site")
def test_a_name_that_is_looked_up_for_long_is_left_at_the_deadline(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    began = time.monotonic()
    refused("/picture", limit_s=0.3)
    assert time.monotonic() - began < 30
    answered.set()


def test_no_proxy_of_the_environment_is_used(site, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://10.9.9.9:3128")
    assert get("/picture") == PICTURE and site.connected == ["127.0.0.1"]


def test_fetching_is_off_unless_allowed(site):
    service, part = FakeService(), image_part("http://public.test/picture")
    result = post_chat(client_for(service), "hi", part)
    assert (result.status_code, result.get_json()["error"]["code"]) == (
        400,
        "remote_media_off",
    ) and site.looked_up == []
    result = post_chat(client_for(service, allow_remote_media=True), "hi", part, part)
    assert "[(30, 20), (30, 20)]" in result.get_json()["choices"][0]["message"]["content"]
