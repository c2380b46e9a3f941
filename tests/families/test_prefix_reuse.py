"""Conversations that begin alike, over families whose positions, masks and states depend on
pictures: what was read before, by this request or another, changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from common import Oracle, picture

from mtmd.base.errors import PromptError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.events import Answer, Finished
from mtmd.llm.state import PAGE
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
CASES = {
    "blocks wider than the window": (
        "gemma3",
        "6 heads on 2, image block wider than the window, as published",
    ),
    "blocks in some layers": ("gemma4", "dense: keys are values, images attend in both directions"),
    "positions on grids": ("qwen2_vl", "qwen2-vl, heads of 40 and 24"),
    "features for layers": ("qwen3_vl", "dense"),
    "delta nets and grids": ("qwen3_5", "dense"),
    "convolutions and tiles": ("lfm2_vl", "tiles and thumbnail"),
}
SHARED, SECOND, OTHER = picture(0, 150, 190), picture(1, 60, 90), picture(2, 90, 60)


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": "user", "content": content}


def conversations() -> list[list[dict[str, Any]]]:
    """A picture that is always the same; then another text, or an answer and another picture."""
    first = user("Describe the image. What do you see here? a red circle", SHARED, "at the left?")
    stated = {
        "role": "assistant",
        "content": "a blue square and a red circle at the left; a red circle and a blue square.",
    }
    more = "here? " + "What do you see at the left, a red circle or a blue square? " * 2
    return [
        [first],
        [
            user(
                "Describe the image. What do you see here? a red circle",
                SHARED,
                "and a blue square?",
            )
        ],
        [first, stated, user("and", SECOND, more)],
        [first, stated, user("and", OTHER, more)],
        [first, stated, user(more, SECOND)],
    ]


def load(oracle: Oracle) -> Model:
    return Model(
        open_checkpoint(oracle.folder),
        LoadOptions(device="cpu", dtype="fp32", context=512, parallel=3),
    )


def answers(model: Model, requested: list[list[dict[str, Any]]]) -> list[Answer]:
    """All of them at once."""
    tickets = [
        model.service.submit(messages, max_tokens=16, ignore_eos=True) for messages in requested
    ]
    result = [list(ticket)[-1] for ticket in tickets]
    model.release()
    return [event.answer for event in result if isinstance(event, Finished)]


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_before_changes_no_answer(case: str, build: Build) -> None:
    oracle = build(*CASES[case])
    requested, model = conversations(), load(oracle)
    expected = [answers(model, [messages])[0] for messages in requested]
    assert all(a.receipt.reused_tokens == 0 for a in expected), "closing forgets"
    assert len({a.output_token_ids for a in expected}) > 2
    together = answers(model, requested)
    assert [a.output_token_ids for a in together] == [a.output_token_ids for a in expected]
    one_after_another = [
        list(model.stream(messages, max_tokens=16, ignore_eos=True))[-1] for messages in requested
    ]
    model.release()
    actual = [event.answer for event in one_after_another if isinstance(event, Finished)]
    assert [a.output_token_ids for a in actual] == [a.output_token_ids for a in expected]
    assert sum(a.receipt.reused_tokens >= PAGE for a in actual[1:]) >= 3, [
        a.receipt.reused_tokens for a in actual
    ]


def test_matrices_and_windows_of_texts_are_taken_up_again(build: Build) -> None:
    model = load(build("granite_hybrid", "experts, one group, no positions"))
    first = user("Describe the image. What do you see here? a red circle, " * 4)
    said = {"role": "assistant", "content": "a blue square and a red circle at the left. " * 4}
    requested = [[first], [first, said, user("and here?")], [first, said, user("What is it?")]]
    expected = [answers(model, [messages])[0] for messages in requested]
    result = [list(model.stream(m, max_tokens=16, ignore_eos=True))[-1] for m in requested]
    model.release()
    actual = [event.answer for event in result if isinstance(event, Finished)]
    assert [a.output_token_ids for a in actual] == [a.output_token_ids for a in expected]
    assert all(a.receipt.reused_tokens >= PAGE for a in actual[1:])


@pytest.mark.parametrize(
    ("row", "variant"),
    [
        ("paligemma", "gemma 2, a prompt wider than the window, 6 heads on 2"),
        ("mllama", "4 heads on 2, llama3 rope, neighbours attend"),
    ],
)
def test_what_depends_on_all_of_a_prompt_is_read_anew(row: str, variant: str, build: Build) -> None:
    """On its last token, where it is seen in both directions, or on its last picture, where all
    tokens attend to pictures.
    """
    model = load(build(row, variant))
    requested = conversations()
    expected = [answers(model, [messages])[0] for messages in requested]
    together = answers(model, requested)
    one_after_another = [
        list(model.stream(messages, max_tokens=16, ignore_eos=True))[-1]
        for messages in [*requested, requested[2]]
    ]
    model.release()
    actual = [event.answer for event in one_after_another if isinstance(event, Finished)]
    for result in (together, actual[:-1], [*actual[:2], actual[-1], *actual[3:-1]]):
        assert [a.output_token_ids for a in result] == [a.output_token_ids for a in expected]
    reused = [a.receipt.reused_tokens >= PAGE for a in actual]
    assert not any((reused[0], reused[2], reused[3])) and reused[-1]


def test_pictures_that_are_too_many_are_refused(build: Build) -> None:
    model = load(build("mllama", "4 heads on 2, llama3 rope, neighbours attend"))
    assert len(model.prompts.prepare([user(*[SHARED] * 4)]).images) == 4
    with pytest.raises(PromptError, match="5 pictures, and this model sees at most 4 at once"):
        model.prompts.prepare([user(*[SHARED] * 5)])
