"""Progress of a job: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType

from tqdm import tqdm

from mtmd.base.text import plural

INTERVAL_S = 30.0
DAY_S = 86_400


@dataclass
class Progress:
    """Counts of rows. Those `before` were in the folder when the job began."""

    total: int = 0
    before: int = 0
    written: int = 0
    failed: int = 0
    failed_before: int = 0
    actors: int = 0
    ended: int = 0
    start: float = 0.0

    @property
    def left(self) -> int:
        return self.total - self.before - self.written

    @property
    def rows_s(self) -> float:
        """Rows a second since the first actor was ready."""
        return self.written / max(time.monotonic() - self.start, 1e-9) if self.start else 0.0

    @property
    def line(self) -> str:
        left = f"{self.left:,} left"
        if self.rows_s > 0:
            left += f", {duration(self.left / self.rows_s)}"
        return (
            f"{self.before + self.written:,} of {self.total:,} rows, {self.rows_s:.1f} rows/s, "
            f"{left}; {self.actors} actors; {self.failed + self.failed_before:,} failed"
        )

    def summary(self, out: str, seconds: float) -> str:
        before = f" and {self.before} from before" if self.before else ""
        speed = f", {self.rows_s:.1f} images/s" if self.written else ""
        left = f"; {self.left} left" if self.left else ""
        ended = f"; {self.ended} actors ended and were replaced" if self.ended else ""
        return (
            f"{out}: {plural(self.written, 'row')} in {seconds:.1f} s{speed}{before}; "
            f"{self.failed + self.failed_before} failed{left}{ended}"
        )


class Reporter:
    """Writes to stderr. The bar, or the first line, comes with the first call of `report`."""

    def __init__(self, interval_s: float = INTERVAL_S):
        self._interval_s, self._last = interval_s, time.monotonic()
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def report(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            if time.monotonic() - self._last >= self._interval_s:
                self._last = time.monotonic()
                print(progress.line, file=sys.stderr, flush=True)
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


def duration(seconds: float) -> str:
    if seconds >= DAY_S:
        return f"{seconds / DAY_S:.1f} days"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
