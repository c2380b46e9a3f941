"""`mtmd transcribe`: files that are no audio are refused before a model is loaded for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("PNG", "found a picture (PNG), expected a WAV, MP3, FLAC, Ogg, Opus, M4A, AAC or WebM"),
        ("", "found plain text, expected a WAV, MP3, FLAC, Ogg, Opus, M4A, AAC or WebM"),
    ],
)
def test_what_is_no_audio(mtmd: Any, tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "slide.png"
    path.write_text("Dear Ada,\n")
    if kind:
        Image.new("RGB", (8, 8)).save(path, kind)
    line = mtmd("transcribe", path, "-m", "no/such-model").refused()
    advice = "ask about it as a picture, as with `mtmd describe`" if kind else "convert it"
    assert message in line and advice in line and "slide.png" in line
