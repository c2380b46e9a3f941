"""Quantized keys and values in whole models: machine code against the ops' references, explicit
attention, ranks, prompts that begin alike, tokens that are proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.graph import Node
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.quantization.kv_rows import (
    BLOCK,
    CODED,
    ROW_TYPES,
    blocks_of,
    dequantize_rows,
    part_of,
    part_types,
    rotate,
)
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.state import PAGE
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
CASES = {
    "windows": ("gemma3", "6 heads on 2, image block wider than the window, as published"),
    "delta nets": ("qwen3_5", "dense"),
    "heads of 24": ("qwen2_vl", "qwen2-vl, heads of 40 and 24"),
}
PROMPT = [Span(tuple(5 + i * 7 % 50 for i in range(45)))]
NMSE = 1e-9
BETWEEN = 0.02  # of a step: so near to the middle of two codes, a value may be rounded to either


@dataclass
class Answer:
    """Tokens, the logits after the prompt, and the states that were stored, by name."""

    tokens: list[int]
    logits: torch.Tensor
    stored: Mapping[str, torch.Tensor]


def answer(runner: Runner, count: int) -> Answer:
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    first = logits = runner.prefill(PROMPT, cache, sequence)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = runner.read([(sequence, [Span((tokens[-1],))])], cache)[0]
    return Answer(tokens, first, cache.tensors)


class Following(Reference):
    """Ops by their references. Where a value lies between two codes, the one is stored that another
    implementation stored: all that comes after can be compared closely.
    """

    def __init__(self, stored: Mapping[str, torch.Tensor]):
        super().__init__()
        self.stored = stored

    def lower(self, node: Node, in_place: bool = False) -> Run:
        run = super().lower(node, in_place)
        if node.op != "kv_store" or not node.attrs.get("quant"):
            return run
        cache, quant = node.inputs[0], node.attrs["quant"]
        assert cache is not None
        theirs = self.stored[cache.name]

        def store(stored, k, v, slots):  # type: ignore[no-untyped-def]
            result = run(stored, k, v, slots)
            for which, (x, kind) in enumerate(zip((k, v), part_types(quant), strict=True)):
                size = x.shape[-1]
                ours, others = (part_of(of, which, quant, size) for of in (result, theirs))
                follow(ours, others, slots[slots >= PAGE], x[slots >= PAGE].float(), kind)
            return result

        return store


def follow(
    ours: torch.Tensor, theirs: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, kind: str
) -> None:
    """Put their rows [S, G, bytes] for x [T, G, K] in the place of ours, if they are as near to x."""
    of, count = ROW_TYPES[kind], blocks_of(x.shape[-1])
    x = torch.nn.functional.pad(x, (0, count * BLOCK - x.shape[-1]))
    x = (rotate(x) if of.rotated else x).unflatten(-1, (count, BLOCK))
    errors, scales = [], []
    for rows in (ours[slots], theirs[slots]):
        numbers = dequantize_rows(rows, kind, count * BLOCK)
        numbers = (rotate(numbers) if of.rotated else numbers).unflatten(-1, (count, BLOCK))
        errors.append((numbers - x).abs())
        at = of.code_bytes(x.shape[-1] * count)
        scales.append(rows[..., at : at + 2 * count].contiguous().view(torch.float16).float())
    # Numbers of a few bits have steps in proportion to them, and x is known to 1e-6 of the largest
    step = x.abs() / {"fp8": 8, "bf16": 128}.get(kind, torch.inf)
    step = step + 1e-4 * x.abs().amax(-1, keepdim=True)
    allowed = torch.full_like(step, BETWEEN)
    if not of.plain:
        own, other = scales
        step = step + own.abs()[..., None] * (2**-9 if kind == "fp8" else 1)
        # A scale, too, may be rounded to either of two; 127 steps of it are 2^-11 apart
        allowed = torch.where((own == other)[..., None], BETWEEN, 0.2)
    assert (errors[1] <= errors[0] + allowed * step).all()
    ours[slots] = theirs[slots]


@pytest.mark.parametrize("kind", [*CODED, "q4_0/q8_0", "bf16/q4_0"])
@pytest.mark.parametrize("case", CASES)
def test_machine_code_explicit_attention_and_ranks(case: str, kind: str, build: Build) -> None:
    checkpoint = open_checkpoint(build(*CASES[case]).folder)

    def run(**how: Any) -> Answer:
        return answer(runner_of(checkpoint, 0, kv_type=kind, **how), 8)

    both = run_ranks(2, lambda group: rank(group, run))
    assert both[0].tokens == both[1].tokens and torch.equal(both[0].logits, both[1].logits)
    made = [run(), run(flash_attn="off"), run(backends=[Cpu(native=False)])]
    whole = {name: state.shape[2] for name, state in made[0].stored.items()}
    made.append(Answer(both[0].tokens, both[0].logits, joined([b.stored for b in both], whole)))
    for one in made:
        expected = run(backends=[Following(one.stored)])
        assert nmse(one.logits, expected.logits) < NMSE
        assert one.tokens == expected.tokens


def rank(group: ThreadGroup, run: Callable[..., Any]) -> Any:
    return run(sharding=Sharding(group))


def joined(
    parts: list[Mapping[str, torch.Tensor]], whole: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """States of ranks, which are cut along their axis 2 unless each rank has them whole."""
    return {
        name: parts[0][name]
        if parts[0][name].shape[2] == size
        else torch.cat([part[name] for part in parts], 2)
        for name, size in whole.items()
    }


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
        for kind in ("fp32", "bf16", *CODED, "q8_0/q4_0", "bf16/q8_0")
    }
    head = {"fp32": 96, "bf16": 48, "q8_0": 36, "fp8": 36, "q4_0": 20, "q8_0/q4_0": 28}
    head["bf16/q8_0"] = (64 + 36) / 2  # heads in bf16 are filled up, too
    assert {k: v / sizes["fp32"] for k, v in sizes.items()} == {
        k: v / head["fp32"] for k, v in head.items()
    }
    delta = open_checkpoint(build(*CASES["delta nets"]).folder)
    options = LoadOptions(device="cpu", dtype="fp32", context=64, kv_type="q4_0")
    report = Model(delta, options).warmup_report
    assert report.kv is not None and report.kv.recurrent_bytes > 0
    assert "keys and values: q4_0" in str(report) and "as they are" in str(report)
