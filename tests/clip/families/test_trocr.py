"""TrOCR: published settings, what cannot be followed, one picture and no words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from common import Oracle, picture
from trocr import trocr

from mtmd.base.errors import ModelError, PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.encoder_decoder.trocr import TrOcrVision, read, usual_words
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.model import Model
from mtmd.options.load import LoadOptions

LINE = picture(0, 70, 50)
# As in microsoft/trocr-base-printed: all else is transformers' default.
CONFIG: dict[str, Any] = {
    "model_type": "vision-encoder-decoder",
    "tie_word_embeddings": False,
    "encoder": {"model_type": "vit", "image_size": 384, "qkv_bias": False},
    "decoder": {
        "model_type": "trocr",
        "cross_attention_hidden_size": 768,
        "decoder_start_token_id": 2,
    },
}


def family(image: dict[str, Any] | None = None, **parts: Any) -> TrOcrVision:
    config = {k: v | parts.pop(k, {}) if isinstance(v, dict) else v for k, v in CONFIG.items()}
    words = usual_words(Settings(config | parts, "config.json"))
    settings = {"size": 384, "resample": 2, **(image or {})}
    return read(Settings(words, "config.json"), Settings(settings, "preprocessor_config.json"))


def test_published_sizes() -> None:
    result = family()
    assert (result.resolution.side, result.resolution.stretched, result.rows) == (384, True, 577)
    assert (result.image_token, result.projected) == ("</s>", False)
    shapes = {name: one.shape for name, one in result.parameters().items()}
    assert shapes["v.position_embd.weight"] == (577, 768)
    assert "v.blk.11.attn_q.bias" not in shapes and "v.blk.11.attn_out.bias" in shapes
    assert family(decoder_start_token_id=0).image_token == "<s>"
    large = family(decoder={"cross_attention_hidden_size": None})
    assert large.projected and large.parameters()["mm.input_projection.weight"].shape == (1024, 768)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "encoder": ({}, {"encoder": {"model_type": "beit"}}, "model_type is 'beit', expected one of"),
    "decoder": ({}, {"decoder": {"model_type": "gpt2"}}, "model_type is 'gpt2', expected"),
    "patches": ({}, {"encoder": {"patch_size": 17}}, "image_size 384 is no whole number"),
    "sizes": ({}, {"encoder": {"image_size": [384, 96]}}, r"image_size is \[384, 96\]"),
    "width": ({}, {"decoder": {"cross_attention_hidden_size": 80}}, "80, expected 768"),
    "square": ({"size": 256}, {}, "size 256 without a crop does not give 384 x 384"),
    "start": ({}, {"decoder_start_token_id": 57}, "57, a token that .* does not name"),
    "no start": ({}, {"decoder_start_token_id": "x"}, "decoder_start_token_id is 'x', expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    image, parts, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(image, **parts)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return trocr(tmp_path_factory.mktemp("trocr") / "model")


@pytest.fixture(scope="module")
def model(oracle: Oracle) -> Model:
    options = LoadOptions(device="cpu", dtype="fp32", parallel=3)
    return Model(open_checkpoint(oracle.folder), options)


def turn(*parts: np.ndarray | str) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


def test_a_picture_is_all_that_it_needs(model: Model, oracle: Oracle) -> None:
    expected = oracle.greedy(oracle.inputs([], [LINE]), 12)
    for ask in ({}, {"task": "text"}):
        answer = model.answer(LINE, max_tokens=12, ignore_eos=True, **ask)
        assert answer.output_token_ids == tuple(expected)
        assert answer.prompt_token_ids == (oracle.image_token,)
    # What was read before is known again, beside another picture's.
    both = [picture(1, 33, 91), LINE]
    answers = [model.answer(one, max_tokens=12, ignore_eos=True) for one in both]
    assert answers[1].output_token_ids == tuple(expected) != answers[0].output_token_ids


@pytest.mark.parametrize(
    ("messages", "reported"),
    [
        (
            [turn(LINE, "Who wrote it?")],
            r"takes no words, found 'Who wrote it\?'; send the picture alone",
        ),
        (
            [turn("Who wrote it?")],
            r"takes no words, found 'Who wrote it\?'; send the picture alone",
        ),
        ([turn("Describe the image.")], "reads the text of a picture, found none; send one"),
        ([turn(LINE, LINE)], "2 pictures, and this model sees at most 1 at once"),
        ([{"role": "system", "content": "Be brief."}, turn(LINE)], "no place for a system text"),
        (
            [turn(LINE), {"role": "assistant", "content": "a word"}, turn(LINE)],
            "2 pictures, and this model sees at most 1",
        ),
        ([turn(LINE, "</s>")], "takes no words"),
    ],
)
def test_what_it_cannot_use_is_refused(
    model: Model, messages: list[dict[str, Any]], reported: str
) -> None:
    with pytest.raises(PromptError, match=reported):
        model.prompts.prepare(messages)


def test_memory_of_states_is_foreseen(model: Model) -> None:
    states = model.runner.state_bytes()
    assert {name.partition(".")[0] for name in states} == {"kv", "context"}
    # 37 rows of a picture, as two pages, for three sequences and the one that fills batches up
    assert states["context.0"] == 2 * 4 * 64 * 80 * 4
