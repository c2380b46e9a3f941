"""Where the memory of a server lies while pictures come, most of them damaged: in the process that
reads requests, in the model's, and in the caches that `/metrics` counts.

    .venv/bin/python tests/hostile/memory.py --pictures 1000,5000 --seed 41
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent / "shapes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from attackers import Attackers
from attempts import Attempt
from damaged_pictures import picture_attempt
from served import ATTACKER, Served, served
from watcher import resident_bytes

SETTLED_S, LOOKS = 10.0, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", default="1000,5000", help="when to look (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with served("--threads", "1") as server, Attackers(2) as attackers:
        print(f"{0:>6} pictures {settled(server)}", flush=True)
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
            print(f"{count:>6} pictures {settled(server)} {server.stored_mib()}", flush=True)


def usual_picture(rng: random.Random, key: str) -> Attempt:
    """None that takes seconds of a core, or much memory of a worker."""
    while (attempt := picture_attempt(rng, key)).what.startswith(("bomb", "heavy")):
        pass
    return attempt


def settled(server: Served) -> str:
    """Return the memory of both processes once all is answered."""
    time.sleep(SETTLED_S)
    looks = []
    for _ in range(LOOKS):
        looks.append([resident_bytes(pid) for pid in (server.process.pid, *server.engines())])
        time.sleep(1)
    web, *models = (round(median(sizes) / 2**20) for sizes in zip(*looks, strict=True))
    return f"{web} MiB, the model's {' '.join(map(str, models))} MiB"


if __name__ == "__main__":
    main()
