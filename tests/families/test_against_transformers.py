"""Every family against transformers, from the same files: prompt ids, pixels, embeddings, logits,
greedy tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from blocks import once
from common import Oracle, picture
from requested_device import RequestedDevice
from table import CASES, ROWS

from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.clip.image.decode import open_picture
from mtmd.events import Finished
from mtmd.kernels.plan.executor import finish
from mtmd.kernels.plan.flash_choice import SETTINGS
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.rewritten_turns import SYSTEM_IN_TURN

Build = Callable[[str, str], Oracle]
TOKENS = 48
PICTURES = [picture(0, 70, 50), picture(1, 33, 91)]
every_variant = pytest.mark.parametrize(
    ("row", "variant"), CASES, ids=[f"{row}: {variant}" for row, variant in CASES]
)
every_vision_variant = pytest.mark.parametrize(
    ("row", "variant"),
    [c for c in CASES if ROWS[c[0]].vision],
    ids=[f"{row}: {variant}" for row, variant in CASES if ROWS[row].vision],
)


def conversation(*parts: Any) -> list[dict[str, Any]]:
    """One turn of the user: texts, and pictures by their number."""
    return [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": PICTURES[p]}
                if isinstance(p, int)
                else {"type": "text", "text": p}
                for p in parts
            ],
        }
    ]


def conversations(row: str) -> list[list[dict[str, Any]]]:
    """Of different lengths: two pictures between texts, text alone, one picture."""
    if ROWS[row].asks:
        return [conversation(*parts) for parts in ROWS[row].asks]
    if not ROWS[row].vision:
        return [
            conversation("What is", "and", "here?"),
            conversation("Describe a red circle at the left and the blue square"),
            conversation("Who?"),
        ]
    return [
        conversation("What is", 0, "and", 1, "here?"),
        conversation("Describe a red circle"),
        conversation(1, "What do you see?"),
    ]


def requested(oracle: Oracle, messages: list[dict[str, Any]]) -> Any:
    """transformers' inputs for a conversation."""
    return oracle.inputs(
        messages, [p["image"] for m in messages for p in m["content"] if p["type"] == "image"]
    )


class Subject:
    """Our model of a variant, and what transformers says, each asked once."""

    def __init__(self, oracle: Oracle, row: str):
        self.oracle, self.conversations = oracle, conversations(row)
        self.model = Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))
        self.inputs = [requested(oracle, messages) for messages in self.conversations]
        self.logits = oracle.logits(self.inputs[0])
        self.greedy = [oracle.greedy(inputs, TOKENS) for inputs in self.inputs]

    def spans(self, index: int = 0) -> list[Span]:
        return self.model.spans(self.conversations[index])

    def engine(self, sequences: int, flash: str = "auto") -> Runner:
        checkpoint = self.model.checkpoint
        return Runner(
            checkpoint.text,
            checkpoint.text_weights,
            self.model.backends,
            dtype=torch.float32,
            context=1024,
            sequences=sequences,
            image_tokens=self.model.runner.image_tokens,
            flash_attn=flash,
            residency=self.model.runner.residency,
        )


def tile_of(
    patches: np.ndarray, shape: tuple[int, ...], merge: int, channels_last: bool
) -> np.ndarray:
    """[3, Y, X] from the patches transformers cuts a picture into, `merge` x `merge` of them
    together: [P, numbers of a patch].

    A patch that stands for two equal frames holds each pixel twice.
    """
    channels, height, width = shape
    side = int((height * width / len(patches)) ** 0.5)
    rows, columns = height // side // merge, width // side // merge
    if channels_last:
        cells = patches.reshape(rows, columns, merge, merge, side, side, channels).transpose(
            6, 0, 2, 4, 1, 3, 5
        )
        return cells.reshape(shape)
    frames = patches.reshape(len(patches), channels, -1, side, side)
    assert all(np.array_equal(frames[:, :, 0], frames[:, :, i]) for i in range(frames.shape[2]))
    return (
        frames[:, :, 0]
        .reshape(rows, columns, merge, merge, channels, side, side)
        .transpose(4, 0, 2, 5, 1, 3, 6)
        .reshape(shape)
    )


# Rows whose processors give patches: how many to a side lie together, and whether their channels
# come last.
PATCHES = {
    "cohere_compass": (2, False),
    "exaone4_5": (2, False),
    "ernie4_5_vl": (2, False),
    "gemma4": (1, True),
    "lfm2_vl": (1, True),
    "lfm3_vl": (2, False),
    "hunyuan_vl": (1, False),
    "hyperclovax": (2, False),
    "dots_ocr": (2, False),
    "kimi_k25": (1, False),
    "paddleocr_vl": (1, False),
    "qwen2_vl": (2, False),
    "qwen3_5": (2, False),
    "qwen3_vl": (2, False),
    "qwen_omni": (2, False),
    "video_llama3": (1, False),
}
# Rows whose towers read pictures of unequal sizes in one run
PACKED = {
    "cohere_compass",
    "exaone4_5",
    "dots_ocr",
    "ernie4_5_vl",
    "gemma4",
    "glm4v",
    "hyperclovax",
    "kimi_k25",
    "lfm2_vl",
    "minicpmv4_6",
    "paddleocr_vl",
    "phi4_siglip",
    "pixtral",
    "video_llama3",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
}


@pytest.fixture
def subject(build: Build, row: str, variant: str) -> Subject:
    return once((Subject, row, variant), lambda: Subject(build(row, variant), row))


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected|^2 / |expected|^2"""
    return float(
        (result.double() - expected.double()).square().sum() / expected.double().square().sum()
    )


@every_vision_variant
def test_pixels_are_exact(subject: Subject, row: str) -> None:
    pictures = [p["image"] for p in subject.conversations[0][0]["content"] if "image" in p]
    shown = subject.model.prompts.bridge.prepare([open_picture(p) for p in pictures], anew=True)
    actual = [tile for one in shown for tile in one.plan.tiles]
    expected = subject.oracle.pixels(subject.inputs[0])
    if row in PATCHES:
        expected = [
            tile_of(p, t.shape, *PATCHES[row]) for p, t in zip(expected, actual, strict=True)
        ]
    assert [t.shape for t in actual] == [p.shape for p in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@every_vision_variant
def test_embeddings(subject: Subject) -> None:
    spans = [s for s in subject.spans() if not s.content.startswith(b"mark ")]
    rows = [s.embeddings for s in spans if s.embeddings is not None]
    assert nmse(torch.cat(rows), subject.oracle.image_features(subject.inputs[0])) <= 1e-8


@pytest.mark.parametrize("few", [False, True], ids=["to the token", "few sizes"])
@pytest.mark.parametrize(
    ("row", "variant"),
    [c for c in CASES if c[0] in PACKED],
    ids=[f"{row}: {variant}" for row, variant in CASES if row in PACKED],
)
def test_pictures_in_one_pack(subject: Subject, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal sizes: each as alone, and as transformers has it."""
    monkeypatch.setattr("mtmd.clip.packing.MAX_ON_HOST", 4096)
    encoder = subject.model.encoder
    assert encoder is not None and encoder.why_no_packs is None and encoder.strip is not None
    packing = Encoder(
        encoder.family,
        encoder.weights,
        encoder.backends,
        dtype=encoder.dtype,
        residency=encoder.residency,
    )
    packing.strip = replace(encoder.strip, few=few)
    shown = subject.model.prompts.bridge.prepare([open_picture(p) for p in PICTURES], anew=True)
    tiles = [tile for one in shown for tile in one.plan.tiles]
    side = encoder.strip.cells.side
    narrow = np.random.default_rng(0).standard_normal((3, side, 3 * side))
    packed = [*tiles, narrow.astype(np.float32)]
    assert packing.pack_of([t.shape for t in packed]) == list(range(len(packed)))
    actual = finish(packing.steps(packed))
    for ours, alone in zip(actual, encoder.encode(packed), strict=True):
        assert nmse(ours, alone) <= 1e-10
    parts = iter(actual)
    joined = [encoder.join(one.plan, [next(parts) for _ in one.plan.tiles]) for one in shown]
    expected = subject.oracle.image_features(subject.inputs[0])
    assert nmse(torch.cat(joined), expected) <= 1e-8


@every_variant
def test_prompts(subject: Subject) -> None:
    for index, inputs in enumerate(subject.inputs):
        assert [t for s in subject.spans(index) for t in s.tokens] == subject.oracle.prompt_ids(
            inputs
        )


def stated(role: str, *parts: Any) -> dict[str, Any]:
    """A message: one text as a string, anything else in parts."""
    (message,) = conversation(*parts)
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else message["content"]
    return {"role": role, "content": content}


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        conversation(m["content"])[0] | {"role": m["role"]} if isinstance(m["content"], str) else m
        for m in messages
    ]


TURNS = [
    stated("user", "What do you see?"),
    stated("assistant", "a red circle"),
    stated("user", "and at the left?"),
    stated("assistant", "a blue square"),
    stated("user", "Describe the circle"),
]
SHAPES = {
    "text alone": [stated("user", "Describe a red circle")],
    "system": [stated("system", "see the image"), stated("user", "Describe a red circle")],
    "three turns": TURNS,
    "three turns in parts": in_parts(TURNS),
    "a picture, then text alone": [stated("user", 0, "What do you see?"), *TURNS[1:]],
    "several parts": [stated("user", "What is", "at the left", "here?"), *TURNS[1:]],
}


@every_variant
def test_prompts_of_conversations(subject: Subject, row: str) -> None:
    """transformers' processors read parts; strings have to become the same prompt."""
    if ROWS[row].asks:
        pytest.skip("made for one picture, not for conversations")
    for shape, messages in SHAPES.items():
        if shape.startswith("a picture") and not ROWS[row].vision:
            continue
        prepared = subject.model.prompts.prepare(messages)
        try:
            expected = requested(subject.oracle, in_parts(messages))
        except jinja2.TemplateError:  # the template refuses a system message
            assert shape == "system" and prepared.notes == (SYSTEM_IN_TURN,)
            continue
        assert prepared.notes == (), shape
        assert list(prepared.tokens) == subject.oracle.prompt_ids(expected), shape


@every_variant
@pytest.mark.parametrize("flash", [s for s in SETTINGS if s != "auto"])
def test_logits(subject: Subject, flash: str) -> None:
    engine = subject.engine(1, flash)
    assert nmse(engine.prefill(subject.spans(), engine.new_cache()), subject.logits) <= 1e-8


@every_variant
@pytest.mark.parametrize("flash", [s for s in SETTINGS if s != "auto"])
def test_greedy_tokens(subject: Subject, flash: str, requested_device: RequestedDevice) -> None:
    model = Model(
        subject.model.checkpoint,
        LoadOptions(device=requested_device.name, dtype="fp32", flash_attn=flash),
    )
    *_, last = model.stream(subject.conversations[0], max_tokens=TOKENS, ignore_eos=True)
    assert isinstance(last, Finished)
    assert list(last.answer.output_token_ids) == subject.greedy[0]
    assert len(set(subject.greedy[0])) > 5, (
        "the random model repeats itself: the comparison says little"
    )


@every_variant
def test_three_sequences_in_one_batch(subject: Subject) -> None:
    engine = subject.engine(3)
    cache = engine.new_cache()
    running = [engine.begin(cache, slot) for slot in (1, 2, 0)]
    logits = engine.read([(r, subject.spans(i)) for i, r in enumerate(running)], cache)
    assert decode(engine, cache, running, logits) == subject.greedy


@every_variant
def test_prefill_in_chunks_of_seven(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.llm.engine.runner.PREFILL", 7)
    engine = subject.engine(1)
    cache = engine.new_cache()
    running = engine.begin(cache, 0)
    logits = engine.prefill(subject.spans(), cache, running)[None]
    assert nmse(logits[0], subject.logits) <= 1e-8
    assert decode(engine, cache, [running], logits) == subject.greedy[:1]


def decode(
    engine: Runner, cache: Any, running: list[Sequence], logits: torch.Tensor
) -> list[list[int]]:
    """Greedy tokens of sequences that are decoded together."""
    tokens: list[list[int]] = [[] for _ in running]
    for step in range(TOKENS):
        for mine, row in zip(tokens, logits, strict=True):
            mine.append(int(row.argmax()))
        if step < TOKENS - 1:
            logits = engine.read(
                [(r, [Span((t[-1],))]) for r, t in zip(running, tokens, strict=True)], cache
            )
    return tokens
