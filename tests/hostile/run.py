"""One real server under attack, kind by kind, with neighbours who chat; then model files. Ends with
exit code 1 where the account shows what should not be.

    .venv/bin/python tests/hostile/run.py --minutes 30 --seed 1 --out report.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "shapes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

from attack import Account
from attackers import Attackers
from attempts import Generator
from audio_cases import gemma4_unified
from damaged_audio import audio_attempt
from damaged_pictures import picture_attempt
from damaged_videos import video_attempt
from grammars import constraint_attempt
from http_shapes import http_shape
from served import ATTACKER, Served, Watched, served
from slow_clients import attack_slowly

HEALTH_MS = 250.0
MEMORY_MIB = 3072
"""Of the server and its workers together: the demo model 0.5 GiB, one picture of the most pixels
that may be decoded in 2.5."""
GROWTH = 1.15  # of the server's memory while the same goes on
SHARES = {
    "requests": 8,
    "pictures": 10,
    "videos": 4,
    "audio": 3,
    "schemas": 5,
    "slow": 2,
    "models": 5,
}
"""Of the minutes."""
COUNTS = {
    "requests": 50_000,
    "pictures": 20_000,
    "videos": 5_000,
    "audio": 2_000,
    "schemas": 10_000,
    "slow": 500,
    "models": 5_000,
}
GENERATORS: dict[str, Generator] = {
    "requests": http_shape,
    "pictures": picture_attempt,
    "videos": video_attempt,
    "audio": audio_attempt,
    "schemas": constraint_attempt,
}
CALM_S, AFTER_S = 15.0, 5.0
MODEL_KINDS = (
    "config",
    "processor",
    "tokenizer",
    "bombs",
    "template",
    "safetensors",
    "gguf",
    "files",
)
MODEL_STEP = 20


def main() -> int:
    options = parse()
    minutes = {k: options.minutes * s / sum(SHARES.values()) for k, s in SHARES.items()}
    requested = {k: getattr(options, k) for k in SHARES}
    report: dict[str, Any] = {"seed": options.seed}
    problems: list[str] = []
    how = ("--threads", str(options.threads), *options.serve)
    report["log"] = []
    if any(requested[k] for k in (*GENERATORS, "slow") if k != "audio"):
        with served(*how) as server:
            report |= run_on(server, options, requested | {"audio": 0}, minutes)
        report["log"] += server.problems
    if requested["audio"]:
        with tempfile.TemporaryDirectory() as folder:
            gemma4_unified(Path(folder))  # the demo model takes no audio
            with served(*how, "-m", folder) as server:
                alone = dict.fromkeys(requested, 0) | {"audio": requested["audio"]}
                made = run_on(server, options, alone, minutes)
        report.setdefault("calm", made["calm"])
        report["audio"] = made["audio"] | {"files": made["files"]}
        report["log"] += server.problems
    problems += report["log"]
    if requested["models"]:
        began = time.monotonic()
        report["models"] = model_files(
            options.seed, requested["models"], 60 * minutes["models"], options.attackers
        )
        report["models"]["minutes"] = round((time.monotonic() - began) / 60, 1)
    calm = report.get("calm", {}).get("watched", {})
    busy = calm.get("over_250_ms", 0) > 0  # with something else: times decide nothing
    if busy:
        print(
            "the machine is busy: how long /health took is reported and not judged", file=sys.stderr
        )
    for name, result in report.items():
        if isinstance(result, dict):
            problems += [f"{name}: {p}" for p in result.get("first_problems", ())]
            problems += judged(name, result.get("watched", {}), options.memory, busy)
            problems += [f"{name}: {p}" for p in grown(result.get("server_mib", []))]
    report["problems"] = problems
    text = json.dumps(report, indent=1)
    if options.out:
        Path(options.out).write_text(text + "\n")
    print(text)
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="in all, shared out (30)")
    for name in SHARES:
        text = "connections at a time" if name == "slow" else "at most"
        maximum = COUNTS[name]
        parser.add_argument(
            f"--{name}", type=int, default=maximum, help=f"{text}, 0 for none ({maximum:,})"
        )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first attempt (0)")
    parser.add_argument("--at-once", type=int, default=32, help="attempts at a time (32)")
    parser.add_argument("--attackers", type=int, default=2, help="processes that attack (2)")
    parser.add_argument("--chats", type=int, default=4, help="neighbours who chat (4)")
    parser.add_argument("--threads", type=int, default=1, help="of the server (1)")
    parser.add_argument(
        "--serve",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of mtmd serve, as --serve=--engine-process; may be repeated",
    )
    parser.add_argument(
        "--memory", type=int, default=MEMORY_MIB, help="budget in MiB (%(default)s)"
    )
    parser.add_argument("--out", help="file for the report")
    return parser.parse_args()


def run_on(
    server: Served,
    options: argparse.Namespace,
    requested: dict[str, int],
    minutes: dict[str, float],
) -> dict[str, Any]:
    where, report = (server.host, server.port), dict[str, Any]()
    watched = Watched(server, options.chats)
    try:
        watched.begin("start")
        time.sleep(5)
        watched.begin("calm")
        time.sleep(CALM_S)
        report["calm"] = {"server_mib": [server.resident_mib()]}
        for kind in (k for k in (*GENERATORS, "slow") if requested[k]):
            watched.begin(kind)
            began = time.monotonic()
            seconds = 60 * minutes[kind]
            if kind == "slow":
                account = attack_slowly(
                    where,
                    ATTACKER,
                    options.seed,
                    count=requested[kind],
                    seconds=seconds,
                    to_the_end=True,
                )
                sizes = [server.resident_mib()]
            else:
                account, sizes = at_once(server, kind, requested[kind], seconds, options)
            report[kind] = reported(account) | {
                "minutes": round((time.monotonic() - began) / 60, 1),
                "server_mib": sizes,
            }
            passed = {
                k: report[kind][k] for k in ("count", "statuses", "first_problems", "minutes")
            }
            print(kind, json.dumps(passed), file=sys.stderr, flush=True)
            if server.process.poll() is not None:
                report[kind]["first_problems"].append("the server ended")
                break
            report[kind]["stored_mib"] = server.stored_mib()
        watched.begin("after")
        time.sleep(AFTER_S)
        for name, result in watched.end().items():
            report.setdefault(name, {})["watched"] = result
        report["files"] = {"now": server.settled_files(), "at_start": server.files}
    finally:
        watched.close()
    return report


def at_once(
    server: Served, kind: str, count: int, seconds: float, options: argparse.Namespace
) -> tuple[Account, list[int]]:
    """An account, and the server's resident memory in MiB as it went."""
    sizes = list[int]()

    def look() -> None:
        if server.process.poll() is None:
            sizes.append(server.resident_mib())

    with Attackers(options.attackers) as attackers:
        account = attackers.attack(
            (server.host, server.port),
            GENERATORS[kind],
            ATTACKER,
            options.seed,
            count=count,
            seconds=seconds,
            at_once=options.at_once,
            first=options.first,
            look=look,
        )
    look()
    return account, sizes


def grown(sizes: list[int]) -> list[str]:
    """Memory in MiB that keeps growing, or is kept: the second fifth against the last."""
    part = len(sizes) // 5
    if part < 3:
        return []
    early, late = median(sizes[part : 2 * part]), median(sizes[-part:])
    if late <= GROWTH * early:
        return []
    return [f"the server's memory grew from {early} to {late} MiB, {GROWTH - 1:.0%} are allowed"]


def reported(account: Account) -> dict[str, Any]:
    by_what = {what: dict(statuses) for what, statuses in sorted(account.by_what.items())}
    return account.report() | {"by_what": by_what}


def model_files(seed: int, count: int, seconds: float, processes: int) -> dict[str, Any]:
    """Damaged checkpoints opened in processes of their own, kind after kind."""
    from mutated_files import Worker, failures, make_seeds

    result, wrong, end = Counter[str](), list[str](), time.monotonic() + seconds
    peak, lock = 0, threading.Lock()
    batches = zip(itertools.count(), itertools.cycle(MODEL_KINDS), range(0, count, MODEL_STEP))

    def work(worker: Worker) -> None:
        nonlocal peak, wrong
        while time.monotonic() < end:
            with lock:
                number, kind, begun = next(batches, (0, "", count))
            if begun >= count:
                return
            first = seed * 1_000_000 + number // len(MODEL_KINDS) * MODEL_STEP
            results = worker.run(kind, first, min(MODEL_STEP, count - begun))
            with lock:
                result.update(r["outcome"] for r in results)
                peak = max(peak, *(r["peak"] for r in results))
                wrong += [f"{kind}: {failure}" for failure in failures(results)]

    with tempfile.TemporaryDirectory() as name:
        (seeds := Path(name) / "seeds").mkdir()
        made = make_seeds(seeds)
        workers = list[Worker]()
        for index in range(processes):
            (scratch := Path(name) / f"scratch {index}").mkdir()
            workers.append(Worker(made, scratch))
        try:
            with ThreadPoolExecutor(processes) as pool:
                list(pool.map(work, workers))
        finally:
            for worker in workers:
                worker.close()
    return {
        "count": result.total(),
        "outcomes": dict(result),
        "peak_mib": peak >> 20,
        "processes": sum(worker.started for worker in workers),
        "problems": len(wrong),
        "first_problems": wrong[:20],
    }


def judged(name: str, watched: dict[str, Any], memory_mib: int, busy: bool) -> list[str]:
    """What should not be in what the watcher saw."""
    if not watched or name == "start":
        return []
    rules: list[tuple[str, Callable[[], bool]]] = [
        (f"health {watched['health']}", lambda: set(watched["health"]) != {"200"}),
        (
            f"health took {watched['health_ms'].get('max')} ms, {watched['over_250_ms']} times more "
            f"than {HEALTH_MS:g}",
            lambda: watched["over_250_ms"] > 0 and not busy,
        ),
        (
            f"{watched['peak_memory_mib']} MiB, the budget is {memory_mib}",
            lambda: watched["peak_memory_mib"] > memory_mib,
        ),
        (f"chats {watched['chats']}", lambda: "cut off" in watched["chats"]),
    ]
    return [f"{name}: {text}" for text, holds in rules if holds()]


if __name__ == "__main__":
    sys.exit(main())
