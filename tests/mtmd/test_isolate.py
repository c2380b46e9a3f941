"""`isolate`: the same answers, with pictures and schemas kept away from this process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import ImageError, ModelError, OptionError
from mtmd.clip.image import decode
from mtmd.events import Finished
from mtmd.llm.sampling import grammar, isolated_grammar
from mtmd.loaded import loaded_model
from mtmd.loading import load
from mtmd.model import Model
from mtmd.prompt.conversation import user_message

COUNT = "How many shapes are there?"
SCHEMA = {"enum": [1, 2, "three"]}
BOMB = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(1, 18)]}


@pytest.fixture(scope="module")
def separate() -> Iterator[Model]:
    model = load(device="cpu", isolate=True, threads=1)
    model.loaded.start_workers()
    yield model
    model.close()


def test_the_same_answers(separate: Model, demo: Model, world: dict[int, Path]) -> None:
    for n in (1, 2):
        source = world[n].read_bytes() if n == 1 else world[n]
        assert separate.describe(source, COUNT) == demo.describe(source, COUNT)
    chosen: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 60}
    here, there = (m.answer(world[1], COUNT, **chosen) for m in (demo, separate))
    assert here.text == there.text and json.loads(here.text) in SCHEMA["enum"]


def test_neither_is_looked_into_here(
    separate: Model, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: object, **__: object) -> Any:
        raise AssertionError("in this process")

    for name in ("LLMatcher", "LLTokenizer"):
        monkeypatch.setattr(f"llguidance.{name}", touched)
    monkeypatch.setattr(grammar, "compile_grammar", touched)
    monkeypatch.setattr(decode, "_READERS", {})
    assert json.loads(separate.describe(one, COUNT, json_schema=SCHEMA)) in SCHEMA["enum"]


def test_a_bomb_is_refused_while_others_are_answered(
    separate: Model, world: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_grammar, "TRIAL_LIMITS", isolated_grammar.Limits(2, 64 << 20))
    expected, errors = separate.describe(world[2], COUNT), list[OptionError]()

    def bomb() -> None:
        with pytest.raises(OptionError) as caught:
            separate.describe(world[1], COUNT, json_schema=BOMB)
        errors.append(caught.value)

    thread = threading.Thread(target=bomb)
    thread.start()
    while thread.is_alive():
        assert separate.describe(world[2], COUNT) == expected
    thread.join()
    assert "found a schema that needs more than" in str(errors[0])


def test_a_worker_that_is_killed_ends_one_answer(separate: Model, world: dict[int, Path]) -> None:
    grammars = separate.loaded.grammars
    free = [{"type": "array", "items": {"type": "integer"}}, SCHEMA]
    tickets = [
        separate.service.submit([user_message(world[1], COUNT)], json_schema=schema, max_tokens=200)
        for schema in free
    ]
    number = grammars._server.pid  # type: ignore[union-attr]
    assert number is not None
    os.kill(number, 9)  # and all workers with it, if there are any yet
    ended = []
    for ticket in tickets:
        try:
            *_, last = ticket
            ended.append(isinstance(last, Finished))
        except Exception as error:
            ended.append("json_schema" in str(error) or "worker process" in str(error))
    assert ended == [True, True]
    assert separate.answer(world[1], COUNT, json_schema=SCHEMA).receipt.finish == "stop"


def test_what_is_wrong_is_told_in_the_same_words(
    separate: Model, demo: Model, tmp_path: Path
) -> None:
    for source in (b"%PDF-1.4", tmp_path / "none.png", b""):
        stated = []
        for model in (demo, separate):
            with pytest.raises(ImageError) as caught:
                model.describe(source, COUNT)
            stated.append(str(caught.value))
        assert stated[0] == stated[1]
    for model in (demo, separate):
        with pytest.raises(OptionError, match="cannot be followed"):
            model.stream([user_message(b"", COUNT)], json_schema={"type": "string!"})


def test_it_is_refused_where_nothing_can_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "can_isolate", lambda: False)
    with pytest.raises(OptionError, match="isolate: this system has no limits for processes"):
        load(isolate=True)


def test_a_pipe_as_a_model_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        load(tmp_path / "model.gguf")
