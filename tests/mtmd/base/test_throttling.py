"""How often a control group's CPU time is used up, as cpu.stat of both versions tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmd.base.throttling import SustainedClock, Throttled, ThrottleWatch


@pytest.mark.parametrize(
    ("quota", "seconds", "used", "expected"),
    [
        (None, 0.05, 0.1, 0.05),
        (1.5, 0.05, 0.1, 0.1 / 1.5),  # two threads: done before the period's time is used up
        (1.5, 0.2, 0.3, 0.2),  # they have stood still meanwhile
        (1.5, 0.05, 0.05, 0.05),  # one thread has what it wants
        (0.5, 0.05, 0.05, 0.1),
    ],
)
def test_work_as_it_takes_when_it_goes_on(
    quota: float | None, seconds: float, used: float, expected: float
) -> None:
    wall, cpu = iter((10.0, 10.0 + seconds)), iter((3.0, 3.0 + used))
    clock = SustainedClock(quota, lambda: next(wall), lambda: next(cpu))
    assert clock.since(clock.now()) == pytest.approx(expected)


V2 = "usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_periods {}\nnr_throttled {}\nthrottled_usec 7\n"
V1 = "nr_periods {}\nnr_throttled {}\nthrottled_time 7\nnr_bursts 0\nburst_time 0\n"


@pytest.mark.parametrize(
    ("listed", "folder", "text"),
    [("0::/a/b\n", "a", V2), ("4:memory:/x\n1:cpu:/a/b\n0::/\n", "cpu/a/b", V1)],
    ids=["version 2, further up", "version 1"],
)
def test_periods_without_time_left(listed: str, folder: str, text: str, tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(listed)
    (cgroup / folder).mkdir(parents=True)
    file = cgroup / folder / "cpu.stat"
    file.write_text(text.format(10, 4))
    watch = ThrottleWatch(proc, cgroup)
    assert watch.throttled() is None, "nothing ran, or no quota is set"
    file.write_text(text.format(30, 9))
    result = watch.throttled()
    assert result == Throttled(20, 5) and result.share == 0.25


@pytest.mark.parametrize("text", [None, "", "usage_usec 9\n", "nr_periods x\nnr_throttled\n"])
def test_what_tells_nothing(text: str | None, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    if text is not None:
        (tmp_path / "cpu.stat").write_text(text)
    assert ThrottleWatch(tmp_path, tmp_path).throttled() is None
