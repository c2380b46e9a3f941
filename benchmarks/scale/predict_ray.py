"""The simulator's prediction of a job of `mtmd batch --ray` on two Ray nodes of this machine, one
of which is killed in the middle, beside what such a job then takes.

    python benchmarks/scale/predict_ray.py --costs costs.json               2,000 pictures
    python benchmarks/scale/predict_ray.py --costs costs.json --no-kill

The costs are those of another run, of one actor (`measure_costs.py cpu`). Nothing else should run.
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
from pathlib import Path
from typing import Any

from scenario import Costs, Failures, Fleet, Kill, Scenario, Traffic
from simulation import simulate

from mtmd.kernels.errors import MtmdError

sys.path.append(str(Path(__file__).parents[1]))
UNIT = 33
NODES = 2


def scenario(costs: Costs, pictures: int, kill: bool) -> Scenario:
    """Two nodes on this machine, an actor of one thread on each."""
    kills = (Kill(1, 0.5),) if kill else ()
    return Scenario(
        costs,
        Fleet(NODES, cores=os.cpu_count() or 1, share=NODES),
        Traffic("backlog", pictures, unit=UNIT),
        Failures(kills=kills),
    )


def measured(pictures: int, kill: bool, port: int) -> tuple[float, str]:
    """Pictures a second, as the command tells them; and its last line."""
    from ray_batch import COUNT, draw_pictures, end, node, nodes_of, parts, until

    folder = Path(tempfile.mkdtemp(prefix="predict_ray"))
    address, started = f"127.0.0.1:{port}", list[subprocess.Popen[Any]]()
    out = folder / "rows.jsonl"
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
        if kill:
            units = -(-pictures // UNIT)
            until(lambda: parts(out) >= units // 2, job)
            end(started[1])
        told = job.communicate(timeout=600)[1].strip().splitlines()
        rows = sum(len(part.read_text().splitlines()) for part in out.glob("part-*"))
    finally:
        for process in reversed(started):
            end(process)
        shutil.rmtree(folder, ignore_errors=True)
    found = re.search(r"\d+ rows in .*? ([\d.]+) images/s.*", " ".join(told))
    if found is None or rows != pictures:
        raise SystemExit(f"{rows} rows of {pictures}: {' '.join(told)[-300:]}")
    return float(found[1]), found[0]


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
        predicted = simulate(scenario(Costs.read(args.costs), args.pictures, kill))
    except MtmdError as error:
        parser.error(str(error))
    used = ", ".join(f"{name} {part:.0%}" for name, part in predicted.utilization.items())
    print(f"predicted: {predicted.rate:.1f} pictures/s ({used})", flush=True)
    rate, told = measured(args.pictures, kill, args.port)
    print(f"measured:  {rate:.1f} pictures/s ({told})")
    print(f"the prediction is off by {predicted.rate / rate - 1:+.1%}")


if __name__ == "__main__":
    main()
