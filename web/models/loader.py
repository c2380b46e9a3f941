"""Models of this package, loaded one beside the other in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mtmd.checkpoint.collection import Source
from mtmd.checkpoint.facts import facts_of
from mtmd.loaded.interpreter import collect_all, leave_out
from mtmd.web.models.entry import Facts
from mtmd.web.models.presets import Preset
from mtmd.web.models.progress import Read
from mtmd.web.served_model import ServedModel

if TYPE_CHECKING:
    from mtmd import Model, Service
    from mtmd.loaded.several import Shared

ENDING_S = 20.0  # for the step that the device is in


class PackageLoader:
    """`chosen`: the fields of LoadOptions for all models, which a preset's come before; its
    `memory_limit` is that of all of them together. `warm_up`: each is run once before it answers.
    The others are as of `Service`.
    """

    def __init__(
        self,
        chosen: Mapping[str, Any],
        *,
        queue: int,
        share_cache: bool,
        hang_s: float | None,
        warm_up: bool = True,
    ) -> None:
        self._chosen, self.warm_up = dict(chosen), warm_up
        self.service_options: dict[str, Any] = {
            "queue": queue,
            "share_cache": share_cache,
            "hang_s": hang_s,
        }
        self.loaded: list[Model] = []

    @cached_property
    def shared(self) -> Shared:
        from mtmd.commands.shared import SMALL_BYTES
        from mtmd.loaded.several import Shared

        return Shared(self._chosen, SMALL_BYTES)

    @property
    def limits(self) -> dict[str, int]:
        """Bytes for all models that were asked for, by memory space. Raises OptionError."""
        return self.shared.limits

    def free(self) -> dict[str, int]:
        return self.shared.free()

    def fetch(self, source: Source, tell: Callable[[Read], None]) -> Source:
        """Raises ModelError."""
        from mtmd.checkpoint.pull import pull

        pulled = pull(source.model, tell=lambda arriving: tell(arriving.read))
        return replace(source, bytes=pulled.bytes)

    def open(self, source: Source, preset: Preset) -> OpenedModel:
        """Raises MtmdError."""
        from mtmd.checkpoint.hub import is_demo, resolve_model
        from mtmd.loaded.predicted_memory import predicted_bytes
        from mtmd.loading import load_beside

        self.shared.usual_threads()
        options, path = self._chosen | dict(preset.load), source.model
        if not is_demo(path):
            found = resolve_model(path, fetch=False)
            path = str(found.path)
            if found.projector and not options.get("mmproj"):
                options["mmproj"] = str(found.projector)
        model = load_beside(path, **options)
        needs = predicted_bytes(model.loaded)
        limited = self.limits
        if limited:
            # The one of its own is what it is predicted to take, so that all keep the whole.
            space = next(iter(limited))
            own = min(needs.get(space, 0), limited[space])
            model = load_beside(path, **options | {"memory_limit": own})
        model.loaded.name = source.name
        return OpenedModel(self, model, needs)


class OpenedModel:
    """Made by `PackageLoader.open`."""

    def __init__(self, loader: PackageLoader, model: Model, needs: Mapping[str, int]) -> None:
        self._loader = loader
        self._model: Model | None = model
        self._service: Service | None = None
        self._closing = threading.Lock()
        sees = model.encoder is not None
        self.facts = Facts(needs, model.runner.context, sees, facts_of(model.checkpoint))
        model.weights_read()  # plans are made for it, once, and not where /ready asks

    def weights_read(self) -> tuple[int, int]:
        model = self._model
        return (0, 0) if model is None else model.weights_read()

    def start(self, aliases: tuple[str, ...], preset: Preset) -> ServedModel:
        from mtmd.service.service import Service

        model, loader = self._model, self._loader
        assert model is not None
        sizes = [one.checkpoint.weight_bytes for one in (*loader.loaded, model)]
        loader.shared.settle_threads(sizes)
        model.loaded.start_workers()
        report = model.warm_up() if loader.warm_up else model.warmup_report
        self._service = Service(model, **loader.service_options)
        self._service.plan_ahead()
        loader.loaded.append(model)
        leave_out()
        return ServedModel(
            self._service, report, aliases, system=preset.system, preset=preset.answer
        )

    def close(self) -> None:
        """Its memory is free when this returns, but for what somebody else still holds of it. A
        second call waits for the first, and goes on behind where that has raised.
        """
        with self._closing:
            if self._model is not None:
                self._close()

    def _close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            self._loader.loaded = [m for m in self._loader.loaded if m is not self._model]
            service.close(ENDING_S)
        model, self._model = self._model, None
        assert model is not None
        model.loaded.close()
        del model, service
        collect_all()  # models and their caches refer to each other in circles
        self._loader.shared.given_back()
        if left := self._loader.loaded:
            leave_out(collected=True)
            self._loader.shared.settle_threads([one.checkpoint.weight_bytes for one in left])
