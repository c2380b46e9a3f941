"""A video file in a family that reads videos, from its path to the receipt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clips import video
from common import Oracle

from mtmd import VideoInput
from mtmd.base.errors import PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.video.footage import VideoFile
from mtmd.clip.video.video import Video
from mtmd.model import Model
from mtmd.options.load import LoadOptions

ROW = "qwen2_vl", "qwen2.5-vl, windows of 2x2 merged patches"


@pytest.fixture(scope="module")
def model(build: Callable[[str, str], Oracle]):
    options = LoadOptions(device="cpu", dtype="fp32", context=512)
    with Model(open_checkpoint(build(*ROW).folder), options) as model:
        yield model


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    path.write_bytes(video(40, fps=10))
    return path


def test_a_file_is_read_as_its_frames_would_be(model: Model, clip: Path) -> None:
    answer = model.answer(VideoInput(clip, fps=1), "what moves?", max_tokens=3)
    (seen,) = answer.receipt.videos
    indices = tuple(frame.index for frame in seen.frames)
    with VideoFile(clip).opened() as reader:
        _, times, frames = zip(*reader.take(indices, (96, 64)), strict=True)
        given = Video(frames, indices, times, reader.facts)
    (known,) = model.prompts.bridge.prepare_media([given], model.loaded.limits)
    assert known.cached_groups == len(known.groups) > 1
    tokens = answer.prompt_token_ids
    token = model.checkpoint.tokenizer.id(model.prompts.bridge.video.token)
    assert tokens.count(token) == seen.tokens == known.shape.all_tokens
    assert seen.how == "as the model's own processor takes videos" and answer.receipt.images == ()
    assert [f.place for f in seen.frames] == [n % 2 for n in range(len(seen.frames))]


def test_a_second_question_encodes_nothing_and_a_longer_part_what_is_new(
    model: Model, clip: Path
) -> None:
    def requested(end: float):
        chosen = VideoInput(clip, fps=2, start=0, end=end)
        return model.answer(chosen, "what?", max_tokens=1).receipt.videos[0]

    requested(1.4)
    tiles = model.service.stats().encode_tiles
    again = requested(1.4)
    assert again.read_before and all(frame.cached for frame in again.frames)
    assert model.service.stats().encode_tiles == tiles


def test_as_many_frames_as_fit_the_context(model: Model, clip: Path) -> None:
    answer = model.answer(VideoInput(clip, fps=10), "what?", max_tokens=1)
    (seen,) = answer.receipt.videos
    assert answer.receipt.prompt_tokens < 512
    if len(seen.frames) < 40:
        assert any("more do not fit the context of 512 tokens" in note for note in seen.notes)


def test_pictures_beside_a_video(model: Model, clip: Path) -> None:
    picture = Path(__file__).parents[2] / "examples/shapes.png"
    receipt = model.answer([picture, clip], "what?", max_tokens=1).receipt
    assert (len(receipt.images), len(receipt.videos)) == (1, 1)


def test_a_template_that_knows_no_videos(
    model: Model, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = model.answer(clip, "what?", max_tokens=1).prompt_token_ids
    render = model.checkpoint.template.render

    def blind(messages: Any, **more: Any) -> str:
        if any(isinstance(m["content"], str) for m in messages):
            raise PromptError("parts alone are read")
        shown = [
            {**m, "content": [p for p in m["content"] if p["type"] != "video"]} for m in messages
        ]
        return render(shown, **more)

    monkeypatch.setattr(model.prompts.text, "_render", blind)
    assert model.answer(clip, "what?", max_tokens=1).prompt_token_ids == usual
