"""Ranks whose collectives are launches record their runs and replay them, and answer as ranks that
launch node by node; others record nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from common import Oracle
from ranks import ThreadGroup, run_ranks
from stand_in import StandIn
from table import CASES

from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.parallel.shard import Sharding
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span

Build = Callable[[str, str], Oracle]
SIZE, STEPS = 2, 6
PROMPT = tuple(range(3, 20))


def experts_of(row: str) -> tuple[str, str]:
    return next((r, v) for r, v in CASES if r == row and "experts" in v)


# Dense, with a vocabulary that is shared out; experts; recurrent states and short convolutions
CHOSEN = [
    next(case for case in CASES if case[0] == "gemma3"),
    experts_of("qwen3_vl"),
    next(case for case in CASES if case[0] == "qwen3_5"),
    next(case for case in CASES if case[0] == "lfm2_vl"),
]


def answers(
    oracle: Oracle, records: bool, capturable: bool
) -> list[tuple[list[int], list[torch.Tensor], StandIn, str | None, list[int]]]:
    """Of each rank: greedy tokens, logits, its device, why its steps are not replayed, and
    the bytes it handed to collectives.
    """
    checkpoint = open_checkpoint(oracle.folder)

    def rank(
        group: ThreadGroup,
    ) -> tuple[list[int], list[torch.Tensor], StandIn, str | None, list[int]]:
        device = StandIn(records)
        runner = Runner(
            checkpoint.text,
            checkpoint.text_weights,
            [device, Cpu(), Reference()],
            dtype=torch.float32,
            context=64,
            sharding=Sharding(group),
        )
        cache = runner.new_cache()
        sequence = runner.begin(cache, 0)
        logits = [runner.prefill([Span(PROMPT)], cache, sequence)]
        tokens = [int(logits[0].argmax())]
        for _ in range(STEPS):
            logits.append(runner.read([(sequence, [Span((tokens[-1],))])], cache)[0])
            tokens.append(int(logits[-1].argmax()))
        reason = runner._executor(runner.sizes()["decode"]).not_replayed
        return tokens, logits, device, reason, group.handed

    return run_ranks(SIZE, rank, capturable)


@pytest.mark.parametrize(("row", "variant"), CHOSEN)
def test_a_replay_on_ranks_is_a_run(build: Build, row: str, variant: str) -> None:
    oracle = build(row, variant)
    for found, expected in zip(
        answers(oracle, True, True), answers(oracle, False, True), strict=True
    ):
        assert found[0] == expected[0] and found[4][-3:] == expected[4][-3:]
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
        recorder = found[2].recorder
        assert recorder is not None and recorder.recordings == 1
        assert recorder.replays == STEPS - 2 and found[3] is None


def test_ranks_that_wait_for_each_other_on_the_host_record_nothing(build: Build) -> None:
    for _, _, device, reason, _ in answers(build(*CHOSEN[0]), True, False):
        assert device.recorder is not None and device.recorder.recordings == 0
        assert (
            reason is not None and "(all_reduce) and" in reason and "wait for the device" in reason
        )
