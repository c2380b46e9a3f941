"""Who watches a thread hears of every node, and of those that may take long before they begin."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from random_graphs import Source, given

from mtmd.base.heartbeat import Heartbeat, beat, patience, waiting
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan import executor
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import make_plan


class Listening(Cpu):
    """Notes what is heard while each node runs."""

    def __init__(self, heart: Heartbeat):
        super().__init__(native=False)
        self.heart, self.heard = heart, list[tuple[str, int, float]]()

    def lower(self, node: Node, in_place: bool = False) -> Run:
        run = super().lower(node, in_place)

        def listening(*inputs: torch.Tensor) -> torch.Tensor:
            self.heard.append((node.name, self.heart.beats, self.heart.more_s))
            result: torch.Tensor = run(*inputs)
            return result

        return listening


def on_a_thread(work: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_every_node_is_heard_and_long_ones_before_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, heart = Source(), Heartbeat()
    x = ops.gelu(given("x", 3, 50), approximate="none", name="short")
    x = ops.matmul(x, source.node("up", 7, 50), name="long")
    x = ops.gelu(x, approximate="none", name="after")
    device = Listening(heart)
    long = OPS["matmul"].flops(x.inputs[0])  # type: ignore[arg-type]
    monkeypatch.setattr(executor, "SLOWEST", 1.0)
    monkeypatch.setattr(executor, "LONG_S", long - 1.0)
    run = Executor(make_plan([x], [device]), Residency())

    def watched() -> None:
        heart.count_this_thread()
        run.run({"x": torch.ones(3, 50)})

    on_a_thread(watched)
    assert [(name, more) for name, _, more in device.heard] == [
        ("short", 0.0),
        ("long", long),
        ("after", 0.0),
    ]
    beats = [count for _, count, _ in device.heard]
    assert beats == sorted(set(beats)) and heart.beats > beats[-1] and heart.more_s == 0


def test_what_takes_long_and_fails_is_over() -> None:
    heart = Heartbeat()

    def failing() -> None:
        heart.count_this_thread()
        with patience(60.0):
            assert heart.more_s == 60
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on_a_thread(failing)
    assert heart.more_s == 0


def test_what_is_inside_leaves_what_is_around_it_as_it_was() -> None:
    heart, seen = Heartbeat(), list[tuple[float, bool]]()

    def see() -> None:
        seen.append((heart.more_s, heart.waits))

    def nested() -> None:
        heart.count_this_thread()
        with patience(60.0), waiting():
            with patience(5.0), waiting():
                see()
            see()

    on_a_thread(nested)
    see()
    assert seen == [(60.0, True), (60.0, True), (0.0, False)]


def test_a_thread_that_nobody_watches_goes_its_way() -> None:
    heart = Heartbeat()

    def alone() -> None:
        with patience(60.0):
            beat()

    on_a_thread(alone)
    assert heart.beats == 0 and heart.more_s == 0
