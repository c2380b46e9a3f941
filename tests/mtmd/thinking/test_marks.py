"""A text is split at the marks of its thought, in whatever pieces it comes."""

from __future__ import annotations

import random

import pytest
from thinking_templates import known

from mtmd.thinking.marks import Marks, Splitter, ThoughtText

THINK = Marks("<think>\n", "\n</think>\n\n")


def split(marks, inside, text, rng=None):
    """(thought, answer) of a text that comes in parts, character by character without `rng`."""
    splitter, pieces, at = Splitter(marks, inside), [], 0
    while at < len(text):
        length = rng.randint(1, 9) if rng else 1
        pieces += splitter.push(text[at : at + length])
        at += length
    pieces += splitter.finish()
    thought = "".join(p.text for p in pieces if isinstance(p, ThoughtText))
    return thought, "".join(p for p in pieces if isinstance(p, str))


CASES = [
    (False, "<think>\nHm.\n\nYes.\n</think>\n\nHello.", ("Hm.\n\nYes.", "Hello.")),
    (False, "\n<think>Hm.</think>Hello.", ("Hm.", "Hello.")),
    (True, "Hm.\n</think>\n\nHello.", ("Hm.", "Hello.")),
    (True, "\n\nHm.</think>\n\n Hello. ", ("Hm.", "Hello. ")),
    (True, "</think>Hello.", ("", "Hello.")),
    (False, "<think>\n\n</think>\n\nHello.", ("", "Hello.")),
    (True, "Hm, and no end", ("Hm, and no end", "")),
    (True, "Hm, and </thin", ("Hm, and </thin", "")),
    (True, "a < b </thin> c</think>d", ("a < b </thin> c", "d")),
    (False, "<think", ("", "<think")),
    (False, "  indented", ("", "  indented")),
    (False, "<thank>you</think>", ("", "<thank>you</think>")),
    (False, "Say <think>no</think>.", ("", "Say <think>no</think>.")),
    (True, "a</think>b <think>c</think> d", ("a", "b <think>c</think> d")),
    (True, "a</think>\n<think>\nb\n</think>c", ("a\n\nb", "c")),
    (True, "<tool_call>{}</tool_call></think>x", ("<tool_call>{}</tool_call>", "x")),
    (False, "", ("", "")),
    (True, "<think>\nHm.\n</think>\n\nHello.", ("Hm.", "Hello.")),
    (True, "\n<think>\n\n</think>\n\nHello.", ("", "Hello.")),
    (True, "<think>\n<think>Hm.</think>Hello.", ("<think>Hm.", "Hello.")),
    (True, "a <think>b</think>c", ("a <think>b", "c")),
    (True, "<thi", ("<thi", "")),
    (True, "<thinker</think>c", ("<thinker", "c")),
    (False, "<think><think>Hm.</think>Hello.", ("Hm.", "Hello.")),
    (True, "   ", ("", "")),
]


@pytest.mark.parametrize(("inside", "text", "parts"), CASES)
def test_thought_and_answer_are_told_apart(inside, text, parts):
    assert split(THINK, inside, text) == parts
    for seed in range(20):
        assert split(THINK, inside, text, random.Random(seed)) == parts


def test_headers_of_channels_belong_to_neither():
    marks = known("channels").marks
    thought, header = "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>"
    assert split(marks, False, f"{thought}<|start|>assistant{header}Hello.") == ("Hm.", "Hello.")
    assert split(marks, False, f"{header}Hello.") == ("", "Hello.")
    assert split(marks, True, "Hm.<|end|>Hello.") == ("Hm.", "Hello.")
    marks = known("pairs").marks
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello."
    assert split(marks, True, text) == ("Hm.", "Hello.")


def test_what_begins_any_message_is_no_text_of_one_without_a_header():
    marks = known("channels").marks
    thought, call = "<|channel|>analysis<|message|>Hm.<|end|>", "to=look<|channel|>commentary{}"
    assert split(marks, False, f"{thought}<|start|>assistant {call}") == ("Hm.", call)
    assert split(marks, True, f"Hm.<|end|><|start|>assistant {call}") == ("Hm.", call)
    assert marks.turn == "<|start|>assistant" and THINK.turn == ""


@pytest.mark.parametrize("inside", [True, False])
def test_a_header_that_is_cut_is_no_answer(inside):
    marks = known("channels").marks
    thought = ("" if inside else marks.opening) + "Hm."
    for cut in range(len(marks.closing.rstrip())):
        result, answer = split(marks, inside, thought + marks.closing[:cut])
        assert answer == "" and result.startswith("Hm."), cut
    header = "<|channel|>final<|message|>"
    for cut in range(len("<|channel|>"), len(header)):
        assert split(marks, False, header[:cut]) == ("", "")


@pytest.mark.parametrize("begin", ["", "<think>", "<think>Hm.", "<think>Hm.</think>"])
def test_blanks_that_wait_are_copied_once(begin):
    splitter, looked = Splitter(THINK, inside=False), 0
    splitter.push(begin)
    for _ in range(2000):
        splitter.push(" \n" * 4)
        looked += len(splitter._text)
    assert looked <= 2000 * len("</think>")
    blanks = " \n" * 8000
    pieces = [*splitter.push("x"), *splitter.finish()]
    text = "".join(p if isinstance(p, str) else p.text for p in pieces)
    assert text == ("x" if begin in ("<think>", "<think>Hm.</think>") else f"{blanks}x")


def test_what_is_certain_does_not_wait():
    splitter = Splitter(THINK, inside=True)
    assert splitter.push("a b") == [ThoughtText("a b")]
    assert splitter.push(" \n") == []
    assert splitter.push("c</") == [ThoughtText(" \nc")]
    assert splitter.is_inside and not splitter.is_over
    assert splitter.push("think>\n") == [] and not splitter.is_inside
    assert splitter.push("\nHello") == ["Hello"] and splitter.is_over
    assert splitter.push("  ") == ["  "]
