"""The simulator's prediction of a job of `mtmd batch --ray` on two Ray nodes of this machine, one
of which is killed in the middle, beside what such a job then takes.

    python benchmarks/scale/predict_ray.py --costs costs.json               2,000 pictures
    python benchmarks/scale/predict_ray.py --costs costs.json --no-kill

The costs are those of another run, of one actor (`measure_costs.py cpu`). What other processes take
of the machine meanwhile is measured, too.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from measure_costs import CLOCK, cpu_s
from scenario import Costs, Failures, Fleet, Kill, Scenario, Traffic
from simulation import simulate

from mtmd.base.errors import MtmdError

sys.path.append(str(Path(__file__).parents[1]))
from ray_batch import COUNT, below, draw_pictures, end, node, nodes_of, parts, until

UNIT = 33
NODES = 2


class Others:
    """Cores that processes take which are not below this one, between `begin` and `mean`."""

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._start = self._busy = self._before = 0.0
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        self._look()
        self._start, self._busy = time.monotonic(), _busy_s()
        self._before = sum(self._own.values())
        self._thread.start()

    def mean(self) -> float:
        self._over.set()
        self._thread.join()
        own = sum(self._own.values()) - self._before
        return max((_busy_s() - self._busy - own) / (time.monotonic() - self._start), 0.0)

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self._look()

    def _look(self) -> None:
        for pid in below(os.getpid()):
            self._own[pid] = max(self._own.get(pid, 0.0), cpu_s(pid))


def _busy_s() -> float:
    """Of all cores, since the machine was started: proc_stat(5), without idle and waiting."""
    times = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / CLOCK


def scenario(costs: Costs, pictures: int, kill: bool, others: float = 0.0) -> Scenario:
    """Two nodes on this machine, an actor of one thread on each; `others` take so many cores."""
    kills = (Kill(1, 0.5),) if kill else ()
    return Scenario(
        costs,
        Fleet(NODES, cores=(os.cpu_count() or 1) - others, share=NODES),
        Traffic("backlog", pictures, unit=UNIT),
        Failures(kills=kills),
    )


def measured(pictures: int, kill: bool, port: int) -> tuple[float, float, str]:
    """Pictures a second, as the command tells them; cores that others took from the first rows on;
    the command's last line.
    """
    folder = Path(tempfile.mkdtemp(prefix="predict_ray"))
    address, started = f"127.0.0.1:{port}", list[subprocess.Popen[Any]]()
    out, others = folder / "rows.jsonl", Others()
    try:
        (folder / "pictures").mkdir()
        draw_pictures(folder / "pictures", pictures)
        started.append(node("--head", "--port", str(port), "--include-dashboard=0"))
        until(lambda: nodes_of(address) == 1)
        started.append(node("--address", address))
        until(lambda: nodes_of(address) == NODES)
        command = [sys.executable, "-m", "mtmd.cli", "batch", str(folder / "pictures"), "-p", COUNT]
        command += ["--ray", address, "--actors", str(NODES), "--threads", "1"]
        command += ["--out", str(out), "--unit", str(UNIT)]
        job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(job)
        until(lambda: parts(out) > 0, job)
        others.begin()
        if kill:
            units = -(-pictures // UNIT)
            until(lambda: parts(out) >= units // 2, job)
            end(started[1])
        reported = job.communicate(timeout=600)[1].strip().splitlines()
        taken = others.mean()
        rows = sum(len(part.read_text().splitlines()) for part in out.glob("part-*"))
    finally:
        for process in reversed(started):
            end(process)
        shutil.rmtree(folder, ignore_errors=True)
    result = re.search(r"\d+ rows in .*? ([\d.]+) images/s.*", " ".join(reported))
    if result is None or rows != pictures:
        raise SystemExit(f"{rows} rows of {pictures}: {' '.join(reported)[-300:]}")
    return float(result[1]), taken, result[0]


def main() -> None:
    doc = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=doc[0], epilog=doc[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--port", type=int, default=6392)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # of nodes and commands that are started here, and of nobody else
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    kill = not args.no_kill
    try:
        costs = Costs.read(args.costs)
        alone = simulate(scenario(costs, args.pictures, kill)).rate
    except MtmdError as error:
        parser.error(str(error))
    print(f"predicted: {alone:.1f} pictures/s with the machine to itself", flush=True)
    rate, others, reported = measured(args.pictures, kill, args.port)
    print(f"measured:  {rate:.1f} pictures/s, others took {others:.2f} cores ({reported})")
    alongside = simulate(scenario(costs, args.pictures, kill, others)).rate
    print(
        f"predicted with so many cores less: {alongside:.1f} pictures/s, off by "
        f"{alongside / rate - 1:+.1%} (with all of them {alone / rate - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
