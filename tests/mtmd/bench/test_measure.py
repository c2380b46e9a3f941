"""Samples, growth, ceilings, and processes that keep a core busy."""

import json
import subprocess
import sys
import time

import pytest
import torch

from mtmd.bench.measure import HostPeak, Sample, busy, exponent
from mtmd.bench.report import Point, Stage
from mtmd.bench.stages import Plan
from mtmd.kernels.report.measured_speeds import Ceilings


def test_a_sample_tells_middle_ends_and_spread():
    sample = Sample((4.0, 1.0, 2.0, 3.0, 100.0))
    assert (sample.median, sample.minimum, sample.maximum) == (3.0, 1.0, 100.0)
    assert sample.spread == pytest.approx(1 / 3) and Sample((5.0,)).spread == 0


def test_growth_is_the_exponent_of_a_power():
    assert exponent([(x, 3 * x**2) for x in (1.0, 2.0, 5.0)]) == pytest.approx(2)
    assert exponent([(1.0, 1.0), (2.0, 2.0)]) is None
    assert exponent([(0.0, 1.0), (1.0, 2.0), (2.0, 4.0)]) is None


def test_the_floor_of_a_node_is_the_longer_of_products_and_reading():
    ceilings = Ceilings(10e9, 100e9, 50e9)
    work = [(int(1e9), 0), (0, int(1e9))]
    assert ceilings.floor_ms(work, torch.bfloat16) == pytest.approx(110)
    assert ceilings.floor_ms(work, torch.float32) == pytest.approx(120)
    assert ceilings.best(Ceilings(5e9, 200e9, 1e9)) == Ceilings(10e9, 200e9, 50e9)


def test_busy_processes_run_beside_and_end(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    with busy(2):
        assert [p.poll() for p in started] == [None, None]
        time.sleep(0.05)
    assert all(p.poll() is not None for p in started) and len(started) == 2


# In a process of its own: in this one, what earlier tests left may be freed in between.
PEAKS = """
from mtmd.bench.measure import HostPeak
peak = HostPeak()
readings = [peak.read()]
stored = bytearray(b"x") * (256 << 20)
del stored
peak.restart()
readings.append(peak.read())
stored = bytearray(b"x") * (64 << 20)
del stored
readings.append(peak.read())
print(readings)
"""


def test_the_peak_counts_from_its_start_or_is_not_given():
    ran = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    nothing, before, after = json.loads(ran.stdout.replace("None", "null"))
    assert nothing is None, "nothing has been started"
    # Neither is given where the kernel supports the request and goes on counting.
    assert (before is None and after is None) or 60 << 20 < after - before < 100 << 20


@pytest.mark.parametrize("peak, known", [(1 << 20, True), (3 << 20, False)], ids=str)
def test_a_peak_that_does_not_start_anew_is_not_given(tmp_path, monkeypatch, peak, known):
    (tmp_path / "clear_refs").touch()
    (tmp_path / "status").write_text(f"Name:\tx\nVmHWM:\t{peak} kB\nVmRSS:\t{1 << 20} kB\n")
    monkeypatch.setattr("mtmd.base.process_memory.PROC", tmp_path)
    host = HostPeak()
    host.restart()
    assert host.read() == (peak * 1024 if known else None)


def test_no_peak_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr("mtmd.base.process_memory.PROC", tmp_path / "none")
    host = HostPeak()
    host.restart()
    assert host.read() is None


def point(**changed):
    return Point(**{
        "resolution": 512, "images": 1, "context": 256, "batch": 1, "threads": None, "load": 0,
    } | changed)  # fmt: skip


def test_one_axis_is_varied_at_a_time_and_each_point_comes_once():
    plan = Plan(
        None, None, (512, 1024), (1,), (256, 256), (1, 4), (), (0, 1), 8, 3, "auto", False, ""
    )
    points = dict(plan.points())
    assert list(points) == [point(), point(resolution=1024), point(batch=4), point(load=1)]
    assert points[point(batch=4)] == ("decode",) and "encode" in points[point(resolution=1024)]


def test_shares_and_rates_are_of_the_median():
    stage = Stage("decode", point(), Sample((10.0, 20.0, 40.0)), 4, 5.0, None)
    assert (stage.tokens_per_s, stage.share) == (200.0, 0.25)
