from __future__ import annotations

import base64
import io
import os
import struct
import threading
import zlib
from pathlib import Path

import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, png, post_chat

from mtmd import BusyError, ImageError, OptionError
from mtmd.prompt.load_image import ImageLimits, picture_size
from mtmd.web.errors import ApiError
from mtmd.web.intake import media as media_module
from mtmd.web.intake import picture_budget as budget_module
from mtmd.web.intake.media import Media, Reference
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.intake.uploads import LIFETIME_S, RECORD_BYTES, Uploads
from mtmd.web.settings import MediaBudget, ServerSettings


def bomb(width, height):
    """A PNG whose header promises more than its few bytes hold."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


class Fetcher:
    """Gives pictures from a table; notes what is asked."""

    limit_s = 5.0

    def __init__(self, pictures=None):
        self.pictures, self.requested = pictures or {}, []

    def fetch(self, url, location, max_bytes, deadline, *, kind="image"):  # noqa: ARG002
        self.requested.append((url, max_bytes))
        return self.pictures[url]


def media(fetcher=None, path=None, uploads=None, **budget):
    return Media(PictureBudget(MediaBudget(**budget)), uploads or Uploads(1 << 20), fetcher, path)


def sizes(opener, *urls, owner="me"):
    with opener.opened(
        [Reference(f"at[{i}]", url) for i, url in enumerate(urls)], owner
    ) as pictures:
        return [p.size for p in pictures]


@pytest.fixture
def decoded(monkeypatch):
    """How often a picture was decoded."""
    calls = []
    load = budget_module.load_isolated
    monkeypatch.setattr(budget_module, "load_isolated", lambda *a: calls.append(1) or load(*a))
    return calls


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_header_tells_the_size_without_decoding(kind, monkeypatch):
    data = png(33, 21, kind=kind)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    assert picture_size(data) == (33, 21)
    with pytest.raises(ImageError, match="33 x 21"):
        picture_size(data, ImageLimits(max_pixels=33 * 21 - 1))
    with pytest.raises(ImageError, match="bytes"):
        picture_size(data, ImageLimits(max_bytes=len(data) - 1))


def test_pictures_come_in_the_order_of_the_request():
    uploads = Uploads(1 << 20)
    id_ = uploads.add("me", "x", "vision", png(3, 4)).id
    fetcher = Fetcher({"http://a.test/": png(5, 6)})
    assert sizes(
        media(fetcher, uploads=uploads),
        "http://a.test/",
        data_url(png(1, 2)),
        id_,
        data_url(png(7, 8)),
        "http://a.test/",
    ) == [(5, 6), (1, 2), (3, 4), (7, 8), (5, 6)]


def test_too_many_are_refused_before_any_is_looked_at(decoded):
    fetcher = Fetcher()
    with pytest.raises(ApiError) as error:
        sizes(media(fetcher, images=3), *["http://a.test/"] * 3, "data:image/png;base64,!!!")
    assert (error.value.status, error.value.code, fetcher.requested, decoded) == (
        413,
        "too_many_images",
        [],
        [],
    )


def test_too_many_bytes_are_refused_before_anything_is_fetched_or_decoded(decoded, monkeypatch):
    monkeypatch.setattr(base64, "b64decode", None)
    fetcher, big = Fetcher(), data_url(bytes(600))
    with pytest.raises(ApiError) as error:
        sizes(media(fetcher, bytes=1000), "http://a.test/", big, big)
    assert (error.value.status, error.value.code, fetcher.requested, decoded) == (
        413,
        "images_too_large",
        [],
        [],
    )


def test_what_is_fetched_has_what_is_left_of_the_budget(decoded):
    here, first, second = png(9, 9), png(8, 8), png(7, 7)
    fetcher = Fetcher({"http://a.test/": first, "http://b.test/": second})
    budget = len(here) + len(first) + len(second)
    assert sizes(
        media(fetcher, bytes=budget + 5), "http://a.test/", "http://b.test/", data_url(here)
    ) == [(8, 8), (7, 7), (9, 9)]
    assert [maximum for _, maximum in fetcher.requested] == [
        budget + 5 - len(here),
        len(second) + 5,
    ]
    decoded.clear()
    with pytest.raises(ApiError, match="together"):
        sizes(media(fetcher, bytes=budget - 1), "http://a.test/", "http://b.test/", data_url(here))
    assert not decoded


def test_pixels_are_summed_from_the_headers_before_any_is_decoded(decoded):
    ten = data_url(png(10, 10))
    assert len(sizes(media(pixels=300), ten, ten, ten)) == len(decoded) == 3
    decoded.clear()
    with pytest.raises(ApiError) as error:
        sizes(media(pixels=299), ten, ten, ten)
    assert (error.value.status, error.value.code, error.value.param, decoded) == (
        413,
        "too_many_pixels",
        "at[2]",
        [],
    )


@pytest.mark.parametrize(
    "width, height", [(100_000, 100_000), (2**31 - 1, 2**31 - 1), (1, 2**31 - 1), (0, 5)]
)
def test_a_bomb_is_refused_by_its_header(decoded, width, height):
    with pytest.raises(ApiError) as error:
        sizes(media(), data_url(png(2, 2)), data_url(bomb(width, height)))
    assert (error.value.status, error.value.param, decoded) == (400, "at[1]", [])


def test_all_requests_together_hold_so_many_pixels_and_no_more(decoded):
    opener, ten = media(server_pixels=250), Reference("here", data_url(png(10, 10)))
    with opener.opened([ten], "me"), opener.opened([ten], "me"):
        assert len(decoded) == 2
        with pytest.raises(BusyError, match="later"), opener.opened([ten], "me"):
            raise AssertionError
        assert len(decoded) == 2
    with opener.opened([ten, ten], "me") as pictures:
        assert len(pictures) == 2


def test_pixels_are_let_go_when_a_picture_does_not_decode():
    opener, broken = media(server_pixels=250), data_url(bomb(10, 20))
    for _ in range(3):
        with pytest.raises(ApiError, match=r"truncated|damaged"):
            sizes(opener, broken)
    assert sizes(opener, data_url(png(10, 20))) == [(10, 20)]


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,###",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,A",
        "data:image/png;base64;x,AAAA",
        "data:text/html;base64,PGh0bWw+",
        data_url(b"GIF89a"),
        data_url(b"%PDF-1.7"),
        data_url(png()[:40]),
        data_url(b"\xff\xd8\xff" + bytes(50)),
        "",
        "x",
        "blob:http://x/1",
        "javascript:alert(1)",
        "C:\\x.png",
        "/etc/passwd",
        "../x.png",
    ],
)
def test_what_is_no_picture_is_refused(url):
    with pytest.raises(ApiError) as error:
        sizes(media(), url)
    assert (
        error.value.status == 400
        and error.value.param == "at[0]"
        and len(error.value.message) < 400
    )


def test_the_type_that_is_claimed_does_not_matter_and_neither_do_line_breaks():
    assert sizes(
        media(),
        data_url(png(4, 5), "video/mp4"),
        "DATA:;BASE64," + base64.encodebytes(png(60, 50)).decode(),
    ) == [(4, 5), (60, 50)]


def test_a_picture_followed_by_something_else_is_that_picture():
    assert sizes(media(), data_url(png(4, 5) + b"<script>alert(1)</script>PK\x03\x04")) == [(4, 5)]


@pytest.fixture
def folder(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "in-not"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "a b.png").write_bytes(png(4, 3))
    (inside / "sub" / "c.png").write_bytes(png(5, 3))
    (outside / "secret.png").write_bytes(png(6, 3))
    (inside / "link.png").symlink_to(outside / "secret.png")
    (inside / "fine.png").symlink_to(inside / "sub" / "c.png")
    (inside / "loop.png").symlink_to(inside / "loop.png")
    (inside / "up").symlink_to(outside)
    os.mkfifo(inside / "pipe.png")
    return inside


def test_files_below_the_media_folder_are_read(folder):
    urls = [
        "file:///a%20b.png",
        f"file://{folder}/a%20b.png",
        "file://localhost/sub/c.png",
        f"file://{folder}/sub/../sub/c.png",
        "file:///fine.png",
    ]
    assert sizes(media(path=folder), *urls) == [(4, 3), (4, 3), (5, 3), (5, 3), (5, 3)]


@pytest.mark.parametrize(
    "path",
    [
        "/../in-not/secret.png",
        "/%2e%2e/in-not/secret.png",
        "/..%2fin-not%2fsecret.png",
        "/sub/../../in-not/secret.png",
        "/link.png",
        "/loop.png",
        "/up/secret.png",
        "/pipe.png",
        "/sub",
        "/",
        "",
        "/missing.png",
        "/a%20b.png%00",
        "/a%20b.png?x",
        "/a%20b.png#x",
        "/etc/passwd",
        "//etc/passwd",
        "/%ff",
        "/" + "a" * 5000,
        "/dev/zero",
        "/proc/self/environ",
        "{outside}/secret.png",
    ],
)
def test_files_outside_it_are_refused_in_the_same_words_as_missing_ones(folder, path):
    url = "file://" + path.replace("{outside}", str(folder) + "-not")
    with pytest.raises(ApiError) as error:
        sizes(media(path=folder), url)
    assert error.value.message == "at[0]: no such file that may be read"


def test_other_hosts_files_are_refused(folder):
    with pytest.raises(ApiError, match="no such file"):
        sizes(media(path=folder), "file://server/a%20b.png")


def test_files_are_off_unless_a_folder_is_given(folder):
    with pytest.raises(ApiError) as error:
        sizes(media(), f"file://{folder}/a%20b.png")
    assert error.value.code == "media_path_off"


def test_a_file_that_grows_after_it_was_measured_is_not_read_whole(folder, monkeypatch):
    real, read = media_module._read_file, []

    def grown(path, maximum, refusal):
        path.write_bytes(path.read_bytes() + bytes(5000))
        read.append(real(path, maximum, refusal))
        return read[-1]

    monkeypatch.setattr(media_module, "_read_file", grown)
    with pytest.raises(ApiError, match="together"):
        sizes(media(path=folder, bytes=1000), "file:///a%20b.png")
    assert len(read[0]) == 1001


def test_the_media_folder_has_to_be_there(tmp_path):
    with pytest.raises(OptionError, match="no folder"):
        ServerSettings(media_path=tmp_path / "no")


def test_uploads_belong_to_who_made_them():
    uploads = Uploads(1 << 20)
    mine = uploads.add("me", "x", "vision", png(3, 4)).id
    for read in (
        lambda: uploads.get("you", mine),
        lambda: uploads.delete("you", mine),
        lambda: sizes(media(uploads=uploads), mine, owner="you"),
        lambda: uploads.get("me", mine + "0"),
        lambda: uploads.get("me", "file-../../etc/passwd"),
    ):
        with pytest.raises(ApiError, match="no file of this id"):
            read()
    assert uploads.all_of("you") == [] and [f.id for f in uploads.all_of("me")] == [mine]


def test_uploads_have_a_room_and_an_end():
    now = [0.0]
    uploads = Uploads(RECORD_BYTES + 10, clock=lambda: now[0])
    first = uploads.add("me", "x", "vision", bytes(6))
    with pytest.raises(ApiError) as error:
        uploads.add("me", "y", "vision", b"")  # a file takes more than its bytes
    assert error.value.status == 413
    uploads.add("you", "y", "vision", bytes(5))
    now[0] = LIFETIME_S - 1
    uploads.get("me", first.id)
    now[0] = 2 * LIFETIME_S - 2
    assert uploads.get("me", first.id) is first and uploads.all_of("you") == []
    uploads.delete("me", first.id)
    uploads.add("me", "y", "vision", bytes(10))


def test_only_pictures_can_be_uploaded():
    client = client_for(FakeService(), media=MediaBudget(bytes=2000))

    def send(data, **form):
        return client.post(
            "/v1/files", data={"purpose": "vision", "file": (io.BytesIO(data), "x.png")} | form
        )

    assert send(png()).status_code == 200
    for data, status in (
        (b"<html>", 400),
        (b"", 400),
        (bomb(99999, 99999), 400),
        (png() + bytes(3000), 413),
    ):
        result = send(data)
        assert (result.status_code, result.get_json()["error"]["param"]) == (status, "file")
    assert send(png(), purpose="fine-tune").get_json()["error"]["param"] == "purpose"
    assert (
        client.post(
            "/v1/files", data={"purpose": "vision", "other": (io.BytesIO(png()), "x.png")}
        ).get_json()["error"]["param"]
        == "file"
    )
    assert client.post("/v1/files", json={}).status_code == 415


def test_an_upload_is_never_shown_as_a_page():
    client = client_for(FakeService())
    id_ = client.post(
        "/v1/files",
        data={
            "purpose": "vision",
            "file": ((Path(__file__).parents[3] / "examples" / "shapes.png").open("rb"), "x.html"),
        },
    ).get_json()["id"]
    result = client.get(f"/v1/files/{id_}/content")
    assert (
        result.mimetype == "application/octet-stream"
        and result.headers["Content-Disposition"] == "attachment"
    )
    assert result.headers["X-Content-Type-Options"] == "nosniff"


def test_requests_decode_at_the_same_time_only_so_many(monkeypatch):
    now, maximum, lock, load = [0], [0], threading.Lock(), budget_module.load_isolated

    def counted(*args):
        with lock:
            now[0] += 1
            maximum[0] = max(maximum[0], now[0])
        try:
            return load(*args)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(budget_module, "load_isolated", counted)
    opener, url = media(), data_url(png(400, 400))
    threads = [threading.Thread(target=sizes, args=(opener, *[url] * 4)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= maximum[0] <= opener._budget.decoded_at_once


def test_a_picture_in_a_request_fails_that_request_alone():
    service = FakeService()
    client = client_for(service)
    assert post_chat(client, "hi", image_part(data_url(bomb(50, 50)))).status_code == 400
    assert (
        "[(20, 10)]"
        in post_chat(client, "hi", image_part(data_url(png()))).get_json()["choices"][0]["message"][
            "content"
        ]
    )
