"""Several models, each in a process of its own: to load one is to start a process, to unload it is
to end that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import TYPE_CHECKING, Any, cast

from mtmd import MtmdError
from mtmd.base.control_groups import CGROUP, PROC
from mtmd.base.system_memory import system_bytes
from mtmd.checkpoint.collection import Source
from mtmd.engine_process.supervisor import EngineClient
from mtmd.web.models.entry import Facts
from mtmd.web.models.presets import Preset
from mtmd.web.models.progress import Read
from mtmd.web.served_model import ServedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from mtmd import Service

ENDING_S = 20.0  # for the step that the device is in
MEMORY_LIMIT_S = 1.0  # to tell what is free; an earlier number stands where it takes longer


class ProcessLoader:
    """`chosen`: the fields of LoadOptions for all models, which a preset's come before; its
    `memory_limit` is that of all of them together. `warm_up`: each is run once before it answers.
    `restarts`: as of `EngineClient`. The others are as of `Service`.

    Models are surveyed in one process, which becomes that of the model that is loaded next.
    """

    def __init__(
        self,
        chosen: Mapping[str, Any],
        *,
        queue: int,
        share_cache: bool,
        hang_s: float | None,
        warm_up: bool = True,
        restarts: bool = False,
    ) -> None:
        self._chosen, self.warm_up = dict(chosen), warm_up
        self._queue, self._share_cache = queue, share_cache
        self._hang_s, self._restarts = hang_s, restarts
        self._lock = threading.Lock()
        self._ready: EngineClient | None = None
        self._loaded: list[EngineClient] = []
        self._limits: dict[str, int] = {}
        self._free: dict[str, int] = {}

    @property
    def limits(self) -> dict[str, int]:
        """Bytes for all models that were asked for, by memory space. Raises MtmdError."""
        if not self._free:
            self.free()
        return self._limits

    def free(self) -> dict[str, int]:
        """Bytes of memory that can be taken right now, by space, as far as they are known. Raises
        MtmdError.
        """
        if not self._free:
            engine = self._take()
            try:
                memory = engine.memory(self._chosen)
            finally:
                self._give_back(engine)
            self._limits, self._free = memory["limits"], memory["free"]
        with self._lock:
            engines = [*([] if self._ready is None else [self._ready]), *self._loaded]
        if set(self._free) - {"cpu"} and engines:
            with suppress(MtmdError, Empty):
                self._free = engines[0].memory(self._chosen, MEMORY_LIMIT_S)["free"]
        elif (free := system_bytes(PROC, CGROUP)) is not None:
            self._free = self._free | {"cpu": free}
        return self._free

    def fetch(self, source: Source, report: Callable[[Read], None]) -> Source:
        """Raises ModelError."""
        from mtmd.checkpoint.pull import pull

        pulled = pull(source.model, report=lambda arriving: report(arriving.read))
        return replace(source, bytes=pulled.bytes)

    def open(self, source: Source, preset: Preset) -> OpenedModel:
        """Raises MtmdError."""
        engine = self._take()
        try:
            facts = engine.open(source.model, self._chosen | dict(preset.load), source.name)
        except BaseException:
            self._give_back(engine)
            raise
        return OpenedModel(self, engine, Facts(**facts))

    def surveyed(self) -> None:
        """All models are: the process for that stays where no model is loaded yet."""
        if self._loaded:
            self.close()

    def close(self) -> None:
        """End the process that is ready for a model."""
        with self._lock:
            engine, self._ready = self._ready, None
        if engine is not None:
            _end(engine)

    def begin(self, engine: EngineClient) -> Any:
        """Returns the report of the warm-up. Raises MtmdError."""
        report = engine.warm_up() if self.warm_up else engine.warmup_report
        engine.begin(queue=self._queue, share_cache=self._share_cache)
        with self._lock:
            self._loaded.append(engine)
        return report

    def end(self, engine: EngineClient) -> None:
        with self._lock:
            if is_loaded := engine in self._loaded:
                self._loaded.remove(engine)
        if is_loaded:
            with suppress(MtmdError):  # its process ends in any case
                engine.close(ENDING_S)
            _end(engine)
        else:
            self._give_back(engine)

    def _take(self) -> EngineClient:
        with self._lock:
            engine, self._ready = self._ready, None
        return engine or EngineClient(hang_s=self._hang_s, restarts=self._restarts)

    def _give_back(self, engine: EngineClient) -> None:
        """One whose model was not loaded."""
        try:
            engine.drop()
        except MtmdError:
            _end(engine)
            return
        with self._lock:
            if self._ready is None:
                self._ready = engine
                return
        _end(engine)


class OpenedModel:
    """Made by `ProcessLoader.open`."""

    def __init__(self, loader: ProcessLoader, engine: EngineClient, facts: Facts) -> None:
        self._loader, self.facts = loader, facts
        self._engine: EngineClient | None = engine
        self._closing = threading.Lock()

    def weights_read(self) -> tuple[int, int]:
        engine = self._engine
        return (0, 0) if engine is None else engine.weights_read()

    def start(self, aliases: tuple[str, ...], preset: Preset) -> ServedModel:
        engine = self._engine
        assert engine is not None
        report = self._loader.begin(engine)
        service = cast("Service", engine)  # as far as it is asked anything
        return ServedModel(service, report, aliases, system=preset.system, preset=preset.answer)

    def close(self) -> None:
        """Close it. Its memory is free when this returns. A second call waits for the first."""
        with self._closing:
            engine, self._engine = self._engine, None
            if engine is not None:
                self._loader.end(engine)


def _end(engine: EngineClient) -> None:
    with engine:
        pass
