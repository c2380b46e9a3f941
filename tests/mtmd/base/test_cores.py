"""How many cores there are for this process, as its affinity and its control groups say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtmd.base import cores
from mtmd.base.cores import Cores, OthersWatch, usable_cores
from mtmd.kernels.resources import threads
from mtmd.kernels.resources.threads import settle_cores

V1 = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
SYSTEMS: dict[str, tuple[str, dict[str, dict[str, str]], float | None]] = {
    "no groups": ("", {}, None),
    "version 2": ("0::/a/b\n", {"a/b": {"cpu.max": "200000 100000\n"}}, 2.0),
    "version 2, no limit": ("0::/a\n", {"a": {"cpu.max": "max 100000\n"}}, None),
    "a limit further up": ("0::/a/b\n", {"a/b": {"cpu.max": "max 100000"}, "a": {"cpu.max": "50000 100000"}}, 0.5),
    "inside a container": ("0::/not/to/be/seen\n", {".": {"cpu.max": "300000 100000\n"}}, 3.0),
    "version 1": ("4:memory:/a\n3:cpu:/a\n", {"cpu/a": V1}, 1.5),
    "version 1, two controllers": ("3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a": V1}, 1.5),
    "version 1, no limit": ("3:cpu:/a\n", {"cpu/a": V1 | {"cpu.cfs_quota_us": "-1\n"}}, None),
    "broken files": ("3:cpu:/a\n0::/b\nnonsense\n", {"cpu/a": {"cpu.cfs_quota_us": "x"}, "b": {"cpu.max": "1 0"}}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_quota_of_control_groups(name: str, tmp_path: Path) -> None:
    listed, files, expected = SYSTEMS[name]
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(listed)
    for folder, texts in files.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (tmp_path / "cgroup" / folder / file).write_text(text)
    actual = usable_cores(tmp_path / "proc", tmp_path / "cgroup")
    assert actual.quota == expected and actual.affinity >= 1


def test_of_affinity_and_quota_the_lower_counts() -> None:
    assert [Cores(64, q).usable for q in (None, 2.0, 1.5, 0.1, 100.0)] == [64, 2, 2, 1, 64]
    assert (
        str(Cores(64, 1.5)) == "2 cores (a CPU quota of 1.5, of 64)" and str(Cores(1)) == "1 core"
    )


def test_a_container_gets_threads_for_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker run --cpus 2` on a machine of many cores; a number that was asked for stays."""
    count = SimpleNamespace(now=64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count.now)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: setattr(count, "now", n))
    monkeypatch.setattr(threads, "usable_cores", lambda: Cores(64, 2.0))
    monkeypatch.setattr(threads, "_requested", threads._Requested())
    settle_cores()
    assert count.now == 2
    threads.ask_threads(8)
    settle_cores()
    assert count.now == 8 and threads.why_threads() == "as asked"
    threads.ask_threads(None)
    assert count.now == 2 and threads.why_threads() == ""


def test_what_others_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores for ten seconds: 12 s of work, of which 4 are this process's."""
    tick = os.sysconf("SC_CLK_TCK")
    clock = SimpleNamespace(now=0.0, own=1.0)
    monkeypatch.setattr(cores, "_numbers", lambda: [0, 2])

    def passed(seconds: int, busy: int) -> None:
        line = f"{busy * tick // 2} 0 0 {(seconds - busy // 2) * tick} 0 0 0 0 0 0"
        (tmp_path / "stat").write_text(
            f"cpu  9 9 9 9\ncpu0 {line}\ncpu1 {seconds * tick} 0 0 0 0 0 0 0\ncpu2 {line}\nintr 5\n"
        )

    passed(0, 0)
    watch = OthersWatch(tmp_path, lambda: clock.now, lambda: clock.own)
    passed(10, 12)
    clock.now, clock.own = 10.0, 5.0
    assert watch.cores() == pytest.approx(0.8)
    assert OthersWatch(tmp_path / "none").cores() is None


def test_this_machine_tells() -> None:
    assert 1 <= usable_cores().usable <= (os.cpu_count() or 1)


HALVED = """
import json, os, subprocess, sys, threading
from mtmd.base.cores import leave_half, on_all_cores, usable_cores

def of_child():
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)

def reported(start):
    result = []
    thread = threading.Thread(target=lambda: result.append(sorted(os.sched_getaffinity(start))))
    thread.start()
    thread.join()
    return result[0]

may_end = threading.Event()
earlier = threading.Thread(target=may_end.wait)
earlier.start()
before, count = sorted(os.sched_getaffinity(0)), usable_cores()
leave_half()
result = [reported(earlier.native_id), reported(0), of_child()]
whole = [on_all_cores(of_child)]
result.append(of_child())
may_end.set()
assert usable_cores() == count
leave_half()
result.append(reported(0))
print(json.dumps({"before": before, "kept": result, "whole": whole, "pid": os.getpid()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="cores of threads")
def test_a_process_that_leaves_half_of_its_cores_keeps_to_the_others() -> None:
    """All of its threads and what they start, but for what is to have all; once is as twice. Which
    half it is goes by the number of the process.
    """
    run = subprocess.run([sys.executable, "-c", HALVED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    before = result["before"]
    start, count = result["pid"] % len(before), max(1, len(before) // 2)
    assert result["kept"] == [sorted((before * 2)[start : start + count])] * 5
    assert result["whole"] == [before]
