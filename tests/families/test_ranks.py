"""Every family shared out among ranks: the tokens and the logits of one process, both forms of
attention, the tower too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import nmse
from common import Oracle, picture
from random_graphs import device
from ranks import ThreadGroup, run_ranks
from table import CASES, ROWS

from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.config import LoadOptions
from mtmd.kernels.backends import Cpu
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.plan.scheduler import Override
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.model import Model

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
        context=512,
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


def opened(oracle: Oracle) -> Checkpoint:
    return open_checkpoint(oracle.folder)


class Subject:
    def __init__(self, checkpoint: Checkpoint, vision: bool):
        self.model = Model(checkpoint, LoadOptions(device="cpu", dtype="fp32"))
        parts: list[dict[str, Any]] = [{"type": "text", "text": "Describe a red circle"}]
        if vision:
            parts.append({"type": "image", "image": PICTURE})
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
            return (*greedy(runner, self.spans, count), runner)

        return run_ranks(size, rank)

    def check(self, size: int, count: int = TOKENS, **options: Any) -> list[Runner]:
        tokens, logits = self.whole(count)
        results = self.on_ranks(size, count, **options)
        assert [r[0] for r in results] == [tokens] * size
        assert max(nmse(r[1], logits) for r in results) <= 1e-9
        return [r[2] for r in results]

    def check_tower(self, size: int, flash: str = "auto") -> None:
        encoder = self.model.encoder
        assert encoder is not None
        tiles: list[np.ndarray] = list(encoder.family.resolution.prepare(PICTURE).tiles)
        expected = encoder.encode(tiles)

        def rank(group: ThreadGroup) -> list[torch.Tensor]:
            part = Encoder(
                encoder.family,
                encoder.weights,
                [Cpu()],
                dtype=torch.float32,
                flash_attn=flash,
                sharding=Sharding(group),
            )
            return part.encode(tiles)

        for result in run_ranks(size, rank):
            for ours, whole in zip(result, expected, strict=True):
                assert nmse(ours, whole) <= 1e-9


@pytest.mark.parametrize(
    ("row", "variant"), CASES, ids=[f"{row}: {variant}" for row, variant in CASES]
)
def test_every_family_answers_as_one_process_does(build: Build, row: str, variant: str) -> None:
    subject, size = Subject(opened(build(row, variant)), ROWS[row].vision), SIZES[row, variant]
    flash = ("on", "off")[size % 2]
    subject.check(size, flash_attn=flash)
    if ROWS[row].vision:
        subject.check_tower(size, flash)


def first_of(row: str) -> tuple[str, str]:
    return row, next(variant for name, variant in CASES if name == row)


def test_keys_and_values_off_the_device_keep_their_split(build: Build) -> None:
    """llama.cpp PR 21717: tensor parallelism with the cache on the host (-nkvo) ends in a crash
    there. A Gemma whose cache, and attention with it, lies beside the device.
    """
    subject = Subject(opened(build(*first_of("gemma3"))), vision=True)
    runners = subject.check(
        2,
        backends=lambda: [device("card"), Cpu(native=False)],
        overrides=[Override.parse(r"kv_store|keys$|values$=cpu")],
    )
    for runner in runners:
        plan = runner.plan(runner.sizes()["decode"])
        assert {c.attrs["source"] for c in plan.copies} == {"card", "cpu"}
        stores = [s for s in plan.steps if s.node.op == "kv_store"]
        assert stores and all(s.backend.space == "cpu" for s in stores)
        whole = subject.model.checkpoint.text.layers[0][0].shape(1, 1)[2]
        assert all(s.node.shape[2] < whole or whole == 1 for s in stores)


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
        assert runner.residency.bytes["cpu"] == plan.weight_bytes["cpu"]
    whole = runner_of(subject.model.checkpoint, subject.image_tokens)
    total = whole.plan(whole.sizes()["decode"]).weight_bytes["cpu"]
    mirrored = sum(
        node.type.bytes
        for (node, _) in plan.leaves
        if node.op == "weight" and node.attrs["source"] is subject.model.checkpoint.text_weights
    )
    assert plan.weight_bytes["cpu"] <= mirrored + (total - mirrored) * 0.52


CASES_OF: dict[str, list[str]] = {}
for _row, _variant in CASES:
    CASES_OF.setdefault(_row, []).append(_variant)
