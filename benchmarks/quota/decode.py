"""What a CPU quota costs: a tile of a picture encoded and tokens decoded in a control group that
gives so much time of cores, as a container of `docker run --cpus 1.5` has.

    python benchmarks/quota/decode.py                            # on Linux; it needs root
    python benchmarks/quota/decode.py --quotas 1 1.5 0 --threads 0 1 2 --shape smolvlm-256m

A quota of 0 sets no limit, 0 threads ask for no number. Each line is a process and a group of its
own: milliseconds of a tile and of a token, the warm-up's beside the mean of many one after the
other; how many cores decoding kept busy; and what cpu.stat counts meanwhile, periods in which the
time was used up. Then what the warm-up says of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PERIOD_US = 100_000
GROUPS = Path("/sys/fs/cgroup")
CONTEXT, PROMPT, SIDE = 1024, 64, 512
CHOOSING = 24  # tokens until threads are chosen
TILES = 6
COLUMNS = (
    "quota",
    "--threads",
    "tile: warm-up",
    "mean",
    "token: warm-up",
    "mean",
    "cores",
    "used up",
)


@contextmanager
def group(quota: float) -> Iterator[Path]:
    """A new group with that quota, of either version. Raises OSError where none can be made."""
    first = (GROUPS / "cpu").is_dir()
    folder = (GROUPS / "cpu" if first else GROUPS) / f"mtmd-quota-{os.getpid()}"
    folder.mkdir()
    try:
        if first:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            limit = str(round(quota * PERIOD_US)) if quota else "-1"
            (folder / "cpu.cfs_quota_us").write_text(limit)
        else:
            limit = str(round(quota * PERIOD_US)) if quota else "max"
            (folder / "cpu.max").write_text(f"{limit} {PERIOD_US}")
        yield folder
    finally:
        folder.rmdir()


def periods(folder: Path) -> tuple[int, int]:
    """Of cpu.stat: those in which something ran, and those in which the time was used up."""
    rows = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
    return int(rows.get("nr_periods", 0)), int(rows.get("nr_throttled", 0))


def mean_ms(work: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times * 1e3


def measured(folder: Path, shape: str, threads: int, steps: int) -> dict[str, Any]:
    """In this process, once it is in the group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    import mtmd  # noqa: F401  # before torch: how its threads wait

    # isort: split
    import torch

    from mtmd.bench.shapes import random_checkpoint
    from mtmd.bench.subject import picture
    from mtmd.llm.engine.spans import Span
    from mtmd.model import Model
    from mtmd.options.load import LoadOptions

    options = LoadOptions(threads=threads or None, speculate="off", context=CONTEXT, parallel=1)
    model = Model(random_checkpoint(shape, "BF16"), options)
    try:
        report = model.warm_up()
        encoder, tile_ms = model.loaded.encoder, None
        with torch.inference_mode():
            if encoder is not None:
                ways, shown = encoder.preprocessing, picture(SIDE)
                plan = ways.prepare(lambda: ways.resolution.prepare(shown))

                def encode() -> object:
                    return encoder.encode(plan.tiles[:1], way=plan.normalize)

                encode()
                tile_ms = mean_ms(encode, TILES)
            cache = model.runner.new_cache()
            cache.clear(0)
            sequence = model.runner.begin(cache, 0)
            model.runner.prefill([Span(tuple(range(PROMPT)))], cache, sequence)

            def step() -> object:
                return model.runner.read([(sequence, [Span((7,))])], cache)

            mean_ms(step, CHOOSING)
            before, start, used = periods(folder), time.perf_counter(), time.process_time()
            token_ms = mean_ms(step, steps)
            cores = (time.process_time() - used) / (time.perf_counter() - start)
            after = periods(folder)
        checks = {check.graph: check for check in report.checks}
        reported = [line.strip() for line in str(report).splitlines()]
        return {
            "tile_ms": (checks["encoder"].steady_ms if encoder else None, tile_ms),
            "token_ms": (checks["decoder"].best_ms, token_ms),
            "cores": cores,
            "periods": [late - early for late, early in zip(after, before, strict=True)],
            "told": [
                x for x in reported if x.startswith(("result:", "to do:")) or "decodes with" in x
            ],
        }
    finally:
        model.close()


def row(result: dict[str, Any]) -> Iterator[str]:
    for ms in (*result["tile_ms"], *result["token_ms"]):
        yield "-" if ms is None else f"{ms:,.1f}"
    yield f"{result['cores']:.2f}"
    every, used_up = result["periods"]
    yield f"{used_up} of {every} periods" if every else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quotas", type=float, nargs="+", default=[0, 1.5, 1])
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shape", default="smolvlm-256m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(measured(args.inside, args.shape, args.threads[0], args.steps)))
        return
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    reported = []
    for quota in args.quotas:
        for threads in args.threads:
            with group(quota) as folder:
                command = [sys.executable, __file__, "--inside", str(folder), "--shape", args.shape]
                command += ["--threads", str(threads), "--steps", str(args.steps)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            name = f"{quota or 'none'} | {threads or 'none'}"
            print(f"| {name} | {' | '.join(row(result))} |", flush=True)
            reported += [f"{name} | {line}" for line in result["told"]]
    print("\n".join(["", *reported]))


if __name__ == "__main__":
    main()
