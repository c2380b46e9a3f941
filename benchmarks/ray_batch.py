"""`mtmd batch --ray` on two Ray nodes of this machine: one node is killed, then the command; run
again, it goes on. Every row has to be there once. The demo model.

    python benchmarks/ray_batch.py                   2,000 pictures
    python benchmarks/ray_batch.py --pictures 400
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools" / "demo_model"))
COUNT = "How many shapes are there?"
WORDS = ("Zero.", "One.", "Two.", "Three.", "Four.")
WAIT_S = 600.0


def draw_pictures(folder: Path, count: int) -> dict[str, str | None]:
    """And what is to be answered, None for one that is broken."""
    from world import draw

    rng, result = random.Random(3), dict[str, str | None]()
    for n in range(count):
        image, facts = draw(rng)
        image.save(folder / f"{n:05}.png")
        result[f"{n:05}.png"] = WORDS[len(facts.things)]
    broken = folder / f"{count // 2:05}.png"
    broken.write_bytes(broken.read_bytes()[:100])
    return result | {broken.name: None}


def below(pid: int) -> list[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    result, waiting = [], [pid]
    while waiting:
        result.append(waiting.pop())
        waiting += children.get(result[-1], [])
    return result


def end(process: subprocess.Popen[Any]) -> None:
    """As a machine does that loses its power."""
    for pid in below(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def node(*options: str) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    command += ["--num-cpus", "1", "--object-store-memory", str(128 << 20)]
    command += ["--disable-usage-stats"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def parts(out: Path) -> int:
    return len(list(out.glob("part-*"))) if out.exists() else 0


def until(condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    late = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > late or (process is not None and process.poll() is not None):
            raise SystemExit("it did not come so far")
        time.sleep(0.2)


def nodes_of(address: str) -> int:
    code = f"import ray; ray.init({address!r}, logging_level='ERROR', log_to_driver=False)\n"
    code += "print('alive', sum(n['Alive'] for n in ray.nodes()))"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0
    result = re.search(r"alive (\d+)", done.stdout)
    return int(result[1]) if result else 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pictures", type=int, default=2000)
    arguments.add_argument("--port", type=int, default=6391)
    chosen = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # of nodes and commands that are started here, and of nobody else
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    folder = Path(tempfile.mkdtemp(prefix="ray_batch"))
    address, started = f"127.0.0.1:{chosen.port}", list[subprocess.Popen[Any]]()
    try:
        measure(chosen.pictures, folder, address, started)
    finally:
        for process in started:
            end(process)
        shutil.rmtree(folder, ignore_errors=True)


def measure(count: int, folder: Path, address: str, started: list[subprocess.Popen[Any]]) -> None:
    (folder / "pictures").mkdir()
    texts, out = draw_pictures(folder / "pictures", count), folder / "rows.jsonl"
    port = address.partition(":")[2]
    started.append(node("--head", "--port", port, "--include-dashboard=0"))
    until(lambda: nodes_of(address) == 1)
    started.append(node("--address", address))
    until(lambda: nodes_of(address) == 2)

    command = [sys.executable, "-m", "mtmd.cli", "batch", str(folder / "pictures"), "-p", COUNT]
    command += ["--ray", address, "--actors", "2", "--threads", "1", "--out", str(out), "--resume"]
    command += ["--unit", str(max(count // 60, 1))]
    units = -(-count // max(count // 60, 1))

    def run() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    start = time.monotonic()

    def report(text: str) -> None:
        print(
            f"{time.monotonic() - start:6.1f} s  {parts(out):3} of {units} files  {text}",
            flush=True,
        )

    first = run()
    until(lambda: parts(out) >= units // 5, first)
    report("a node is killed, with its actor")
    end(started[1])
    had = parts(out)
    until(lambda: parts(out) >= had + units // 5, first)
    report("the command is killed")
    first.kill()
    for line in (first.communicate()[1] or "").strip().splitlines():
        print(f"          {line.replace(str(folder), '')[:200]}")
    saved = {path.name: path.read_bytes() for path in out.glob("part-*")}
    started.append(node("--address", address))
    until(lambda: nodes_of(address) == 2)
    report("another node has come, and the command is run again")
    reported = (second := run()).communicate(timeout=WAIT_S)[1]
    report(f"ended with code {second.returncode}")
    print(reported.strip().splitlines()[-1].replace(str(folder), ""))

    rows = [json.loads(line) for path in out.glob("part-*") for line in path.open()]
    times = Counter(row["id"] for row in rows)
    result = {Path(row["image"]).name: row["text"] for row in rows}
    stayed = all((out / name).read_bytes() == data for name, data in saved.items())
    print(
        f"{len(rows)} rows of {len(texts)} pictures; {sum(n > 1 for n in times.values())} twice, "
        f"{len(texts.keys() - result.keys())} missing, "
        f"{sum(result.get(name) != text for name, text in texts.items())} with another answer; "
        f"{sum(row['error'] is not None for row in rows)} with an error; files of the first run "
        f"{'as they were' if stayed else 'CHANGED'}"
    )


if __name__ == "__main__":
    main()
