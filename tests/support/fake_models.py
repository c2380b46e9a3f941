"""Several models without a model: a loader that takes as long, and fails, as it is told."""

from __future__ import annotations

import threading
from dataclasses import replace

from fake_service import FakeService

from mtmd.checkpoint.collection import Source
from mtmd.web.models.entry import Entry, Facts
from mtmd.web.models.presets import NONE
from mtmd.web.models.registry import Registry
from mtmd.web.served_model import ServedModel

GIB = 1 << 30


class FakeModelService(FakeService):
    """Its answers say which model gave them. `under_way`: something for each that is."""

    def __init__(self, name, pace_s):
        super().__init__(pace_s)
        self.name, self.closed, self.under_way = name, False, []

    @property
    def busy(self):
        return bool(self.under_way)

    def answer(self, messages, pictures):
        return f"{self.name} says {super().answer(messages, pictures)}"

    def close(self, within_s=None):  # noqa: ARG002
        self.closed = True


class FakeLoader:
    """`needs`: GiB of each model by name. `fails`: by name, what is raised. `gate`: where it is
    cleared, a load waits for it, with `read` of the weights read; `hub`: likewise a fetch.
    """

    def __init__(self, needs, total=10):
        self.needs, self.total = needs, total
        self.fails, self.log = {}, []
        self.gate = threading.Event()
        self.gate.set()
        self.hub = threading.Event()
        self.hub.set()
        self.read, self.pace_s = (0, 100), 0.0
        self.taken = {}

    def free(self):
        return {"cpu": (self.total - sum(self.taken.values())) * GIB}

    def fetch(self, source, report):
        self.log.append(f"fetch {source.name}")
        report(lambda: self.read)
        assert self.hub.wait(20)
        if "fetch " + source.name in self.fails:
            raise self.fails["fetch " + source.name]
        return replace(source, bytes=self.needs[source.name] * GIB)

    def open(self, source, preset):
        assert source.is_here
        if "open " + source.name in self.fails:
            raise self.fails["open " + source.name]
        return FakeOpened(self, source, preset)

    def surveyed(self):
        pass

    def close(self):
        pass


class FakeOpened:
    def __init__(self, loader, source, preset):
        self.loader, self.name, self.preset = loader, source.name, preset
        self.facts = Facts({"cpu": loader.needs[source.name] * GIB}, 512, True)

    def weights_read(self):
        return self.loader.read

    def start(self, aliases, preset):
        loader = self.loader
        loader.log.append(f"load {self.name}")
        loader.taken[self.name] = loader.needs[self.name]
        assert sum(loader.taken.values()) <= loader.total, loader.taken
        assert loader.gate.wait(20)
        if self.name in loader.fails:
            raise loader.fails[self.name]
        self.service = FakeModelService(self.name, loader.pace_s)
        return ServedModel(self.service, None, aliases, system=preset.system, preset=preset.answer)

    def close(self):
        if hasattr(self, "service"):
            self.service.close()
            self.loader.log.append(f"unload {self.name}")
        self.loader.taken.pop(self.name, None)


def registry_of(needs, presets=None, loader=None, total=10, away=(), **options):
    """Not started. `away`: names of models that are to be fetched first."""
    loader = loader or FakeLoader(needs, total)
    entries = [
        Entry(
            Source(name, f"/models/{name}", None if name in away else size * GIB, "GGUF"),
            (presets or {}).get(name, NONE),
        )
        for name, size in needs.items()
    ]
    return Registry(entries, loader, slots=4, **options), loader
