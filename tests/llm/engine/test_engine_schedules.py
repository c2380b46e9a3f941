"""Requests come, are given up and give way at random, over families that keep different things:
each is answered as if it were alone. On the CPU, on a device that records its runs and replays
them, and by the kernels of a GPU in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import test_runner as small
import torch
from interpreted import Interpreted
from quick_interpreter import quicken
from stand_in import StandIn

from mtmd.kernels.backends import Backend, Cpu, Reference
from mtmd.kernels.checkpoint.rotary import rotary
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.gpu.paged_attention import kernel as paged
from mtmd.kernels.graph import Type
from mtmd.llm.batch import Batch
from mtmd.llm.engine import snapshots
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
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
# Whose heads are as large as the kernel of paged attention takes them
WIDER: Mapping[str, Any] = {
    "windows, blocks, heads of 16": replace(
        small.FAMILY,
        head=16,
        ropes={"sliding_attention": rotary(1e4, 16), "full_attention": rotary(1e6, 16)},
    ),
    "delta nets, grids": FAMILIES["delta nets, grids"],
    "convolutions, heads of 20": lfm2.read(
        Settings(CONVOLUTIONS | {"num_attention_heads": 2, "num_key_value_heads": 1}, "config.json")
    ),
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

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def engine(name: str, pages: int | None = None, device: Backend | None = None) -> Engine:
    """On a CPU, or on a device and what it refuses there."""
    family = (FAMILIES | WIDER)[name]
    backends = [device, Cpu(), Reference()] if device else [Cpu()]
    runner = Runner(family, Noise(family), backends, dtype=torch.float32, context=256, sequences=3)
    if pages is not None:
        runner.pages = pages
    return Engine(runner)


def request(name: str, seed: int) -> Prompt:
    """A prompt of one of few beginnings, with a picture perhaps, and something of its own."""
    rng, width = Random(seed), (FAMILIES | WIDER)[name].width
    beginning, picture, content = rng.randint(0, 1), rng.choice((0, 1, 1)), rng.randint(0, 2)
    spans = [Span(tuple(5 + beginning + i % 40 for i in range(rng.choice((3, 40)))))]
    if picture:
        values = torch.randn(48, width, generator=torch.Generator().manual_seed(content))
        block, grid = (
            name.startswith("windows, blocks"),
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


def answer_all(
    subject: Engine, name: str, rng: Random, requests: int, maximum: int = 40
) -> list[tuple[int, Sequence]]:
    """Requests of up to `maximum` tokens, by number, as they come and are given up; each is compared.
    A batch has as many tokens as the draw says.
    """
    subject.scheduler.tokens = rng.choice((20, 64, 512))
    requested: list[tuple[int, Sequence]] = []
    for _ in range(requests):
        number = rng.randint(0, 11)
        prompt = replace(request(name, number), owner=rng.choice("aab"))
        prompt = replace(prompt, max_tokens=min(prompt.max_tokens, maximum))
        requested.append((number, subject.submit(prompt)))
        for _ in range(rng.choice((0, 1, 4, 30))):
            subject.step()
        if rng.random() < 0.2:
            subject.cancel(rng.choice(requested)[1])
    for _ in range(3000):
        if subject.busy:
            subject.step()
    for number, sequence in requested:
        assert sequence.finish in ("length", "cancelled")
        expected = alone(name, number)[:maximum]
        assert sequence.tokens == (
            expected if sequence.finish == "length" else expected[: len(sequence.tokens)]
        )
    assert subject.scheduler.pages.stored == 0 and len(subject.snapshots) <= 4
    return requested


@pytest.mark.parametrize(
    ("device", "name", "seed"),
    [
        *(("cpu", name, seed) for name in FAMILIES for seed in range(4)),
        *(("stand-in", name, seed) for name in WIDER for seed in range(2)),
    ],
)
def test_each_is_answered_as_if_it_were_alone(
    device: str, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOTS", 4)
    rng, recording = Random(seed), StandIn() if device == "stand-in" else None
    subject = engine(name, rng.choice((9, 14, None)), recording)
    requested = answer_all(subject, name, rng, 14)
    assert sum(g.reused for _, g in requested) >= PAGE, "beginnings were known"
    if recording is not None and recording.recorder is not None:
        assert recording.recorder.replays > recording.recorder.recordings > 1


class Watched:
    """What batches were: with answers, with parts of prompts, with both, or with pictures; and by
    how many programs keys were shared out.
    """

    def __init__(self, subject: Engine, monkeypatch: pytest.MonkeyPatch):
        self.batches: set[str] = set()
        self.splits: set[int] = set()
        forward, launch = subject.runner.forward, paged.choose_launch

        def seen(batch: Batch, *rest: Any) -> torch.Tensor:
            counts = batch.starts[1:] - batch.starts[:-1]
            several = min(counts) == 1 < max(counts)
            self.batches.add(
                "both" if several else "answers" if max(counts) == 1 else "parts of prompts"
            )
            self.batches |= {"pictures"} if batch.images is not None else set()
            return forward(batch, *rest)

        def chosen(*types: Any) -> Any:
            tile, splits = launch(*types)
            self.splits.add(splits)
            return tile, splits

        monkeypatch.setattr(subject.runner, "forward", seen)
        monkeypatch.setattr(paged, "choose_launch", chosen)


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keys are shared out as soon as there are two blocks of them, by few programs: the interpreter
    runs one after the other.
    """
    quicken(monkeypatch)
    monkeypatch.setattr(paged, "REQUESTED", 4)
    monkeypatch.setattr(paged, "MINIMUM", 1)
    yield


@pytest.mark.parametrize(
    ("name", "seed", "requests"),  # seeds of short prompts that come while answers are written
    [*((*row, 2) for row in zip(WIDER, (4, 1, 1), strict=True)), (next(iter(WIDER)), 2, 5)],
)
@pytest.mark.usefixtures("few_splits")
def test_by_the_kernels_of_a_gpu(
    name: str, seed: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paged, with keys shared out and not, prompts and answers in one batch, on rewritten graphs."""
    monkeypatch.setattr(snapshots, "SNAPSHOTS", 4)
    rng, device = Random(seed), Interpreted()
    subject = engine(name, rng.choice((9, 14, None)), device)
    watched = Watched(subject, monkeypatch)
    answer_all(subject, name, rng, requests, maximum=4)
    assert watched.batches >= {"answers", "both", "pictures"}
    assert len(watched.splits) > 1 and 1 in watched.splits, "of large batches they are not"
    ops = {step.node.op for step in subject.runner.plan(subject.runner.sizes()["decode"]).steps}
    assert ops >= {"paged_attention", "rope_store", "add_norm"} and "gather_pages" not in ops
    assert not subject.runner.fallbacks


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
    assert steps < 15 and subject.yielded == 1
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


@pytest.mark.parametrize(("room", "saved"), [(1 << 30, 3), (0, 1), (2, 2)])
def test_snapshots_take_a_bounded_memory(
    room: int, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = engine("delta nets, grids")
    each = sum(state.nbytes for state in subject.cache.snapshot(0).states.values())
    monkeypatch.setattr(snapshots, "SNAPSHOT_BYTES", room if room > 2 else room * each)
    for first in range(3):
        subject.submit(
            Prompt([Span(tuple(range(first, first + 40)))], Sampler(Sampling()), max_tokens=1)
        )
    while subject.busy:
        subject.step()
    assert len(subject.snapshots) == len(subject.snapshots) == saved
