"""`mtmd batch --ray local`, with Ray: an actor is killed, then the command itself, and it is run
again. `make ray` runs it: Ray takes longer to install and to start than the other tests.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtmd.base.errors import OptionError
from mtmd.cluster.connect import cluster_lock, connected

COUNT = "How many shapes are there?"
WORDS = ("Zero.", "One.", "Two.", "Three.", "Four.")
LONG_S = 120.0
AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")  # Ray's own, which take a minute to notice


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with 36 pictures as files, in a tar file and in a Parquet file, and one that is
    broken; how many shapes are in each, by its name.
    """
    from world import draw

    folder, rng, result = tmp_path_factory.mktemp("pictures"), random.Random(7), {}
    data = {}
    for n in range(36):
        image, facts = draw(rng)
        path = folder / f"{n:02}.png"
        image.save(path)
        data[path.name] = path.read_bytes()
        result[path.name] = WORDS[len(facts.things)]
    with tarfile.open(folder / "s.tar", "w") as tar:
        for name in list(data)[12:24]:
            tar.add(folder / name, name)
    rows = {"picture": [data[name] for name in list(data)[24:]], "key": list(data)[24:]}
    pq.write_table(pa.table(rows), folder / "t.parquet", row_group_size=5)
    for name in list(data)[12:]:
        (folder / name).unlink()
    (folder / "broken.png").write_bytes(data["00.png"][:100])
    yield folder, result


def start(folder: Path, out: Path, reported: Path) -> subprocess.Popen[bytes]:
    """Its stderr goes to `reported`."""
    words = ["batch", str(folder), "--ray", "local", "-p", COUNT, "--out", str(out), "--unit", "4"]
    words += ["--actors", "2", "--threads", "1", "--parallel", "2"]
    words += ["--column", "picture", "--name-column", "key", "--resume"]
    command = [sys.executable, "-m", "mtmd.cli", *words]
    with reported.open("wb") as file:
        return subprocess.Popen(command, stderr=file)


def parts(out: Path) -> list[Path]:
    return sorted(out.glob("part-*.jsonl"))


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    end = time.monotonic() + LONG_S
    while not (result := condition()):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    return result


def descendants(pid: int) -> dict[int, str]:
    """Processes below one, with their names."""
    below: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue
        child, _, name = head.partition(" (")
        below.setdefault(int(tail.split()[1]), []).append((int(child), name))
    result: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child, name in below.get(waiting.pop(), ()):
            result[child] = name
            waiting.append(child)
    return result


def actors(pid: int) -> list[int]:
    """Their processes, which Ray names by what they are, the oldest first."""
    result = [child for child in descendants(pid) if title(child).startswith("ray::Worker")]
    return sorted(result, key=lambda child: int(fields_of(child)[19]))


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def fields_of(pid: int) -> list[str]:
    """Of its stat file, from the state on: proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_there(pid: int) -> bool:
    try:
        return fields_of(pid)[0] != "Z"
    except OSError:
        return False


def test_every_row_is_there_once_when_an_actor_and_then_the_command_are_killed(
    pictures: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """The first actor is killed while the second one loads: most is left to do."""
    (folder, texts), out, reported = pictures, tmp_path / "rows.jsonl", tmp_path / "told"
    first = start(folder, out, reported)
    try:
        wait_for(lambda: parts(out), first)
        os.kill(actors(first.pid)[0], signal.SIGKILL)
        had = len(parts(out))
        wait_for(lambda: "an actor ended; its pictures go to" in reported.read_text(), first)
        wait_for(lambda: len(parts(out)) > had, first)
        started = descendants(first.pid)
    finally:
        first.kill()
        first.wait()
    saved = {path.name: path.read_bytes() for path in parts(out)}
    assert 1 < len(saved) < 10

    second = start(folder, out, reported)
    assert second.wait(LONG_S) == 4, reported.read_text()
    line = reported.read_text().splitlines()[-1]
    assert re.search(r"rows\.jsonl: \d+ rows in .* and \d+ from before; 1 failed$", line)
    rows = [json.loads(line) for path in parts(out) for line in path.read_text().splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == 37
    assert {row["image"].rpartition("/")[2]: row["text"] for row in rows} == {
        **texts,
        "broken.png": None,
    }
    assert {name: (out / name).read_bytes() for name in saved} == saved, "rows stay as they were"
    assert not list(out.glob("_writing*"))
    end = time.monotonic() + LONG_S
    while left := {pid: name for pid, name in started.items() if is_there(pid)}:
        if all(name in AGENTS for name in left.values()):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            break
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_one_command_of_a_cluster_at_a_time_writes_to_an_address() -> None:
    out = "s3://user:5ec2e7@bucket/rows.jsonl"
    with connected("local") as ray:
        for _ in range(2):
            with (
                cluster_lock(ray, out),
                pytest.raises(
                    OptionError, match=rf"work there \(process {os.getpid()} on"
                ) as reported,
                cluster_lock(ray, out),
            ):
                pass
            assert "5ec2e7" not in str(reported.value)
