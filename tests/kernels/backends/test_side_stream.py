"""What is asked of CUDA for a queue beside the decoder's, with a driver in its place that notes the
calls: which stream waits for which, priorities, and the device that was current before.
"""

from __future__ import annotations

import gc
import itertools
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mtmd.base.errors import OptionError
from mtmd.kernels.backends import backends_for, several_backends
from mtmd.kernels.backends.cuda_graphs import MAX_FAILED, CudaGraphs
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.side_stream import STREAMS, CudaSideStream, host_bytes, own_stream
from mtmd.kernels.backends.vision_attention import measure
from mtmd.kernels.backends.vision_attention.measure import CudaProbe


class Driver:
    """Streams by name; device 1 is current, and streams are of device 0. Of each priority there
    are 32, which are given out in turn.
    """

    def __init__(self):
        self.calls, self.device, self.made = [], 1, 0
        self.now, self.after = "default", 2  # polls until an event is over
        self.handles, self.turns = {}, {}
        self.entered = []
        self.slept, self.launched = 0, -1  # of the device and the host, in the device's cycles

    def handle(self, priority):
        turn = self.turns[priority] = self.turns.get(priority, -1) + 1
        return self.handles.setdefault((priority, turn % 32), object())

    def stream_class(self):
        driver = self

        class Stream:
            def __init__(self, device=None, priority=0):
                driver.made += 1
                self.cuda_stream = driver.handle(priority)
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
                self.left = 2 if driver.launched < driver.slept else 0

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
        made.entered.append((stream.cuda_stream, stream.priority))
        try:
            yield
        finally:
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
    monkeypatch.setattr(cuda, "synchronize", lambda *_: made.calls.append("device is done"))
    monkeypatch.setattr(cuda, "_sleep", lambda cycles: setattr(made, "slept", cycles))
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
    assert len(runs) == 3 + 20
    assert driver.calls == ["device is done"] + ["event in default"] * 2 * 20


@pytest.mark.parametrize(("host", "discarded"), [(1 << 20, 2), (1 << 30, 4)])
def test_what_the_host_took_to_launch_a_run_is_not_counted(driver, monkeypatch, host, discarded):
    """The device is kept busy for longer, until it is there when the run is; a run that waits for
    the device takes its time whatever is done.
    """
    monkeypatch.setattr(measure, "FLUSHED_BYTES", 1 << 10)
    driver.launched, runs = host, []
    CudaProbe(torch.device("cpu")).seconds(lambda: runs.append(1))
    assert len(runs) == 3 + discarded + 20


def test_memory_beyond_the_result(monkeypatch, driver):  # noqa: ARG001
    for name, value in (("memory_allocated", 100), ("max_memory_allocated", 164)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    assert CudaProbe(torch.device("cpu")).extra_bytes(lambda: torch.zeros(4)) == 64 - 16


class Graphs:
    """What CudaGraphs asks of torch, noted: on which stream each run was captured, in what pool."""

    def __init__(self, driver, monkeypatch):
        self.captures, self.pools = [], 0

        self.refuses, self.notes, outer = set(), [], self

        class CUDAGraph:
            def capture_begin(self, pool, capture_error_mode):
                assert capture_error_mode == "thread_local" and not gc.isenabled()
                outer.note("begin")
                outer.captures.append((*driver.entered[-1], pool))

            def capture_end(self):
                broken = outer.notes[-1] == "run" and "run" in outer.refuses
                outer.note("end", broken)  # as CUDA says then

        def pool():
            self.pools += 1
            return self.pools

        monkeypatch.setattr(CudaGraphs, "_mark", lambda _: torch.ones(1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", pool)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda *at: self.notes.append(at), raising=False
        )

    def note(self, name, refused=False):
        self.notes.append(name)
        if name in self.refuses or refused:
            raise RuntimeError(f"{name} is not permitted")


def test_each_queue_has_a_pool_and_a_stream_of_captures_that_is_nobody_elses(driver, monkeypatch):
    """Memory of a pool is given again only on the stream of its allocation."""
    graphs, card = Graphs(driver, monkeypatch), Gpu("cuda:0")
    sides = [card.side_stream(use) for use in ("encode", "resize")]
    queues = [sides[0]._stream, sides[0]._first]
    for _ in range(2 * STREAMS):
        for own in queues:
            monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, own=own: own)
            assert card.recorder.record(lambda: ["result"]).outputs == ["result"]
    encode, decode = graphs.captures[0], graphs.captures[2]
    # The first of each queue is kept: a pool that no graph uses is gone for good
    assert graphs.captures[:4] == [encode, encode, decode, decode] and graphs.pools == 2
    assert graphs.captures[4:] == [encode, decode] * (2 * STREAMS - 1)
    assert encode[0] is not decode[0] and encode[1:] == (0, 1) and decode[1:] == (-1, 2)
    others = {id(s.cuda_stream) for side in sides for s in (side._stream, side._first)}
    assert len(others) == 4 and not others & {id(encode[0]), id(decode[0])}
    assert len(driver.calls) == 4 * STREAMS  # each capture waits for what was asked before


def test_a_card_that_records_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for chosen in (backends_for, several_backends):
        for records in (True, False):
            card, *_ = chosen("cuda", records=records)
            assert (card.records, card.recorder is not None) == (records, records)
        with pytest.raises(OptionError, match="no_graphs: found the device cpu"):
            chosen("cpu", records=False)


@pytest.mark.parametrize("at", ["begin", "run", "end"])
def test_a_capture_that_fails_leaves_the_thread_where_it_was(at, driver, monkeypatch):
    """And torch allocates in its pool no more, which no other capture has."""
    graphs, recorder = Graphs(driver, monkeypatch), CudaGraphs(torch.device("cuda:0"))
    own = torch.cuda.Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: own)

    def run():
        graphs.note("run")
        return ["result"]

    assert recorder.record(run).outputs == ["result"]
    assert graphs.notes == ["begin", "end", "begin", "run", "end"]
    graphs.refuses.add(at)
    for failed in range(MAX_FAILED):
        graphs.notes.clear()
        with pytest.raises(RuntimeError, match=f"{at} is not permitted"):
            recorder.record(run)
        assert graphs.notes[-1] == (1, 1 + failed)
        assert driver.now == "default" and gc.isenabled()
    stream = {capture[0] for capture in graphs.captures}
    assert len(stream) == 1 and graphs.pools == 1 + MAX_FAILED
    graphs.refuses.clear()
    reported = f"3 runs could not be recorded; the last: {at} is not permitted"
    assert recorder.given_up == reported
    with pytest.raises(RuntimeError, match=reported):
        recorder.record(run)


@pytest.mark.usefixtures("driver")
def test_a_stream_is_held_by_one_until_it_is_let_go():
    card = torch.device("cuda:0")
    stored = [own_stream(card) for _ in range(STREAMS)]
    assert len({id(stream.cuda_stream) for stream in stored}) == STREAMS
    with pytest.raises(RuntimeError, match="all 32 streams of priority 0 of cuda:0 are in use"):
        own_stream(card)
    assert own_stream(card, -1).priority == -1
    free = stored.pop(7).cuda_stream
    assert own_stream(card).cuda_stream is free


@pytest.mark.usefixtures("driver")
def test_without_page_locked_memory_pictures_go_up_from_other_memory(monkeypatch, caplog):
    made = torch.empty

    def empty(*args, pin_memory=False, **options):
        if pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return made(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    side = CudaSideStream(torch.device("cuda:0"))
    side.device = torch.device("cpu")
    assert side.upload((2, 3), lambda host: host.fill_(7)).tolist() == [[7] * 3] * 2
    assert "no page-locked memory (CUDA error: out of memory)" in caplog.text
    assert host_bytes((4,)).shape == (4,)


def test_what_is_left_to_the_caller_is_waited_for_on_its_own_queue(driver, monkeypatch):
    side, recorded = CudaSideStream(torch.device("cuda:0")), []

    class Queue:
        synchronize = staticmethod(lambda: driver.calls.append("own queue is done"))

    class Value:
        is_cuda, record_stream = True, staticmethod(recorded.append)

    queue = Queue()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: queue)
    side.wait_for_caller()
    side.hand_over(Value())
    assert driver.calls == ["own queue is done"] and recorded == [queue]
    side.hand_over(torch.zeros(1))  # a tensor of the host is everybody's


def test_results_of_each_queue_lie_in_one_place(monkeypatch):
    graphs = CudaGraphs(torch.device("cpu"))
    queues = [SimpleNamespace(cuda_stream=n) for n in (1, 2)]
    result = []
    for queue, size in itertools.product(queues, (300, 200, 512, 600)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, queue=queue: queue)
        result.append(graphs.results(size))
    assert [f.nbytes for f in result] == 2 * [512, 512, 512, 1024]
    assert result[0] is result[1] is result[2] and result[0].data_ptr() != result[4].data_ptr()


def test_no_wait_for_a_whole_device_beside_a_capture(driver, monkeypatch):
    """CUDA would end the capture, and the wait with an error."""
    graphs, card = Graphs(driver, monkeypatch), Gpu("cuda:0")
    own = torch.cuda.Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: own)
    waits = threading.Thread(target=card.synchronize)

    def run():
        waits.start()
        waits.join(0.05)
        assert waits.is_alive() and "device is done" not in driver.calls
        return ["result"]

    card.recorder.record(run)
    waits.join()
    assert driver.calls[-1] == "device is done" and graphs.notes[-1] == "end"
