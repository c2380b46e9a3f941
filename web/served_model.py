"""The model that is served, as both products speak of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmd import WarmupReport

if TYPE_CHECKING:
    from mtmd import Service


class ServedModel:
    """`warmup`: the report to show, None for one that is made, once, without a run."""

    def __init__(self, service: Service, warmup: WarmupReport | None = None) -> None:
        self._service, self._warmup = service, warmup

    @property
    def name(self) -> str:
        return self._service.name

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._service.context

    @property
    def sees(self) -> bool:
        """Whether it takes pictures."""
        return self._service.sees

    @property
    def warmup_report(self) -> WarmupReport:
        if self._warmup is None:
            self._warmup = self._service.warmup_report
        return self._warmup
