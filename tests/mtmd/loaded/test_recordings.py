"""Recorded runs of a model whose weights are not always the same: adapters that answers choose, and
a model that is loaded anew on the same device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from stand_in import StandIn

from mtmd.finding import find_checkpoint
from mtmd.kernels.backends import Cpu, Reference
from mtmd.model import Model
from mtmd.options.load import LoadOptions

CHOICES: tuple[Any, ...] = (None, "a", {"a": 0.5}, "b", ["a", "b"], None, "a")


def answers(device: StandIn, lora: dict[str, Path]) -> list[list[tuple[int, float]]]:
    """Tokens with their probabilities, of one answer after another."""
    options = LoadOptions(dtype="fp32", context=128, parallel=1, lora=lora)
    checkpoint, name = find_checkpoint(None, options)
    with Model(checkpoint, options, [device, Cpu(), Reference()], name=name) as model:
        made = (
            model.answer(None, "What is here?", max_tokens=6, logprobs=0, ignore_eos=True, **chosen)
            for chosen in ({"adapter": choice} if choice else {} for choice in CHOICES)
        )
        return [[(t.id, round(t.logprob, 4)) for t in one.logprobs] for one in made]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), seed=seed) for seed in range(3)]


def test_recorded_runs_have_the_adapters_of_each_answer(adapters: list[Path]) -> None:
    """And after the model was loaded anew, with another adapter of the same name, its weights."""
    device = StandIn()
    assert device.recorder is not None
    for first, second in ((0, 1), (2, 1)):
        lora = {"a": adapters[first], "b": adapters[second]}
        before = device.recorder.replays
        actual = answers(device, lora)
        assert device.recorder.replays - before > 6 * len(CHOICES) / 2
        assert actual == answers(StandIn(records=False), lora)
        assert actual[0] == actual[5] and actual[1] == actual[6]
        assert len({str(one) for one in actual}) == 5
