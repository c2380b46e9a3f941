"""`mtmd ask`: one question, with pictures or without."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mtmd.loading import DEMO_MODEL

COUNT = "How many shapes are there?"
NO_IMAGE = "I see no image. Please add one.\n"


def test_with_pictures_and_without(world: dict[int, Path], mtmd: Any) -> None:
    assert mtmd("ask", COUNT, "--quiet").out == NO_IMAGE
    ran = mtmd("ask", COUNT, "-i", world[1])
    assert (ran.code, ran.out) == (0, "One.\n") and "demo model on" in ran.err
    both = mtmd("ask", "-i", world[1], "-i", world[2], COUNT, "--json")
    assert len(json.loads(both.out)["receipt"]["images"]) == 2
    assert mtmd("ask", *COUNT.split(), "-i", world[1], "--quiet").out == "One.\n"


def test_the_question_from_a_pipe_or_a_file(
    one: Path, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "question.txt").write_text(f"{COUNT}\n")
    for words in (("ask", "-", "-i", one, "--quiet"), ("ask", "-i", one, "--quiet")):
        piped = io.TextIOWrapper(io.BytesIO(COUNT.encode()), "utf-8")
        monkeypatch.setattr(sys, "stdin", piped)
        assert mtmd(*words).out == "One.\n", words
    assert mtmd("ask", f"@{tmp_path}/question.txt", "-i", one, "--quiet").out == "One.\n"


def test_without_a_question(mtmd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b""), "utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    assert "found nothing in standard input" in mtmd("ask").refused()
    assert "question: found none" in mtmd("ask", "").refused()
    assert 'mtmd ask "What is this?"' in mtmd("ask", "-p", COUNT).refused()


def test_memory_is_needed_for_one_answer(one: Path, mtmd: Any) -> None:
    """One full cache of 8 MiB, not those of several answers at once."""
    assert mtmd("ask", COUNT, "-i", one, "--quiet", "--memory-limit", "40MiB").out == "One.\n"


def test_it_answers_as_a_conversation_does(one: Path, mtmd: Any, tmp_path: Path) -> None:
    """By the model's own settings, to the end of the context."""
    folder = tmp_path / "sampled"
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "generation_config.json"
    chosen = {"do_sample": True, "temperature": 0.6}
    path.write_text(json.dumps(json.loads(path.read_text()) | chosen))
    words = ("-m", folder, "--json", "--context", 64, "--ignore-eos")
    requested = json.loads(mtmd("ask", COUNT, "-i", one, *words).out)["receipt"]
    assert requested["sampling"]["temperature"] == {"value": 0.6, "source": path.name}
    assert requested["prompt_tokens"] + requested["output_tokens"] == 64
    greedy = json.loads(mtmd("ask", COUNT, *words, "--sampling", "greedy").out)["receipt"]
    assert greedy["sampling"]["temperature"] == {"value": 0, "source": "default"}
