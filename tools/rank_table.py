"""Every variant of every family on 2, 3 and 4 ranks against one process, on random tiny
checkpoints: 48 greedy tokens, logits, tower; what a rank holds, and what could not be shared.

    python tools/rank_table.py [WORD IN ROW OR VARIANT]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("support", "families")]

from table import CASES, ROWS  # noqa: E402
from test_ranks import Subject  # noqa: E402

TOKENS = 48
SIZES = (2, 3, 4)


def main(word: str = "") -> None:
    print(f"{'row: variant':<70} {'ranks':>5} {'largest rank':>13}   kept whole as asked otherwise")
    for row, variant in CASES:
        if word not in f"{row}: {variant}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            subject = Subject(ROWS[row].variants[variant](Path(folder)), ROWS[row].vision)
            total = subject.model.runner.plan(subject.model.runner.sizes()["decode"])
            for size in SIZES:
                for flash in ("on", "off"):
                    runners = subject.check(size, TOKENS, flash_attn=flash)
                    if ROWS[row].vision:
                        subject.check_tower(size, flash)
                most = max(r.residency.bytes["cpu"] for r in runners)
                kept = {
                    k.reason
                    for r in runners
                    if r.sharding
                    for k in r.sharding.kept_whole
                    if k.refused
                }
                share = most / total.weight_bytes["cpu"]
                print(
                    f"{row + ': ' + variant:<70.70} {size:>5} {share:>12.0%}   {'; '.join(kept)}",
                    flush=True,
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
