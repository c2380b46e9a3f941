"""Whoever runs the server learns why a picture was not fetched; its client does not."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch_media import Fetcher


def not_found(*_, **__):
    raise socket.gaierror(-2, "Name or service not known")


def inner(_, port, **__):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]


@pytest.mark.parametrize(
    ("look_up", "url", "reported"),
    [
        (
            not_found,
            "https://example.com/key=secret.png?token=1",
            "example.com: its name is not found",
        ),
        (inner, "http://inner.test/secret", "inner.test: Denied: an address that is not public"),
        (inner, "http://inner.test:99/secret", "inner.test: ValueError: not an address"),
        (inner, "http://[::1/secret", "an address without a host: "),
        (inner, "http://a\nb\x1b.test/secret", ": ValueError: not a URL"),
    ],
    ids=["no name", "not public", "a port", "no host", "control characters"],
)
def test_why_a_fetch_failed(look_up, url, reported, monkeypatch, caplog):
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with caplog.at_level(logging.WARNING, "mtmd.web"), pytest.raises(ApiError) as error:
        Fetcher().fetch(url, "messages[0].content[1].image_url", 100, time.monotonic() + 5)
    (line,) = (record.getMessage() for record in caplog.records)
    assert (
        line.startswith("messages[0].content[1].image_url was not fetched from ")
        and reported in line
    )
    assert "secret" not in line and "token" not in line and line.isprintable()
    assert error.value.message.startswith("messages[0].content[1].image_url: the picture could not")
    assert "not found" not in error.value.message and "public:" not in error.value.message
