"""A model that is served, as both products speak of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtmd import WarmupReport
from mtmd.checkpoint.hub import DEMO_NAMES
from mtmd.options.answer import PresetSampling

if TYPE_CHECKING:
    from mtmd import Service

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of AnswerOptions


class ServedModel:
    """`warmup`: the report to show, None for one that is made, once, without a run. `aliases`:
    other names of the model; `any_name`: it answers to every one. `system`, and the fields of
    AnswerOptions in `preset`, hold where a request does not say otherwise. `since`: seconds since
    1970.
    """

    def __init__(
        self,
        service: Service,
        warmup: WarmupReport | None = None,
        aliases: Sequence[str] = (),
        *,
        any_name: bool = False,
        system: str = "",
        preset: Mapping[str, Any] | None = None,
    ) -> None:
        self.service, self._warmup = service, warmup
        self._aliases, self._any_name = tuple(aliases), any_name
        self.system, self.preset = system, dict(preset or {})
        self.since = time.time()

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model: its own, then its aliases."""
        return tuple(dict.fromkeys((self.name, *self._aliases)))

    def answers_to(self, name: str | None) -> bool:
        """Return whether a request may call it so; None for one that names no model."""
        return name is None or self._any_name or name in self.names or self._is_demo(name)

    def called(self, name: str | None) -> str:
        """The name in an answer: the one of its names that was asked for, or its own."""
        is_known = name is not None and (name in self.names or self._is_demo(name))
        return name if is_known and name is not None else self.name

    def _is_demo(self, name: str) -> bool:
        """The demo model has two names, of which either is as good."""
        return {name, self.name} <= DEMO_NAMES

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.service.context

    @property
    def sees(self) -> bool:
        """Return whether it takes pictures."""
        return self.service.sees

    @property
    def warmup_report(self) -> WarmupReport:
        if self._warmup is None:
            self._warmup = self.service.warmup_report
        return self._warmup

    def options(self, chosen: Mapping[str, Any], detail: str = "auto") -> dict[str, Any]:
        """The fields of AnswerOptions for a request that gives those in `chosen`: the others are
        the preset's, and, where that says nothing, the model's own sampling, up to the end of the
        context. `detail`: of pictures, "auto" where the request does not say.
        """
        preset = self.preset if detail == "auto" else self.preset | {"detail": detail}
        usual: dict[str, Any] = {"max_tokens": self.context, "sampling": "model", "detail": detail}
        options = usual | preset | dict(chosen)
        if names := tuple(name for name in SAMPLING if name in preset and name not in chosen):
            options["sampling"] = PresetSampling(options["sampling"], names)
        return options

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation, begun by what the model is told before all else, unless it says so
        itself.
        """
        if not self.system or any(message["role"] == "system" for message in messages[:1]):
            return messages
        return [{"role": "system", "content": self.system}, *messages]
