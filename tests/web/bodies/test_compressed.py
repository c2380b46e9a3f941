"""Bodies that clients have compressed: read within the same limits as others, whatever they become."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable
from mmap import mmap
from typing import Any
from urllib.parse import urlsplit

import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, noise, running, user

from mtmd.web.bodies import compressed
from mtmd.web.bodies.compressed import BLOCKS, MEMBERS, PIECE, plain
from mtmd.web.errors import ApiError
from mtmd.web.settings import ConnectionLimits, JsonLimits

brotli = pytest.importorskip("brotli")
zstandard = pytest.importorskip("zstandard")


def raw_deflate(data: bytes) -> bytes:
    one = zlib.compressobj(wbits=-15)
    return one.compress(data) + one.flush()


def zstd(data: bytes) -> bytes:
    result: bytes = zstandard.ZstdCompressor().compress(data)
    return result


WAYS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip ", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "br": ("br", lambda data: brotli.compress(data, quality=3)),
    "zstd": ("zstd", zstd),
    "identity": ("identity", bytes),
}
MAXIMUM = 4 << 20


def read(data: bytes, encoding: str, maximum: int = MAXIMUM) -> bytes:
    return bytes(plain(data, encoding, maximum, lambda _: None))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_was_compressed(way: str) -> None:
    encoding, compress = WAYS[way]
    chance = random.Random(0)
    for count in (0, 1, 1000, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3):
        for data in (bytes(count), chance.randbytes(count), b'{"a": 1}' * (count // 8)):
            if data or encoding != "identity":
                assert read(compress(data), encoding, max(count, 8)) == data


@pytest.mark.parametrize("way", [way for way in WAYS if way != "identity"])
def test_a_bomb_takes_no_more_than_its_route_takes(way: str) -> None:
    encoding, compress = WAYS[way]
    bomb, taken = compress(bytes(64 << 20)), list[int]()
    assert len(bomb) < 1 << 20
    with pytest.raises(ApiError) as refusal:
        plain(bomb, encoding, MAXIMUM, taken.append)
    assert refusal.value.status == 413 and refusal.value.code == "body_too_large"
    assert sum(taken) <= MAXIMUM and max(taken) <= 2 * PIECE


@pytest.mark.parametrize("way", [way for way in WAYS if way != "identity"])
def test_what_is_damaged_is_refused(way: str) -> None:
    encoding, compress = WAYS[way]
    whole = compress(random.Random(1).randbytes(20_000) + bytes(20_000))
    chance = random.Random(2)
    wrong = [b"", b"\0", whole[: len(whole) // 2], b"{}", chance.randbytes(1000), whole[:-1]]
    wrong += [whole + b"more", bytes(100)]
    for data in wrong:
        try:
            assert read(data, encoding) in (b"", whole) or way in ("raw deflate", "br")
        except ApiError as error:
            assert error.status == 400 and "cannot be read as" in error.message
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read(bytes(data), encoding)
        except ApiError as error:
            assert error.status in (400, 413)


@pytest.mark.parametrize(
    "encoding, data",
    [
        ("gzip", gzip.compress(b"") * (1 << 16)),
        ("zstd", zstandard.ZstdCompressor().compress(b"") * (1 << 17)),
        ("zstd", (b"\x50\x2a\x4d\x18" + bytes(4)) * (1 << 17)),  # frames to be skipped
        ("br", b"\x0c" * (1 << 20)),
        ("deflate", b"\0\0\0\xff\xff" * (1 << 18)),
    ],
)
def test_much_that_becomes_nothing_takes_no_time(encoding: str, data: bytes) -> None:
    """Processor time in proportion to what is sent: a MiB takes far less than a second."""
    begin = time.process_time()
    try:
        read(data, encoding)
    except ApiError as error:
        assert error.status == 400
    assert time.process_time() - begin < 20


def test_a_window_of_zstd_takes_no_memory_beyond_that_of_the_web() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"x" * 99)
    made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = made.compress(b"x" * 99) + made.flush()
    with pytest.raises(ApiError, match="found a window of 134,217,728 bytes, expected at most 8,3"):
        read(data, "zstd")


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_every_frame_of_zstd_ends(checksum: bool, sized: bool) -> None:
    stated = random.Random(3).randbytes(400_000) + bytes(600_000)
    make = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=sized)
    skipped = b"\x57\x2a\x4d\x18\x03\0\0\0abc"
    frame, little = make.compress(stated), make.compress(b"{}")
    becomes = {frame: stated, little: b"{}", skipped: b""}
    for parts in ([frame], [little], [skipped, frame], [frame, skipped], [little, frame, little]):
        whole = b"".join(parts)
        assert read(whole, "zstd") == b"".join(becomes[part] for part in parts)
        for cut in (n for n in range(1, len(parts[-1])) if n < 40 or n % 9973 == 0):
            with pytest.raises(ApiError, match="cannot be read as zstd"):
                read(whole[:-cut], "zstd")
    if checksum:
        with pytest.raises(ApiError, match="damaged"):
            read(frame[:-1] + bytes([frame[-1] ^ 1]), "zstd")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "identity"])
def test_no_byte_is_in_memory_twice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(mmap):
        maximum = 0

        def __setitem__(self, at: Any, piece: Any) -> None:
            super().__setitem__(at, piece)
            live = tracemalloc.get_traced_memory()[0] - before
            type(self).maximum = max(self.maximum, live + at.stop)

    monkeypatch.setattr(compressed, "mmap", Measured)
    encoding, compress = WAYS[way]
    data = compress(random.Random(4).randbytes(1 << 20) * 12)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = plain(data, encoding, 16 << 20, lambda _: None)
    finally:
        tracemalloc.stop()
    assert isinstance(made, Measured)
    assert 12 << 20 <= made.maximum < (12 << 20) + 8 * PIECE


def test_many_blocks_of_zstd_are_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"")
    begin, last = frame[:-3], frame[-3:]
    assert read(begin + bytes(3) * (BLOCKS - 1) + last, "zstd") == b""
    with pytest.raises(ApiError, match="blocks"):
        read(begin + bytes(3) * BLOCKS + last, "zstd")


def test_parts_of_gzip_stand_one_behind_another() -> None:
    assert read(gzip.compress(b"ab") * MEMBERS, "gzip") == b"ab" * MEMBERS
    with pytest.raises(ApiError, match=f"more than {MEMBERS} parts"):
        read(gzip.compress(b"ab") * (MEMBERS + 1), "gzip")


# Through the server.


def body(*parts: Any, **more: Any) -> bytes:
    return json.dumps({"model": "fake", "messages": [user(*parts)], **more}).encode()


@pytest.mark.parametrize("way", WAYS)
def test_requests_of_every_interface(way: str) -> None:
    encoding, compress = WAYS[way]
    client = client_for(FakeService())
    for path, stated in (
        ("/v1/chat/completions", body("hi")),
        ("/v1/messages", body("hi", max_tokens=5)),
        ("/v1/responses", b'{"input": "hi"}'),
        ("/api/chat", b'{"model": "fake", "stream": false, "messages": []}'),
        ("/tokenize", b'{"content": "a"}'),
    ):
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        result = client.post(path, data=compress(stated), headers=headers)
        assert result.status_code == 200, result.text


def test_large_pictures_on_a_real_server() -> None:
    service = FakeService()
    with running(service) as server:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        for way in ("gzip", "zstd"):
            encoding, compress = WAYS[way]
            stated = compress(body(image_part(data_url(noise(1))), "what?"))
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", stated, headers)
            result = connection.getresponse()
            assert b"pictures [(200, 150)]" in result.read() and result.status == 200
        connection.close()


@pytest.mark.parametrize("encoding", ["compress", "gzip, br", "aws-chunked", "\x00", "x" * 900])
def test_an_encoding_that_is_not_known_is_a_415(encoding: str) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    result = client_for(FakeService()).post("/v1/messages", data=body("hi"), headers=headers)
    assert result.status_code == 415
    assert result.headers["Accept-Encoding"] == "gzip, deflate, br, zstd"
    assert "gzip, deflate, br, zstd" in result.text and len(result.text) < 400


def test_without_libraries_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "find_spec", lambda _: None)
    headers = {"Content-Encoding": "br", "Content-Type": "application/json"}
    result = client_for(FakeService()).post("/v1/messages", data=b"x", headers=headers)
    assert (result.status_code, result.headers["Accept-Encoding"]) == (415, "gzip, deflate")


def test_files_come_as_they_are() -> None:
    client = client_for(FakeService())
    headers = {"Content-Encoding": "gzip"}
    result = client.post("/v1/files", data=gzip.compress(b"x"), headers=headers)
    assert (result.status_code, result.headers["Accept-Encoding"]) == (415, "identity")


def test_limits_are_those_of_other_bodies() -> None:
    client = client_for(FakeService(), json=JsonLimits(bytes=20_000))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}

    def sent(path: str, data: bytes) -> int:
        return client.post(path, data=gzip.compress(data), headers=headers).status_code

    assert sent("/v1/completions", json.dumps({"prompt": "x" * 19_000}).encode()) == 200
    assert sent("/v1/completions", json.dumps({"prompt": "x" * 21_000}).encode()) == 413
    assert sent("/v1/chat/completions", body("x" * 30_000)) == 413
    assert sent("/v1/chat/completions", b"[" * 1000) == 400


def test_bodies_of_all_requests_share_room_until_they_are_answered() -> None:
    client = client_for(FakeService(), connections=ConnectionLimits(body_bytes=50_000))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    for _ in range(3):  # each gives its room back
        result = client.post(
            "/v1/chat/completions", data=gzip.compress(body("a" * 30_000)), headers=headers
        )
        assert result.status_code == 200
    result = client.post(
        "/v1/chat/completions", data=gzip.compress(body("a" * 60_000)), headers=headers
    )
    assert result.status_code == 503 and result.headers["Retry-After"]
    assert client.application.gate.plain_bodies.stored == 0


@pytest.mark.parametrize("compress", [None, gzip.compress])
def test_a_mark_of_utf_8_may_stand_first(compress: Callable[[bytes], bytes] | None) -> None:
    client = client_for(FakeService())
    for mark, status in ((b"\xef\xbb\xbf", 200), (b"\xef\xbb\xbf" * 2, 400), (b"\xff\xfe", 400)):
        data = mark + body("hi")
        headers = {"Content-Type": "application/json"}
        if compress:
            data, headers = compress(data), headers | {"Content-Encoding": "gzip"}
        result = client.post("/v1/chat/completions", data=data, headers=headers)
        assert result.status_code == status, result.text
