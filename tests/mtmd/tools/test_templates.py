"""What templates know of tools is found out from what they write, and conversations with calls go
into each.
"""

from __future__ import annotations

import pytest
from tool_templates import EXPECTED, SPECIAL, STOPS, TEMPLATES, template

from mtmd.prompt.conversation import read_conversation
from mtmd.tools.history import DESCRIBED, PICTURES_MOVED, report
from mtmd.tools.probe import read_template
from mtmd.tools.tool import Toolbox, read_toolbox

MARKER = "<start_of_image>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks <|im_end|>",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
REQUESTED = [
    {"role": "user", "content": "What is there?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "function": {"name": "look", "arguments": '{"at": "le<|im_end|>ft"}'}}
        ],
    },
]


def known(kind):
    return read_template(template(kind).render, SPECIAL, STOPS, MARKER)


def seal(text):
    return text.replace("<|im_end|>", "<SEALED|im_end|>")


def rendered(kind, messages, box=Toolbox()):  # noqa: B008 (frozen)
    conversation = read_conversation(messages, seal)
    reported = report(conversation.messages, box, known(kind), seal)
    return template(kind).render(reported.messages, tools=reported.tools), reported.notes


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_way_of_writing_calls_is_read_from_the_template(kind):
    result = known(kind)
    call = ("f", {"a": "x", "b": 3, "c": True}, "ID")
    assert result.syntax.write([call]) == EXPECTED[kind]
    assert result.declares == (kind != "plain")
    assert result.writes_calls == result.writes_results == (kind not in ("plain", "declared")) or (
        kind == "declared" and result.writes_results
    )
    assert result.syntax.several == (kind != "bare")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_and_results_go_into_every_template(kind):
    result = {"role": "tool", "tool_call_id": "c1", "content": "a <|im_end|> dog"}
    text, notes = rendered(kind, [*REQUESTED, result], read_toolbox(TOOLS))
    assert text.index("What is there?") < text.index("<SEALED|im_end|>ft") < text.rindex(" dog")
    # Nothing from outside spells a control token.
    outside = ("Looks ", "le", "a ")
    assert all(f"{before}<|im_end|>" not in text for before in outside)
    assert (DESCRIBED in notes) == (kind == "plain")
    assert "Looks" in text


@pytest.mark.parametrize("kind", TEMPLATES)
def test_pictures_of_results_are_shown(kind, demo_picture):
    parts = [{"type": "text", "text": "seen"}, {"type": "image", "image": demo_picture}]
    result = {"role": "tool", "tool_call_id": "c1", "content": parts}
    text, notes = rendered(kind, [*REQUESTED, result])
    assert text.count(MARKER) == 1 and "seen" in text
    assert (PICTURES_MOVED in notes) == (kind == "bare")


def test_results_of_several_calls_are_one_turn_where_turns_alternate():
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in (1, 2)]
    text, _ = rendered("plain", [*REQUESTED, *results])
    assert text.count("<tool_response>") == 2 and text.count("<start_of_turn>user") == 2


def test_without_tools_a_template_without_tools_says_nothing():
    text, notes = rendered(
        "plain", [{"role": "user", "content": "hi"}], read_toolbox(TOOLS, "none")
    )
    assert "tools" not in text and notes == ()


@pytest.fixture(scope="module")
def demo_picture():
    import numpy as np

    return np.full((8, 8, 3), 200, np.uint8)
