"""Thought and answer as one text, and back."""

from __future__ import annotations

import pytest

from mtmd.thinking.written import Writing, parts


@pytest.mark.parametrize("begun", ["", "<think>\nH", "<think>\nHm.\n</think>\n\nHel"])
def test_pieces_become_a_text_that_is_read_back(begun):
    writing, text = Writing(begun), begun
    if "</think>" not in begun:
        for piece in ("m", "", "."):
            text += writing.thought(piece)
        assert parts(text) == ("Hm." if begun else "m.", "")
    for piece in ("", "lo", "!"):
        text += writing.answer(piece)
    assert text.count("<think>") == text.count("</think>") == 1
    assert parts(text)[0].endswith("m.") and parts(text)[1].endswith("lo!")


def test_a_text_without_a_thought_stays_as_it_is():
    writing = Writing()
    text = "".join(writing.answer(piece) for piece in ("a ", "<think>", " b"))
    assert (text, parts(text)) == ("a <think> b", ("", "a <think> b"))
    assert parts("x</think>y") == ("", "x</think>y")
