"""Checkpoints and answers that were made elsewhere, by transformers in fp32 and by llama.cpp's
converter and quantizer: the same prompt ids and greedy tokens have to come from here, out of either
format.

They lie beside the repository, in `../shared/golden`; where they do not, these tests are skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from blocks import once
from checkpoints import nmse
from transformers import AutoTokenizer

from mtmd import Finished, VideoInput, load
from mtmd.checkpoint.open import open_checkpoint
from mtmd.llm.families.llama4 import Temperature
from mtmd.loaded import device_and_dtype
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.conversation import user_message
from mtmd.prompt.rewritten_turns import SYSTEM_IN_TURN

SHARED = Path(__file__).parents[4] / "shared"
GOLDEN = SHARED / "golden"
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
# What these tiny models have other than the published ones, and llama.cpp's converter does not
# write.
LIMITS = {"image_min_tokens": 4, "image_max_tokens": 64}
NOT_IN_GGUF: dict[str, dict[str, int]] = {
    "qwen2_5_vl": {"window": 2},
    "qwen3_vl": LIMITS,
    "qwen3_5": LIMITS,
    "kquants": LIMITS,
    "lfm2_vl": LIMITS,
    "gemma4_e2b": {"image_max_tokens": 70},
    "gemma4_unified": {"image_max_tokens": 70},
    "qwen2_5_omni": {"window": 2, **LIMITS},
    "qwen3_omni_moe": {"heard": 100, **LIMITS},
}
# Checkpoints of families that are not all read yet lie in a folder of their own.
MORE = (
    "internvl3_5",
    "qianfan_ocr",
    "glm_ocr",
    "glm46v",
    "granite_vision",
    "gemma4_e2b",
    "gemma4_unified",
    "minicpmv4_6",
    "paddleocr_vl",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "lighton_ocr",
    "cohere2_vision",
    "paligemma",
    "idefics2",
    "qwen2_audio",
    "qwen3_asr",
    "voxtral",
    "llama4",
    "mllama",
    "ovis2",
    "deepseek_ocr2",
    "unlimited_ocr",
    "got_ocr2",
    "kimi_k25",
)
# Files that say less than the folder: what the template writes for a picture, how many tiles, how
# much of audio is seen at once.
FOLDER_ALONE = ("granite_vision", "cohere2_vision", "qwen3_asr")
HOME = {p.parent.name: p.parent for p in GOLDEN.glob("*/expected.json")} | {
    name: SHARED / "golden_more" / name
    for name in MORE
    if (SHARED / "golden_more" / name / "expected.json").exists()
}
FOLDERS = sorted(HOME)
GGUFS = sorted(
    f"{name}/{p.name}"
    for name, home in HOME.items()
    if name not in FOLDER_ALONE
    for p in home.glob("text-*.gguf")
)


def path_of(file: str) -> Path:
    """Of FAMILY/FILE."""
    family, _, name = file.partition("/")
    return HOME[family] / name


def expected(family: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((HOME[family] / "expected.json").read_text())
    return result


def messages(family: str) -> list[Any]:
    reported = expected(family)
    if not (shown := [*reported.get("images", ()), *reported.get("audio", ())]):
        return [{"role": "user", "content": [{"type": "text", "text": reported["prompt"]}]}]
    return [user_message([HOME[family] / name for name in shown], reported["prompt"])]


def answer(model: Model, family: str) -> tuple[list[int], list[int]]:
    """Prompt ids and greedy tokens."""
    *_, last = model.stream(
        messages(family), max_tokens=len(expected(family)["greedy_token_ids"]), ignore_eos=True
    )
    assert isinstance(last, Finished)
    return list(last.answer.prompt_token_ids), list(last.answer.output_token_ids)


def gguf(path: str) -> Model:
    """A golden GGUF with its folder's tokenizer: its own names a pre-tokenizer that these nonsense
    vocabularies were not made with.
    """
    return once(path, lambda: opened_gguf(path))


def opened_gguf(path: str) -> Model:
    tokenizer = folder(path.partition("/")[0]).checkpoint.tokenizer
    checkpoint = replace(open_checkpoint(path_of(path)), tokenizer=tokenizer)
    settings = NOT_IN_GGUF.get(path.partition("/")[0], {})
    if path.startswith("llama4/"):  # chunks and temperature are constants of llama.cpp's
        text = replace(checkpoint.text, chunk=64, temperature=Temperature(32, 0.1))
        resolution = replace(checkpoint.vision.resolution, maximum=4)
        vision = replace(checkpoint.vision, resolution=resolution)
        checkpoint = replace(checkpoint, text=text, vision=vision)
    if "window" in settings:
        checkpoint = replace(
            checkpoint, vision=replace(checkpoint.vision, window=settings["window"])
        )
    if "heard" in settings:  # frames of audio that see each other
        resolution = replace(checkpoint.audio.resolution, frames=settings["heard"])
        checkpoint = replace(checkpoint, audio=replace(checkpoint.audio, resolution=resolution))
    limits = {name: value for name, value in settings.items() if name in LIMITS}
    return Model(checkpoint, LoadOptions(dtype="fp32", **limits))


def logits(model: Model, family: str) -> torch.Tensor:
    def read() -> torch.Tensor:
        return model.runner.prefill(model.spans(messages(family)), model.runner.new_cache())

    return once(("logits", model), read)


def folder(family: str) -> Model:
    return once(("folder", family), lambda: load(HOME[family] / "hf", dtype="fp32"))


@pytest.mark.parametrize("family", FOLDERS)
def test_tokens_from_safetensors(family: str) -> None:
    reported = expected(family)
    assert answer(folder(family), family) == (
        reported["prompt_token_ids"],
        reported["greedy_token_ids"],
    )


@pytest.mark.parametrize("path", [p for p in GGUFS if p.endswith(("BF16.gguf", "F32.gguf"))])
def test_tokens_from_gguf(path: str) -> None:
    family = path.partition("/")[0]
    reported = expected(family)
    assert answer(gguf(path), family) == (
        reported["prompt_token_ids"],
        reported["greedy_token_ids"],
    )


@pytest.mark.parametrize("path", [p for p in GGUFS if p.endswith("BF16.gguf")])
def test_weights_stay_in_16_bits_where_fp32_is_computed_in(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU without bf16 instructions, of models that are not tiny."""
    before, family = gguf(path), path.partition("/")[0]
    monkeypatch.setattr(device_and_dtype, "SMALL_BYTES", 0)
    monkeypatch.setattr(device_and_dtype, "_multiplies_bf16", lambda: False)
    model = Model(before.checkpoint, replace(before.options, dtype="auto", kv_type="fp32"))
    assert model.dtype == torch.float32
    kept = {
        name: source.weights.quant(name)
        for source in (model.runner, *model.loaded.encoders)
        for name in source.family.parameters()
    }
    assert Counter(kept.values())["BF16_32"] > 4 and kept["blk.0.attn_norm.weight"] is None
    assert nmse(logits(model, family), logits(before, family)) <= 1e-11
    assert answer(model, family)[1] == expected(family)["greedy_token_ids"]


@pytest.mark.parametrize("file", ["hf", "text-BF16.gguf"])
@pytest.mark.parametrize(
    "family", ["gemma4_e2b", "gemma4_unified", "qwen2_5_omni", "qwen3_omni_moe"]
)
def test_audio_of_models_that_see(family: str, file: str) -> None:
    reported = json.loads((HOME[family] / "expected_audio.json").read_text())
    model = folder(family) if file == "hf" else gguf(f"{family}/{file}")
    answer = model.answer(
        [HOME[family] / name for name in reported["audio"]],
        reported["prompt"],
        max_tokens=len(reported["greedy_token_ids"]),
        ignore_eos=True,
    )
    assert list(answer.prompt_token_ids) == reported["prompt_token_ids"]
    assert list(answer.output_token_ids) == reported["greedy_token_ids"]


@pytest.mark.parametrize("path", GGUFS)
def test_both_formats_give_the_same_logits(path: str) -> None:
    """Of bf16 files the very same weights, of quantized ones what is left of them: 3 % of the
    logits' power at 8 bits, more with fewer.
    """
    family = path.partition("/")[0]
    error = nmse(logits(gguf(path), family), logits(folder(family), family))
    assert error <= (1e-9 if "BF16" in path else 0.03 if "Q8_0" in path else 3.0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_both_formats_read_videos_alike(family: str) -> None:
    """But for the size of frames, of which llama.cpp writes nothing."""
    hub, other = folder(family), gguf(f"{family}/text-BF16.gguf")
    vision = other.checkpoint.vision
    video = replace(vision.video, limits=hub.checkpoint.vision.video.limits)
    vision = replace(vision, video=video)
    other = Model(replace(other.checkpoint, vision=vision), LoadOptions(dtype="fp32"))
    rng = np.random.default_rng(0)
    clip = VideoInput(rng.integers(0, 256, (6, 56, 84, 3), np.uint8), rate=2.0)
    reported = []
    for model in (hub, other):
        *_, last = model.stream(
            [user_message([clip], "What moves?")], max_tokens=12, ignore_eos=True
        )
        assert isinstance(last, Finished)
        reported.append((last.answer.prompt_token_ids, last.answer.output_token_ids))
    assert reported[0] == reported[1] and last.answer.receipt.videos[0].tokens == 18


TURNS = [("user", "Describe it"), ("assistant", "a red circle"), ("user", "and at the left?")]
CONVERSATIONS = {
    "text alone": [("user", "word " * 20 + "here")],
    "system": [("system", "see the image"), ("user", "Describe it")],
    "three turns": TURNS,
}


# What a processor writes around a text, whatever the template says.
FRAMES = {"paligemma": "<bos>{}\n"}


def tokenizer_of(family: str) -> Any:
    """The tokenizer of transformers."""
    return once(("tokenizer", family), lambda: AutoTokenizer.from_pretrained(HOME[family] / "hf"))


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("family", FOLDERS)
def test_prompts_of_text_are_those_of_transformers(family: str, case: str) -> None:
    """Whichever form a content is sent in, and whichever the template reads."""
    turns = CONVERSATIONS[case]
    strings = [{"role": role, "content": text} for role, text in turns]
    parts = [{"role": r, "content": [{"type": "text", "text": text}]} for r, text in turns]
    model = folder(family)
    theirs = tokenizer_of(family)
    expected = []
    for messages in (parts, strings):
        try:
            made = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError):  # a role or a form that the template refuses
            continue
        if all(text.strip() in made for _, text in turns):
            made = FRAMES.get(family, "{}").format(made)
            expected.append(theirs(made, add_special_tokens=False)["input_ids"])
    for sent in (strings, parts):
        prepared = model.prompts.prepare(sent)
        if prepared.notes:
            assert case == "system" and prepared.notes == (SYSTEM_IN_TURN,) and not expected
        else:
            assert list(prepared.tokens) in expected
