"""Marks and switches are found in every way in which templates write thoughts, and thoughts of the
history go into each.
"""

from __future__ import annotations

import pytest
from thinking_templates import EXPECTED, known, template

from mtmd.thinking.history import FIELD, with_thoughts
from mtmd.thinking.probe import read_thinking
from mtmd.thinking.request import ThinkingRequest
from mtmd.thinking.switches import CLOSED, NO_MARKS, NO_SWITCH, choose

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_template_is_read_by_rendering_it(kind):
    result = known(kind)
    assert result.marks is not None
    marks = result.marks.open, result.marks.close, result.marks.answer
    switches = result.on, result.off, result.effort, " ".join(sorted(result.efforts))
    assert (*marks, result.field, *switches) == EXPECTED[kind]


def test_a_template_without_thoughts_has_no_marks():
    assert known("silent").marks is None
    assert known("silent", ("<bos>", "<think>")).marks is None


@pytest.mark.parametrize(
    ("words", "marks"),
    [
        (("<think>", "</think>"), ("<think>", "</think>")),
        (("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
        (("<seed:think>", "</seed:think>"), ("<seed:think>", "</seed:think>")),
        (
            ("<|begin_of_thought|>", "<|end_of_thought|>"),
            ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ),
    ],
)
def test_marks_of_the_vocabulary_alone_are_known_by_their_shape(words, marks):
    result = known("silent", ("<|im_end|>", *words)).marks
    assert result is not None and (result.open, result.close) == marks


def test_a_template_that_takes_long_is_not_tried_for_ever(monkeypatch):
    calls, seconds = [], iter(range(10_000))
    monkeypatch.setattr("mtmd.thinking.probe.time.thread_time", lambda: next(seconds) / 10)
    names = [f"think{n}" for n in range(1000)]
    result = read_thinking(lambda *_, **more: calls.append(more) or str(more), "", names, ())
    assert result.marks is None and len(calls) < 60
    tried = {name for call in calls for name in call if name.startswith("think")}
    assert len(tried) <= 8


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_prompt_that_ends_inside_a_thought_is_told_from_one_that_does_not(kind):
    result, render = known(kind), template(kind).render
    opened = ("opened", "stripped", "start", "words", "pairs")
    assert result.marks.ends_inside(render(HI)) == (kind in opened)
    assert result.marks.ends_after(render(HI)) == (kind in ("asked", "channel"))
    if result.off is not None:
        off = render(HI, **result.off)
        assert not result.marks.ends_inside(off)
        assert result.marks.ends_after(off) or kind == "told"
    if kind == "asked":
        assert result.marks.ends_inside(render(HI, **result.on))


@pytest.mark.parametrize("kind", [k for k in EXPECTED if k not in ("stripped", "told", "channel")])
def test_thoughts_go_back_in_the_field_that_is_read(kind):
    result = known(kind)
    stated = {"role": "assistant", "content": "Hello.", FIELD: f"greet {result.marks.close} back"}
    text = template(kind).render(with_thoughts([*HI, stated], result), add_generation_prompt=False)
    before, _ = text.split("Hello.")
    assert (
        "greet " in before and " back" in before and result.marks.open in before
    ) or kind == "words"
    assert f"greet {result.marks.close} back" not in before, "a thought does not end itself"
    later = [*HI, stated, *HI, {"role": "assistant", "content": "So."}]
    assert template(kind).render(with_thoughts(later, result)).count("Hello.") == 1


def test_thoughts_in_a_content_are_left_to_the_template():
    result = known("stripped")
    stated = {"role": "assistant", "content": "Hello.", FIELD: "greet"}
    made = with_thoughts([*HI, stated], result)
    assert made[1]["content"] == "<think>\ngreet\n</think>\n\nHello."
    assert "greet" not in template("stripped").render(made)
    assert with_thoughts([*HI, stated], known("told"))[1] == {
        "role": "assistant",
        "content": "Hello.",
    }
    assert with_thoughts([*HI, stated], known("silent"))[1]["content"] == "Hello."


@pytest.mark.parametrize(
    ("kind", "request_", "variables", "closes", "notes"),
    [
        ("opened", {"think": False}, {"enable_thinking": False}, False, ()),
        ("opened", {"think": "none"}, {"enable_thinking": False}, False, ()),
        ("opened", {"think": True}, {"enable_thinking": True}, False, ()),
        ("opened", {"budget": 0}, {"enable_thinking": False}, False, ()),
        ("opened", {"budget": 9}, {}, False, ()),
        ("asked", {"think": True}, {"thinking": True}, False, ()),
        (
            *("asked", {"think": "low"}, {"thinking": True}, False),
            (f"reasoning_effort: {NO_SWITCH}; it has no effect",),
        ),
        ("channels", {"think": "high"}, {"reasoning_effort": "high"}, False, ()),
        ("channels", {"think": False}, {}, True, (CLOSED,)),
        ("channels", {"think": True}, {}, False, (f"think: {NO_SWITCH}; the model decides",)),
        (
            *("pairs", {"think": "medium"}, {"thinking": True}, False),
            ("reasoning_effort: the chat template knows low, max; 'medium' has no effect",),
        ),
        ("pairs", {"think": "low"}, {"thinking": True, "thinking_effort": "low"}, False, ()),
        ("start", {"think": "none"}, {"reasoning_effort": "none"}, False, ()),
        ("stripped", {"think": False}, {}, True, (CLOSED,)),
        ("stripped", {"budget": 0}, {}, True, ()),
        ("silent", {"think": False}, {}, True, (f"think: {NO_MARKS}",)),
        ("silent", {"think": "low"}, {}, False, (f"think: {NO_MARKS}; it has no effect",)),
        ("silent", {"budget": 5}, {}, False, (f"think_budget: {NO_MARKS}; it has no effect",)),
        (
            *("opened", {"variables": {"enable_thinking": False, "colour": 1}}),
            *({"enable_thinking": False, "colour": 1}, False),
            ("chat_template_kwargs: the chat template reads no colour",),
        ),
        (
            *("opened", {"think": True, "variables": {"enable_thinking": False}}),
            *({"enable_thinking": False}, False, ()),
        ),
    ],
)
def test_what_is_requested_becomes_variables_or_a_note(kind, request_, variables, closes, notes):
    chosen = choose(ThinkingRequest(**request_), known(kind), lambda value: value)
    assert (dict(chosen.variables), chosen.closes, chosen.notes) == (variables, closes, notes)
