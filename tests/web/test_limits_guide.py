"""The numbers in docs/limits.md are those of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtmd.kernels.isolation import places
from mtmd.prompt.urls.fetch import MOST_REDIRECTS
from mtmd.web import server
from mtmd.web.api import embedding_requests as vectors
from mtmd.web.connections.parser import SHORT_BODY
from mtmd.web.intake import gate
from mtmd.web.intake.fetch import Fetcher
from mtmd.web.intake.uploads import RECORD_BYTES
from mtmd.web.models import registry
from mtmd.web.page import chat, pictures
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import UNUSED_SECONDS

GUIDE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
S = ServerSettings()
C, M, J = S.connections, S.media, S.json
MIB, KIB = 1 << 20, 1 << 10


@pytest.mark.parametrize(
    "row, facts",
    [
        ("open connections", [f"{C.most:,}"]),
        ("of one address", [f"{C.per_address:,}"]),
        ("the head of a request", [f"{C.head_s:g} s"]),
        ("its body", [f"{C.body_s:g} s", f"{C.body_rate // KIB} KiB"]),
        ("a connection that nothing", [f"{C.idle_s:g} s"]),
        ("an answer that nobody", [f"{C.unread_rate // KIB} KiB/s", f"{C.unread_s:g} s"]),
        ("what waits for one", [f"{server.HELD_BACK // MIB} MiB"]),
        ("bodies of all", [f"{C.body_bytes // MIB} MiB"]),
        ("a body above", [f"{SHORT_BODY // KIB} KiB"]),
        ("pictures of one", [M.images, f"{M.bytes // MIB} MiB", f"{M.pixels // 10**6} million"]),
        (
            "videos of one",
            [
                M.videos,
                f"{M.video.max_seconds / 3600:g} hours",
                f"{M.video.max_pixels // 10**6} mil",
                f"{M.video.cpu_s:g} s of a core to read all",
            ],
        ),
        ("of these, one video", [f"{M.video_pixels // 10**6} million"]),
        ("the rest of its", [f"{J.bytes // MIB} MiB", f"{J.values:,} names", J.deep]),
        ("JSON of the page", [f"{gate.SMALL_VALUES:,} names"]),
        ("texts and pictures that", [f"{vectors.MOST_INPUTS:,}", f"{vectors.LONGEST_TEXT:,} char"]),
        ("an imported", [f"{S.body_bytes // MIB} MiB", f"{gate.HISTORY_VALUES:,} names"]),
        ("a picture that is", [f"{M.bytes // MIB} MiB", f"{M.pixels // 10**6} million"]),
        ("a body where none", [f"{gate.FORGIVEN_BYTES // KIB} KiB"]),
        ("requests being answered", [f"{S.queue:,}"]),
        ("of these, requests", [gate.PREPARED_AT_ONCE]),
        ("of those, requests", [registry.MOST_WAITING, f"{registry.LONGEST_WAIT_S:g} s"]),
        ("requests a minute", [S.rate_limit or "any number"]),
        ("pixels of all", [f"{M.server_pixels // 10**6} million"]),
        ("pictures being", [f"{M.decoding_pixels // 10**6} million"]),
        ("pictures, videos and", [f"{places.LONG_JOBS} and {places.STOPPED_JOBS}"]),
        ("readers of", [S.followers, chat.READERS_EACH]),
        ("downloads", [S.downloads]),
        ("uploaded files", [f"{S.upload_bytes // MIB} MiB", f"{RECORD_BYTES // KIB} KiB"]),
        ("pictures that are", [f"{S.upload_bytes // MIB} MiB", "an hour"]),
        (
            "pictures of all",
            [f"{S.storage_bytes >> 30} GiB", f"{pictures.IN_MEMORY_BYTES >> 30} GiB"],
        ),
        ("a picture fetched", [f"{Fetcher().limit_s:g} s", "three"]),
    ],
)
def test_limits_are_as_documented(row, facts):
    (line,) = re.findall(rf"^\| {row}.*$", GUIDE, re.M)
    assert all(str(fact) in line for fact in facts), line


def test_words_that_stand_for_numbers():
    assert MOST_REDIRECTS == 3 and UNUSED_SECONDS == 3600 and server.QUICK_THREADS == 4
