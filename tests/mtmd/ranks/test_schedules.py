"""Requests come, are given up and make way at random, over a model that ranks share: each is
answered as if it were alone on one. The ranks are threads.
"""

from __future__ import annotations

from random import Random

import pytest
from test_engine_schedules import FAMILIES, alone, request
from thread_ranks import ThreadRanks, runner_of

from mtmd.llm.engine.engine import Engine
from mtmd.ranks import leader


def preempted(name: str, size: int, seed: int) -> int:
    """Of eight requests, which are compared; how often one made way."""
    rng = Random(seed)
    pages = rng.choice((9, 11))
    ranks = ThreadRanks(name, size, pages)
    runner = runner_of(name, ranks.group, pages)  # type: ignore[arg-type]
    runner.lead = leader.RunnerLead(ranks)
    subject = Engine(runner)
    subject.scheduler.tokens = rng.choice((20, 64))
    requested = []
    for _ in range(8):
        number = rng.randint(0, 11)
        requested.append((number, subject.submit(request(name, number))))
        for _ in range(rng.choice((0, 1, 4))):
            subject.step()
        if rng.random() < 0.2:
            subject.cancel(rng.choice(requested)[1])
    for _ in range(3000):
        if subject.busy:
            subject.step()
    for number, sequence in requested:
        assert sequence.finish in ("length", "cancelled")
        whole = alone(name, number)
        expected = whole if sequence.finish == "length" else whole[: len(sequence.tokens)]
        assert sequence.tokens == expected
    assert subject.scheduler.pages.stored == 0
    saved = {number for led in ranks.led for number in led.caches}
    ranks.end()
    assert saved == {1}
    assert [g for g in requested if g[1].finish == "cancelled"] or seed != 0
    return sum(sequence.preemptions for _, sequence in requested)


@pytest.mark.parametrize(
    ("name", "size", "seed"), [*zip(FAMILIES, (3, 2, 2), (6, 6, 18), strict=True)]
)
def test_eight_requests_over_ranks(name: str, size: int, seed: int) -> None:
    """One is given up (0), and one makes way for another (6), or two do (18)."""
    preempted(name, size, 0)
    assert preempted(name, size, seed) > 0
