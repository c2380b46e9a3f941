"""Random graphs as programs against the same graphs node by node, with nodes refused at random so that programs
and calls take turns, and chunks of every size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from random_graphs import RandomGraph

from mtmd.kernels.backends import Cpu
from mtmd.kernels.cpu.native.pool import Pool
from mtmd.kernels.cpu.native.program import CHUNKS
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.lower import Lowering, StepFacts
from mtmd.kernels.plan.native_run import NativePlan
from mtmd.kernels.plan.scheduler import make_plan


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, graph = Random(seed), RandomGraph(seed)
    add = Lowering.add

    def any_chunk(
        self: Lowering,
        address: int,
        args: list,
        units: int,
        chunk: int = 1,
        *rest: object,
        **more: bool,
    ) -> None:
        del chunk
        add(
            self,
            address,
            args,
            units,
            draw.choice((1, 2, 5, units // CHUNKS + 1, units)),
            *rest,
            **more,
        )

    monkeypatch.setattr(Lowering, "add", any_chunk)
    plan = make_plan(graph.outputs, [Cpu()])
    executor = Executor(plan, Residency())
    residency = Residency()
    for share in (1.0, 0.7, 0.3):
        batch = {name: t.clone() for name, t in graph.batch.items()}
        expected = executor.run(batch, observe=lambda *_: None)
        steps = [StepFacts(s.node, s.inputs, draw.random() < share) for s in plan.steps]
        lowered = Lowering(steps, plan.outputs, lambda n: residency.get(n, Cpu())).run()
        calls = [(s.backend.lower(s.node), s.inputs, s.node) for s in plan.steps]
        pool = Pool(draw.choice((1, 2, 3)))
        native = NativePlan(
            lowered, calls, plan.outputs, lambda _, t, *__: t, set(), lambda pool=pool: pool
        )
        for _ in range(4):  # the fourth by fewer threads
            batch = {name: t.clone() for name, t in graph.batch.items()}
            run = native.steps(batch)
            while True:
                try:
                    next(run)
                except StopIteration as done:
                    actual = done.value
                    break
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_most_of_the_random_graphs_runs_as_programs() -> None:
    """Else the test above would say little."""
    native = total = 0
    for seed in range(40):
        plan = make_plan(RandomGraph(seed).outputs, [Cpu()])
        steps = [StepFacts(s.node, s.inputs, True) for s in plan.steps]
        residency = Residency()
        lowered = Lowering(steps, plan.outputs, lambda n, r=residency: r.get(n, Cpu())).run()
        native, total = native + lowered.native, total + len(steps)
    assert native > 0.6 * total, (native, total)
