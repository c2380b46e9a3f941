"""Audio in every family that takes it, against transformers on the same samples: prompt ids,
embeddings, logits, greedy tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import phi4_multimodal
import pytest
import torch
from audio_cases import CASES as TRANSFORMERS
from audio_oracle import AudioOracle
from blocks import once
from common import picture
from gguf_files import decoder, glma_projector
from lfm2_audio import lfm2_audio
from meralion import meralion
from sounds import tones
from ultravox import ultravox

from mtmd.base.errors import MtmdError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.phi4_multimodal import vision
from mtmd.convert.convert import convert
from mtmd.convert.gguf import convert_to_gguf
from mtmd.events import Finished
from mtmd.loading import load
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.audio_input import AudioInput

CASES = TRANSFORMERS | {
    "lfm2_audio": lfm2_audio,
    "meralion": meralion,
    "meralion, no product": partial(meralion, gated=False),
    "ultravox": ultravox,
    "ultravox, before 0.5": partial(ultravox, between=False),
}
# Encoders that llama.cpp has no projector for, or one that computes something else.
WITHOUT = (
    *("glm_asr", "meralion, no product", "music_flamingo", "phi4_multimodal"),
    "ultravox, before 0.5",
)
TOKENS = 48
SECONDS = {
    "one sample": 0,
    "odd": 0.357,
    "longer": None,
    "several": None,
    "silence": 0.3,
    "a window": None,
    "a window and a sample": None,
}


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).pow(2).sum() / expected.pow(2).sum())


class Subject:
    """Our model of a case, and what transformers says."""

    def __init__(self, name: str, oracle: AudioOracle):
        self.name, self.oracle = name, oracle
        self.model = Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))
        assert self.model.loaded.audio_encoder is not None
        self.rate = self.model.loaded.audio_encoder.family.rate

    def recordings(self, case: str) -> list[np.ndarray]:
        if case == "several":
            lengths = enumerate(self.oracle.several)
            return [tones(seconds, self.rate, seed) for seed, seconds in lengths]
        if case == "one sample":
            return [np.full(self.oracle.shortest, 0.3, np.float32)]
        if case.startswith("a window"):
            count = self.oracle.window + case.endswith("sample")
            return [tones(count / self.rate, self.rate)]
        samples = tones(SECONDS[case] or self.oracle.seconds, self.rate)
        return [samples * 0 if case == "silence" else samples]

    def messages(self, audio: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        shown = [{"type": "audio", "audio": AudioInput(one, self.rate)} for one in audio]
        return [{"role": "user", "content": [*shown, {"type": "text", "text": "What is here?"}]}]


def subject_of(name: str, folders: pytest.TempPathFactory) -> Subject:
    return once(name, lambda: Subject(name, CASES[name](folders.mktemp(name))))


@pytest.fixture(params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(request.param, tmp_path_factory)


@pytest.mark.parametrize("case", SECONDS)
def test_audio_is_heard_as_by_transformers(subject: Subject, case: str) -> None:
    audio = subject.recordings(case)
    messages = subject.messages(audio)
    bare = [
        {
            **m,
            "content": [
                {"type": p["type"], **({"text": p["text"]} if "text" in p else {})}
                for p in m["content"]
            ],
        }
        for m in messages
    ]
    inputs = subject.oracle.inputs(bare, audio)
    encoded = subject.model.prompt(messages)
    assert list(encoded.tokens) == inputs["input_ids"][0].tolist()
    assert subject.model.loaded.audio_encoder is not None
    token = subject.model.checkpoint.tokenizer.id(subject.model.loaded.audio_encoder.family.token)
    heard = [s.embeddings for s in encoded.spans if s.tokens[0] == token]
    rows = torch.cat([one for one in heard if one is not None])
    expected = subject.oracle.features(inputs)
    assert rows.shape == expected.shape
    assert torch.equal(rows, expected) or nmse(rows, expected) <= 1e-8
    runner = subject.model.runner
    logits = runner.prefill(encoded.spans, runner.new_cache())
    assert nmse(logits, subject.oracle.logits(inputs)) <= 1e-8
    answer = subject.model.answer(messages=messages, max_tokens=TOKENS, ignore_eos=True)
    assert list(answer.output_token_ids) == subject.oracle.greedy(inputs, TOKENS)
    assert answer.receipt.audio_tokens == len(rows) and answer.receipt.image_tokens == 0


@pytest.mark.parametrize(
    "name", ["gemma3n", "gemma4", "gemma4_unified", "qwen2_5_omni", "qwen3_omni", "phi4_multimodal"]
)
def test_pictures_between_recordings_are_those_of_transformers(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = subject_of(name, tmp_path_factory)
    audio = subject.recordings("several")
    images = [picture(1, 90, 61), picture(2, 40, 77)]
    shown: dict[str, list[dict[str, Any]]] = {
        "audio": [{"type": "audio", "audio": AudioInput(one, subject.rate)} for one in audio],
        "image": [{"type": "image", "image": one} for one in images],
    }
    order = ("audio", "image", "audio", "audio", "image")
    parts = [shown[kind].pop(0) for kind in order]
    question = {"type": "text", "text": "What is here?"}
    messages = [{"role": "user", "content": [*parts, question]}]
    bare = [{"role": "user", "content": [*({"type": kind} for kind in order), question]}]
    inputs = subject.oracle.inputs_with_pictures(bare, audio, images)
    encoded = subject.model.prompt(messages)
    assert list(encoded.tokens) == inputs["input_ids"][0].tolist()
    runner = subject.model.runner
    logits = runner.prefill(encoded.spans, runner.new_cache())
    assert nmse(logits, subject.oracle.logits(inputs)) <= 1e-8
    answer = subject.model.answer(messages=messages, max_tokens=TOKENS, ignore_eos=True)
    assert list(answer.output_token_ids) == subject.oracle.greedy(inputs, TOKENS)


@pytest.mark.parametrize("published", [False, True])
def test_adapters_go_by_what_a_prompt_has(
    published: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures, or audio alone; answers in one batch. As published, nothing says the tower's size."""
    monkeypatch.setattr(vision, "SIGLIP", phi4_multimodal.VISION)
    folder = tmp_path_factory.mktemp("phi4")
    oracle = phi4_multimodal.heard(folder, adapted=True, published=published)
    samples, image = tones(0.6), picture(1, 90, 61)
    given = {"audio": AudioInput(samples, 16_000), "image": image}
    expected, asked = [], []
    for order in ((), ("audio",), ("image",), ("image", "audio")):
        question = {"type": "text", "text": "What is here?"}
        bare = [{"role": "user", "content": [*({"type": kind} for kind in order), question]}]
        audio = [samples] * order.count("audio")
        if "image" in order:
            inputs = oracle.inputs_with_pictures(bare, audio, [image])
            if "audio" not in order:
                inputs = {**inputs, "parts": []}
        else:
            inputs = oracle.inputs(bare, audio)
        expected.append(oracle.greedy(inputs, TOKENS))
        parts = [{"type": kind, kind: given[kind]} for kind in order]
        asked.append([{"role": "user", "content": [*parts, question]}])
    with load(folder, device="cpu", dtype="fp32") as model:
        tickets = [model.service.submit(one, max_tokens=TOKENS, ignore_eos=True) for one in asked]
        answers = [e.answer for one in tickets for e in one if isinstance(e, Finished)]
        assert [list(one.output_token_ids) for one in answers] == expected
        assert [list(one.receipt.adapters) for one in answers] == [
            [],
            ["audio"],
            ["pictures"],
            ["pictures"],
        ]
        none = model.answer(
            messages=asked[1], max_tokens=TOKENS, ignore_eos=True, adapter="audio:0"
        )
        assert list(none.output_token_ids) != expected[1]


def test_gguf_hears_the_same(subject: Subject, tmp_path: Any) -> None:
    checkpoint = subject.model.checkpoint
    if subject.name in WITHOUT:
        with pytest.raises(MtmdError, match="--text-only"):
            convert_to_gguf(checkpoint, tmp_path / "model.gguf", "F32")
        return
    *_, last = convert_to_gguf(checkpoint, tmp_path / "model.gguf", "F32")
    back = open_checkpoint(tmp_path / "model.gguf", last.path)
    assert back.audio is not None and checkpoint.audio_weights and back.audio_weights
    for name in checkpoint.audio_weights.shapes:
        a = back.audio_weights.read(name, torch.float32)
        assert torch.equal(a, checkpoint.audio_weights.read(name, torch.float32))


def test_heads_of_glm_asr_turn_by_pairs_in_gguf(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As llama.cpp's converter leaves them; windows of 30 s, which the folder has shorter ones of,
    and what llama.cpp reads beside that is not needed.
    """
    folder = tmp_path_factory.mktemp("glma")
    subject = Subject("glm_asr", CASES["glm_asr"](folder))
    decoder(folder, folder / "text.gguf", "llama")
    glma_projector(folder, folder / "mmproj.gguf")
    back, ours = open_checkpoint(folder / "text.gguf"), subject.model.checkpoint
    assert back.audio is not None and ours.audio is not None and back.vision is None
    assert back.audio.resolution.frames == 3000  # type: ignore[attr-defined]
    assert back.audio_weights is not None and ours.audio_weights is not None
    assert set(back.audio.parameters()) == set(ours.audio.parameters())
    for name in ours.audio_weights.shapes:
        a = back.audio_weights.read(name, torch.float32)
        assert torch.equal(a, ours.audio_weights.read(name, torch.float32)), name


def test_an_adapter_in_the_folder_is_for_answers_about_audio(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """As transformers enables and disables it, in one batch too."""
    folder = tmp_path_factory.mktemp("adapted")
    oracle = CASES["granite_speech"](folder)
    text = [{"role": "user", "content": [{"type": "text", "text": "What is here?"}]}]
    bare = [{"role": "user", "content": [{"type": "audio"}, *text[0]["content"]]}]
    alone = oracle.inputs(text, [])
    without = oracle.greedy({**alone, "parts": []}, TOKENS)
    samples = tones(0.6)
    heard = oracle.inputs(bare, [samples])
    settings = peft.LoraConfig(r=3, lora_alpha=9, target_modules=r".*language_model.*[qv]_proj")
    plain = oracle.greedy(heard, TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of transformers
        adapted = peft.get_peft_model(oracle.model.body, settings)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.8)
        adapted.save_pretrained(folder)
    expected = oracle.greedy(heard, TOKENS)
    assert expected != plain
    model = load(folder, device="cpu", dtype="fp32")
    part = {"type": "audio", "audio": AudioInput(samples, 16_000)}
    about_audio = [{"role": "user", "content": [part, *text[0]["content"]]}]
    tickets = [
        model.service.submit(one, max_tokens=TOKENS, ignore_eos=True, adapter=choice)
        for one, choice in ((about_audio, ()), (text, ()), (about_audio, ("audio:0",)))
    ]
    answers = [e.answer for one in tickets for e in one if isinstance(e, Finished)]
    assert [list(one.output_token_ids) for one in answers] == [expected, without, plain]
    assert [one.receipt.adapters for one in answers] == [{"audio": 1.0}, {}, {}]
    model.close()
    decoder, *_ = convert(folder, folder.parent / "adapted.gguf", to="F32")
    assert decoder.left_out.endswith(f"--lora audio={folder} and choose it with --adapter audio")
    convert(folder, folder.parent / "fp8", to="FP8")
    with load(folder.parent / "fp8", device="cpu", dtype="fp32") as model:
        (adapter,) = model.loaded.checkpoint.adapters
        assert adapter.with_audio


def test_an_adapter_of_the_encoder_is_merged(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """As PEFT computes it; one that answers are to choose is refused."""
    folder = tmp_path_factory.mktemp("plain")
    oracle = CASES["qwen2_audio"](folder)
    samples = tones(0.4)
    bare = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What?"}]}]
    inputs = oracle.inputs(bare, [samples])
    before = oracle.features(inputs)
    targets = r".*(audio_tower.*(q_proj|fc1)|multi_modal_projector.linear)"
    settings = peft.LoraConfig(r=3, lora_alpha=9, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of transformers
        adapted = peft.get_peft_model(oracle.model, settings)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(tmp_path)
    expected = oracle.features(inputs)
    with load(folder, device="cpu", dtype="fp32", lora=tmp_path) as model:
        part = {"type": "audio", "audio": AudioInput(samples, 16_000)}
        encoded = model.prompt([{**bare[0], "content": [part, bare[0]["content"][1]]}])  # type: ignore[dict-item]
        rows = torch.cat([s.embeddings for s in encoded.spans if s.embeddings is not None])
        assert nmse(rows, expected) <= 1e-8 < nmse(rows, before)
    with pytest.raises(MtmdError, match="changed in their weights alone; leave its name out"):
        load(folder, device="cpu", dtype="fp32", lora={"own": tmp_path})


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("qwen3_asr")])
def test_an_answer_that_is_begun(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also by a template that shows no answers."""
    subject = subject_of(name, tmp_path_factory)
    samples = tones(0.5, subject.rate)
    result = subject.model.transcribe(
        (samples, subject.rate), language="de", hint="Ada", max_tokens=2, ignore_eos=True
    )
    (segment,) = result.segments
    heard = {"type": "audio", "audio": AudioInput(samples, subject.rate)}
    messages = [{"role": "system", "content": "Ada"}, {"role": "user", "content": [heard]}]
    begun = {"role": "assistant", "content": "language German<asr_text>"}
    rendered = subject.model.prompts.rendered([*messages, begun], open_end=True)
    whole = subject.model.prompts.rendered(messages)
    assert "Ada" in rendered and rendered == whole + begun["content"]
    assert segment.receipt.prompt_tokens > segment.receipt.audio_tokens > 0


def test_it_is_read_and_encoded_once(subject: Subject) -> None:
    model, samples = subject.model, tones(0.41, subject.rate, 7)
    first, second = (
        model.answer(prompt="What?", audio=(samples, subject.rate), max_tokens=1).receipt
        for _ in range(2)
    )
    assert [one.cached for one in (*first.audio, *second.audio)] == [False, True]
    assert first.audio[0].tokens == second.audio[0].tokens == first.audio_tokens
    assert f"audio 1: 0.4 s of mono at {subject.rate:,} Hz (arrays)" in str(first)
    stats = model.service.stats()
    assert stats.audio >= 2 and stats.audio_cache_hits >= 1


def test_pictures_and_audio_stand_in_their_order(subject: Subject) -> None:
    model, picture = subject.model, np.full((30, 50, 3), 90, np.uint8)
    audio = AudioInput(tones(0.3, subject.rate), subject.rate)
    if model.encoder is None:
        with pytest.raises(MtmdError, match="takes audio"):
            model.answer([picture, audio], "What?", max_tokens=1)
        return
    answer = model.answer([picture, audio, picture], "What?", max_tokens=1)
    receipt = answer.receipt
    assert (len(receipt.images), len(receipt.audio)) == (2, 1)
    family, heard = model.encoder.family, model.loaded.audio_encoder
    assert heard is not None
    tokenizer = model.checkpoint.tokenizer
    image, sound = tokenizer.id(family.image_token), tokenizer.id(heard.family.token)
    runs = [t for t in answer.prompt_token_ids if t in (image, sound)]
    half = receipt.image_tokens // 2
    assert runs == [image] * half + [sound] * receipt.audio_tokens + [image] * half
    counted = model.service.count(
        [{"role": "user", "content": [{"type": "audio", "audio": audio}]}]
    )
    assert counted.audio_tokens == (receipt.audio_tokens,)


def test_long_audio_is_transcribed_in_pieces(subject: Subject) -> None:
    seconds = 2.5 * subject.model.service.instructions.seconds  # type: ignore[union-attr]
    samples = tones(seconds, subject.rate) * np.float32(0.5)
    result = subject.model.transcribe((samples, subject.rate), max_tokens=3, ignore_eos=True)
    starts, ends = [s.start for s in result.segments], [s.end for s in result.segments]
    assert len(result.segments) >= 3 and starts == [0.0, *ends[:-1]]
    assert ends[-1] == pytest.approx(result.seconds) == pytest.approx(seconds, abs=1e-2)
    assert all(s.receipt.audio_tokens and s.receipt.output_tokens == 3 for s in result.segments)
