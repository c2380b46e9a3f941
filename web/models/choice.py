"""Describes where a request meets the model that answers it: the only one, or one of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flask import request

from mtmd.checkpoint.collection import near
from mtmd.checkpoint.facts import CheckpointFacts, ServedAdapter
from mtmd.web.errors import ApiError
from mtmd.web.served_model import SAMPLING, ServedModel
from mtmd.web.telemetry.metrics import Life, Measured

if TYPE_CHECKING:
    import numpy as np

    from mtmd import DeviceError

UNLOADED, LOADING, LOADED, FAILED = "unloaded", "loading", "loaded", "failed"
UNLOADING = "unloading"  # nobody new is let in, answers under way are written
FETCHING = "fetching"  # from the hub; lists tell it as loading, which clients know


@dataclass(frozen=True)
class Listed:
    """A model as lists show it. `names`: its own, then its aliases. `file_bytes`: None where its
    files are not here yet; `needs_bytes`: of memory, predicted, by space, empty as long as that is
    not known; None for what is not known of `context`, `sees`, `hears`. `stage`, `progress`: while
    it is loaded. `since`: when the server had it to offer, seconds since 1970. `reason`: why it
    could not be loaded. `room`: "fits", "swap" (once others are unloaded) or "too large", "" where
    that is not known. `checkpoint`: None where it was not opened yet.
    """

    name: str
    names: tuple[str, ...]
    since: float
    state: str = LOADED
    kind: str = ""
    file_bytes: int | None = None
    needs_bytes: Mapping[str, int] = field(default_factory=dict)
    context: int | None = None
    sees: bool | None = None
    hears: bool | None = None
    stage: str = ""
    progress: float = 0.0
    reason: str = ""
    room: str = ""
    in_use: bool = False
    default: bool = True
    preset: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointFacts | None = None

    @property
    def adapters(self) -> tuple[ServedAdapter, ...]:
        """Return the adapters that requests may choose, as far as they are known."""
        return () if self.checkpoint is None else self.checkpoint.adapters

    @property
    def usual_sampling(self) -> dict[str, float]:
        """Return how tokens are chosen where a request says nothing: by the preset, and the model's
        own settings.
        """
        way = str(self.preset.get("sampling", "model"))
        own = {} if self.checkpoint is None else self.checkpoint.sampling.defaults(way)
        return own | {n: value for n, value in self.preset.items() if n in SAMPLING}


class Claim(Protocol):
    """Claim on a model, by one request: once it is in memory it stays there until `give_back`, or
    its client leaves, or does not ask for it for long.
    """

    @property
    def how_far(self) -> float | None:
        """Return how far it is loaded, from 0 to 1; None where that has not begun."""

    @property
    def stage(self) -> tuple[str, float | None]:
        """Return what is done to load it, in words, and how far that is, to a hundredth; ("", None)
        where that has not begun.
        """

    def wait(self, seconds: float = ...) -> bool:
        """Wait for so long at most; returns whether it is in memory. Raises ApiError where it
        cannot be loaded, LeftError where nobody wants it any more.
        """

    def chosen(self) -> ServedModel:
        """Once it is in memory: for the request that is being answered, with which the claim ends.
        Raises ApiError.
        """

    def using(self) -> AbstractContextManager[ServedModel]:
        """Do what `chosen` does, for what is done in the context, by a thread that answers no
        request.
        """

    def give_back(self) -> None:
        """Give it back where it is not chosen; who waits for it gets a LeftError. A second call
        does nothing. From any thread.
        """


class Models(Protocol):
    """`many`: whether there may be several."""

    @property
    def many(self) -> bool: ...

    def choose(self, name: str | None) -> ServedModel:
        """Choose the model for the request that is being answered, once it is in memory. Raises
        ApiError for a name that is not here, and where it cannot be loaded.
        """

    def claim(self, name: str | None) -> Claim:
        """Return it without waiting. Raises as `choose`."""

    def at_hand(self, name: str | None = None) -> ServedModel | None:
        """Return it without waiting: None where it is not in memory; without a name the one of
        those in memory that was used last. Raises ApiError for a name that is not here.
        """

    def unload(self, name: str) -> bool:
        """Unload it as soon as nobody uses it; False where it stays. Raises ApiError for a name
        that is not here.
        """

    def listed(self) -> Sequence[Listed]: ...

    def find(self, name: str | None) -> Listed:
        """The one that `choose` takes. Raises ApiError for a name that is not here."""

    @property
    def slots(self) -> int:
        """Answers at once, of one model."""

    @property
    def fault(self) -> DeviceError | None:
        """Why nothing can be answered any more."""

    @property
    def busy(self) -> bool:
        """Return whether anything is being answered, or waits for a model."""

    def failures(self) -> Mapping[str, str]:
        """Return the failures of models whose process has failed and is being started again: the
        reason, by name.
        """

    def loading(self) -> dict[str, Any] | None:
        """Return how far the model is that is being loaded; None where none is."""

    def measured(self) -> Sequence[Measured]:
        """Return the measures of those that were in memory."""

    def lives(self) -> Mapping[str, Life]:
        """Return the lives by name, where there are several."""

    def processed(self, sha256: str, tenant: str) -> tuple[np.ndarray, ...] | None:
        """Do what `Service.processed` does, for whichever has it."""


class _Granted:
    """Claim on a model that is always there."""

    how_far = None
    stage = "", None

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def wait(self, seconds: float = 0.0) -> bool:  # noqa: ARG002
        return True

    def chosen(self) -> ServedModel:
        return self._model

    def using(self) -> AbstractContextManager[ServedModel]:
        return nullcontext(self._model)

    def give_back(self) -> None:
        """Give back; it stays all the same."""


class OneModel:
    """A server with one model, which is there from the start."""

    many = False

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def choose(self, name: str | None) -> ServedModel:
        if not self.model.answers_to(name):
            raise ApiError(
                404,
                "the requested model is not available"
                f"{near((name or '')[:256], self.model.names) or ';'} this server has "
                f"{self.model.name!r}; its options --alias NAME and --any-model accept other names",
                param="model",
                code="model_not_found",
            )
        return self.model

    def claim(self, name: str | None) -> Claim:
        return _Granted(self.choose(name))

    def at_hand(self, name: str | None = None) -> ServedModel | None:
        return self.choose(name)

    def unload(self, name: str) -> bool:
        self.choose(name)
        return False

    def listed(self) -> Sequence[Listed]:
        model = self.model
        return [
            Listed(
                model.name,
                model.names,
                model.since,
                context=model.context,
                sees=model.sees,
                hears=model.hears,
                preset={"system": model.system} | model.preset,
                checkpoint=model.service.checkpoint_facts,
            )
        ]

    def find(self, name: str | None) -> Listed:
        self.choose(name)
        return self.listed()[0]

    @property
    def slots(self) -> int:
        return self.model.service.stats().slots

    @property
    def fault(self) -> DeviceError | None:
        return self.model.service.fault

    @property
    def busy(self) -> bool:
        return self.model.service.busy

    def failures(self) -> Mapping[str, str]:
        failure = self.model.service.failure
        return {} if failure is None else {self.model.name: failure}

    def loading(self) -> dict[str, Any] | None:
        return None

    def measured(self) -> Sequence[Measured]:
        service = self.model.service
        return [Measured({}, service.stats(), service.latencies)]

    def lives(self) -> Mapping[str, Life]:
        return {}

    def processed(self, sha256: str, tenant: str) -> tuple[np.ndarray, ...] | None:
        return self.model.service.processed(sha256, tenant)


def in_memory(models: Models) -> ServedModel:
    """The one that the address of this request asks about (`?model=NAME`), or the one that was used
    last. Raises ApiError where it is not in memory.
    """
    name = request.args.get("model")
    model = models.at_hand(name)
    if model is None:
        raise ApiError(
            409,
            "no model is in memory" if name is None else f"the model {name!r:.80} is not in memory",
            code="model_not_in_memory",
        )
    return model


def state_of(models: Models, well: str) -> tuple[dict[str, Any], int]:
    """Return what probes of the server read, `well` where nothing is wrong, and the HTTP status.
    Names models whose process is being started again, with the reason, which is 503 where there is
    no other model; of several models, how far the one is that is being loaded.
    """
    fault, failures, loading = models.fault, models.failures(), models.loading()
    if fault is not None:
        return {"status": "failed", "reason": str(fault)}, 503
    state: dict[str, Any] = {"status": well}
    if failures:
        state["restarting"] = [{"model": n, "reason": r} for n, r in failures.items()]
        if not models.many:
            return state | {"status": "restarting"}, 503
    return state | ({} if loading is None else {"loading": loading}), 200
