"""Florence-2: published settings, what cannot be followed, prompts of tasks, places that are
written, and what is computed again for another prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from common import picture
from florence2 import PLACES, Read, florence2

from mtmd.base.errors import ModelError, PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.florence2.vision import ALONE, TASKS, WITH_WORDS, Florence2Vision, read
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import text_family
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.tasks import shown_tokens

PHOTO = picture(0, 70, 50)
# As in florence-community/Florence-2-base: all else is transformers' default.
CONFIG: dict[str, Any] = {
    "model_type": "florence2",
    "image_token_id": 51289,
    "vision_config": {"model_type": "florence_vision", "projection_dim": 768},
    "text_config": {
        "model_type": "bart",
        "d_model": 768,
        "decoder_layers": 6,
        "encoder_layers": 6,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "vocab_size": 51328,
        "forced_bos_token_id": 0,
        "decoder_start_token_id": 2,
    },
}
IMAGE = {"size": {"height": 768, "width": 768}, "do_center_crop": False, "resample": 3}


def family(image: dict[str, Any] | None = None, **parts: Any) -> Florence2Vision:
    config = {k: v | parts.pop(k, {}) if isinstance(v, dict) else v for k, v in CONFIG.items()}
    return read(
        Settings(config | parts, "config.json"),
        Settings({**IMAGE, **(image or {})}, "preprocessor_config.json"),
    )


def test_published_sizes() -> None:
    result = family()
    assert [stage.grid[0] for stage in result.tower.stages] == [192, 96, 48, 24]
    assert [stage.depth for stage in result.tower.stages] == [1, 1, 9, 1]
    assert (result.rows, result.instruction.tokens) == (577, 447)
    assert (result.image_token, result.begins) == ("</s>", "<s>")
    assert list(result.tasks) == list(TASKS)
    shapes = {name: one.shape for name, one in result.parameters().items()}
    assert shapes["v.2.8.channel.conv2.weight"] == (512, 1, 3, 3)
    assert shapes["mm.encoder.word_embd.weight"] == (51328, 768)
    text_config = {**CONFIG["text_config"], "vision_config": CONFIG["vision_config"]}
    text = text_family("bart", Settings(text_config, "config.json"))
    assert (text.context, text.layers[0][1].rows) == (1024, 1024)  # type: ignore[union-attr]
    large = {"embed_dim": [256, 512, 1024, 2048], "num_heads": [8, 16, 32, 64]}
    large |= {"num_groups": [8, 16, 32, 64], "projection_dim": 1024}
    wide = {"d_model": 1024, "encoder_attention_heads": 16}
    assert family(vision_config=large, text_config=wide).width == 2048


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stages": ({}, {"vision_config": {"depths": [1, 1]}}, "depths has 2 numbers for 4 stages"),
    "no stages": ({}, {"vision_config": {"embed_dim": []}}, r"embed_dim is \[\], expected a list"),
    "deep": ({}, {"vision_config": {"depths": [10**9] * 4}}, "depths is .* from 1 to 1024"),
    "flags": ({}, {"vision_config": {"patch_prenorm": [0] * 4}}, "patch_prenorm is .* flags"),
    "heads": ({}, {"vision_config": {"num_heads": [5] * 4}}, "5 heads and 4 groups of width 128"),
    "groups": ({}, {"vision_config": {"num_groups": [5] * 4}}, "4 heads and 5 groups of width 128"),
    "window": ({}, {"vision_config": {"window_size": 65}}, "window_size is 65, expected"),
    "places": ({}, {"vision_config": {"max_position_embeddings": 23}}, "24 x 24 cells, for which"),
    "width": ({}, {"vision_config": {"projection_dim": 80}}, "projection_dim is 80, expected 768"),
    "room": ({}, {"text_config": {"max_position_embeddings": 577}}, "577, too few for a picture"),
    "encoder": ({}, {"text_config": {"encoder_attention_heads": 7}}, "7 heads of width 768"),
    "begin": ({}, {"text_config": {"forced_bos_token_id": 57}}, "forced_bos_token_id is 57, a tok"),
    "start": ({}, {"text_config": {"decoder_start_token_id": 57}}, "decoder_start_token_id is 57"),
    "small": (
        {"size": {"height": 2, "width": 2}},
        {"vision_config": {"patch_padding": [0] * 4}},
        "smaller than a patch of 7",
    ),
    "large": ({"size": {"height": 9999, "width": 9999}}, {}, "height is 9999, expected"),
    "shape": ({"size": {"height": 768, "width": 512}}, {}, "expected an equal height and width"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    image, parts, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported) as error:
        family(image, **parts)
    assert "\n" not in str(error.value)


def test_prompts_of_tasks_are_those_of_the_processor() -> None:
    from transformers import Florence2Processor

    reader = _prompts_of(Florence2Processor.__new__(Florence2Processor))
    assert reader[0] == ALONE
    assert {task: p.replace("{input}", "{}") for task, p in reader[1].items()} == WITH_WORDS
    ours = family()
    for task, words in ALONE.items():
        assert ours.rewritten("</s>" + task) == "</s>" + words
    for task, words in WITH_WORDS.items():
        assert ours.rewritten(f"</s>{task} a {{dog}} ") == "</s>" + words.format("a {dog}")
    assert ours.rewritten("</s>Describe the image.") == "</s>" + ALONE[TASKS["caption"]]
    assert ours.rewritten("</s> Is it red?") == "</s> Is it red?"


def _prompts_of(processor: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The tables that its constructor makes before it asks for anything."""
    with pytest.raises(AttributeError):
        type(processor).__init__(processor)
    return processor.task_prompts_without_inputs, processor.task_prompts_with_input


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return florence2(tmp_path_factory.mktemp("florence2") / "model")


@pytest.fixture(scope="module")
def model(oracle: Read) -> Model:
    return Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))


def turn(*parts: np.ndarray | str, role: str = "user") -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "reported"),
    [
        ([turn("<OD>")], "looks at a picture, found none; send one"),
        ([turn(PHOTO, "<OD> a dog")], "<OD> stands alone in a prompt, found '<OD> a dog'"),
        ([turn(PHOTO, PHOTO, "<OD>")], "2 pictures, and this model sees at most 1 at once"),
    ],
)
def test_what_it_cannot_use_is_refused(
    model: Model, messages: list[dict[str, Any]], reported: str
) -> None:
    with pytest.raises(PromptError, match=reported):
        model.prompts.prepare(messages)


def instruction(model: Model, *messages: dict[str, Any]) -> list[int]:
    (read,) = {p.instruction for p in model.prompts.prepare(list(messages)).pieces if p.instruction}
    return list(read)


def test_the_encoder_reads_the_prompt_as_the_processor_writes_it(
    model: Model, oracle: Read
) -> None:
    for text in ("<OCR>", "Who is it?", f"<REGION_TO_OCR>{PLACES[1]}{PLACES[2]}", "a <loc_9> b"):
        expected = oracle.inputs([turn(text)], [PHOTO])["input_ids"][0].tolist()
        assert instruction(model, turn(PHOTO, text)) == expected[10:]
    place = model.checkpoint.tokenizer.id("<loc_9>")
    assert place in instruction(model, turn(PHOTO, "a <loc_9> b"))
    # Other special tokens that users write stay text.
    ends = model.checkpoint.tokenizer.id("</s>")
    assert instruction(model, turn(PHOTO, "a </s> b")).count(ends) == 1
    system = {"role": "system", "content": "Be brief."}
    before = instruction(model, system, turn(PHOTO, "Who is it?"))
    assert before == instruction(model, turn(PHOTO, "Be brief.\nWho is it?"))
    # Of several turns the last one is asked.
    earlier = [turn(PHOTO, "<OD>"), turn("red<loc_9>", role="assistant"), turn("<OCR>")]
    assert instruction(model, *earlier) == instruction(model, turn(PHOTO, "<OCR>"))


def test_a_picture_is_encoded_once_for_all_prompts(model: Model, oracle: Read) -> None:
    for text in ("<OCR>", "Who is it?", "<OCR>"):
        expected = oracle.greedy(oracle.inputs([turn(text)], [PHOTO]), 8)
        answer = model.answer(PHOTO, text, max_tokens=8, ignore_eos=True)
        assert answer.output_token_ids == tuple(expected)
    assert answer.receipt.images[0].cached
    assert model.answer(PHOTO, task="objects", max_tokens=1).prompt_token_ids == tuple(
        oracle.prompt_ids(oracle.inputs([turn("<OD>")], [PHOTO]))
    )


def test_a_prompt_that_is_too_long_is_refused(model: Model) -> None:
    family = model.checkpoint.vision
    assert isinstance(family, Florence2Vision) and family.instruction.tokens == 118
    with pytest.raises(PromptError, match=r"has \d+ tokens, expected at most 116, .* shorten it"):
        model.prompts.prepare([turn(PHOTO, "red circle " * 200)])


def test_places_are_text_of_answers(model: Model) -> None:
    shown = shown_tokens(model.checkpoint.vision)
    assert shown is not None
    kept = {text for text in model.checkpoint.tokenizer.silent if shown.fullmatch(text)}
    assert kept == {*PLACES, "<poly>", "</poly>"}


def test_the_first_frames_place_is_that_of_transformers(oracle: Read, model: Model) -> None:
    table = oracle.model.model.multi_modal_projector.visual_temporal_embed.pos_idx_to_embed
    weights = model.checkpoint.vision_weights
    assert weights is not None
    assert torch.equal(weights.read("mm.first_frame", torch.float32), table[0])
