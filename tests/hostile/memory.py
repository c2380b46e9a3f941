"""Where the memory of a server of one process lies while pictures come, most of them damaged: what
it says that it holds after so many, and what it gives back in the end as its caches are emptied one
after another.

    .venv/bin/python tests/hostile/memory.py --pictures 1000,5000 --seed 41
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "shapes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from attackers import Attackers
from attempts import Attempt
from damaged_pictures import picture_attempt
from served import ATTACKER, Served, served
from watcher import resident_bytes

REPORT = "emptied.json"  # in the server's folder
SETTLED_S, LOOKS, WAIT_S = 10.0, 5, 120.0


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", default="1000,5000", help="when to look (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        served("--threads", "1", "--no-engine-process", program=[__file__]) as server,
        Attackers(2) as attackers,
    ):
        print(f"{0:>6} pictures {settled(server)} MiB", flush=True)
        before = 0
        for count in map(int, options.pictures.split(",")):
            attackers.attack(
                (server.host, server.port),
                usual_picture,
                ATTACKER,
                options.seed,
                count=count - before,
                seconds=1e9,
                at_once=32,
                first=before,
            )
            before = count
            print(f"{count:>6} pictures {settled(server)} MiB {server.stored_mib()}", flush=True)
        server.process.send_signal(signal.SIGUSR1)
        report = server.log.with_name(REPORT)
        end = time.monotonic() + WAIT_S
        while not report.exists() and time.monotonic() < end:
            time.sleep(0.1)
        last = None
        for name, size in json.loads(report.read_text()):
            print(f"{name:>24} {size:6.1f} MiB" + ("" if last is None else f" {size - last:+.1f}"))
            last = size


def usual_picture(rng: random.Random, key: str) -> Attempt:
    """None that takes seconds of a core, or much memory of a worker."""
    while (attempt := picture_attempt(rng, key)).what.startswith(("bomb", "heavy")):
        pass
    return attempt


def settled(server: Served) -> float:
    """MiB, once all is answered."""
    time.sleep(SETTLED_S)
    return median(server.resident_mib() for _ in range(LOOKS) if not time.sleep(1))


def serve() -> None:
    """In the server: as the command, and SIGUSR1 empties it."""
    from mtmd.cli import main as command

    def begin(*_: object) -> None:
        threading.Thread(target=write_report, daemon=True).start()

    signal.signal(signal.SIGUSR1, begin)
    sys.exit(command())


def write_report() -> None:
    rows = list(emptied())
    made = Path(f"{REPORT}.new")
    made.write_text(json.dumps(rows))
    made.rename(REPORT)


def emptied() -> Iterable[tuple[str, float]]:
    """Resident MiB after each step."""
    from mtmd.clip.encoder import TowerEncoder
    from mtmd.llm.engine.runner import Runner
    from mtmd.prompt.embedding_cache import EmbeddingCache
    from mtmd.service.processed_tiles import ProcessedTiles
    from mtmd.web.intake.uploads import Uploads
    from mtmd.web.page.pictures import PictureCache

    saved, of_packs = ("_plan", "_executor"), ("_pack_plan", "_pack_executor")
    steps: list[tuple[str, type, Callable[[Any], object]]] = [
        ("encoded pictures", EmbeddingCache, lambda c: c._entries.clear()),
        ("what the model saw", ProcessedTiles, lambda c: c._entries.clear()),
        ("page pictures", PictureCache, lambda c: (c._cached.clear(), c._thumbnails.clear())),
        ("files", Uploads, lambda c: c._files.clear()),
        ("plans of the encoder", TowerEncoder, lambda e: clear_plans(e, *saved, *of_packs)),
        ("plans of the decoder", Runner, lambda r: clear_plans(r, *saved)),
    ]
    gc.unfreeze()
    yield "as it is", resident_mib()
    ctypes.CDLL(None).malloc_trim(0)
    yield "trimmed", resident_mib()
    kinds = tuple(kind for _, kind, _ in steps)
    objects = [o for o in gc.get_objects() if isinstance(o, kinds)]
    for name, kind, empty in steps:
        for one in objects:
            if isinstance(one, kind):
                empty(one)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        yield name, resident_mib()


def clear_plans(one: Any, *caches: str) -> None:
    for name in caches:
        getattr(one, name).cache_clear()
    one.fallbacks.clear()


def resident_mib() -> float:
    return resident_bytes(os.getpid()) / 2**20


if __name__ == "__main__":
    main()
