"""The warm-up report: one dataclass, `str()` for people, `asdict()` for JSON."""

from __future__ import annotations

from mtmd.kernels.report.facts import WarmupFacts
from mtmd.kernels.report.report_text import render


class WarmupReport(WarmupFacts):
    """Report that `mtmd warmup` shows: the facts, and `str()` of them as text for a terminal."""

    def __str__(self) -> str:
        return render(self)

    def text(self, columns: int) -> str:
        """Return what `str()` does, in lines of so many characters at most."""
        return render(self, columns)
