"""A device that hangs, breaks, or whose thread is gone: who waits is told, who comes is refused,
and what needs no device is answered.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from failing_backend import FailingDevice
from stand_in import StandIn

from mtmd.base.errors import DeviceError, MtmdError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.cuda_graphs import Recording
from mtmd.loaded.device_thread import DeviceThread, Stall
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.service.run_loop import RunLoop
from mtmd.service.service import Service

TEXT = [{"role": "user", "content": "How many shapes are there?"}]
SOON = 0.2  # seconds


@pytest.fixture
def device() -> Iterator[FailingDevice]:
    made = FailingDevice()
    yield made
    made.gate.set()


@pytest.fixture
def model(device: FailingDevice) -> Model:
    return Model(open_checkpoint(DEMO_MODEL), LoadOptions(context=256), [device])


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing after 20 s"
        time.sleep(0.005)


def outcome(work: Callable[[], Any]) -> list[BaseException]:
    """A thread that does some work; what it raised, once it has ended."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threading.Thread(target=run, daemon=True).start()
    return raised


def test_a_device_that_hangs(
    model: Model, device: FailingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    service, reported = Service(model, hang_s=SOON), []
    service.on_fault(reported.append)
    list(service.submit(TEXT, max_tokens=1))
    device.hang()
    tickets = [service.submit(TEXT, max_tokens=2) for _ in range(2)]
    assert device.entered.wait(20)
    tickets.append(service.submit(TEXT, max_tokens=2))  # nobody has taken this one
    waiting = outcome(lambda: model.exclusively(lambda: None))
    for ticket in tickets:
        with pytest.raises(DeviceError, match="the device hangs: it has done nothing for"):
            list(ticket)
    until(lambda: waiting and isinstance(waiting[0], DeviceError))
    assert service.fault is reported[0] and len(reported) == 1
    for late in (
        lambda: service.submit(TEXT),
        lambda: service.exclusively(lambda: None),
        lambda: model.describe("no such.png"),
        lambda: Service(model).submit(TEXT),
    ):
        with pytest.raises(DeviceError, match="start the process again"):
            late()
    assert service.stats().finished == 1
    tickets[0].cancel()
    service.close()
    model.loaded.device_thread.close()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "the device hangs" in record.getMessage()
    assert "failing_backend.py" in record.getMessage(), "where it hangs"
    thread = model.loaded.device_thread._thread
    assert thread
    device.gate.set()  # after all; nobody waits any more, and the thread ends
    thread.join(20)
    assert not thread.is_alive() and service.fault is reported[0]


def test_numbers_are_told_while_the_device_is_busy_for_long(
    model: Model, device: FailingDevice
) -> None:
    service = Service(model, hang_s=None)
    device.hang()
    ticket = service.submit(TEXT, max_tokens=1)
    assert device.entered.wait(20)
    stats = service.stats()
    assert (stats.requests, stats.running, stats.finished) == (1, 1, 0) and service.fault is None
    device.gate.set()
    list(ticket)
    assert service.stats().finished == 1
    service.close()


def test_a_service_is_closed_over_a_device_that_hangs(model: Model, device: FailingDevice) -> None:
    service = Service(model, hang_s=None)
    device.hang()
    ticket = service.submit(TEXT)
    assert device.entered.wait(20)
    service.close(within_s=0.05)
    with pytest.raises(DeviceError, match=r"has not ended what it does in 0\.05 s"):
        list(ticket)
    service.close()


def test_a_broken_device(
    model: Model, device: FailingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    service, reported = Service(model), []
    service.on_fault(reported.append)
    device.error, device.broken = RuntimeError("CUDA error: device-side assert triggered"), True
    with pytest.raises(DeviceError, match=r"the device cpu has failed \(RuntimeError\)") as caught:
        list(service.submit(TEXT))
    assert caught.value.__cause__ is device.error
    until(lambda: reported)
    with pytest.raises(DeviceError):
        service.submit(TEXT)
    (record,) = caplog.records
    assert "device-side assert triggered" in record.getMessage()
    assert "in _fail" in record.getMessage() and "illegal memory access" in record.getMessage()
    service.close()


@pytest.mark.parametrize(
    ("at", "error", "words"),
    [
        ("record", torch.OutOfMemoryError, "ran out of memory while a run was recorded"),
        ("record", torch.AcceleratorError, "has failed in a recorded run"),
        ("replay", torch.AcceleratorError, "has failed in a recorded run"),
    ],
    ids=["memory", "recorded", "replayed"],
)
def test_a_recorded_run_that_fails_ends_the_service(
    at: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the device answers: what was recorded is not to be relied on any more."""

    def fails(*_: object) -> None:
        raise error("CUDA error: out of memory")

    device = StandIn()
    monkeypatch.setattr(device.recorder, "record", fails)
    if at == "replay":
        monkeypatch.setattr(device.recorder, "record", lambda _: Recording([], fails))  # type: ignore[arg-type]
    service = Service(
        Model(open_checkpoint(DEMO_MODEL), LoadOptions(context=256), [device, Cpu(), Reference()])
    )
    tickets = [service.submit(TEXT, max_tokens=20, ignore_eos=True) for _ in range(2)]
    for ticket in tickets:
        with pytest.raises(DeviceError, match=words):
            list(ticket)
    with pytest.raises(DeviceError):
        service.submit(TEXT)
    assert service.fault is not None
    service.close()


def test_an_error_of_a_sound_device_is_logged_with_its_cause_and_the_service_goes_on(
    model: Model, device: FailingDevice, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(model)
    device.error = RuntimeError("a shape that nobody thought of")
    with pytest.raises(MtmdError, match="internal error: RuntimeError") as caught:
        list(service.submit(TEXT))
    assert not isinstance(caught.value, DeviceError)
    (record,) = caplog.records
    reported = record.getMessage()
    assert reported.startswith("1 requests end by an internal error\nTraceback")
    assert "in _fail" in reported and "a shape that nobody thought of" in reported
    device.error = None
    list(service.submit(TEXT, max_tokens=1))
    assert service.fault is None and service.stats().finished == 1
    service.close()


def test_a_device_thread_that_is_killed(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """While nobody guards it and no lock is held: an exception that comes from another thread may
    strike between the two instructions that end a `with`, and what that held stays held.
    """
    service = Service(model)
    list(service.submit(TEXT, max_tokens=1))
    model.loaded.device_thread.post(sys.exit)
    with pytest.raises(DeviceError, match="the device thread has ended by a SystemExit"):
        list(service.submit(TEXT))
    assert "Traceback" in caplog.text and service.fault
    service.close()


@pytest.mark.parametrize("where", ["pause", "defect"])
def test_a_defect_in_what_nothing_guards(
    where: str, model: Model, device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the device thread: nobody waits for ever."""

    def broken(*_: object) -> None:
        raise KeyError(where)

    monkeypatch.setattr(RunLoop, where, broken)
    device.error = RuntimeError("x") if where == "defect" else None
    service = Service(model)
    with pytest.raises(DeviceError, match="the device thread has ended by a KeyError"):
        list(service.submit(TEXT))
    service.close()


def test_every_node_is_a_beat(model: Model) -> None:
    """So that a long step is none, however many nodes it has."""
    service, heart = Service(model), model.loaded.device_thread._heart
    list(service.submit(TEXT, max_tokens=1))
    before = heart.beats
    list(service.submit([{"role": "user", "content": "another question"}], max_tokens=1))
    nodes = len(model.runner.plan(model.runner.sizes()["decode"]).steps)
    assert heart.beats - before >= nodes > 50
    service.close()


def test_what_others_do_with_the_device_takes_as_long_as_it_takes(model: Model) -> None:
    """A look at every node in a debugger, for one."""
    service, heart = Service(model, hang_s=SOON), model.loaded.device_thread._heart
    limits = []
    service._device.post(lambda: limits.append(heart.limit_s))
    assert service.exclusively(lambda: heart.limit_s) is None and limits == [SOON]
    service.close()


def test_standing_still_is_counted_from_the_last_beat() -> None:
    stall = Stall()
    assert [stall.look(beats, 2.0) for beats in (1, 1, 1, 2, 2)] == [0, 2, 4, 0, 2]
    assert [stall.look(beats, 2.0) for beats in (None, None, 2, 2)] == [0, 0, 0, 2], "idle is not"


def watched(monkeypatch: pytest.MonkeyPatch, device: DeviceThread, looks: list[float]) -> bool:
    """Whether a thread is given up that does nothing while somebody looks at these times."""
    ended, left = threading.Event(), iter(looks)

    def now() -> float:
        try:
            return next(left)
        except StopIteration:
            ended.set()
            return looks[-1]

    monkeypatch.setattr("mtmd.loaded.device_thread.time.monotonic", now)
    device._watch(threading.current_thread(), ended)
    return device.fault is not None


@pytest.mark.parametrize("more_s, given_up", [(0.0, True), (0.02, True), (0.05, False)])
def test_a_long_node_has_more_time(
    more_s: float, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceThread()
    device._tick_s, device._heart.limit_s, device._heart.more_s = 0.001, 0.01, more_s
    assert watched(monkeypatch, device, [0.002 * i for i in range(20)]) is given_up


def test_a_process_that_was_stopped_has_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, and ten minutes later `fg`: one look that comes late is no longer than two."""
    device = DeviceThread()
    device._tick_s, device._heart.limit_s = 0.001, 0.01
    assert not watched(monkeypatch, device, [0.0, 0.001, 601.0, 601.001])
