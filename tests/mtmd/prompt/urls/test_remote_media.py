"""Addresses in Python and on the command line. What is fetched from where is tested with the server's
fetcher, which asks the same function (tests/web/intake/test_fetch_media.py).
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import ImageError
from mtmd.events import Finished
from mtmd.model import Model
from mtmd.prompt import fetch_url as fetch
from mtmd.prompt.fetch_url import Denied, Fetched, RemoteMedia
from mtmd.prompt.load_image import load_image
from mtmd.prompt.video_input import is_video

ADDRESS = "https://me:secret@pictures.test/a.png?key=1"
COUNT = "How many shapes are there?"


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch, one: Path) -> list[str]:
    """The addresses asked, at each of which the picture lies."""
    requested: list[str] = []

    def get(url: str, *_: Any) -> Fetched:
        requested.append(url)
        return Fetched(None, one.read_bytes())

    monkeypatch.setattr(fetch, "_get", get)
    return requested


@pytest.fixture
def fetching(demo: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The demo model as if loaded with `allow_remote_media`."""
    from dataclasses import replace

    monkeypatch.setattr(demo.loaded, "options", replace(demo.options, allow_remote_media=True))
    return demo


def test_a_picture_is_fetched_once_and_shown(requested: list[str], fetching: Model) -> None:
    answer = fetching.answer(ADDRESS, COUNT)
    assert answer.text == "One." and requested == [ADDRESS] and "<img" in answer._repr_html_()
    parts = [{"type": "image_url", "image_url": {"url": ADDRESS}}, {"type": "text", "text": COUNT}]
    *_, last = fetching.stream([{"role": "user", "content": parts}])
    assert isinstance(last, Finished) and last.answer.text == "One." and len(requested) == 2


def test_nothing_is_fetched_unless_it_is_allowed(requested: list[str], demo: Model) -> None:
    with pytest.raises(ImageError, match="a web address, expected a file; have addresses fetched"):
        demo.answer(ADDRESS, COUNT)
    assert requested == []


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (Denied("an address that is not public"), "an address that is not public"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "it took too long"),
        (ValueError("not an address that is asked"), "not an address that is asked"),
    ],
    ids=["denied", "no name", "slow", "strange"],
)
def test_who_asked_is_told_why(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, reported: str
) -> None:
    def get(*_: Any) -> Fetched:
        raise error

    monkeypatch.setattr(fetch, "_get", get)
    with pytest.raises(ImageError) as caught:
        load_image(ADDRESS, remote=RemoteMedia())
    assert str(caught.value).startswith(
        f"https://pictures.test/a.png: the picture could not be fetched ({reported}); only public"
    )


def test_pictures_of_a_call_share_a_deadline(monkeypatch: pytest.MonkeyPatch, one: Path) -> None:
    deadlines: list[float] = []

    def get(_: str, __: int, deadline: float, ___: bool) -> Fetched:
        deadlines.append(deadline)
        return Fetched(None, one.read_bytes())

    monkeypatch.setattr(fetch, "_get", get)
    remote = RemoteMedia()
    for _ in range(2):
        load_image(ADDRESS, remote=remote)
    assert deadlines[0] == deadlines[1]


def test_an_address_is_a_video_by_its_name() -> None:
    """Nothing is fetched to find out."""
    assert is_video("https://a.test/clip.MP4?x=1.png") and not is_video("https://a.test/a.png")


def test_the_command_takes_addresses_where_it_is_told_to(mtmd: Any, requested: list[str]) -> None:
    refused = mtmd("describe", ADDRESS)
    assert refused.code == 2 and "--allow-remote-media" in refused.err and requested == []
    done = mtmd("describe", "--allow-remote-media", ADDRESS, "-p", COUNT)
    assert done.out == "One.\n" and requested == [ADDRESS]
