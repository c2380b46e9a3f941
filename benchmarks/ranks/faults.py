"""What becomes of an answer whose second rank is killed, hangs or is slow, in its midst or before
the first run of a plan: how long until the error, or the answer; whether a process is left.

    python benchmarks/ranks/faults.py
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from mtmd import DeviceError, load
from mtmd.kernels.resources.threads import ask_threads
from mtmd.model import Model

PICTURE = Path(__file__).parents[2] / "examples" / "shapes.png"
SLOW_S = 3.0  # for which a rank does nothing, less than it is waited for
MESSAGES = [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}]


def second(model: Model) -> int:
    assert model.loaded.ranks
    (follower,) = model.loaded.ranks.followers
    assert follower.process is not None
    return follower.process.pid


def reported(kind: str, number: int, expected: str, known: bool = True) -> None:
    """`number` is the signal that the second rank gets in the midst of an answer; without `known`,
    before a model's first one, for which weights are read.
    """
    model = load(tp=2, speculate="off")
    pid, words = second(model), list[object]()
    try:
        if known:
            model.describe(PICTURE)
        events = model.stream(MESSAGES, temperature=0)
        if known:
            words.append(next(events))
        os.kill(pid, number)
        if kind == "slow":
            threading.Timer(SLOW_S, os.kill, (pid, signal.SIGCONT)).start()
        start, error = time.perf_counter(), ""
        try:
            words += list(events)
        except DeviceError as lost:
            error = str(lost)
        seconds = time.perf_counter() - start
    finally:
        model.close()
        model.loaded.close()
    ask_threads(None)
    ended = not Path(f"/proc/{pid}").exists()
    outcome = error or f"answered, {'as' if stated(words) == expected else 'NOT AS'} by one process"
    when = "" if known else ", first run"
    print(f"{kind + when:<20}{seconds:6.2f} s  {outcome}; process left: {'no' if ended else 'YES'}")


def stated(events: list[object]) -> str:
    return "".join(getattr(event, "text", "") for event in events).strip()


def main() -> None:
    with load(speculate="off") as one:
        expected = stated(list(one.stream(MESSAGES, temperature=0)))
    for kind, number in (
        ("slow", signal.SIGSTOP),
        ("killed", signal.SIGKILL),
        ("hung", signal.SIGSTOP),
    ):
        reported(kind, number, expected)
    for kind, number in (("killed", signal.SIGKILL), ("hung", signal.SIGSTOP)):
        reported(kind, number, expected, known=False)


if __name__ == "__main__":
    main()
