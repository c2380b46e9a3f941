"""The runner on a small random decoder: batches, limits, caches, fallbacks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mtmd.kernels.backends import Backend, Cpu, Limited, Reference
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.errors import DeviceMemoryError, ModelError, PromptError
from mtmd.kernels.graph import Type
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families.gemma3 import Gemma3Text
from mtmd.llm.state import PAGE

FAMILY = Gemma3Text(
    width=32,
    ffn=48,
    heads=4,
    groups=2,
    head=8,
    vocabulary=64,
    context=256,
    eps=1e-6,
    scale=8**-0.5,
    window=6,
    kinds=("sliding_attention", "full_attention"),
    ropes={"sliding_attention": rotary(1e4, 8), "full_attention": rotary(1e6, 8)},
    softcap=None,
    final_softcap=None,
)
PROMPT = [Span(tuple(range(5, 16)))]


class Noise:
    def __init__(self) -> None:
        self.shapes = {name: p.shape for name, p in FAMILY.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sorted(self.shapes).index(name))
        shape = self.shapes[name]
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 4.0 if "post" in name else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None


def runner(context: int = 64, rules: tuple[str, ...] = (), **chosen: Any) -> Runner:
    backends: list[Backend] = (
        [Limited(Cpu(), rules), Cpu(), Reference()] if rules else [Cpu(), Reference()]
    )
    return Runner(FAMILY, Noise(), backends, dtype=torch.float32, context=context, **chosen)


def answer(subject: Runner, spans: list[Span] = PROMPT, count: int = 12) -> list[int]:
    """Greedy tokens, one forward each."""
    cache = subject.new_cache()
    running = subject.begin(cache, 0)
    tokens = [int(subject.prefill(spans, cache, running).argmax())]
    while len(tokens) < count:
        tokens.append(int(subject.read([(running, [Span((tokens[-1],))])], cache)[0].argmax()))
    return tokens


def test_generation_equals_one_prefill_a_token() -> None:
    """Decoding with a cache gives what prefilling the longer prompt anew gives."""
    subject = runner()
    tokens = answer(subject)
    assert len(set(tokens)) > 3
    for n in range(len(tokens)):
        logits = subject.prefill(
            [*PROMPT, Span(tuple(tokens[:n]))] if n else PROMPT, subject.new_cache()
        )
        assert int(logits.argmax()) == tokens[n]


@pytest.mark.parametrize(
    "chosen",
    [
        {"flash_attn": "off"},
        {"rules": ("attention:/blk\\.1/",)},
        {"rules": ("attention",), "flash_attn": "on"},
        {"rules": ("kv_store",)},
        {"rules": ("matmul", "rope")},
    ],
    ids=str,
)
def test_same_tokens_wherever_it_runs(chosen: dict[str, Any]) -> None:
    assert answer(runner(**chosen)) == answer(runner())


def test_caches_live_where_they_are_written() -> None:
    layer = (
        2 * (PAGE + 64) * 2 * 8 * 4
    )  # a context of 64 tokens, and a page for rows that fill up a batch
    assert runner().cache_bytes() == {"cpu": 2 * layer}
    assert runner(rules=("kv_store:/blk\\.0/",)).cache_bytes() == {"cpu": layer, "limited": layer}


def test_prompt_longer_than_the_context() -> None:
    with pytest.raises(PromptError, match=r"takes 64 tokens.*context holds 64"):
        answer(runner(), [Span((1,) * 64)])


def test_a_token_without_an_embedding() -> None:
    with pytest.raises(ModelError, match=r"token 64.*table ends at 63"):
        answer(runner(), [Span((1, 64))])


def test_an_empty_prompt() -> None:
    with pytest.raises(PromptError, match="takes no tokens"):
        answer(runner(), [])


def test_no_memory_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.llm.state.zeros_untouched", Mock(side_effect=MemoryError))
    with pytest.raises(
        DeviceMemoryError, match=r"the cache of 1 x 64 tokens needs 24.0 KiB.*--context"
    ):
        answer(runner())


def test_no_memory_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = runner()

    told = (
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 1 bytes."
    )
    monkeypatch.setattr(
        "mtmd.kernels.backends.cpu.Cpu.lower",
        Mock(return_value=Mock(side_effect=RuntimeError(told))),
    )
    monkeypatch.setattr(
        "mtmd.kernels.plan.native_run.native_plan", Mock(side_effect=RuntimeError(told))
    )
    with pytest.raises(DeviceMemoryError, match="this run needs"):
        answer(subject)


def test_three_sequences_in_one_batch_are_each_as_alone() -> None:
    """Prompts of different lengths are read and decoded together: same tokens, though they share
    every forward.
    """
    prompts = [[Span(tuple(range(5, 16)))], [Span((7, 3))], [Span(tuple(range(40, 63)))]]
    alone = [answer(runner(), prompt) for prompt in prompts]
    subject = runner(sequences=3)
    cache = subject.new_cache()
    slots = [2, 0, 1]
    running = [subject.begin(cache, slot) for slot in slots]
    logits = subject.read(list(zip(running, prompts, strict=True)), cache)
    tokens: list[list[int]] = [[], [], []]
    for _ in range(12):
        for mine, row in zip(tokens, logits, strict=True):
            mine.append(int(row.argmax()))
        logits = subject.read(
            [(r, [Span((t[-1],))]) for r, t in zip(running, tokens, strict=True)], cache
        )
    assert tokens == alone


def test_a_sequence_joins_while_another_decodes() -> None:
    first, second = [Span(tuple(range(5, 16)))], [Span(tuple(range(30, 50)))]
    alone = [answer(runner(), p) for p in (first, second)]
    subject = runner(sequences=2)
    cache = subject.new_cache()
    a, b = subject.begin(cache, 0), subject.begin(cache, 1)
    token = int(subject.prefill(first, cache, a).argmax())
    logits = subject.read([(a, [Span((token,))]), (b, second)], cache)
    assert [token, int(logits[0].argmax())] == alone[0][:2]
    assert int(logits[1].argmax()) == alone[1][0]


def test_a_slot_is_used_again() -> None:
    subject = runner()
    cache = subject.new_cache()
    first = subject.prefill(PROMPT, cache)
    subject.prefill([Span((1, 2, 3))], cache)
    assert torch.equal(subject.prefill(PROMPT, cache, subject.begin(cache, 0)), first)
