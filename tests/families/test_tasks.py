"""Tasks: the words of a model's authors in place of a prompt, wherever a prompt can stand; what a
model was not made for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from common import Oracle, picture

from mtmd.base.errors import OptionError, PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.family import FAMILIES
from mtmd.clip.tasks import TASKS, tasks_of
from mtmd.events import Answer
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.tasks import LOCATION_TOKEN, with_task

Build = Callable[[str, str], Oracle]
PAGE = picture(0, 70, 50)


@pytest.fixture
def model(build: Build) -> Model:
    folder = build("paddleocr_vl", "heads of 40 and 24").folder
    return Model(open_checkpoint(folder), LoadOptions(device="cpu", dtype="fp32"))


def prompt_of(answer: Answer) -> tuple[int, ...]:
    return tuple(answer.prompt_token_ids)


def test_a_task_is_asked_for_in_the_authors_words(model: Model) -> None:
    tasks = tasks_of(model.checkpoint.vision)
    assert list(tasks) == ["text", "table", "formula", "layout"]
    for task, words in tasks.items():
        plain = prompt_of(model.answer(PAGE, words, max_tokens=1))
        assert prompt_of(model.answer(PAGE, task=task, max_tokens=1)) == plain
    turn = {"role": "user", "content": [{"type": "image", "image": PAGE}]}
    assert prompt_of(model.answer(messages=[turn], task=task, max_tokens=1)) == plain
    blank = {**turn, "content": [*turn["content"], {"type": "text", "text": " "}]}
    assert prompt_of(model.answer(messages=[blank], task=task, max_tokens=1)) == plain


def test_what_a_task_cannot_be(model: Model) -> None:
    with pytest.raises(
        OptionError,
        match=r"^task: found markdown, which this model was not made for; it has text, table, formu",
    ):
        model.answer(PAGE, task="markdown")
    with pytest.raises(OptionError, match="task: found 'poem', expected one of markdown, text"):
        model.answer(PAGE, task="poem")
    for ask in (
        lambda: model.answer(PAGE, "What is it?", task="text"),
        lambda: model.complete("once", task="text"),
    ):
        with pytest.raises(PromptError, match=r"^task: found with a prompt, expected one of them"):
            ask()


def test_families_have_tasks_of_those_there_are() -> None:
    found: dict[str, Any] = {}
    for entry in FAMILIES:
        module = __import__(entry.module, fromlist=["TASKS"])
        found |= {entry.module: module.TASKS} if hasattr(module, "TASKS") else {}
    assert len(found) >= 2
    assert all(set(tasks) <= set(TASKS) for tasks in found.values())


def test_a_model_without_tasks_says_so(build: Build) -> None:
    folder = build("minicpmv4_6", "slices, windows merged after the second layer").folder
    other = Model(open_checkpoint(folder), LoadOptions(device="cpu", dtype="fp32"))
    with pytest.raises(
        OptionError, match=r"task: found text, .*; it has none; ask in your own wor"
    ):
        other.answer(PAGE, task="text")


def test_marks_of_places_stay_in_answers() -> None:
    places = "<|LOC_0|> <|LOC_1000|> <|LOC_BEGIN|> <|TEXT_END|> <|ref|> <|/det|> <|box_start|>"
    assert all(map(LOCATION_TOKEN.fullmatch, places.split()))
    assert not any(
        map(LOCATION_TOKEN.fullmatch, ("<|im_end|>", "<|LOC|>", "</s>", "<|grounding|>"))
    )


def test_a_special_token_of_a_task_is_that_token(build: Build) -> None:
    """DeepSeek-OCR's, in a conversation that a published folder has no template for."""
    folder = build("deepseek_ocr", "DeepSeek-OCR, as its authors").folder
    model = Model(open_checkpoint(folder), LoadOptions(device="cpu", dtype="fp32"))
    tokenizer = model.checkpoint.tokenizer
    tasks = tasks_of(model.checkpoint.vision)
    assert list(tasks) == ["markdown", "text", "layout"]
    grounding = tokenizer.id("<|grounding|>")
    for task, words in tasks.items():
        asked = prompt_of(model.answer(PAGE, task=task, max_tokens=1))
        assert (grounding in asked) is words.startswith("<|grounding|>")
        assert asked[-len(tokenizer.encode(words)) :] == tuple(tokenizer.encode(words))
        # What a user writes stays text.
        assert grounding not in prompt_of(model.answer(PAGE, words, max_tokens=1))


def test_prompts_of_folders_without_a_template(build: Build, tmp_path: Path) -> None:
    """As published ones are: DeepSeek-OCR's as its authors write them, GOT-OCR 2's as transformers'
    processor does.
    """
    for family, variant in (
        ("deepseek_ocr", "DeepSeek-OCR, as its authors"),
        ("deepseek_ocr", "Unlimited-OCR"),
        ("got_ocr2", "SAM and Qwen2, tied"),
    ):
        oracle = build(family, variant)
        folder = tmp_path / variant
        folder.mkdir()
        for file in oracle.folder.iterdir():
            if file.name != "chat_template.jinja":
                (folder / file.name).symlink_to(file)
        model = Model(open_checkpoint(folder), LoadOptions(device="cpu", dtype="fp32"))
        for task, words in tasks_of(model.checkpoint.vision).items():
            turn = {"role": "user", "content": [{"type": "image", "image": PAGE}]}
            shown = model.prompts.rendered(with_task([turn], task, {task: words}))
            if family == "got_ocr2":
                formatted = "with format" in words
                theirs = oracle.processor(images=[PAGE], format=formatted, return_tensors="pt")
                ours = prompt_of(model.answer(PAGE, task=task, max_tokens=1))
                assert list(ours) == theirs["input_ids"][0].tolist()
            else:
                marker = "<image>" if variant == "Unlimited-OCR" else "<image>\n"
                assert shown == f"<s>{marker}{words}"
