"""Quantized keys and values in whole models: machine code against the ops' references, explicit
attention, ranks, prompts that begin alike, tokens that are proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import nmse
from common import Oracle
from ranks import ThreadGroup, run_ranks
from test_prefix_reuse import answers, conversations
from test_ranks import greedy, runner_of

from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.quantization.kv_rows import ROW_TYPES
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
CASES = {
    "windows": ("gemma3", "6 heads on 2, image block wider than the window, as published"),
    "delta nets": ("qwen3_5", "dense"),
    "heads of 24": ("qwen2_vl", "qwen2-vl, heads of 40 and 24"),
}
PROMPT = [Span(tuple(5 + i * 7 % 50 for i in range(45)))]
TIES = 1e-4  # a code between two may be rounded to either, and every layer after it sees that


@pytest.mark.parametrize("kind", [*ROW_TYPES, "q4_0/q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_machine_code_explicit_attention_and_ranks(case: str, kind: str, build: Build) -> None:
    checkpoint = open_checkpoint(build(*CASES[case]).folder)

    def run(**how: Any) -> tuple[list[int], torch.Tensor]:
        return greedy(runner_of(checkpoint, 0, kv_type=kind, **how), PROMPT, 8)

    tokens, logits = run(backends=[Reference()])
    both = run_ranks(2, lambda group: rank(group, run))
    for other, others in (run(), run(flash_attn="off"), run(backends=[Cpu(native=False)]), *both):
        assert nmse(others, logits) < TIES
        assert other == tokens


def rank(group: ThreadGroup, run: Callable[..., Any]) -> Any:
    return run(sharding=Sharding(group))


@pytest.mark.parametrize("case", CASES)
def test_q8_0_gives_the_tokens_of_numbers_as_they_are(case: str, build: Build) -> None:
    checkpoint = open_checkpoint(build(*CASES[case]).folder)
    plain, quantized = (runner_of(checkpoint, 0, kv_type=kind) for kind in ("auto", "q8_0"))
    tokens, _ = greedy(plain, PROMPT, 12)
    for a, b in zip(along(plain, tokens), along(quantized, tokens), strict=True):
        assert 0 < nmse(b, a) < 1e-2
        first, second = a.topk(2).values.tolist()
        assert int(a.argmax()) == int(b.argmax()) or first - second < 0.1 * float(a.std())


def along(runner: Runner, tokens: list[int]) -> list[torch.Tensor]:
    """Logits after the prompt and after each of the tokens."""
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    logits = [runner.prefill(PROMPT, cache, sequence)]
    for token in tokens:
        logits.append(runner.read([(sequence, [Span((token,))])], cache)[0])
    return logits


@pytest.mark.parametrize("kind", ["q8_0", "q8_0/q4_0"])
def test_a_prompt_that_begins_alike_and_proposals_change_nothing(kind: str, build: Build) -> None:
    checkpoint = open_checkpoint(build(*CASES["windows"]).folder)
    requested, results = conversations()[:3], []
    for speculate in ("off", 3):
        options = LoadOptions(
            device="cpu", dtype="fp32", context=512, parallel=3, kv_type=kind, speculate=speculate
        )
        model = Model(checkpoint, options)
        alone = [answers(model, [messages])[0] for messages in requested]
        together = answers(model, requested)
        in_turn = [model.answer(messages=m, max_tokens=16, ignore_eos=True) for m in requested]
        model.release()
        assert all(a.receipt.reused_tokens for a in in_turn[1:])
        results += [[a.output_token_ids for a in one] for one in (alone, together, in_turn)]
        receipt = together[0].receipt
        assert receipt.kv_type == kind and f"keys and values in {kind} (" in str(receipt)
    assert all(one == results[0] for one in results)


def test_memory_and_report(build: Build) -> None:
    """Of heads of 24, which take a block; states of delta nets stay as they are."""
    checkpoint = open_checkpoint(build(*CASES["heads of 24"]).folder)
    sizes = {
        kind: sum(runner_of(checkpoint, 0, kv_type=kind).cache_bytes().values())
        for kind in ("fp32", "bf16", *ROW_TYPES, "q8_0/q4_0")
    }
    head = {"fp32": 96, "bf16": 48, "q8_0": 36, "fp8": 36, "q4_0": 20, "q8_0/q4_0": 28}
    assert {k: v / sizes["fp32"] for k, v in sizes.items()} == {
        k: v / head["fp32"] for k, v in head.items()
    }
    delta = open_checkpoint(build(*CASES["delta nets"]).folder)
    options = LoadOptions(device="cpu", dtype="fp32", context=64, kv_type="q4_0")
    report = Model(delta, options).warmup_report
    assert report.kv is not None and report.kv.recurrent_bytes > 0
    assert "keys and values: q4_0" in str(report) and "as they are" in str(report)
