"""Describes how fast one answer is written, beside what the memory of the machine would allow."""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.report.why_slow import step_bytes as step_bytes


@dataclass(frozen=True)
class DecodeSpeed:
    """Speed of one answer alone. `most_tokens_per_s`: if all that a token reads came as fast as
    memory gives it, `read_bytes_per_s`.
    """

    tokens_per_s: float
    most_tokens_per_s: float
    read_bytes_per_s: float

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.most_tokens_per_s

    def __str__(self) -> str:
        return (
            f"A single answer is written at {self.tokens_per_s:.3g} tokens/s, "
            "as measured when the model was loaded. The memory, at "
            f"{self.read_bytes_per_s / 1000000000.0:.3g} GB/s, would allow "
            f"{self.most_tokens_per_s:.3g}: it reaches {self.share:.0%}."
        )


def decode_speed(report: WarmupReport, read_bytes_per_s: float) -> DecodeSpeed | None:
    """None where `step_bytes` is 0."""
    bytes_read = step_bytes(report)
    if not bytes_read:
        return None
    step = next(check for check in report.checks if check.graph == "decoder")
    return DecodeSpeed(1e3 / step.best_ms, read_bytes_per_s / bytes_read, read_bytes_per_s)
