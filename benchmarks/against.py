"""This checkout against another one, alternating in one run: cold start, decoding, an 896 px
encode, and a server under load. Ratios above 1 mean that this one is quicker.

    python benchmarks/against.py OTHER_PYTHON     the interpreter of the other checkout's venv
    python benchmarks/against.py OTHER_PYTHON --rounds 3 --seconds 10

Only what both offer to users is called: the package's public names and its commands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serve import server, throughput

EXAMPLES = Path(__file__).parents[1] / "examples"
PICTURE = EXAMPLES / "shapes.png"

# Runs in either checkout: milliseconds of an encode and per decoded token, best and median.
MEASURE = """
import json, statistics, sys
import numpy as np
from mtmd import load
model = load()
picture = sys.argv[1]
model.answer(picture)
tokens = []
for _ in range(12):
    receipt = model.answer(picture).receipt
    tokens.append(receipt.decode_ms / max(receipt.output_tokens - 1, 1))
tower = load(sys.argv[2])
encodes = []
for seed in range(5):
    pixels = np.random.default_rng(seed).integers(0, 256, (896, 896, 3), dtype=np.uint8)
    encodes.append(tower.answer(pixels, "x", max_tokens=1).receipt.encode_ms)
print(json.dumps({"decode, ms a token": tokens, "encode of 896 px, ms": encodes[1:]}))
"""


# A random checkpoint with two layers of Gemma 3's published tower: 4,096 patches.
TOWER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import checkpoints
checkpoints.gemma3(
    Path(sys.argv[2]),
    tokens=256,
    vision=dict(hidden_size=1152, intermediate_size=4304, num_attention_heads=16, image_size=896),
)
"""


def measure(python: str, tower: Path) -> dict[str, list[float]]:
    """Of one checkout, in fresh processes. They run in a folder from which neither is imported."""
    command = [python, "-c", MEASURE, str(PICTURE), str(tower)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tower)
    result: dict[str, list[float]] = json.loads(done.stdout)
    cold = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(
            [python, "-m", "mtmd", "describe", str(PICTURE)],
            check=True,
            capture_output=True,
            cwd=tower,
        )
        cold.append(time.perf_counter() - start)
    return result | {"cold describe, s": cold}


def load(python: str, folder: Path, seconds: float) -> float:
    """Answers a second over HTTP with 16 clients."""
    with server(python, folder) as (port, _):
        asyncio.run(throughput(port, 4, 2))
        return asyncio.run(throughput(port, 16, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", help="the Python of the other checkout's environment")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="of load (default: %(default)s)")
    args = parser.parse_args()
    pythons = {"this": sys.executable, "other": args.other}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in pythons}
    rates: dict[str, list[float]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        tests = str(Path(__file__).parents[1] / "tests" / "support")
        subprocess.run(
            [sys.executable, "-c", TOWER, tests, folder], check=True, capture_output=True
        )
        for _ in range(args.rounds):
            for name, python in pythons.items():
                for what, values in measure(python, Path(folder)).items():
                    times[name].setdefault(what, []).extend(values)
                rates[name].append(load(python, Path(folder), args.seconds))
    print(
        f"{'':<24} {'this, best':>11} {'median':>8} {'other, best':>12} {'median':>8} {'ratio':>13}"
    )
    for what in times["this"]:
        mine, theirs = times["this"][what], times["other"][what]
        medians = statistics.median(mine), statistics.median(theirs)
        print(
            f"{what:<24} {min(mine):11.2f} {medians[0]:8.2f} {min(theirs):12.2f} {medians[1]:8.2f} "
            f"{min(theirs) / min(mine):6.3f} {medians[1] / medians[0]:6.3f}"
        )
    mine, theirs = rates["this"], rates["other"]
    medians = statistics.median(mine), statistics.median(theirs)
    print(
        f"{'answers/s, 16 clients':<24} {max(mine):11.2f} {medians[0]:8.2f} {max(theirs):12.2f} "
        f"{medians[1]:8.2f} {max(mine) / max(theirs):6.3f} {medians[0] / medians[1]:6.3f}"
    )


if __name__ == "__main__":
    main()
