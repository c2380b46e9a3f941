"""Videos in every family that reads them, against transformers on the same frames: pixels, prompt
ids, embeddings, logits, greedy tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from common import Oracle, picture
from test_against_transformers import decode, nmse
from videos import CASES, Clip, VideoCase, VideoOracle, clip

from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.image.decode import open_picture
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.config import LoadOptions
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.prompt.bridge import PreparedVideo, flat
from mtmd.prompt.prompts import PreparedPrompt

Build = Callable[[str, str], Oracle]
Part = "str | np.ndarray | Clip"
TOKENS = 12
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
        self.asked: list[tuple[Any, ...]] = [
            (*first, *second, "here?"),
            ("Describe a red circle",),
            (LONGER, "What do you see?"),
        ]
        self.inputs = [
            self.reference.inputs(conversation(parts), [p for p in parts if not isinstance(p, str)])
            for parts in self.asked
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
        return self.model.prompts.encode(self.prompt(self.asked[index])).spans

    def runner(self, sequences: int) -> Runner:
        checkpoint = self.model.checkpoint
        return Runner(
            checkpoint.text,
            checkpoint.text_weights,
            self.model.backends,
            dtype=torch.float32,
            context=512,
            sequences=sequences,
            image_tokens=self.model.runner.image_tokens,
            residency=self.model.runner.residency,
        )


SUBJECTS: dict[str, Subject] = {}


@pytest.fixture(params=CASES)
def subject(build: Build, request: pytest.FixtureRequest) -> Subject:
    case = CASES[request.param]
    if case.name not in SUBJECTS:
        SUBJECTS[case.name] = Subject(build(case.row, case.variant), case)
    return SUBJECTS[case.name]


def test_pixels_are_exact(subject: Subject) -> None:
    shown = subject.prompt(subject.asked[0]).shown
    groups = [g for v in shown if isinstance(v, PreparedVideo) for g in v.groups]
    found = [tile for group in groups for tile in group.plan.tiles]
    clips = [p for p in subject.asked[0] if isinstance(p, Clip)]
    expected = subject.case.tiles(subject.reference.inputs(conversation(clips), clips))
    assert [t.shape for t in found] == [e.shape for e in expected]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_prompts(subject: Subject) -> None:
    for parts, inputs in zip(subject.asked, subject.inputs, strict=True):
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
