"""The numbers in docs/limits.md are those of the program."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from mtmd.base.errors import OptionError
from mtmd.base.isolation import worker_slots
from mtmd.batch.inputs import PARTS_MAX
from mtmd.clip.image.decode import DEFAULT_LIMITS
from mtmd.clip.video.limits import DEFAULT_LIMITS as VIDEO_LIMITS
from mtmd.cluster import command, manifest, run, schedule
from mtmd.cluster.sources import reader, tables, tar
from mtmd.commands import batch
from mtmd.options.load import LoadOptions
from mtmd.prompt.fetch_url import MAX_REDIRECTS
from mtmd.prompt_logprobs import PROMPT_LOGPROBS_MAX
from mtmd.service import many, prepare_ahead
from mtmd.web import connection
from mtmd.web.connection import SHORT_BODY
from mtmd.web.intake import request_limits
from mtmd.web.intake.fetch_media import Fetcher
from mtmd.web.intake.uploads import RECORD_BYTES
from mtmd.web.interfaces import embedding_requests as vectors
from mtmd.web.models import registry
from mtmd.web.page import chat, pictures
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import UNUSED_SECONDS

GUIDE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
S = ServerSettings()
C, M, J = S.connections, S.media, S.json
MIB, KIB = 1 << 20, 1 << 10


def default_of(option):
    parser = ArgumentParser()
    batch.add_arguments(parser)
    return parser.get_default(option)


def maximum_of(option):
    """As it is refused."""
    with pytest.raises(OptionError, match="expected") as refused:
        LoadOptions(**{option: 1 << 40})
    return int(re.findall(r"\d+", str(refused.value).replace(",", ""))[-1])


@pytest.mark.parametrize(
    "row, facts",
    [
        ("open connections", [f"{C.total:,}"]),
        ("of one address", [f"{C.per_address:,}"]),
        ("the head of a request", [f"{C.head_s:g} s", f"{connection.HEADERS} headers"]),
        ("the chunk headers of a chunked body", [f"{connection.CHUNKED // KIB} KiB"]),
        ("its body", [f"{C.body_s:g} s", f"{C.body_rate // KIB} KiB"]),
        ("an idle connection", [f"{C.idle_s:g} s"]),
        ("an answer that nobody", [f"{C.unread_rate // KIB} KiB/s", f"{C.unread_s:g} s"]),
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
        ("JSON of the page", [f"{request_limits.SMALL_VALUES:,} names"]),
        ("texts and pictures that", [f"{vectors.MAX_INPUTS:,}", f"{vectors.LONGEST_TEXT:,} char"]),
        ("an imported", [f"{S.body_bytes // MIB} MiB", f"{request_limits.HISTORY_VALUES:,} names"]),
        ("a picture that is", [f"{M.bytes // MIB} MiB", f"{M.pixels // 10**6} million"]),
        ("a body where none", [f"{request_limits.FORGIVEN_BYTES // KIB} KiB"]),
        ("requests being answered", [f"{S.queue:,}"]),
        ("of those, requests", [registry.MAX_WAITING, f"{registry.LONGEST_WAIT_S:g} s"]),
        ("requests a minute", [S.rate_limit or "any number"]),
        ("pixels of all", [f"{M.server_pixels // 10**6} million"]),
        ("pictures being", [f"{M.decoding_pixels // 10**6} million"]),
        ("pictures, videos and", [f"{worker_slots.LONG_JOBS} and {worker_slots.STOPPED_JOBS}"]),
        ("log probabilities of prompts", [f"{PROMPT_LOGPROBS_MAX:,}"]),
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
    (line,) = re.findall(rf"^\| {row}.*$", GUIDE.partition("## Many pictures")[0], re.M)
    assert all(str(fact) in line for fact in facts), line


P, V = DEFAULT_LIMITS, VIDEO_LIMITS


@pytest.mark.parametrize(
    "row, facts",
    [
        ("one picture", [f"{P.max_bytes // MIB} MiB", f"{P.max_pixels // 10**6} million"]),
        (
            "one video",
            [
                f"{V.max_bytes >> 30} GiB",
                f"{V.max_seconds / 3600:g} hours",
                f"{V.max_pixels // 10**6} million pixels",
                f"{V.max_frames:,} frames",
                f"{V.cpu_s:g} s of a core",
            ],
        ),
        ("parts of one", [f"{PARTS_MAX:,}"]),
        ("answered at once", [f"{maximum_of('parallel'):,} ({default_of('parallel')} unless"]),
        (
            "prepared ahead",
            [
                f"{prepare_ahead.MINIMUM} to {prepare_ahead.MAXIMUM} more",
                f"{prepare_ahead.MAX_BYTES >> 30} GiB",
                f"{many.WAITING} times",
            ],
        ),
        ("pictures of one `--out`", [f"{manifest.MAX_ITEMS:,}"]),
        ("rows of a file", [f"{command.MAXIMUM['unit']:,} (at most {manifest.MAX_UNIT} unless"]),
        ("actors \\(", [f"{command.MAXIMUM['actors']:,}"]),
        ("units of one", [f"| {schedule.UNITS_PER_ACTOR} |"]),
        ("a picture in a tar", [f"{reader.PICTURE_MAX // MIB} MiB"]),
        ("a video there", [f"{reader.VIDEO_MAX >> 30} GiB"]),
        (
            "videos of more",
            [f"{reader.PICTURE_MAX // MIB} MiB", f"{reader.VIDEO_MAX >> 30} GiB together"],
        ),
        ("a row group", [f"{tables.GROUP_MAX >> 30} GiB"]),
        ("headers before", [f"{tar.HEADERS_MAX // MIB} MiB"]),
        (
            "processes that ended",
            [f"{schedule.MAX_LOST_ACTORS}, then", f"{schedule.MAX_LOST_ACTORS} more"],
        ),
        ("rows given up", [f"| {schedule.MAX_LOST_ROWS} |"]),
        ("actors that end", [f"{schedule.MAX_ENDS}, or twice"]),
        ("an actor that waits", [f"{run.START_S:g} s"]),
        ("an actor that loads", [f"{run.LOAD_S / 3600:g} hours"]),
    ],
)
def test_limits_of_many_pictures_are_as_documented(row, facts):
    many_pictures = GUIDE.partition("## Many pictures")[2]
    (line,) = re.findall(rf"^\| {row}.*$", many_pictures, re.M)
    assert all(str(fact) in line for fact in facts), line


def test_words_that_stand_for_numbers():
    assert MAX_REDIRECTS == 3 and UNUSED_SECONDS == 3600
