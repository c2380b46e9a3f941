"""How far a job is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from mtmd.cluster.job import Progress

EVERY_S = 30.0
DAY_S = 86_400


class Teller:
    """Tells to stderr. The bar, or the first line, comes with the first call."""

    def __init__(self, every_s: float = EVERY_S):
        self._every_s, self._last = every_s, time.monotonic()
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Teller:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def tell(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            if time.monotonic() - self._last >= self._every_s:
                self._last = time.monotonic()
                print(line(progress), file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = tqdm(
                total=progress.total,
                initial=progress.before,
                unit="row",
                dynamic_ncols=True,
                leave=False,
            )
        failed = progress.failed + progress.failed_before
        self._bar.set_postfix(actors=progress.actors, failed=failed, refresh=False)
        self._bar.update(progress.before + progress.written - self._bar.n)


def line(progress: Progress) -> str:
    there = progress.before + progress.written
    left = f"{progress.left:,} left"
    if progress.rows_s > 0:
        left += f", {duration(progress.left / progress.rows_s)}"
    return (
        f"{there:,} of {progress.total:,} rows, {progress.rows_s:.1f} rows/s, {left}; "
        f"{progress.actors} actors; {progress.failed + progress.failed_before:,} failed"
    )


def duration(seconds: float) -> str:
    if seconds >= DAY_S:
        return f"{seconds / DAY_S:.1f} days"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
