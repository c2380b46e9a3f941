"""Adapters of a model: which fit it, where they are merged, what an answer that chooses some is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import DEMO, write_adapter

from mtmd.base.errors import ModelError, OptionError
from mtmd.events import Answer
from mtmd.loading import load

PICTURE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
QUESTION = "What is here? " * 8  # more than a page of the cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a")
    write_adapter(folder / "b", seed=1, rank=3)
    return folder


def answered(model: Any, **options: Any) -> Answer:
    answer: Answer = model.answer(PICTURE, QUESTION, max_tokens=24, logprobs=0, **options)
    return answer


def numbers(answer: Answer) -> tuple[list[int], list[float]]:
    return list(answer.output_token_ids), [round(t.logprob, 3) for t in answer.logprobs]


def test_chosen_by_answers(folder: Path) -> None:
    with load(device="cpu", lora={"a": folder / "a", "b": f"{folder / 'b'}:0.5"}) as model:
        plain = answered(model)
        first = answered(model, adapter="a")
        assert first.receipt.adapters == {"a": 1.0}
        assert numbers(first) != numbers(plain)
        # nothing that was read with one is used with another
        assert first.receipt.reused_tokens == 0
        assert numbers(answered(model)) == numbers(plain)
        again = answered(model, adapter="a")
        assert numbers(again) == numbers(first)
        assert again.receipt.reused_tokens > 0
        both = answered(model, adapter={"a": 0.5, "b": 0.25})
        assert both.receipt.adapters == {"a": 0.5, "b": 0.25}
        assert answered(model, adapter=["b", "a:0.5"]).receipt.adapters == {"a": 0.5, "b": 0.5}
        assert numbers(answered(model, adapter={"a": 0})) == numbers(plain)
        with pytest.raises(OptionError, match="adapter: found 'c', expected one of a, b"):
            answered(model, adapter="c")
    with load(device="cpu", lora=[folder / "a"]) as model:
        assert numbers(answered(model))[0] == numbers(first)[0]
        assert answered(model).receipt.adapters == {"a": 1.0}
        with pytest.raises(OptionError, match="expected one of none: load some"):
            answered(model, adapter="a")


def test_of_another_model(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, dict.fromkeys(DEMO, (128, 256)), base_model_name_or_path="x/y")
    with pytest.raises(
        ModelError, match=r"and 1 more of shape \[128, 256\] is no weight .* made for x/y"
    ):
        load(device="cpu", lora=path)
    with pytest.raises(ModelError, match="is no weight of this model"):
        load(device="cpu", lora=write_adapter(tmp_path, {"transformer.h.0.c_attn": (256, 256)}))
    with pytest.raises(OptionError, match="two adapters named a"):
        path = write_adapter(tmp_path)
        load(device="cpu", lora=[f"a={path}", f"a={path}"])


@pytest.mark.parametrize("value", ["", 3, ["a", 2], "x:123456", [f"{i}=x" for i in range(65)]])
def test_option(value: Any) -> None:
    with pytest.raises(OptionError, match="lora: "):
        load(device="cpu", lora=value)
