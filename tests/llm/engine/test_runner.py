"""The runner on a small random decoder: batches, limits, caches, fallbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from stand_in import StandIn

from mtmd.base.errors import DeviceMemoryError, ModelError, PromptError
from mtmd.kernels.backends import Backend, Cpu, Limited, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.backends.torch_device import TorchDevice
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.graph import Type
from mtmd.kernels.plan.scheduler import Override
from mtmd.llm.batch import Batch, BatchShape
from mtmd.llm.batch_shapes import foreseen_batches
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.families.gemma import GemmaText
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.llm.state import PAGE

FAMILY = GemmaText(
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
    tied=True,
    norms_after=True,
    norms_heads=True,
)
ON_HOST = Override.parse(r"^blk\.\d+\.(kv_store|keys|values|attn)$=cpu")
PROMPT = [Span(tuple(range(5, 16)))]


class Noise:
    def __init__(self, family: GemmaText = FAMILY) -> None:
        self.shapes = {name: p.shape for name, p in family.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sorted(self.shapes).index(name))
        shape = self.shapes[name]
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 4.0 if "post" in name else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
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

    reported = (
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 1 bytes."
    )
    monkeypatch.setattr(
        "mtmd.kernels.backends.cpu.Cpu.lower",
        Mock(return_value=Mock(side_effect=RuntimeError(reported))),
    )
    monkeypatch.setattr(
        "mtmd.kernels.plan.native_run.native_plan", Mock(side_effect=RuntimeError(reported))
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


@pytest.mark.parametrize(
    ("device", "chosen", "tokens"),
    [
        (Cpu(), {}, 512),
        (Reference(), {}, 512),
        (TorchDevice("xpu:0", torch.device("cpu")), {}, 512),
        (Target("cuda:90"), {}, 2048),
        (Target("hip:gfx942"), {}, 2048),
        (Target("cuda:90"), {"flash_attn": "off"}, 512),
        (Limited(Target("cuda:90"), ["attention:/blk.1/"]), {}, 512),
        (Limited(Target("cuda:90"), ["matmul"]), {}, 2048),
        (Target("cuda:90"), {"overrides": [ON_HOST]}, 512),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_a_prefill_is_as_large_as_the_device_needs_it(
    device: Backend, chosen: dict[str, Any], tokens: int
) -> None:
    """Of a GPU many tokens, but where the scores of all of them would be kept at once."""
    family = replace(FAMILY, head=16, ropes={kind: rotary(1e4, 16) for kind in FAMILY.ropes})
    subject = Runner(
        replace(family, context=8192),
        Noise(family),
        [device, Cpu(), Reference()],
        dtype=torch.float32,
        context=8192,
        sequences=2,
        image_tokens=3000,
        cuts_images=True,
        **chosen,
    )
    assert subject.prefill_tokens == subject.image_tokens == tokens
    sizes = subject.sizes()["prefill"]
    assert (sizes.tokens, sizes.images) == (tokens, tokens)
    longest = max(shape.tokens for shape in foreseen_batches(subject))
    assert longest == BatchShape(tokens + 2).rounded().tokens
    whole = Runner(
        family, Noise(family), [device, Cpu(), Reference()], dtype=torch.float32, context=200
    )
    assert whole.sizes()["prefill"].tokens == 200


def test_an_engine_reads_as_much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step by hand: prompts are cut at so many tokens."""
    family, device = replace(FAMILY, context=4096), StandIn()
    device.large_batches = True
    rest = BatchShape(252).rounded().tokens
    for many, batches in ((True, [2048, rest]), (False, [*[512] * 4, rest])):
        subject = Runner(family, Noise(), [device, Cpu()], dtype=torch.float32, context=4096)
        assert subject._reads_many
        subject.__dict__["_reads_many"] = many
        seen: list[int] = []
        forward = subject.forward

        def counted(
            batch: Batch, *others: Any, seen: list[int] = seen, forward: Any = forward
        ) -> torch.Tensor:
            seen.append(len(batch.tokens))
            logits: torch.Tensor = forward(batch, *others)
            return logits

        monkeypatch.setattr(subject, "forward", counted)
        prompt = [Span((5, 6, 7, 8) * 575)]
        logits = subject.prefill(prompt, subject.new_cache())
        assert seen == batches
        seen.clear()
        engine = Engine(subject)
        sequence = engine.submit(Prompt(prompt, Sampler(Sampling()), max_tokens=1))
        while engine.busy:
            engine.step()
        assert sequence.tokens == [int(logits.argmax())] and seen == batches
        assert engine.scheduler.tokens == subject.prefill_tokens == max(batches)
