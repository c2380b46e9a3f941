"""Runs that are recorded once and replayed, on a device on the CPU that is as strict as a GPU's."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import Refused, StandIn, storage

from mtmd.base.errors import PlacementError
from mtmd.base.text import mib
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.graph import Node, Type, graph_input
from mtmd.kernels.plan import scheduler
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.graph_replay import recordings_bytes
from mtmd.kernels.plan.scheduler import Override, make_plan

SLOTS = 6


def graph() -> list[Node]:
    """A state that is added to where a batch says, and a part of it."""
    state = Node(
        "input",
        (),
        Type.contiguous((SLOTS, 1, 3), torch.float32),
        {"fill": lambda b: b.state, "state": True},
        "state",
    )
    at = graph_input("at", (2,), torch.int64, lambda b: b.at)
    rows = graph_input("rows", (2, 3), torch.float32, lambda b: b.rows)
    saved = ops.state_store(state, ops.scale(rows, factor=2.0, name="twice"), at, name="kept")
    flat = ops.reshape(saved, shape=(SLOTS, 3), name="flat")
    return [saved, ops.softcap(ops.take_rows(flat, at, name="taken"), cap=9.0, name="out")]


def batch(state: torch.Tensor, number: int) -> SimpleNamespace:
    at = torch.tensor([number % SLOTS, (number + 1) % SLOTS])
    return SimpleNamespace(state=state, at=at, rows=torch.full((2, 3), float(number)))


def executor(device: StandIn, *outputs: Node) -> Executor:
    return Executor(make_plan(outputs or graph(), [device, Cpu(), Reference()]), Residency())


def run(subject: Executor, states: list[torch.Tensor], steps: range) -> list[torch.Tensor]:
    return [subject.run(batch(states[i % len(states)], i))[1] for i in steps]


@pytest.mark.parametrize("caches", [1, 2])
def test_a_replay_is_a_run(caches: int) -> None:
    """Its outputs stay as they are when the next is run, and another state is another recording."""
    device, actual, expected = (
        StandIn(),
        *([torch.zeros(SLOTS, 1, 3) for _ in range(caches)] for _ in range(2)),
    )
    subject = executor(device)
    results = run(subject, actual, range(9))
    plain = run(executor(StandIn(records=False)), expected, range(9))
    assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert device.recorder is not None and subject.replay is not None
    assert device.recorder.recordings == (1 if caches == 1 else 7)
    assert (subject.replay.replayed, subject.not_replayed) == (7, None)


def test_a_state_is_handed_over_as_it_lies() -> None:
    """And so is what is a view of it; all other outputs in memory of their own, counted so."""
    state, other = torch.zeros(SLOTS, 1, 3), torch.zeros(SLOTS, 1, 3)
    saved, out = graph()
    flat = ops.reshape(saved, shape=(SLOTS, 3), name="seen")
    subject = executor(StandIn(), saved, flat, out)
    for number, cache in enumerate((state, state, state, state, other)):
        result = subject.run(batch(cache, number))
        assert all(value.data_ptr() == cache.data_ptr() for value in result[:2])
        assert storage(result[2]) not in {storage(cache)}
        last = subject.run(batch(cache, number))[2]
        assert storage(last) != storage(result[2])
    assert subject.replay is not None and subject.replay.replayed == 8
    assert subject.plan.copied_out == (out,)
    plain = make_plan([saved, flat, out], [StandIn(records=False)])
    more = subject.plan.compute_bytes["stand-in"] - plain.compute_bytes["stand-in"]
    assert more == out.type.bytes and plain.copied_out == ()


def test_a_recording_keeps_no_state() -> None:
    """A cache that nobody has any more is freed, though runs on it were recorded."""
    saved, out = graph()
    subject, state = executor(StandIn(), saved, out), torch.zeros(SLOTS, 1, 3)
    for number in range(4):
        result = subject.run(batch(state, number))[0]
        assert result.data_ptr() == state.data_ptr() and torch.equal(result, state)
    assert subject.replay is not None and subject.replay._recording is not None
    assert storage(state) not in set(map(storage, subject.replay._recording.outputs))


def test_weights_that_were_moved_are_another_recording() -> None:
    """By a plan that has several of them in one product, where they are parts of one tensor."""
    device, residency = StandIn(), Residency()
    assert device.recorder is not None
    source = SimpleNamespace(read=lambda name, dtype: torch.full((2, 3), float(name), dtype=dtype))

    def weight(name: str, rows: int = 2, **attrs: Any) -> Node:
        kind = Type.contiguous((rows, 3), torch.float32)
        return Node("weight", (), kind, {"source": source, **attrs}, name)

    rows = graph_input("rows", (2, 3), torch.float32, lambda b: b.rows)
    parts = weight("2"), weight("3")
    subject = Executor(make_plan([ops.matmul(rows, parts[0], name="one")], [device]), residency)
    given = SimpleNamespace(rows=torch.ones(2, 3))
    for _ in range(4):
        expected = subject.run(given)[0]
    joint = ops.matmul(rows, weight("joint", 4, parts=parts), name="both")
    Executor(make_plan([joint], [device]), residency).run(given)
    assert device.recorder.recordings == 1 and residency.moved == 1
    assert torch.equal(subject.run(given)[0], expected) and device.recorder.recordings == 2
    assert torch.equal(subject.run(given)[0], expected) and device.recorder.recordings == 2


def test_recordings_keep_no_results_of_their_own() -> None:
    """What they return lies in one place for all of them, which a larger one replaces."""
    device = StandIn()
    assert device.recorder is not None
    rows = [graph_input("rows", (n, 3), torch.float32, lambda b: b.rows) for n in (2, 3, 90)]
    subjects = [executor(device, *(ops.scale(r, factor=f) for f in (2.0, 3.0))) for r in rows]
    given = [SimpleNamespace(rows=torch.full((n, 3), float(n))) for n in (2, 3, 90)]
    for _ in range(4):
        results = [s.run(b) for s, b in zip(subjects, given, strict=True)]
    assert all(s.replay is not None and s.replay.replayed == 2 for s in subjects)
    for result, b in zip(results, given, strict=True):
        assert all(torch.equal(r, b.rows * f) for r, f in zip(result, (2, 3), strict=True))
    small, middle, large = (storage(s.replay._recording.outputs[0]) for s in subjects)  # type: ignore
    assert small == middle != large
    assert device.recorder.results(0).nbytes == 4096 >= 2 * 90 * 3 * 4


def test_what_recordings_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the largest that is recorded, and twice what results take."""
    plan = make_plan(graph(), [StandIn()])
    run, result = plan.run_bytes["stand-in"], 256
    assert recordings_bytes([(plan, 1)]) == {"stand-in": run + 2 * result}
    assert recordings_bytes([(plan, 1), (plan, 3)]) == {"stand-in": 3 * run + 2 * 1024}
    assert recordings_bytes([(make_plan(graph(), [StandIn(records=False)]), 1)]) == {}
    monkeypatch.setattr(scheduler, "MAX_RECORDED", 50)
    assert recordings_bytes([(plan, 9)]) == {"stand-in": 50 + 2 * 256}  # 50 parts of 256


def test_looking_on_goes_node_by_node() -> None:
    device, state = StandIn(), torch.zeros(SLOTS, 1, 3)
    subject, seen = executor(device), []
    run(subject, [state], range(4))
    subject.run(batch(state, 4), observe=lambda node, *_: seen.append(node.name))
    assert "twice" in seen and subject.replay is not None and subject.replay.replayed == 2


@pytest.mark.parametrize("error", [RuntimeError, Refused, torch.AcceleratorError])
def test_what_cannot_be_recorded_is_launched(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise error("operation not permitted\nwhen stream is capturing")

    device, actual, expected = StandIn(), torch.zeros(SLOTS, 1, 3), torch.zeros(SLOTS, 1, 3)
    monkeypatch.setattr(device.recorder, "record", refuses)
    subject = executor(device)
    with caplog.at_level(logging.WARNING):
        results = run(subject, [actual], range(6))
    assert torch.equal(
        torch.stack(results),
        torch.stack(run(executor(StandIn(records=False)), [expected], range(6))),
    )
    (record,) = caplog.records
    assert "operation not permitted when stream is capturing" in record.getMessage()


def test_a_thread_that_has_never_run_it_records_nothing() -> None:
    """Libraries make a thread's handles in its first run, which cannot be recorded."""
    device, state = StandIn(), torch.zeros(SLOTS, 1, 3)
    assert device.recorder is not None
    subject, recorded = executor(device), []

    def elsewhere() -> None:
        for step in (2, 3):
            run(subject, [state], range(step, step + 1))
            recorded.append(device.recorder.recordings)

    run(subject, [state], range(2))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert recorded == [0, 1]


def test_recordings_go_with_their_executor_at_once() -> None:
    """As garbage they would be freed at any time, such as during another recording."""
    subject = executor(StandIn())
    run(subject, [torch.zeros(SLOTS, 1, 3)], range(4))
    assert subject.replay is not None and subject.replay.recorded == 1
    gone = weakref.ref(subject), weakref.ref(subject.replay)
    gc.disable()
    try:
        del subject
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_a_wrong_input_is_refused_as_ever() -> None:
    subject, state = executor(StandIn()), torch.zeros(SLOTS, 1, 3)
    run(subject, [state], range(3))
    wrong = batch(state, 3)
    wrong.rows = wrong.rows.double()
    with pytest.raises(PlacementError, match="input rows was filled with"):
        subject.run(wrong)
    elsewhere = batch(torch.zeros(2 * SLOTS, 1, 3)[::2], 3)
    with pytest.raises(PlacementError, match="state state lies on"):
        subject.run(elsewhere)
    assert torch.isfinite(subject.run(batch(state, 3))[1]).all()


def test_why_a_plan_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert executor(StandIn(records=False)).not_replayed == "its device records nothing"
    device = StandIn()
    plan = make_plan(graph(), [device, Reference()], [Override.parse("twice=reference")])
    assert "it runs in several memories: cpu, stand-in" in str(
        Executor(plan, Residency()).not_replayed
    )
    monkeypatch.setattr(scheduler, "MAX_RECORDED", 50)
    large = executor(StandIn())
    assert large.replay is None and large.plan.copied_out == ()
    assert f"of which up to {mib(50)} are kept" in str(large.not_replayed)


def test_an_op_that_asks_the_device_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.OPS["softcap"], "waits", True)
    result = executor(StandIn())
    assert result.replay is None
    assert result.not_replayed == "out (softcap) and 0 others wait for the device"


def test_the_stand_in_is_strict() -> None:
    """What a graph's capture refuses, it refuses, and recording runs nothing."""
    device = StandIn()
    assert device.recorder is not None
    state = torch.zeros(3)
    for waits in (lambda: state.sum().item(), lambda: state.nonzero(), lambda: torch.tensor([1.0])):
        with pytest.raises(Refused):
            device.recorder.record(lambda waits=waits: [waits(), state][1:])  # type: ignore[misc]
    recording = device.recorder.record(lambda: [state.add_(1).mul(2)])
    assert state.sum() == 0
    recording.replay()
    recording.replay()
    assert state.tolist() == [2, 2, 2] and recording.outputs[0].tolist() == [4, 4, 4]
