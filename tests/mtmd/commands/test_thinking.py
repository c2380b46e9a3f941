"""Thoughts on the command line: on stderr, so that what is read from stdout is the answer alone."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from thinking_templates import TEMPLATES

from mtmd.terminal.transcript import read_transcript

THINK = ("--think-budget", "4", "--max-tokens", "24")


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATES["opened"])
    return ("--chat-template", str(path))


def test_an_answer_goes_to_stdout_and_the_thought_before_it_to_stderr(mtmd, template):
    shown = mtmd("ask", "hi", *template, *THINK)
    thought, _, receipt = shown.err.partition("\n\n")
    assert shown.code == 0 and thought and "</think>" not in shown.out + shown.err
    assert re.search(r"output tokens, \d+ of them thought", receipt)
    quiet = mtmd("ask", "hi", *template, *THINK, "--quiet")
    assert (quiet.out, quiet.err) == (shown.out, "")
    result = json.loads(mtmd("ask", "hi", *template, *THINK, "--json").out)
    assert (result["thinking"], result["text"]) == (thought, shown.out.rstrip("\n"))
    assert result["receipt"]["thinking_tokens"] > 4


def test_thinking_is_turned_off_and_given_to_the_template(mtmd, template):
    for chosen in (("--think", "off"), ("--chat-template-kwargs", '{"enable_thinking": false}')):
        result = json.loads(
            mtmd("ask", "hi", *template, *chosen, "--max-tokens", "9", "--json").out
        )
        assert "thinking" not in result and result["text"]
    assert "think: found" in mtmd("ask", "hi", *template, "--think", "maybe").refused()
    bad = mtmd("ask", "hi", *template, "--chat-template-kwargs", "{").refused()
    assert "chat-template-kwargs: found" in bad
    assert "no marks of thoughts" in mtmd("ask", "hi", "--think", "on", "--max-tokens", "2").err


def test_a_conversation_keeps_its_thoughts(mtmd, template, tmp_path, monkeypatch):
    saved = tmp_path / "c.json"
    stated = f"hi\nand?\n/set think off\nso?\n/save {saved}\n/load {saved}\nyes?\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stated.encode()), "utf-8"))
    ran = mtmd("chat", *template, *THINK)
    assert ran.code == 0 and "</think>" not in ran.out
    retained = json.loads(saved.read_text())
    assert [bool(turn.get("thinking")) for turn in retained["turns"]] == [True, True, False]
    assert retained["options"]["think"] == "off"
    transcript, chosen, _ = read_transcript(saved)
    assert chosen["think"] == "off"
    thoughts = [m.get("reasoning_content") for m in transcript.messages() if m["role"] != "user"]
    assert thoughts == [turn["thinking"] for turn in retained["turns"][:2]]
