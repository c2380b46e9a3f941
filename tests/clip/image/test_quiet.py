"""Pillow's own warnings are silenced exactly while a decoder is inside, and nobody else's ever."""

from __future__ import annotations

import io
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from mtmd.clip.image.decode import open_picture
from mtmd.clip.image.quiet import quiet_pillow


def warn_from(module: str) -> None:
    warnings.warn_explicit(
        "about metadata", UserWarning, filename=f"{module}.py", lineno=1, module=module
    )


def test_silence_lasts_until_the_last_one_leaves():
    with quiet_pillow:
        with quiet_pillow:
            warn_from("PIL.TiffImagePlugin")
        warn_from("PIL.TiffImagePlugin")
    with pytest.raises(UserWarning, match="about metadata"):
        warn_from("PIL.TiffImagePlugin")


def damaged_tiff() -> Image.Image:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "TIFF", compression="tiff_deflate")
    data = file.getvalue()
    return Image.open(io.BytesIO(data[:8] + bytes(30) + data[38:]))


def test_what_libtiff_writes_for_others_is_still_written(capfd):
    """Past Python, to the file descriptor of stderr."""
    written = []
    for silence in (nullcontext(), quiet_pillow, nullcontext()):
        with silence, damaged_tiff() as image, pytest.raises(OSError):
            image.load()
        written.append(capfd.readouterr().err)
    assert written[1] == "" and written[0] == written[2] != ""


def test_others_are_still_heard():
    with quiet_pillow, pytest.raises(UserWarning, match="about metadata"):
        warn_from("numpy")


def test_filters_set_meanwhile_are_kept():
    with quiet_pillow:
        warnings.filterwarnings("ignore", module="numpy")
    warn_from("numpy")
    with pytest.raises(UserWarning):
        warn_from("PIL.Image")


def encoded(seed: int, format_: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(
        buffer, format_
    )
    return buffer.getvalue()


def test_threads_do_not_disturb_each_other_or_the_warning_filters():
    sources = [
        encoded(seed, format_) for seed in range(3) for format_ in ("PNG", "TIFF", "JPEG", "WEBP")
    ]
    filters, digests = list(warnings.filters), {}
    expected = [open_picture(source).sha256 for source in sources]

    def work(start: int) -> None:
        digests[start] = [
            open_picture(sources[(start + i) % len(sources)]).sha256 for i in range(len(sources))
        ]

    threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert digests == {start: expected[start:] + expected[:start] for start in range(8)}
    assert list(warnings.filters) == filters
