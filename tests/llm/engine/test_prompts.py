"""Prompts read by programs of machine code, against the same plan run node by node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.cpu.native.program import AGAIN, Program
from mtmd.kernels.cpu.tiled import many_rows
from mtmd.kernels.plan import native_run
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.loading import load

# In fp32, x of products with integers is rounded to 16 bits, where little decides to which
LIMIT = {torch.float32: 1e-8, torch.bfloat16: 2e-3}


@pytest.fixture(scope="module")
def quantized() -> Iterator[Runner]:
    with load("demo", weights="Q8_0", dtype="fp32", threads=1) as model:
        yield model.runner


def runner_of(like: Runner, device: Cpu, dtype: torch.dtype, kv_type: str = "auto") -> Runner:
    backends = [device, Reference()]
    return Runner(like.family, like.weights, backends, dtype=dtype, context=800, kv_type=kv_type)


def nmse(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a.double() - b.double()) ** 2).mean() / (b.double() ** 2).mean())


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("kv_type", ["auto", "q8_0"])
def test_a_prompt_is_the_same_by_programs(
    quantized: Runner, dtype: torch.dtype, kv_type: str
) -> None:
    native = runner_of(quantized, Cpu(), dtype, kv_type)
    by_node = runner_of(quantized, Cpu(native=False), dtype, kv_type)
    caches = native.new_cache(), by_node.new_cache()
    # A key or a value that is rounded to another step of the cache's type changes more
    limit = max(LIMIT[dtype], 0.0 if kv_type == "auto" else 1e-5)
    if many_rows.form_of("Q4_0", many_rows.TYPES[dtype])[0] == "words":
        limit = max(limit, 1e-7)  # x in 16 bits, rounded to another step now and then
    for tokens in (17, 49, 600):
        prompt = [Span(tuple((7 * i + 3) % 90 + 5 for i in range(tokens)))]
        both = zip((native, by_node), caches, strict=True)
        assert nmse(*(runner.prefill(prompt, cache) for runner, cache in both)) <= limit


def test_a_prompt_is_programs_alone_and_takes_little_memory(
    quantized: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = native_run.native_plan
    monkeypatch.setattr(
        native_run, "native_plan", lambda *args: made.append(original(*args)) or made[-1]
    )
    subject = runner_of(quantized, Cpu(), torch.float32)
    subject.prefill([Span((5, 6, 7, 8) * 40)], subject.new_cache())
    lowered = made[0].lowered
    programs = [part for part in lowered.parts if isinstance(part, Program)]
    assert lowered.wide and programs == lowered.parts
    assert not any(row[AGAIN] for program in programs for row in program.table)
    assert lowered.arena < 160 * 4 * (8 * quantized.family.width + 4 * quantized.family.ffn)
