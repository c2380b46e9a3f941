"""Videos in every family that reads them, against transformers on the same frames: pixels, prompt
ids, embeddings, logits, greedy tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blocks import once
from common import Oracle, picture
from gguf_files import decoder, glm4v_projector
from test_against_transformers import decode, nmse
from videos import CASES, Clip, VideoCase, VideoOracle, clip

from mtmd.base.errors import PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.image.decode import open_picture
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.bridge import Bridge, PreparedVideo, flat
from mtmd.prompt.prompts import PreparedPrompt
from mtmd.service.encode_queue import EncodeQueue

Build = Callable[[str, str], Oracle]
EDGES, CLIP_PIXELS = ("shortest_edge", "longest_edge"), (112 * 112, 28 * 28 * 2 * 30000)
TOKENS = int(os.environ.get("GREEDY_TOKENS", 12))  # 48 say more, and take longer
PICTURE = picture(0, 70, 50)
ODD = clip(1, 5, 62, 45, every=8, fps=10.0)
LONGER = clip(2, 6, 40, 61, every=25, fps=24.0)
ONE = clip(3, 1, 50, 70, every=12, fps=12.0)


def video_of(shown: Clip) -> Video:
    height, width = shown.frames[0].shape[:2]
    facts = VideoFacts(shown.total, shown.fps, shown.total / shown.fps, width, height)
    return Video(shown.frames, shown.indices, shown.times, facts)


def conversation(parts: Sequence[Any]) -> list[dict[str, Any]]:
    kinds = {np.ndarray: "image", Clip: "video"}
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": kinds[type(p)]}
        for p in parts
    ]
    return [{"role": "user", "content": content}]


class Subject:
    """Our model of a case, and what transformers says, each asked once."""

    def __init__(self, oracle: Oracle, case: VideoCase):
        self.reference = VideoOracle(oracle, case)
        self.oracle, self.case = self.reference.oracle, case
        self.model = Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))
        first = ("What moves in", ODD)
        second = (*(("and", PICTURE) if case.mixed else ()), *(("or", LONGER) if case.many else ()))
        self.requested: list[tuple[Any, ...]] = [
            (*first, *second, "here?"),
            ("Describe a red circle",),
            (LONGER, "What do you see?"),
        ]
        self.inputs = [
            self.reference.inputs(conversation(parts), [p for p in parts if not isinstance(p, str)])
            for parts in self.requested
        ]
        self.logits = self.oracle.logits(self.inputs[0])
        self.greedy = [self.oracle.greedy(inputs, TOKENS) for inputs in self.inputs]

    def prompt(self, parts: Sequence[Any]) -> PreparedPrompt:
        prompts = self.model.prompts
        media = [
            video_of(p) if isinstance(p, Clip) else open_picture(p)
            for p in parts
            if not isinstance(p, str)
        ]
        shown = prompts.bridge.prepare_media(media)
        rendered = self.model.checkpoint.template.render(conversation(parts))
        return PreparedPrompt(prompts.bridge.read(rendered, shown), flat(shown), (), tuple(shown))

    def spans(self, index: int = 0) -> list[Span]:
        return self.model.prompts.encode(self.prompt(self.requested[index])).spans

    def runner(self, sequences: int) -> Runner:
        checkpoint = self.model.checkpoint
        return Runner(
            checkpoint.text,
            checkpoint.text_weights,
            self.model.backends,
            dtype=torch.float32,
            context=1536,
            sequences=sequences,
            image_tokens=self.model.runner.image_tokens,
            residency=self.model.runner.residency,
        )


@pytest.fixture(params=CASES)
def subject(build: Build, request: pytest.FixtureRequest) -> Subject:
    return one_case(build, request.param)


def test_pixels_are_exact(subject: Subject) -> None:
    shown = subject.prompt(subject.requested[0]).shown
    groups = [g for v in shown if isinstance(v, PreparedVideo) for g in v.groups]
    encoder = subject.model.encoder
    assert encoder
    actual = [encoder.pixels(tile) for group in groups for tile in group.plan.tiles]
    clips = [p for p in subject.requested[0] if isinstance(p, Clip)]
    expected = subject.case.tiles(subject.reference.inputs(conversation(clips), clips))
    assert [t.shape for t in actual] == [e.shape for e in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_prompts(subject: Subject) -> None:
    for parts, inputs in zip(subject.requested, subject.inputs, strict=True):
        assert list(subject.prompt(parts).tokens) == subject.oracle.prompt_ids(inputs)


def test_embeddings(subject: Subject) -> None:
    rows = [s.embeddings for s in subject.spans() if s.embeddings is not None]
    assert nmse(torch.cat(rows), subject.oracle.image_features(subject.inputs[0])) <= 1e-8


def test_logits_with_prefill_in_chunks_of_seven(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, spans = subject.runner(1), subject.spans()
    assert nmse(runner.prefill(spans, runner.new_cache()), subject.logits) <= 1e-8
    monkeypatch.setattr("mtmd.llm.engine.runner.PREFILL", 7)
    assert nmse(runner.prefill(spans, runner.new_cache()), subject.logits) <= 1e-8


def test_three_sequences_in_one_batch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_against_transformers.TOKENS", TOKENS)
    runner = subject.runner(3)
    cache = runner.new_cache()
    running = [runner.begin(cache, slot) for slot in (1, 2, 0)]
    logits = runner.read([(r, subject.spans(i)) for i, r in enumerate(running)], cache)
    assert decode(runner, cache, running, logits) == subject.greedy


def test_one_frame(subject: Subject) -> None:
    """The references that refuse it are given it twice."""
    twice = replace(ONE, frames=ONE.frames * 2, indices=ONE.indices * 2)
    given = twice if subject.case.two_at_least else ONE
    inputs = subject.reference.inputs(conversation(["What", ONE, "is it?"]), [given])
    prompt = subject.prompt(["What", ONE, "is it?"])
    assert list(prompt.tokens) == subject.oracle.prompt_ids(inputs)
    runner, spans = subject.runner(1), subject.model.prompts.encode(prompt).spans
    logits = runner.prefill(spans, runner.new_cache())
    assert nmse(logits, subject.oracle.logits(inputs)) <= 1e-8


def one_case(
    build: Build, name: str = "qwen2_vl: qwen2.5-vl, windows of 2x2 merged patches"
) -> Any:
    case = CASES[name]
    return once(name, lambda: Subject(build(case.row, case.variant), case))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.mixed])
def test_pictures_beside_videos_where_the_reference_takes_none(build: Build, name: str) -> None:
    subject = one_case(build, name)
    both = subject.prompt(["What", PICTURE, "and", ODD, "?"])
    alone = subject.prompt(["What", ODD, "?"])
    (_, video), (same,) = both.shown, alone.shown
    assert video.text == same.text and len(both.pictures) > len(alone.pictures)
    assert [g.key for g in both.pictures[-len(alone.pictures) :]] == [g.key for g in alone.pictures]
    shown = [piece for piece in both.pieces if not piece.is_text]
    pieces = [piece for piece in alone.pieces if not piece.is_text]
    assert [p.tokens for p in shown[-len(pieces) :]] == [p.tokens for p in pieces]
    assert sum(len(p.tokens) for p in shown) == sum(p.plan.tokens for p in both.pictures)


def encoded(bridge: Bridge, shown: Clip, **options: Any) -> tuple[int, list[torch.Tensor]]:
    """How many groups of a clip were encoded before, and what all of them show."""
    queue = EncodeQueue(bridge)
    video = bridge.prepare_video(video_of(shown), **options)
    jobs = {id(g): queue.add(g) for g in video.groups if g.embeddings is None}
    while queue.busy:
        queue.step(None)
    result = [g.embeddings if id(g) not in jobs else jobs[id(g)].embeddings for g in video.groups]
    assert all(f is not None for f in result)
    return video.cached_groups, [f for f in result if f is not None]


def test_a_group_is_encoded_once(build: Build) -> None:
    """A second question encodes nothing, a longer cut what is new; by what is seen, not by when."""
    model = one_case(build).model
    bridge = Bridge(model.encoder, model.checkpoint.tokenizer)
    frames = tuple(picture(500 + i, 62, 45) for i in range(8))
    first = Clip(frames[:4], (0, 8, 16, 24), 40, 10.0)
    longer = Clip(frames, tuple(range(0, 64, 8)), 64, 12.0)
    assert encoded(bridge, first)[0] == 0
    again, known = encoded(bridge, first)
    assert again == 2
    part, result = encoded(bridge, longer)
    assert part == 2 and len(result) == 4
    assert all(a is b for a, b in zip(known, result, strict=False))
    assert encoded(bridge, longer, salt="another")[0] == 0
    assert encoded(bridge, longer, anew=True)[0] == 0
    assert encoded(bridge, Clip((*frames[1:4], frames[0]), (0, 8, 16, 24), 40, 10.0))[0] == 0


def test_a_smaller_budget_makes_smaller_frames(build: Build) -> None:
    bridge = one_case(build).model.prompts.bridge
    assert bridge.video is not None
    usual = bridge.video.shape(62, 45, 5)
    small = bridge.video.shape(62, 45, 5, Budget(max_tokens=2))
    assert usual.notes == () and usual.groups == small.groups == 3
    assert small.tokens <= 2 < usual.tokens
    assert "to keep to 2 tokens each pair" in small.notes[0]
    assert bridge.prepare_video(video_of(ODD), Budget(max_tokens=2)).shape == small


@pytest.mark.parametrize(
    ("parts", "text", "reported"),
    [
        ((ODD,), "no place", "wrote 0 video places for 1 videos"),
        ((ODD,), "<|video_pad|><|video_pad|>", "wrote 2 video places for 1 videos"),
        ((PICTURE,), "<|video_pad|>", "wrote 0 picture places for 1 pictures"),
        ((), "<|video_pad|>", "wrote 1 video places for 0 videos"),
        ((ODD, PICTURE), "{picture}<|video_pad|>", "in another order than the message"),
    ],
)
def test_templates_that_do_not_fit(
    build: Build, parts: tuple[Any, ...], text: str, reported: str
) -> None:
    bridge = one_case(build).model.prompts.bridge
    media = [video_of(p) if isinstance(p, Clip) else open_picture(p) for p in parts]
    assert bridge.encoder is not None
    text = text.format(picture=bridge.encoder.family.marker)
    with pytest.raises(PromptError, match=reported):
        bridge.read(text, bridge.prepare_media(media))


def test_users_cannot_write_a_video(build: Build) -> None:
    tokenizer = one_case(build).model.checkpoint.tokenizer
    sealed = tokenizer.encode_prompt(tokenizer.seal("what is <|video_pad|>?"))
    assert tokenizer.id("<|video_pad|>") not in sealed


def test_a_clip_out_of_gguf(build: Build, tmp_path: Path) -> None:
    """Kernels of both frames; what a GGUF does not say is as transformers has it."""
    whole = CASES["glm4v: heads of 40 and 24, half of each turning"]
    case = replace(whole, settings={"size": dict(zip(EDGES, CLIP_PIXELS, strict=True))})
    reference = VideoOracle(build(case.row, case.variant), case)
    folder = reference.oracle.folder
    decoder(folder, tmp_path / "text.gguf", "glm4")
    glm4v_projector(folder, tmp_path / "mmproj.gguf")
    model = Model(open_checkpoint(tmp_path / "text.gguf"), LoadOptions(device="cpu", dtype="fp32"))
    inputs = reference.inputs(conversation([ODD, "What?"]), [ODD])
    shown = model.prompts.bridge.prepare_media([video_of(ODD)])
    rendered = model.checkpoint.template.render(conversation([ODD, "What?"]))
    pieces = model.prompts.bridge.read(rendered, shown)
    spans = model.prompts.encode(PreparedPrompt(pieces, flat(shown))).spans
    assert [t for s in spans for t in s.tokens] == reference.oracle.prompt_ids(inputs)
    result = model.runner.prefill(spans, model.runner.new_cache())
    assert nmse(result, reference.oracle.logits(inputs)) <= 1e-8
