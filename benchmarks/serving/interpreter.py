"""How long a step of decoding takes alone, and beside a thread of the same process that computes
in Python, as those do that read requests: each time the device's thread gives the interpreter away,
it may come back late.

    .venv/bin/python benchmarks/serving/interpreter.py [--temperature 0.8] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any
from unittest.mock import patch

from mtmd import Service, load
from mtmd.loaded.interpreter import shared_promptly

ANSWERS, TOKENS = 8, 200
JSON = json.dumps([{"a": [i, {"b": "x" * 20}]} for i in range(30)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with shared_promptly(), closing(Service(load(threads=1))) as service:
        steps_alongside(service, options.temperature, None)
        for _ in range(options.rounds):
            for name, work in WORK.items():
                steps = sorted(steps_alongside(service, options.temperature, work))
                result = ", ".join(
                    f"{location:.0%} {1e3 * steps[int(location * (len(steps) - 1))]:.2f}"
                    for location in (0.5, 0.9, 0.99, 1.0)
                )
                print(f"{name}: {len(steps)} steps, ms: {result}", flush=True)


def count() -> None:
    for _ in range(1000):
        pass


def read() -> None:
    json.loads(JSON)


WORK: dict[str, Callable[[], None] | None] = {
    "alone": None,
    "beside a thread that counts": count,
    "beside a thread that reads JSON": read,
}


def steps_alongside(
    service: Service, temperature: float, work: Callable[[], None] | None
) -> list[float]:
    """Seconds of each step while some answers are written."""
    seconds, over, step = list[float](), threading.Event(), service.engine.step

    def measured() -> Any:
        start = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - start)
        return result

    def go_on() -> None:
        while work is not None and not over.is_set():
            work()

    other = threading.Thread(target=go_on)
    other.start()
    with patch.object(service.engine, "step", measured):
        messages = [{"role": "user", "content": "Go on for long."}]
        tickets = [
            service.submit(
                messages, min_tokens=TOKENS, max_tokens=TOKENS, temperature=temperature, seed=1
            )
            for _ in range(ANSWERS)
        ]
        for ticket in tickets:
            for _ in ticket:
                pass
    over.set()
    other.join()
    return seconds


if __name__ == "__main__":
    main()
