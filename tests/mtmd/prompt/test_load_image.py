"""What a user may call an image, and what is refused before a byte of it is read."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mtmd.base.errors import ImageError
from mtmd.clip.image.decode import ImageLimits
from mtmd.prompt.load_image import load_image

PIXELS = np.random.default_rng(5).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "a picture.png"
    Image.fromarray(PIXELS).save(path)
    return path


def refusal(source, *args, **kwargs) -> str:
    with pytest.raises(ImageError) as caught:
        load_image(source, *args, **kwargs)
    message = str(caught.value)
    assert message.isprintable()
    assert "found" in message
    assert "expected" in message
    return message


def test_every_kind_of_source_gives_the_same_picture(png):
    data = png.read_bytes()
    with png.open("rb") as file, Image.open(png) as image, png.open("rb", buffering=0) as raw:
        sources = [
            png,
            str(png),
            data,
            bytearray(data),
            memoryview(data),
            io.BytesIO(data),
            file,
            raw,
            image,
            PIXELS,
        ]
        pictures = [load_image(source) for source in sources]
        assert not file.closed
        assert image.getpixel((0, 0)) == tuple(PIXELS[0, 0])
    assert {picture.sha256 for picture in pictures} == {pictures[0].sha256}
    assert np.array_equal(pictures[0].pixels, PIXELS)
    assert pictures[0].size == (7, 5)


def test_an_open_file_is_read_from_where_it_stands(png):
    file = io.BytesIO(b"header" + png.read_bytes())
    file.seek(6)
    assert load_image(file).size == (7, 5)


@pytest.mark.parametrize(
    "address", ["http://me:secret@a.example/b.png?key=1", "HTTPS://a.example/b.png"]
)
def test_web_addresses_are_refused_unless_they_may_be_fetched(address):
    message = refusal(address)
    assert (
        "a.example/b.png: found a web address, expected a file; have addresses fetched (" in message
    )
    assert "secret" not in message and "key" not in message


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_a_data_url_is_the_picture_that_it_holds(png):
    url = data_url(png.read_bytes())
    wrapped = url[:60] + "\n" + url[60:]
    for source in (url, wrapped, url.replace("image/png", "text/plain")):
        assert np.array_equal(load_image(source).pixels, PIXELS)


def test_data_urls_are_refused_without_repeating_them(png):
    url = data_url(png.read_bytes() * 100)
    many = {
        url[:-9] + "!": "not base64",
        url.replace(";base64", ""): "not of the form data:TYPE;base64,...",
        data_url(b"no picture"): "found plain text",
        "data:": "not of the form",
    }
    for wrong, reported in many.items():
        message = refusal(wrong, unnamed="image 2")
        assert message.startswith("image 2: found") and reported in message
        assert len(message) < 200
    few = ImageLimits(max_bytes=1000)
    assert "a data URL of some" in refusal(url, few) and "at most 1,000;" in refusal(url, few)


@pytest.mark.parametrize("first", ["iVBORw0KGgo", "/9j/4AAQSkZJRg"], ids=["PNG", "JPEG"])
def test_base64_given_for_a_path_is_told_in_few_words(first):
    message = refusal(first + "A" * 1_000_000)
    assert f"found {len(first) + 1_000_000:,} characters of base64, expected a path" in message
    assert "base64.b64decode(...)" in message and len(message) < 250
    assert refusal((first + "A" * 70 + "\n") * 10).startswith(first[:8])


def test_a_name_is_told_without_its_middle():
    message = refusal("x" * 1_000_000 + ".png")
    assert len(message) < 350 and "xxx...xxx" in message and ".png: found" in message
    assert "no-such-folder/a.png: found no such file" in refusal("no-such-folder/a.png")


def test_a_home_folder_may_be_written_as_in_a_shell(png, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_image("~/a picture.png").size == load_image(Path("~/a picture.png")).size == (7, 5)
    (tmp_path / "~x.png").write_bytes(png.read_bytes())
    assert load_image("~x.png").size == (7, 5), "a file may be called so"
    assert "~nobody/x.png: found no such file" in refusal("~nobody/x.png")


def test_a_file_url_is_the_path_behind_it(png, tmp_path):
    """As Qwen's examples and vLLM's have it."""
    whole = png.as_uri()
    assert "%20" in whole
    for url in (whole, f"file://{png}", whole.replace("file://", "FILE://localhost")):
        assert load_image(url).size == (7, 5)
    (tmp_path / "100%25.png").write_bytes(png.read_bytes())
    assert load_image(f"file://{tmp_path}/100%25.png").size == (7, 5), "a file may be called so"
    assert "no such file" in refusal(f"file://{tmp_path}/no.png")
    assert "found an address, s3://, expected a file" in refusal("s3://bucket/x.png")


def test_a_file_at_its_end_is_read_from_its_beginning(png):
    """As Pillow does: a picture has just been written into it."""
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    assert load_image(file).size == load_image(file).size == (7, 5)
    file = io.BytesIO(b"before" + png.read_bytes())
    file.seek(6)
    assert load_image(file).size == (7, 5)
    assert "found 0 bytes" in refusal(io.BytesIO())


def test_what_holds_a_picture_is_told_how_to_give_it():
    for source, advice in (
        ({"image": PIXELS}, "x['image']"),
        ([PIXELS], "one list of pictures"),
        (type("Array", (), {"__array__": lambda _: PIXELS})(), "numpy.asarray(x)"),
        (3, "open or convert it first"),
    ):
        assert refusal(source).endswith(advice)


@pytest.mark.parametrize("missing", [float("nan"), np.float64("nan"), None], ids=repr)
def test_a_missing_value_of_a_table_is_told_as_one(missing):
    with pytest.raises(ImageError, match=r"a value is missing: leave such rows out"):
        load_image(missing)


def test_columns_of_tables_and_arrays_of_paths_are_told_to_be_lists():
    column = SimpleNamespace(tolist=list, ndim=1, dtype=np.dtype(object), __array__=None)
    with pytest.raises(ImageError, match=r"give the pictures in it as a list, list\(x\)"):
        load_image(column)
    with pytest.raises(ImageError, match=r"give its content as a list, x\.tolist\(\)"):
        load_image(np.array(["a.png", "b.png"]))


def test_a_tensor_of_whole_numbers_is_told_in_its_own_words():
    with pytest.raises(ImageError, match=r"a tensor of torch\.int64 .*x\.to\(torch\.uint8\)"):
        load_image(torch.zeros(3, 4, 4, dtype=torch.int64))


def test_a_tensor_without_values_is_refused():
    assert "on the device meta" in refusal(torch.empty(3, 4, 4, device="meta"))


def test_paths_that_lead_nowhere(png, tmp_path):
    assert "nowhere.png: found no such file" in refusal(tmp_path / "nowhere.png")
    assert "found no such file" in refusal(png / "inside.png")
    assert "found a folder" in refusal(tmp_path)
    assert "found a folder" in refusal(str(tmp_path) + "/")
    assert "found an empty path" in refusal("")
    assert "not a usable path" in refusal("a\0b.png")
    (tmp_path / "link.png").symlink_to("nowhere")
    assert "link.png: found a link to a file that is not there" in refusal(tmp_path / "link.png")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be opened" in refusal(loop)
    assert "a?b.png: found no such file" in refusal(tmp_path / "a\nb.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_sockets_and_devices_are_refused_without_waiting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    os.mkfifo("pipe")
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(refusal("pipe")), daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert answers
    assert (
        "pipe: found a pipe, expected a picture file; save its content to a file first"
        in answers[0]
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "found a socket" in refusal("socket")
    assert "found a device" in refusal("/dev/zero")


def test_a_file_over_the_limit_is_not_read(tmp_path, monkeypatch):
    sparse = tmp_path / "large.png"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(Path, "open", None)
    assert "found 1,099,511,627,776 bytes, expected at most 67,108,864" in refusal(sparse)


def test_an_empty_file_and_one_that_is_no_picture(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"")
    assert "x.png: found 0 bytes" in refusal(path)
    path.write_bytes(b"%!PS-Adobe")
    assert "x.png: found a PostScript document" in refusal(path)


def test_a_file_that_may_not_be_read(png, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # tests may run as root, who may read everything
    assert "found a file that may not be read" in refusal(png)


def test_endless_and_unusable_files():
    class Endless(io.RawIOBase):
        served = 0

        def read(self, size: int = -1) -> bytes:
            self.served += size
            return b"x" * size

    endless = Endless()
    assert "expected at most 1,000" in refusal(endless, ImageLimits(max_bytes=1000))
    assert endless.served == 1001
    assert "found a file open for text" in refusal(io.StringIO("x"))
    closed = io.BytesIO(b"x")
    closed.close()
    assert "cannot be read" in refusal(closed)


def test_what_has_no_name_is_called_as_told(png):
    for source in (b"no picture", io.BytesIO(b"no picture"), np.zeros((2, 2), int), None, ""):
        assert refusal(source, unnamed="image 2").startswith("image 2: found ")
        assert refusal(source).startswith("image: found ")
    missing = png.with_name("missing.png")
    assert refusal(missing, unnamed="image 2").startswith(f"{missing}: found no such file")
    text = png.with_name("text.txt")
    text.write_text("no picture")
    with text.open("rb") as file:
        assert refusal(file, unnamed="image 2").startswith(f"{text}: found plain text")


@pytest.mark.parametrize("stranger", [3, None, object(), {"a": 1}])
def test_strangers_are_refused(stranger):
    assert f"found an object of type {type(stranger).__name__}, expected a path, bytes" in refusal(
        stranger
    )
    assert "found an array of float64" in refusal(np.full((2, 2), 1.5))
