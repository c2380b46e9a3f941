"""Requests come, are given up and give way at random, over families that keep different things:
each is answered as if it were alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import test_runner as small
import torch

from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type
from mtmd.llm.engine import engine as engines
from mtmd.llm.engine.engine import Engine, Prompt
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span
from mtmd.llm.families import lfm2
from mtmd.llm.families.qwen3_next import text as qwen3_next
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.llm.state import PAGE

HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 40,
    "intermediate_size": 54,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
    },
}
CONVOLUTIONS = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_theta": 1e4,
    "tie_embedding": True,
}
FAMILIES: Mapping[str, Any] = {
    "windows, blocks": small.FAMILY,
    "delta nets, grids": qwen3_next.read(Settings(HYBRID, "config.json")),
    "convolutions": lfm2.read(Settings(CONVOLUTIONS, "config.json")),
}


class Noise:
    def __init__(self, family: Any):
        self.shapes = {name: p.shape for name, p in family.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape, generator = (
            self.shapes[name],
            torch.Generator().manual_seed(sorted(self.shapes).index(name)),
        )
        noise = torch.randn(shape, generator=generator)
        if name.endswith("ssm_a"):  # decays are below one; slow enough for the past to matter
            return -0.1 * noise.abs().to(dtype)
        return (
            noise * (shape[-1] ** -0.5 if len(shape) > 1 else 4.0 if "post" in name else 1.0)
        ).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None


def engine(name: str, pages: int | None = None) -> Engine:
    family = FAMILIES[name]
    runner = Runner(family, Noise(family), [Cpu()], dtype=torch.float32, context=256, sequences=3)
    if pages is not None:
        runner.pages = pages
    return Engine(runner)


def request(name: str, seed: int) -> Prompt:
    """A prompt of one of few beginnings, with a picture perhaps, and something of its own."""
    rng, width = Random(seed), FAMILIES[name].width
    beginning, picture, content = rng.randint(0, 1), rng.choice((0, 1, 1)), rng.randint(0, 2)
    spans = [Span(tuple(5 + beginning + i % 40 for i in range(rng.choice((3, 40)))))]
    if picture:
        values = torch.randn(48, width, generator=torch.Generator().manual_seed(content))
        block, grid = (
            name == "windows, blocks",
            ((6, 8), (4, 12), (8, 6))[content] if "grids" in name else None,
        )
        spans.append(Span((9,) * 48, values, block, grid, content=b"picture %d" % content))
    spans.append(Span(tuple(rng.choice(((1, 2, 3), (1, 2, 4), tuple(range(30, 63)))))))
    return Prompt(spans, Sampler(Sampling()), max_tokens=rng.choice((1, 5, 40)))


@cache
def alone(name: str, seed: int) -> list[int]:
    subject = engine(name)
    sequence = subject.submit(request(name, seed))
    while subject.busy:
        subject.step()
    return sequence.tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAMILIES)
def test_each_is_answered_as_if_it_were_alone(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SNAPSHOTS", 4)
    rng = Random(seed)
    subject = engine(name, pages=rng.choice((9, 14, None)))
    subject.batcher.tokens = rng.choice((20, 64, 512))
    asked: list[tuple[int, Sequence]] = []
    for _ in range(14):
        number = rng.randint(0, 11)
        prompt = replace(request(name, number), owner=rng.choice("aab"))
        asked.append((number, subject.submit(prompt)))
        for _ in range(rng.choice((0, 1, 4, 30))):
            subject.step()
        if rng.random() < 0.2:
            subject.cancel(rng.choice(asked)[1])
    for _ in range(3000):
        if subject.busy:
            subject.step()
    for number, sequence in asked:
        assert sequence.finish in ("length", "cancelled")
        expected = alone(name, number)
        assert sequence.tokens == (
            expected if sequence.finish == "length" else expected[: len(sequence.tokens)]
        )
    assert subject.batcher.pages.held == 0 and len(subject._snapshots) <= 4
    assert sum(g.reused for _, g in asked) >= PAGE, "beginnings were known"


@pytest.mark.parametrize("name", FAMILIES)
def test_one_who_makes_way_for_another_client_is_answered_all_the_same(name: str) -> None:
    subject = engine(name)
    many = [subject.submit(replace(request(name, n), owner="a", max_tokens=40)) for n in range(4)]
    for _ in range(20):
        subject.step()
    written = [len(sequence.tokens) for sequence in many]
    assert min(written[:3]) > 5 and written[3] == 0, "three places"
    one = subject.submit(replace(request(name, 5), owner="b", max_tokens=3))
    steps = 0
    while one.finish is None:
        subject.step()
        steps += 1
    assert steps < 15 and subject.made_way == 1
    assert [s.preemptions for s in many] == [0, 0, 1, 0] and many[2].slot is None
    while subject.busy:
        subject.step()
    assert all(s.tokens == long_alone(name, n) for n, s in enumerate(many))


@cache
def long_alone(name: str, seed: int) -> list[int]:
    subject = engine(name)
    sequence = subject.submit(replace(request(name, seed), max_tokens=40))
    while subject.busy:
        subject.step()
    return sequence.tokens


@pytest.mark.parametrize(("room", "kept"), [(1 << 30, 3), (0, 1), (2, 2)])
def test_snapshots_take_a_bounded_memory(
    room: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = engine("delta nets, grids")
    each = sum(state.nbytes for state in subject.cache.snapshot(0).states.values())
    monkeypatch.setattr(engines, "SNAPSHOT_BYTES", room if room > 2 else room * each)
    for first in range(3):
        subject.submit(
            Prompt([Span(tuple(range(first, first + 40)))], Sampler(Sampling()), max_tokens=1)
        )
    while subject.busy:
        subject.step()
    assert len(subject._snapshots) == len(subject.batcher.snapshots) == kept
