"""A model that is served, as both products speak of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtmd import OptionError, WarmupReport
from mtmd.checkpoint.facts import ServedAdapter
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
        self.applied: Mapping[str, float] = {}
        """Scales of adapters, for requests that choose none."""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model: its own, then its aliases."""
        return tuple(dict.fromkeys((self.name, *self._aliases)))

    @property
    def adapters(self) -> tuple[ServedAdapter, ...]:
        """Return the adapters that a request may choose, also as the name of its model."""
        return self.service.checkpoint_facts.adapters

    def _is_adapter(self, name: str | None) -> bool:
        return any(one.name == name for one in self.adapters)

    def answers_to(self, name: str | None) -> bool:
        """Return whether a request may call it so; None for one that names no model."""
        if name is None or self._any_name or name in self.names or self._is_demo(name):
            return True
        return self._is_adapter(name)

    def called(self, name: str | None) -> str:
        """The name in an answer: the one of its names that was asked for, or its own."""
        if name is None:
            return self.name
        is_known = name in self.names or self._is_demo(name) or self._is_adapter(name)
        return name if is_known else self.name

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
    def hears(self) -> bool:
        """Return whether it takes audio."""
        return self.service.instructions is not None

    @property
    def warmup_report(self) -> WarmupReport:
        if self._warmup is None:
            self._warmup = self.service.warmup_report
        return self._warmup

    def options(
        self, chosen: Mapping[str, Any], detail: str = "auto", called: str | None = None
    ) -> dict[str, Any]:
        """The fields of AnswerOptions for a request that gives those in `chosen`: the others are
        the preset's, and, where that says nothing, the model's own sampling, up to the end of the
        context. `detail`: of pictures, "auto" where the request does not say; `called`: how it
        calls the model. Adapters may be chosen by `lora`, too, a list of their numbers and scales.
        """
        chosen = self._with_adapter(chosen, called)
        preset = self.preset if detail == "auto" else self.preset | {"detail": detail}
        usual: dict[str, Any] = {"max_tokens": self.context, "sampling": "model", "detail": detail}
        options = usual | preset | dict(chosen)
        if names := tuple(name for name in SAMPLING if name in preset and name not in chosen):
            options["sampling"] = PresetSampling(options["sampling"], names)
        return options

    def _with_adapter(self, chosen: Mapping[str, Any], called: str | None) -> dict[str, Any]:
        result = dict(chosen)
        by_number = result.pop("lora", None)
        if by_number is not None:
            result["adapter"] = self.scales_of(by_number)
        elif "adapter" not in result and called not in (None, *self.names):
            result |= {"adapter": called} if self._is_adapter(called) else {}
        if self.applied and "adapter" not in result:
            result["adapter"] = self.applied
        return result

    def scales_of(self, by_number: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The scales of adapters by their names. Raises OptionError for one that is not here."""
        adapters = self.adapters
        for number, _ in by_number:
            if number >= len(adapters):
                raise OptionError(
                    f"lora: found the id {number}, expected one of the {len(adapters)} adapters "
                    "that /lora-adapters lists"
                )
        return {adapters[number].name: scale for number, scale in by_number}

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation, begun by what the model is told before all else, unless it says so
        itself.
        """
        if not self.system or any(message["role"] == "system" for message in messages[:1]):
            return messages
        return [{"role": "system", "content": self.system}, *messages]
