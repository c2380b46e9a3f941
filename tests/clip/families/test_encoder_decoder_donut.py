"""Donut: published settings, what cannot be followed, the sheet, windows that are shifted, and
answers in tags.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from common import picture
from donut import Pages, donut

from mtmd.base.errors import ModelError, PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.encoder_decoder.donut import DonutVision, read
from mtmd.clip.families.encoder_decoder.swin import _distances, _hidden, _moved
from mtmd.clip.families.encoder_decoder.words import usual_words
from mtmd.clip.resolution.sheet import read_sheet
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import text_family
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.tasks import shown_tokens

PAGE = picture(0, 70, 50)
# As in naver-clova-ix/donut-base-finetuned-docvqa
CONFIG: dict[str, Any] = {
    "model_type": "vision-encoder-decoder",
    "encoder": {
        "model_type": "donut-swin",
        "depths": [2, 2, 14, 2],
        "embed_dim": 128,
        "hidden_size": 1024,
        "image_size": [2560, 1920],
        "num_heads": [4, 8, 16, 32],
        "patch_size": 4,
        "window_size": 10,
    },
    "decoder": {
        "model_type": "mbart",
        "d_model": 1024,
        "decoder_layers": 4,
        "max_position_embeddings": 128,
        "scale_embedding": True,
        "vocab_size": 57525,
    },
}
IMAGE = {
    "do_align_long_axis": False,
    "do_pad": True,
    "do_thumbnail": True,
    "resample": 2,
    "size": [1920, 2560],
}
TAGS = ("<s_docvqa>", "<s_question>", "<s_answer>")


def words(**parts: Any) -> Settings:
    config = {k: v | parts.pop(k, {}) if isinstance(v, dict) else v for k, v in CONFIG.items()}
    return Settings(usual_words(Settings(config | parts, "config.json")), "config.json")


def family(
    image: dict[str, Any] | None = None, added: tuple[str, ...] = TAGS, **parts: Any
) -> DonutVision:
    tokens = {"added_tokens_decoder": {str(57500 + i): {"content": t} for i, t in enumerate(added)}}
    settings = {**IMAGE, "tokens": tokens, **(image or {})}
    return read(words(**parts), Settings(settings, "preprocessor_config.json"))


def test_published_sizes() -> None:
    result, top = family(), words()
    assert result.swin.grids == ((640, 480), (320, 240), (160, 120), (80, 60))
    assert result.swin.widths == (128, 256, 512, 1024)
    assert (result.image_token, result.questions, result.resolution.turned) == (
        "<s_docvqa>",
        True,
        False,
    )
    assert top.part("text_config").get("encoder_rows", None) == 4800
    text = text_family("mbart", top.part("text_config"))
    assert (text.context, text.layers[0][1].rows) == (128, 4800)  # type: ignore[union-attr]
    shapes = {name: one.shape for name, one in result.parameters().items()}
    assert shapes["v.2.blk.13.attn_bias.weight"] == (16, 361)
    assert shapes["v.2.merge_reduction.weight"] == (1024, 2048)
    assert "v.3.merge_norm.weight" not in shapes
    other = family(added=("<s_cord-v2>", "<s_menu>"))
    assert (other.image_token, other.questions) == ("<s_cord-v2>", False)
    assert family(decoder_start_token_id=57501).image_token == "<s_question>"


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "decoder": (
        {},
        {"decoder": {"model_type": "trocr"}},
        "model_type is 'trocr', expected one of mbart",
    ),
    "positions": ({}, {"encoder": {"use_absolute_embeddings": True}}, "use_absolute_embeddings is"),
    "patches": ({}, {"encoder": {"image_size": [2558, 1920]}}, "2558 x 1920 is no whole number"),
    "large": ({}, {"encoder": {"image_size": 10**6}}, "more than 1,048,576 patches of 4 pixels"),
    "stages": ({}, {"encoder": {"num_heads": [4, 8]}}, "num_heads has 2 numbers for 4 stages"),
    "heads": ({}, {"encoder": {"num_heads": [4, 8, 16, 31]}}, "31 heads of width 1024"),
    "depths": ({}, {"encoder": {"depths": [2, 0, 14, 2]}}, r"depths is \[2, 0, 14, 2\], expected"),
    "deep": ({}, {"encoder": {"depths": [10**9] * 4}}, "depths is"),
    "many": ({}, {"encoder": {"depths": [1] * 9}}, "expected a list of up to 8 numbers"),
    "window": ({}, {"encoder": {"window_size": 61}}, "window_size is 61, expected 2 to 32"),
    "narrow": ({}, {"encoder": {"image_size": [2560, 96]}}, "no more than the 80 x 3 cells"),
    "wide": ({}, {"decoder": {"cross_attention_hidden_size": 80}}, "80, expected 1024"),
    "sheet": ({"size": [960, 1280]}, {}, "960 x 1280, expected 1920 x 2560"),
    "no sheet": ({"do_pad": False}, {}, "do_pad is False, expected one of True"),
    "crop": ({"do_crop_margin": True}, {}, "do_crop_margin is True, expected one of False"),
    "start": ({}, {"decoder_start_token_id": 57}, "57, a token that .* does not name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    image, parts, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported) as error:
        family(image, **parts)
    assert "\n" not in str(error.value)


def test_a_task_that_nothing_says() -> None:
    with pytest.raises(ModelError, match="decoder_start_token_id is not stated, and no token"):
        family(added=("<s_of_mine>",))


@pytest.mark.parametrize("size", [(70, 50), (50, 70), (64, 64), (300, 20), (21, 333), (40, 56)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sheet", [(40, 56), (56, 40)])
def test_the_sheet_is_transformers(
    size: tuple[int, int], turned: bool, sheet: tuple[int, int]
) -> None:
    from transformers.models.donut.image_processing_pil_donut import DonutImageProcessorPil

    settings = {
        "size": {"width": sheet[0], "height": sheet[1]},
        "do_align_long_axis": turned,
        "resample": 2,
    }
    shown = picture(3, *size)
    theirs = DonutImageProcessorPil(**settings)([shown], return_tensors="np")["pixel_values"][0]
    ours = read_sheet(Settings(settings, "preprocessor_config.json"), sheet, 12).prepare(shown)
    np.testing.assert_array_equal(ours.tiles[0], theirs)
    assert ours.tokens == 12 and ours.sizes == (sheet,)


def test_windows_over_an_edge_hide_what_is_not_beside() -> None:
    """Of a grid of 5 x 7 cells in windows of 3, moved by 1, as torch's roll has it."""
    order, ends = _moved(2, (5, 7), 3)
    assert ends == (4, 6, 10, 12)  # windows in both pictures: 1 x 2, then 1, 2 and 1 over edges
    assert sorted(order.tolist()) == list(range(2 * 6 * 9))
    picture_of = torch.arange(6 * 9).view(2, 3, 3, 3).transpose(1, 2).reshape(6, 9)
    moved = torch.roll(picture_of, (-1, -1), (0, 1))
    assert torch.equal(order[:9], moved[:3, :3].reshape(-1))
    corner = _hidden(3, below=True, right=True)
    assert corner[0].tolist() == [0, 0, -100, 0, 0, -100, -100, -100, -100]
    assert not _hidden(3, below=False, right=False).any()
    assert _distances(2).tolist() == [4, 3, 1, 0, 5, 4, 2, 1, 7, 6, 4, 3, 8, 7, 5, 4]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return donut(tmp_path_factory.mktemp("donut") / "model", start="<s_cord-v2>")


@pytest.fixture(scope="module")
def model(pages: Pages) -> Model:
    return Model(open_checkpoint(pages.folder), LoadOptions(device="cpu", dtype="fp32"))


def turn(*parts: np.ndarray | str) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


def test_a_page_is_all_that_a_task_needs(model: Model, pages: Pages) -> None:
    expected = pages.greedy(pages.inputs([], [PAGE]), 12)
    answer = model.answer(PAGE, max_tokens=12, ignore_eos=True)
    assert answer.output_token_ids == tuple(expected)
    assert answer.prompt_token_ids == (pages.image_token,)


@pytest.mark.parametrize(
    ("messages", "reported"),
    [
        ([turn(PAGE, "What is it?")], r"takes no words, found 'What is it\?'; send the picture"),
        ([turn("Describe the image.")], "reads a page, found no picture; send one"),
        ([turn(PAGE, PAGE)], "2 pictures, and this model sees at most 1 at once"),
        ([{"role": "system", "content": "Be brief."}, turn(PAGE)], "no place for a system text"),
    ],
)
def test_what_it_cannot_use_is_refused(
    model: Model, messages: list[dict[str, Any]], reported: str
) -> None:
    with pytest.raises(PromptError, match=reported):
        model.prompts.prepare(messages)


def test_tags_are_text_of_answers(model: Model) -> None:
    tokenizer = model.checkpoint.tokenizer
    shown = shown_tokens(model.checkpoint.vision)
    assert shown is not None
    kept = {text for text in tokenizer.silent if shown.fullmatch(text)}
    assert kept >= {"<s_menu>", "</s_nm>", "<sep/>", "<yes/>"}
    assert not kept & {"<s>", "</s>", "<pad>", "<mask>"}
    ids = [tokenizer.id(t) for t in ("<s_menu>", "<s_nm>", "</s_nm>", "</s_menu>", "</s>")]
    stream = tokenizer.stream(keep={tokenizer.id(t) for t in kept})
    assert "".join(map(stream.push, ids)) + stream.finish() == "<s_menu><s_nm></s_nm></s_menu>"
    # Of answers to questions values alone
    asked = shown_tokens(family())
    assert asked is not None and asked.fullmatch("<yes/>") and not asked.fullmatch("</s_answer>")
