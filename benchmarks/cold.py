"""A cold `mtmd describe` on the demo model against `import torch` alone, in fresh processes,
alternating; prints medians and a ratio.

python benchmarks/cold.py [-n RUNS]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "examples" / "shapes.png"


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=7, help="runs of each (default: %(default)s)")
    args = parser.parse_args()
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "mtmd describe": [sys.executable, "-m", "mtmd.cli", "describe", str(PICTURE)],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        seconds(command)  # the files are in the page cache from here on
    for _ in range(args.n):
        for name, command in commands.items():
            times[name].append(seconds(command))
    for name, result in times.items():
        print(
            f"{name:<14} median {statistics.median(result):.2f} s  of {len(result)}, "
            f"{min(result):.2f} to {max(result):.2f}"
        )
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    print(f"ratio {medians['mtmd describe'] / medians['import torch']:.2f}")


if __name__ == "__main__":
    main()
