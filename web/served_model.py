"""The model that is served, as both products speak of it: the one place that looks behind the
service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmd import WarmupReport

if TYPE_CHECKING:
    from mtmd import Service


class ServedModel:
    """`warmup`: the report to show, None for one that is made, once, without a run."""

    def __init__(self, service: Service, warmup: WarmupReport | None = None) -> None:
        self._model, self._warmup = service.model, warmup

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._model.runner.context

    @property
    def sees(self) -> bool:
        """Whether it takes pictures."""
        return self._model.encoder is not None

    @property
    def warmup_report(self) -> WarmupReport:
        if self._warmup is None:
            self._warmup = self._model.warmup_report
        return self._warmup
