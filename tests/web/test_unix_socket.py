"""A server at a socket in a file: whose file it is, who may connect, and who they are taken for."""

from __future__ import annotations

import fcntl
import http.client
import json
import logging
import os
import socket
import stat
import subprocess
import sys
from contextlib import closing

import pytest
from fake_service import FakeService, until
from serving import running, user

from mtmd import OptionError
from mtmd.web import unix_socket
from mtmd.web.server import bind
from mtmd.web.settings import ConnectionLimits, ServerSettings

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASK = {"messages": [user("hi")]}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Short, as paths of sockets have to be."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "s"


class Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self):
        self.sock = connected(self._path)


def connected(path, data=b""):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(os.path.relpath(path))
    sock.sendall(data)
    return sock


def ask(path, headers=()):
    with closing(Connection(path)) as connection:
        body = json.dumps(ASK).encode()
        headers = {"Content-Type": "application/json", **dict(headers)}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        return response.status, json.load(response)


def left_over(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))
    assert path.exists()


def test_requests_are_answered_and_the_file_goes_at_the_end(path):
    with running(FakeService(), host="unix:s") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.url == f"unix:{path}"
        status, reply = ask(path)
        assert status == 200 and reply["choices"]
    assert not path.exists()


def test_its_mode_is_as_asked(path):
    with bind(ServerSettings(host=f"unix:{path}", socket_mode=0o666)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert not path.exists()


def test_what_a_server_has_left_is_replaced_and_one_that_lives_is_not(path):
    left_over(path)
    settings = ServerSettings(host=f"unix:{path}")
    with bind(settings) as sock:
        for _ in range(2):  # also before anybody accepts, and whoever waits is not lost
            with pytest.raises(OptionError, match=r"unix:.*s'.*another server is there"):
                bind(settings)
        with connected(path):
            sock.accept()[0].close()
    assert not path.exists()


def test_a_folder_that_another_program_has_locked_is_told(path, monkeypatch):
    """Everybody who may read it can lock it, /tmp for one, for as long as they like."""
    monkeypatch.setattr(unix_socket, "WAIT_S", 0.2)
    settings, descriptor = ServerSettings(host=f"unix:{path}"), os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with pytest.raises(OptionError, match="another program has its folder locked"):
            bind(settings)
    finally:
        os.close(descriptor)
    with bind(settings):
        assert path.exists()


def test_what_is_no_socket_stays(path):
    path.write_text("a letter")
    with pytest.raises(OptionError, match="a file is there that is no socket"):
        bind(ServerSettings(host=f"unix:{path}"))
    assert path.read_text() == "a letter"


def test_a_file_that_took_its_place_stays(path):
    with bind(ServerSettings(host=f"unix:{path}")):
        path.unlink()
        left_over(path)
    assert path.exists()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unix:", "expected a path behind it"),
        ("unix:nowhere/s", "No such file or directory"),
        ("unix:~nobody-of-this-name/s", "a path whose ~ names a user"),
        (f"unix:{'long' * 40}", "too long"),
        ("/tmp/mtmd.sock", "--host unix:PATH"),
    ],
)
@pytest.mark.usefixtures("path")
def test_what_is_wrong_with_a_path_is_told(host, words):
    with pytest.raises(OptionError, match=words):
        bind(ServerSettings(host=host, insecure_no_auth=True))


def test_a_mode_goes_with_a_file_alone():
    with pytest.raises(OptionError, match="socket_mode: found with host"):
        ServerSettings(socket_mode=0o660)


def test_a_port_goes_with_an_address_alone():
    with pytest.raises(OptionError, match="port: found 9000 with host 'unix:s'"):
        ServerSettings(host="unix:s", port=9000)
    assert ServerSettings(host="unix:s", port=0).unix_socket is not None


@pytest.mark.parametrize("trusted", [True, False])
def test_whoever_connects_is_this_machine_unless_a_proxy_is_believed(path, trusted, caplog):
    chosen = {"trusted_proxy": ("unix",)} if trusted else {}
    headers = {"X-Forwarded-For": "6.6.6.6, 203.0.113.7"}
    with (
        caplog.at_level(logging.INFO, "mtmd.access"),
        running(FakeService(), host="unix:s", **chosen),
    ):
        assert ask(path, headers)[0] == 200
        until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.fields["client"] == ("203.0.113.7" if trusted else "unix")


def test_it_needs_no_key_but_asks_for_one_that_is_set(path):
    with running(FakeService(), host="unix:s", api_keys=("a-long-enough-key",)):
        assert ask(path)[0] == 401
        assert ask(path, {"Authorization": "Bearer a-long-enough-key"})[0] == 200


def test_names_are_asked_for_as_on_this_machines_own_address(path):
    with running(FakeService(), host="unix:s"):
        assert ask(path, {"Host": "rebound.example.org"})[0] == 403
    with running(FakeService(), host="unix:s", allowed_hosts=("chat.example.org",)):
        assert ask(path, {"Host": "chat.example.org"})[0] == 200


def test_connections_are_not_counted_by_address(path):
    limits = ConnectionLimits(per_address=1)
    with running(FakeService(), host="unix:s", connections=limits) as server:
        socks = [connected(path) for _ in range(3)]
        until(lambda: len(server.connections) == 3)
        for sock in socks:
            sock.sendall(HEALTH)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            sock.close()


def test_the_command_tells_where_it_is(path):
    command = [sys.executable, "-m", "mtmd", "serve", "--host", "unix:s", "--no-warmup"]
    process = subprocess.Popen(
        [*command, "--no-history", "--threads", "1", "--socket-mode", "660"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        while not lines or not lines[-1].startswith("serving at "):
            lines.append(process.stdout.readline())
            assert lines[-1]
        assert lines[-1].startswith(f"serving at unix:{path}, OpenAI's interface at /v1 there;")
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with connected(path, HEALTH) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    assert not path.exists()
