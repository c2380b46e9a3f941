"""Every family decodes as machine code what it decodes node by node: same logits, same states. How
many of its nodes do is printed (`-s`). Those with other layers read prompts so, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from common import Oracle
from family_table import DECODING, documented, share_of
from table import CASES, CHOSEN, ROWS

from mtmd import load
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.plan.executor import Executor
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
# What has layers besides attention and dense products
PROMPT_CASES = [
    (row, variant)
    for row, variant in CHOSEN
    if "experts" in variant
    or row
    in (
        "qwen3_5",
        "qwen3_next",
        "lfm2_vl",
        "kimi_k25",
        "mllama",
        "trocr",
        "donut",
        "florence2",
        "blip",
    )
]
PROMPTS = (tuple(range(3, 43)), tuple(range(30, 39)), (5,))


@pytest.mark.parametrize(("row", "variant"), CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decoding(build: Build, row: str, variant: str, dtype: str) -> None:
    runner = Model(
        open_checkpoint(build(row, variant).folder),
        LoadOptions(device="cpu", parallel=3, context=128, dtype=dtype),
    ).runner
    cache = runner.new_cache()
    running = [runner.begin(cache, slot) for slot in range(3)]
    for one, prompt in zip(running, PROMPTS, strict=True):
        runner.prefill([Span(prompt)], cache, one)
    for step in range(3):
        states = {name: t.clone() for name, t in cache.tensors.items()}
        chosen = running[: 1 + step % 3]
        batch = make_batch([(one, [Span((7 + step,))]) for one in chosen], cache)
        executor = Executor(runner.plan(batch.shape), runner.residency)
        expected = executor.run(batch, observe=lambda *_: None)
        after = {name: t.clone() for name, t in cache.tensors.items()}
        for name, value in states.items():
            cache.tensors[name].copy_(value)
        actual = executor.run(batch)
        native = executor._programs()
        assert native is not None
        lowered = native.lowered
        refused = {f"{n.op}: {why}" for n, why in lowered.refused.items()}
        if step == 0:
            print(
                f"{row}, {variant}, {dtype}: {lowered.native} of {executor.plan.nodes}",
                *refused,
                sep="; ",
            )
        # a router that wavers between two experts may choose the other one in bf16
        limit = 1e-9 if dtype == "fp32" else 5e-2
        for a, b in zip(actual, expected, strict=True):
            assert error(a, b) < limit
        for name, value in after.items():
            assert error(cache.tensors[name], value) < limit
        assert not refused, refused
        for one in chosen:
            one.done = one.total = one.done + 1
            one.position += 1
    if dtype == "bf16":
        (line,) = (line for line in documented("families") if line[0] == ROWS[row].name)
        share = float(line[-1].rstrip("%")) / 100  # at least so much of each variant
        assert share_of(runner.plan(DECODING)) >= share - 0.005, "python tools/family_table.py"


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(((a - b) ** 2).mean() / (b**2).mean().clamp(min=1e-30))


def test_twelve_sequences_at_once() -> None:
    """Of which products take all rows together, where the CPU has tiles."""
    runner = load(device="cpu", parallel=12, context=64, dtype="bf16").runner
    cache = runner.new_cache()
    running = [runner.begin(cache, slot) for slot in range(12)]
    for slot, one in enumerate(running):
        runner.prefill([Span(tuple(range(3, 8 + slot)))], cache, one)
    batch = make_batch([(one, [Span((7 + i,))]) for i, one in enumerate(running)], cache)
    executor = Executor(runner.plan(batch.shape), runner.residency)
    expected = executor.run(batch, observe=lambda *_: None)[-1]
    actual = executor.run(batch)[-1]
    assert executor._programs() is not None and actual.shape == (12, runner.family.vocabulary)
    assert error(actual, expected) < 1e-3


@pytest.mark.parametrize(("row", "variant"), PROMPT_CASES)
def test_prompts(build: Build, row: str, variant: str) -> None:
    """A prompt, one that goes on and a step of decoding in one batch, all as machine code."""
    runner = Model(
        open_checkpoint(build(row, variant).folder),
        LoadOptions(device="cpu", parallel=3, context=128, dtype="bf16"),
    ).runner
    cache = runner.new_cache()
    running = [runner.begin(cache, slot) for slot in range(3)]
    for one, prompt in zip(running[1:], PROMPTS[1:], strict=True):
        runner.prefill([Span(prompt)], cache, one)
    states = {name: t.clone() for name, t in cache.tensors.items()}
    spans = [Span(PROMPTS[0]), Span((7, 9, 4, 11, 3, 8)), Span((6,))]
    batch = make_batch([(one, [span]) for one, span in zip(running, spans, strict=True)], cache)
    executor = Executor(runner.plan(batch.shape), runner.residency)
    expected = executor.run(batch, observe=lambda *_: None)
    after = {name: t.clone() for name, t in cache.tensors.items()}
    for name, value in states.items():
        cache.tensors[name].copy_(value)
    actual = executor.run(batch)
    native = executor._programs()
    if native is None:  # the CPU has no tiles, and torch multiplies
        return
    assert native.lowered.wide
    refused = {f"{n.op}: {why}" for n, why in native.lowered.refused.items()}
    form = host_form("bf16")
    assert not refused or form is None or form[0] != "tiles", refused
    # A router that wavers between two experts chooses another one of tens of experts in bf16.
    limit = 0.2 if "experts" in variant else 5e-2
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < limit
    for name, value in after.items():
        assert error(cache.tensors[name], value) < limit
