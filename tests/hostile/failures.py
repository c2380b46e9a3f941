"""What clients see when the process of one of two models fails under load, and when it answers
again: killed, stopped, out of memory, and raising in the midst of its work.

    .venv/bin/python tests/hostile/failures.py

Prints a table: 16 chats at a time to each of two models.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from served import NEIGHBOUR, Served, served

from mtmd.loading import DEMO_MODEL

CHATS, TOKENS, LOAD_S, LIMIT_S = 16, 120, 4.0, 120.0
SPARE = 1 << 20  # bytes of address space beyond what a process has
# In the thread of the engine each step raises, or wants memory, once the file has the process's id.
PROGRAM = """
import sys
from mtmd.__main__ import main, patch
patch()
from mtmd.engine_process import process
replace = '''
import pathlib
from mtmd.llm.engine.runner import Runner
forward = Runner.forward
def raising(self, *args, **kwargs):
    file = pathlib.Path({file!r})
    what = file.read_text().split() if file.exists() else []
    if what[:1] == [str(__import__("os").getpid())]:
        if what[1:]:
            bytearray(1 << 28)
        else:
            raise RuntimeError("asked for by a test")
    return forward(self, *args, **kwargs)
Runner.forward = raising
'''
process._BOOT = process._BOOT.replace("main(int", "exec(" + repr(replace) + "); main(int")
sys.exit(main())
"""


def stopped(pid: int, _: Path) -> None:
    os.kill(pid, signal.SIGSTOP)


def killed(pid: int, _: Path) -> None:
    os.kill(pid, signal.SIGKILL)


def out_of_memory(pid: int, file: Path) -> None:
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + SPARE, size + SPARE))
    file.write_text(f"{pid} memory")


def raising(pid: int, file: Path) -> None:
    file.write_text(str(pid))


FAILURES: dict[str, Callable[[int, Path], None]] = {
    "killed (SIGKILL)": killed,
    "stopped (SIGSTOP)": stopped,
    "out of memory (RLIMIT_AS)": out_of_memory,
    "raising in every step": raising,
}


class Chats:
    """Clients of one model, one chat after another each, until they are ended."""

    def __init__(self, server: Served, model: str) -> None:
        self._server, self._model, self._over = server, model, threading.Event()
        self.done: list[tuple[float, float, str]] = []
        """Of each chat: when it began and ended, and what came of it."""
        self._threads = [threading.Thread(target=self._run) for _ in range(CHATS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            result = chat(self._server, self._model)
            self.done.append((begun, time.monotonic(), result))
            if result != "whole":
                time.sleep(0.2)


def chat(server: Served, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "How many shapes are there?"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {NEIGHBOUR}", "Content-Type": "application/json"}
    request = Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=LIMIT_S) as response:
            text = response.read().decode()
    except HTTPError as error:
        return f"{error.code} {json.loads(error.read())['error']['code']}"
    except (OSError, HTTPException) as error:
        return type(error).__name__
    if "data: [DONE]" in text and '"error"' not in text:
        return "whole"
    errors = [json.loads(line[6:]) for line in text.splitlines() if '"error"' in line[:60]]
    return f"in the stream: {errors[0]['error']['code'] or 'internal error'}" if errors else "cut"


def health(server: Served) -> dict[str, Any]:
    try:
        with urlopen(f"{server.url}/health", timeout=5) as response:
            state: dict[str, Any] = json.load(response)
    except HTTPError as error:
        state = json.loads(error.read())
    return state


def tried(server: Served, what: str, file: Path) -> str:
    assert chat(server, "a") == "whole"
    while len(server.engines()) > 1:  # the other model is looked at in a process of its own
        time.sleep(0.1)
    (pid,) = server.engines()
    assert chat(server, "b") == "whole"
    chats = {name: Chats(server, name) for name in ("a", "b")}
    time.sleep(LOAD_S)
    begun = time.monotonic()
    FAILURES[what](pid, file)
    named_s, reason = None, ""
    seen: Callable[[], bool] = lambda: any(  # noqa: E731
        result == "whole" and start > begun + (named_s or 0) for start, _, result in chats["a"].done
    )
    while time.monotonic() < begun + LIMIT_S:
        restarting = health(server).get("restarting")
        if restarting and named_s is None:
            named_s, reason = time.monotonic() - begun, restarting[0]["reason"]
        if named_s is not None and not restarting and seen():
            break
        if file.exists() and time.monotonic() > begun + 10:
            file.unlink()
        if what.startswith(("raising", "out of")) and not file.exists() and seen():
            break
        time.sleep(0.05)
    for one in chats.values():
        one.end()
    after = [d for d in chats["a"].done if d[1] > begun]
    wrong = Counter(result for *_, result in after if result != "whole")
    stored = [end - begun for start, end, result in after if start < begun and result != "whole"]
    again = [start - begun for start, _, r in after if r == "whole" and start > begun]
    again = [s for s in again if named_s is None or s > named_s]
    others = Counter(result for *_, result in chats["b"].done)
    return " | ".join(
        (
            f"| {what}",
            "; ".join(f"{count} x {result}" for result, count in wrong.most_common()) or "nothing",
            f"{max(stored):.1f} s" if stored else "-",
            f"{reason} after {named_s:.1f} s" if named_s is not None else "-",
            f"{min(again):.1f} s" if again else "never",
            f"{others.pop('whole', 0)} whole, {sum(others.values())} not |",
        )
    )


def main() -> None:
    print(
        "| model a | its clients saw | under way: told within | /health named it | answers again "
        "from | chats of model b |\n|---|---|---|---|---|---|"
    )
    for what in FAILURES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for model in ("a", "b"):
                shutil.copytree(DEMO_MODEL, folder / "models" / model)
            file = folder / "raise"
            arguments = ("--models", str(folder / "models"), "--no-warmup", "--threads", "1")
            program = ("-c", PROGRAM.replace("{file!r}", repr(str(file))))
            with served(*arguments, program=program) as server:
                print(tried(server, what, file), flush=True)


if __name__ == "__main__":
    main()
