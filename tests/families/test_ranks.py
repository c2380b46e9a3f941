"""Every family shared out among ranks: the tokens and the logits of one process, both forms of
attention, the tower too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import audio_cases
import numpy as np
import pytest
import torch
from checkpoints import nmse
from common import Oracle, picture
from lfm2_audio import lfm2_audio
from meralion import meralion
from random_graphs import device
from ranks import ThreadGroup, run_ranks
from sounds import tones
from table import CASES, ROWS
from ultravox import ultravox

from mtmd.bench.shapes import random_checkpoint
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.kernels.backends import Backend, Cpu
from mtmd.kernels.parallel.shard import Sharding, collectives
from mtmd.kernels.plan.scheduler import Override
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.loaded.ranks_report import rank_plans
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.audio_input import AudioInput

Build = Callable[[str, str], Oracle]
TOKENS = 12  # 48 of each by `python tools/rank_table.py`
SIZES = dict(zip(CASES, cycle((2, 3, 4)), strict=False))
PICTURE = picture(0, 70, 50)


def runner_of(checkpoint: Checkpoint, image_tokens: int, **options: Any) -> Runner:
    return Runner(
        checkpoint.text,
        checkpoint.text_weights,
        options.pop("backends", None) or [Cpu()],
        dtype=torch.float32,
        context=1024,
        image_tokens=image_tokens,
        **options,
    )


def greedy(runner: Runner, spans: list[Span], count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits after the prompt."""
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    first = logits = runner.prefill(spans, cache, sequence)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = runner.read([(sequence, [Span((tokens[-1],))])], cache)[0]
    return tokens, first


def counted(runner: Runner, group: ThreadGroup) -> None:
    """What a rank holds, and has handed to collectives in its last step, is what its plan says."""
    plan = runner.plan(runner.sizes()["decode"])
    foreseen = [
        s.node.type.bytes
        * s.node.attrs.get("sizes", (1,) * group.size)[group.rank]
        // sum(s.node.attrs.get("sizes", (1,)))
        for s in plan.steps
        if s.node.op in ("all_reduce", "all_gather")
    ]
    assert foreseen and group.handed[-len(foreseen) :] == foreseen
    assert sum(runner.residency.bytes.values()) == sum(plan.weight_bytes.values())


def opened(oracle: Oracle) -> Checkpoint:
    return open_checkpoint(oracle.folder)


class Subject:
    def __init__(
        self,
        checkpoint: Checkpoint,
        vision: bool,
        words: str = "Describe a red circle",
        audio: bool = False,
    ):
        self.model = Model(checkpoint, LoadOptions(device="cpu", dtype="fp32"))
        parts: list[dict[str, Any]] = [{"type": "text", "text": words}]
        if vision:
            parts.append({"type": "image", "image": PICTURE})
        if audio:
            parts.append({"type": "audio", "audio": AudioInput(tones(0.7), 16_000)})
        self.spans = self.model.spans([{"role": "user", "content": parts}])
        self.image_tokens = self.model.runner.image_tokens

    def whole(self, count: int) -> tuple[list[int], torch.Tensor]:
        return greedy(runner_of(self.model.checkpoint, self.image_tokens), self.spans, count)

    def on_ranks(self, size: int, count: int, **options: Any) -> list[Any]:
        shares = options.pop("shares", None)

        def rank(group: ThreadGroup) -> tuple[list[int], torch.Tensor, Runner]:
            runner = runner_of(
                self.model.checkpoint,
                self.image_tokens,
                sharding=Sharding(group, shares),
                **{k: v() if callable(v) else v for k, v in options.items()},
            )
            result = greedy(runner, self.spans, count)
            counted(runner, group)
            return (*result, runner)

        return run_ranks(size, rank)

    def check(self, size: int, count: int = TOKENS, **options: Any) -> list[Runner]:
        tokens, logits = self.whole(count)
        results = self.on_ranks(size, count, **options)
        assert [r[0] for r in results] == [tokens] * size
        assert max(nmse(r[1], logits) for r in results) <= 1e-9
        return [r[2] for r in results]

    def check_tower(
        self,
        size: int,
        flash: str = "auto",
        backends: Callable[[], list[Backend]] = lambda: [Cpu()],
        overrides: Sequence[Override] = (),
    ) -> list[Encoder]:
        encoder = self.model.encoder
        assert encoder is not None
        tiles: list[np.ndarray] = list(encoder.family.resolution.prepare(PICTURE).tiles)
        expected = encoder.encode(tiles)

        def rank(group: ThreadGroup) -> tuple[list[torch.Tensor], Encoder]:
            part = Encoder(
                encoder.family,
                encoder.weights,
                backends(),
                dtype=torch.float32,
                flash_attn=flash,
                overrides=overrides,
                sharding=Sharding(group),
            )
            return part.encode(tiles), part

        results = run_ranks(size, rank)
        for result, _ in results:
            for ours, whole in zip(result, expected, strict=True):
                assert nmse(ours, whole) <= 1e-9
        return [part for _, part in results]


@pytest.mark.parametrize(
    ("row", "variant"), CASES, ids=[f"{row}: {variant}" for row, variant in CASES]
)
def test_every_family_answers_as_one_process_does(build: Build, row: str, variant: str) -> None:
    checkpoint, size = opened(build(row, variant)), SIZES[row, variant]
    if ROWS[row].asks:
        words = " ".join(part for part in ROWS[row].asks[0] if isinstance(part, str))
        subject = Subject(checkpoint, True, words)
    else:
        subject = Subject(checkpoint, ROWS[row].vision)
    flash = ("on", "off")[size % 2]
    subject.check(size, flash_attn=flash)
    if ROWS[row].vision:
        subject.check_tower(size, flash)


HEARD = {
    "audio_flamingo3": audio_cases.audio_flamingo3,
    "glm_asr": audio_cases.glm_asr,
    "granite_speech": audio_cases.granite_speech,
    "lfm2_audio": lfm2_audio,
    "meralion": meralion,
    "ultravox": ultravox,
    "voxtral": audio_cases.voxtral,
}


@pytest.mark.parametrize(("name", "size"), [*zip(HEARD, cycle((2, 3)), strict=False)])
def test_audio_is_answered_as_by_one_process(name: str, size: int, tmp_path: Path) -> None:
    """The first rank encodes it."""
    subject = Subject(open_checkpoint(HEARD[name](tmp_path).folder), vision=False, audio=True)
    subject.check(size)


def first_of(row: str) -> tuple[str, str]:
    return row, next(variant for name, variant in CASES if name == row)


@pytest.mark.parametrize(
    "override",
    [r"blk\.1\.=cpu", r"blk\.0\.ffn_moe=cpu", r"attn_k=cpu", r"all_reduce=cpu", r"ffn_down=cpu"],
)
def test_parts_on_another_device(build: Build, override: str) -> None:
    subject = Subject(opened(build("qwen3_vl", "experts")), vision=True)
    (first, _) = subject.check(
        2,
        4,
        backends=lambda: [device("card"), Cpu(native=False)],
        overrides=[Override.parse(override)],
    )
    assert first.plan(first.sizes()["decode"]).copies


def test_shares_that_are_not_equal(build: Build) -> None:
    subject = Subject(
        opened(build("qwen3_vl", "dense, tied, 6 heads on 2, bias, head of 36, as published")), True
    )
    runners = subject.check(2, shares=(3, 1))
    sizes = [r.residency.bytes["cpu"] for r in runners]
    assert sizes[0] > 1.5 * sizes[1]


def test_what_a_rank_takes_is_predicted(build: Build) -> None:
    subject = Subject(opened(build("pixtral", CASES_OF["pixtral"][1])), vision=True)
    for runner in subject.check(2, 2):
        plan = runner.plan(runner.sizes()["decode"])
    whole = runner_of(subject.model.checkpoint, subject.image_tokens)
    total = whole.plan(whole.sizes()["decode"]).weight_bytes["cpu"]
    mirrored = sum(
        node.type.bytes
        for (node, _) in plan.leaves
        if node.op == "weight" and node.attrs["source"] is subject.model.checkpoint.text_weights
    )
    assert plan.weight_bytes["cpu"] <= mirrored + (total - mirrored) * 0.52


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen3-8b", 2), ("qwen3-8b", 4), ("gemma-3-4b", 4), ("lfm2-vl-450m", 2), ("lfm2-vl-450m", 4)],
)
def test_memory_and_exchange_by_formula(name: str, size: int) -> None:
    """Of published shapes, in bf16, where sizes divide: at most an even part of what is split and
    all of what is not; two sums a layer, one for the token table, and the logits.
    """
    model = Model(random_checkpoint(name, "BF16"), LoadOptions(dtype="bf16", context=512))
    text = model.checkpoint.text
    whole = model.runner.plan(model.runner.sizes()["decode"]).weight_bytes["cpu"]
    for rank in range(size):
        plans, shardings = rank_plans(model.loaded, rank, (1.0,) * size)
        plan = plans["decoder", "decode"]
        result = collectives(s.node for s in plan.steps)
        sums = 2 * len(text.layers) + 1
        assert result == {
            "all_reduce": (sums, sums * text.width * 2),
            "all_gather": (1, text.vocabulary * 2),
        }
        weights = [n for n, _ in plan.leaves if n.op == "weight"]
        mirrored = sum(
            n.type.bytes for n in weights if n.attrs["source"] is model.checkpoint.text_weights
        )
        assert plan.weight_bytes["cpu"] <= mirrored + (whole - mirrored) / size
        assert mirrored < 0.01 * whole and not shardings["decoder"].kept_whole


CASES_OF: dict[str, list[str]] = {}
for _row, _variant in CASES:
    CASES_OF.setdefault(_row, []).append(_variant)
