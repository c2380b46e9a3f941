"""What is asked of CUDA for a queue beside the decoder's, with a driver in its place that notes the
calls: which stream waits for which, priorities, and the device that was current before.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.side_stream import CudaSideStream
from mtmd.kernels.backends.vision_attention import measure
from mtmd.kernels.backends.vision_attention.measure import CudaProbe


class Driver:
    """Streams by name; device 1 is current, and streams are of device 0."""

    def __init__(self):
        self.calls, self.device, self.made = [], 1, 0
        self.now, self.after = "default", 2  # polls until an event is over

    def stream_class(self):
        driver = self

        class Stream:
            def __init__(self, device, priority=0):
                driver.made += 1
                self.name, self.priority, self.device = f"s{driver.made}", priority, device

            def wait_stream(self, other):
                driver.calls.append(f"{self.name} waits for {other}")

        return Stream

    def event_class(self):
        driver = self

        class Event:
            def __init__(self, enable_timing=False):  # noqa: ARG002
                self.left = driver.after

            def record(self):
                driver.calls.append(f"event in {driver.now}")

            def query(self):
                self.left -= 1
                return self.left < 0

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                assert other is not self
                return 2.0

        return Event


@pytest.fixture
def driver(monkeypatch):
    made = Driver()

    @contextmanager
    def entered(stream):
        before, made.now = made.now, stream.name
        yield
        made.now = before

    @contextmanager
    def device(_):
        yield

    def set_stream(stream):
        made.now, made.device = stream.name, 0

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Stream", made.stream_class())
    monkeypatch.setattr(cuda, "Event", made.event_class())
    monkeypatch.setattr(cuda, "stream", entered)
    monkeypatch.setattr(cuda, "device", device)
    monkeypatch.setattr(cuda, "set_stream", set_stream)
    monkeypatch.setattr(cuda, "current_stream", lambda *_: made.now)
    monkeypatch.setattr(cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(cuda, "set_device", lambda number: setattr(made, "device", number))
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    return made


def test_the_decoder_goes_first_and_nothing_is_overtaken(driver):
    side = CudaSideStream(torch.device("cuda:0"))
    assert side._first.priority < side._stream.priority == 0  # a lower number goes first
    side.let_first()
    assert driver.calls == ["s2 waits for default"]
    assert driver.now == "s2" and driver.device == 1
    side.follow()
    with side.entered():
        mark = side.mark()
    assert driver.calls[1:] == ["s1 waits for s2", "event in s1"] and driver.now == "s2"
    assert not mark.is_reached()
    mark.wait()
    assert mark.is_reached()


@pytest.mark.usefixtures("driver")
def test_a_card_has_a_stream_for_each_use():
    card = Gpu("cuda:0")
    assert card.side_stream("encode") is card.side_stream("encode")
    assert card.side_stream("encode") is not card.side_stream("resize")


def test_the_card_s_own_clock(driver, monkeypatch):
    monkeypatch.setattr(measure, "FLUSHED_BYTES", 1 << 10)
    probe, runs = CudaProbe(torch.device("cpu")), []
    assert probe.seconds(lambda: runs.append(1)) == 0.002
    assert len(runs) == 3 + 20 and driver.calls == ["event in default"] * 2 * 20


def test_memory_beyond_the_result(monkeypatch, driver):  # noqa: ARG001
    for name, value in (("memory_allocated", 100), ("max_memory_allocated", 164)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    assert CudaProbe(torch.device("cpu")).extra_bytes(lambda: torch.zeros(4)) == 64 - 16
