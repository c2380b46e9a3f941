"""Videos of a conversation, for a family that has none of its own: the demo model's."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clips import animation, numbered, video
from PIL import Image

from mtmd import OptionError, PromptError, VideoError, VideoInput
from mtmd.clip.token_budget import DEFAULT_BUDGET
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.footage import GivenFrames
from mtmd.clip.video.frame_request import FrameRequest
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.clip.video.video import Video
from mtmd.model import Model
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.video_input import Requested, is_video
from mtmd.prompt.videos import _Own

HOW = "frames as pictures: gemma3 has no video of its own"


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    path.write_bytes(video(48))
    return path


def written(model: Model, answer) -> str:
    return model.checkpoint.tokenizer.decode(answer.prompt_token_ids, skip_special=False)


def test_frames_stand_as_pictures_with_their_times(demo: Model, clip: Path) -> None:
    answer = demo.answer(clip, "What moves?", max_tokens=2)
    token = demo.encoder.family.image_token
    family_text = re.sub(
        rf"(\s*(<[^<>]*>)*({re.escape(token)})+(<[^<>]*>)*\s*)", "P", written(demo, answer)
    )
    assert (
        "Frame at 0.0 s:PFrame at 1.0 s:PFrame at 2.0 s:PFrame at 3.0 s:PWhat moves?" in family_text
    )
    (seen,) = answer.receipt.videos
    assert [f.index for f in seen.frames] == [0, 12, 24, 36]
    assert [f.time for f in seen.frames] == [0, 1, 2, 3]
    assert (seen.how, seen.codec, seen.original_size) == (HOW, "h264", (96, 64))
    assert answer.receipt.images == () and answer.receipt.image_tokens == seen.tokens > 0
    assert "video 1: 4.0 s of 96 x 64 at 12 fps (h264), 4 frames" in str(answer.receipt)


def test_a_second_question_reads_and_encodes_nothing(demo: Model, clip: Path) -> None:
    demo.answer(clip, "What is it?", max_tokens=2)
    tiles = demo.service.stats().encode_tiles
    (seen,) = demo.answer(clip, "And which colour?", max_tokens=2).receipt.videos
    assert seen.read_before and all(frame.cached for frame in seen.frames)
    assert demo.service.stats().encode_tiles == tiles


def test_a_longer_part_encodes_only_what_is_new(demo: Model, clip: Path) -> None:
    demo.answer(VideoInput(clip, fps=6, end=1.0), "x", max_tokens=1)
    (seen,) = demo.answer(VideoInput(clip, fps=6, end=1.5), "x", max_tokens=1).receipt.videos
    assert [frame.cached for frame in seen.frames] == [True] * 7 + [False] * 3


def test_what_the_user_chooses(demo: Model, clip: Path) -> None:
    chosen = VideoInput(clip, fps=4, start=1, end=2)
    (seen,) = demo.answer(chosen, "x", max_tokens=1).receipt.videos
    assert [f.time for f in seen.frames] == [1, 1.25, 1.5, 1.75, 2]
    part = {"type": "video", "video": str(clip), "max_frames": 2}
    *_, last = demo.stream([{"role": "user", "content": [part]}], max_tokens=1)
    assert [f.index for f in last.answer.receipt.videos[0].frames] == [0, 47]


@pytest.mark.parametrize("kind", ["bytes", "open file", "moving picture", "array", "list"])
def test_sources(demo: Model, clip: Path, kind: str) -> None:
    frames = [numbered(n) for n in range(4)]
    sources = {
        "bytes": clip.read_bytes(),
        "open file": io.BytesIO(clip.read_bytes()),
        "moving picture": animation("WEBP", 4, 1.0),
        "array": VideoInput(np.stack(frames)),
        "list": VideoInput([Image.fromarray(f) for f in frames], times=[0, 1, 2, 3]),
    }
    (seen,) = demo.answer(sources[kind], "x", max_tokens=1).receipt.videos
    assert [frame.time for frame in seen.frames] == [0, 1, 2, 3]


def test_pictures_and_videos_in_one_question(demo: Model, clip: Path) -> None:
    picture = Image.fromarray(numbered(77))
    answer = demo.answer([picture, clip, picture], "x", max_tokens=1)
    assert (len(answer.receipt.images), len(answer.receipt.videos)) == (2, 1)
    of_all = sum(i.tokens for i in answer.receipt.images) + answer.receipt.videos[0].tokens
    assert answer.receipt.image_tokens == of_all


def test_as_many_frames_as_fit_the_context(demo: Model) -> None:
    """And beside them the answer: of one token, and of as many as it may have if nobody says."""
    chosen = VideoInput(np.stack([numbered(n) for n in range(120)]), rate=12, fps=12)
    answer = demo.answer(chosen, "x", max_tokens=1)
    (seen,) = answer.receipt.videos
    context, count = demo.runner.context, len(seen.frames)
    assert f"{count} of 120 frames: more do not fit the context of {context:,} tokens" in seen.notes
    assert context * 3 // 4 < answer.receipt.prompt_tokens < context
    counted = demo.service.count(
        [{"role": "user", "content": [{"type": "video", "video": chosen}]}]
    )
    longest = AnswerOptions().max_tokens
    assert context // 2 < counted.prompt_tokens <= context - longest
    assert counted.image_tokens == ()
    assert counted.video_tokens[0] < seen.tokens


def test_times_that_are_long_to_write_have_room() -> None:
    """Of a family that writes them; its tokenizer makes one token of a character."""
    family = SimpleNamespace(
        rule=FrameRule(Beginnings(64)),
        token="@",
        shape=lambda _width, _height, frames, _budget: ClipShape((8, 8), 1, frames, 1),
        prompt=lambda video, _: "".join(f"<{t:.1f} s>@" for t in video.times),
    )
    tokenizer = SimpleNamespace(encode=list)
    bridge = SimpleNamespace(video=family, tokenizer=tokenizer, number=lambda _, **__: "")
    loaded = SimpleNamespace(runner=SimpleNamespace(context=999), limits=DEFAULT_BUDGET)
    times = [100_000.0 + n for n in range(40)]
    given = GivenFrames([numbered(0)] * 40, times)
    for start in (None, 100_010.0):
        making = _Own(loaded, bridge, "auto", False, "")
        part = given.part(start, None)
        requested = Requested(given, FrameRequest(start=start))
        indices, notes = making.choose(given.facts, part, requested, 300)
        seen = Video((), tuple(indices), tuple(times[i] for i in indices), given.facts)
        assert 250 < len(family.prompt(seen, None)) <= 300 and "do not fit the context" in notes[0]


def test_what_is_a_video(clip: Path, tmp_path: Path) -> None:
    still = tmp_path / "still.gif"
    still.write_bytes(animation("GIF", frames=1))
    assert is_video(clip) and is_video(str(clip)) and is_video(animation("PNG"))
    assert not is_video(still) and not is_video(tmp_path) and not is_video("nowhere.mp4")
    assert not is_video(np.zeros((2, 4, 4, 3), np.uint8)) and not is_video(b"")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda c: VideoInput(c, fps=0), OptionError, "fps: found 0"),
        (lambda c: VideoInput(c, fps=5e-324), OptionError, "fps: found 4.9"),
        (lambda c: VideoInput(c, end=10**400), OptionError, "end: found a number of hundreds"),
        (lambda c: VideoInput(c, max_frames=True), OptionError, "max_frames"),
        (lambda c: VideoInput(c, rate=2, times=[0]), OptionError, "rate: found with times"),
        (lambda _: VideoInput("no.mp4"), VideoError, "no such file, expected a video"),
        (lambda _: VideoInput(b"RIFF1234AVI "), VideoError, "damaged|no frame|without pictures"),
        (lambda _: VideoInput(object()), VideoError, "object of type object"),
        (lambda c: VideoInput(c, start=60), OptionError, "start: found 60 s"),
    ],
    ids=[
        "fps",
        "tiny fps",
        "endless",
        "count",
        "both",
        "nowhere",
        "damaged",
        "nothing",
        "after the end",
    ],
)
def test_mistakes(demo: Model, clip: Path, make, error, words) -> None:
    with pytest.raises(error, match=words):
        demo.answer(make(clip), "x")


def test_a_video_alone_is_a_question_and_a_part_needs_its_source(demo: Model, clip: Path) -> None:
    alone = [{"role": "user", "content": [{"type": "video", "video": clip}]}]
    *_, last = demo.service.submit(alone, max_tokens=2)
    assert [f.index for f in last.answer.receipt.videos[0].frames] == [0, 12, 24, 36]
    assert written(demo, last.answer).count("Frame at") == 4
    with pytest.raises(PromptError, match="a part of type 'video' has no 'video'"):
        demo.service.submit([{"role": "user", "content": [{"type": "video"}]}])


def test_a_file_that_ends_early_is_told(demo: Model) -> None:
    data = video(48, index_first=True)
    (seen,) = demo.answer(data[: len(data) * 2 // 3], "x", max_tokens=1).receipt.videos
    assert 0 < len(seen.frames) < 4 and "not at 4.0 s as it says" in str(seen)


def test_another_tenant_does_not_find_it(demo: Model, clip: Path) -> None:
    requested = [{"role": "user", "content": [{"type": "video", "video": clip}]}]

    def reported(tenant: str):
        *_, last = demo.service.submit(requested, tenant=tenant, max_tokens=1)
        return last.answer.receipt.videos[0]

    assert [reported(t).read_before for t in ("one", "one", "another")] == [False, True, False]


def test_counting_reads_a_video_once_and_the_answer_does_not_read_it_again(demo: Model) -> None:
    data = video(24, size=(80, 48))
    requested = [{"role": "user", "content": [{"type": "video", "video": data}]}]
    counted = demo.service.count(requested)
    *_, last = demo.service.submit(requested, max_tokens=1)
    (seen,) = last.answer.receipt.videos
    assert seen.read_before and not any(frame.cached for frame in seen.frames[:1])
    assert counted.video_tokens == (seen.tokens,)
    assert counted.prompt_tokens == last.answer.receipt.prompt_tokens


def test_the_command(mtmd, clip: Path) -> None:
    words = ("describe", clip, "--fps", 2, "--max-frames", 3, "--from", "0:01", "--to", "3s")
    ran = mtmd(*words, "--max-tokens", 1)
    assert "3 frames from 1.0 to 3.0 s" in ran.err and ran.code == 0
    assert "--from: found no video" in mtmd("describe", "examples/one.png", "--from", 1).refused()
    assert "--to" in mtmd("describe", clip, "--to", "soon").refused()


def test_videos_and_their_frames_are_counted_beside_pictures(demo: Model, clip: Path) -> None:
    before = demo.service.stats()
    demo.answer([Image.fromarray(numbered(5)), clip], "x", max_tokens=1)
    after = demo.service.stats()
    assert (after.images - before.images, after.videos - before.videos) == (1, 1)
    assert after.video_frames - before.video_frames == 4
