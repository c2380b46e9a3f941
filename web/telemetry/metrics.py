"""Describes what the service counts, for Prometheus. A registry of our own: no other library's
numbers, nothing of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mtmd import __version__
from mtmd.service.latencies import Histogram, Latencies
from mtmd.service.stats import ServiceStats

if TYPE_CHECKING:
    from mtmd import DeviceError

CONTENT_TYPE = CONTENT_TYPE_LATEST
NOW = {  # field of ServiceStats -> what it is
    "slots": "Sequences that can be answered at once",
    "running": "Sequences being answered",
    "waiting": "Requests that wait for a place",
    "clients_waiting": "Clients whose requests are queued",
    "encoding": "Pictures being encoded or waiting for it",
    "pages": "Pages of the key-value cache",
    "pages_used": "Pages of it in use",
    "image_cache_bytes": "Bytes of cached embeddings of pictures",
    "processed_bytes": "Bytes of what the model saw of pictures, to be shown",
    "video_cache_bytes": "Bytes of cached frames of videos",
    "engine_bytes": "Bytes of memory that the engine's process has, if it has its own",
}
SINCE_START = {
    "requests": "Requests taken",
    "finished": "Answers finished",
    "cancelled": "Requests cancelled by their clients",
    "failed": "Requests that failed",
    "rejected": "Requests rejected because the queue was full",
    "images": "Pictures in requests",
    "image_cache_hits": "Pictures whose embeddings were cached",
    "images_shrunk": "Pictures made smaller for want of memory",
    "images_refused": "Pictures refused for want of memory",
    "videos": "Videos in requests",
    "video_frames": "Frames of videos that were seen",
    "audio": "Audio files in requests",
    "audio_cache_hits": "Audio files that were encoded before",
    "image_tokens": "Tokens of pictures",
    "audio_tokens": "Tokens of audio",
    "prompt_tokens": "Tokens of prompts",
    "reused_tokens": "Prompt tokens found in the cache",
    "output_tokens": "Tokens of answers",
    "proposed_tokens": "Tokens proposed for answers, out of their own texts",
    "accepted_tokens": "Tokens of those that were accepted",
    "batches": "Batches of the decoder",
    "batch_rows": "Sequences in the decoder's batches, summed up",
    "encode_batches": "Batches of the encoder",
    "encode_tiles": "Tiles encoded",
    "encode_packed": "Tiles encoded in one run with tiles of other sizes",
    "preemptions": "Sequences that had to make room",
    "made_way": "Sequences that gave their place to another client's",
    "programs_compiled": "GPU programs that were compiled while answers waited for them",
    "plans_made": "Plans made, for batches of new shapes",
    "plans_waited_for": "Plans made while answers in the midst waited for them",
    "engine_cpu_seconds": "Processor time that the engine's process has had, if it has its own",
}
HISTOGRAMS = {  # field of Latencies -> (name, what it is)
    "first_token": ("time_to_first_token", "From a request to the first token of its answer"),
    "between_tokens": ("inter_token", "From one token of an answer to the next"),
    "queue": ("queue_time", "Until a request had a place in the batch"),
    "whole": ("request_duration", "From a request to the end of its answer"),
}
MILLISECONDS = {
    "queued_ms": "waiting for a place",
    "preprocess_ms": "making pictures and prompts ready",
    "encode_ms": "encoding pictures",
    "prefill_ms": "reading prompts",
    "decode_ms": "writing answers",
}


@dataclass(frozen=True)
class Measured:
    """Describes what a model's service has counted. `labels`: by which it is told from others."""

    labels: Mapping[str, str]
    stats: ServiceStats
    latencies: Latencies


@dataclass(frozen=True)
class Life:
    """Describes how a model of several has fared since the server began; `waiting`: requests
    now.
    """

    loaded: bool
    loads: int
    failures: int
    load_seconds: float
    waiting: int


class Counted(Protocol):
    """The models of a server; `many`: there may be several."""

    @property
    def many(self) -> bool: ...

    @property
    def fault(self) -> DeviceError | None: ...

    def measured(self) -> Sequence[Measured]: ...

    def lives(self) -> Mapping[str, Life]: ...


class Metrics:
    """`count`: one response, by its status, and by the name of the key it was asked for with.
    `text`: everything, as Prometheus reads it.
    """

    def __init__(self, models: Counted) -> None:
        self._registry = CollectorRegistry()
        self._stored = dict[str, Callable[[], int]]()
        self._registry.register(_Stats(models, self._stored))
        self._responses = Counter(
            "mtmd_http_responses", "Responses by status", ["status"], registry=self._registry
        )
        self._callers = Counter(
            "mtmd_key_responses", "Responses by name of the key", ["key"], registry=self._registry
        )

    def add_stored(self, what: str, stored_bytes: Callable[[], int]) -> None:
        """Something beside the models that holds so many bytes of the process's memory."""
        self._stored[what] = stored_bytes

    def count(self, status: int, caller: str | None) -> None:
        self._responses.labels(str(status)).inc()
        if caller is not None:
            self._callers.labels(caller).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Stats(Collector):
    def __init__(self, models: Counted, stored: Mapping[str, Callable[[], int]]) -> None:
        self._models, self._stored = models, stored

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily("mtmd_build_info", "1, of this version", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        yield GaugeMetricFamily(
            "mtmd_device_failed",
            "1 where nothing can be answered any more, as /health says",
            value=int(self._models.fault is not None),
        )
        measured = self._models.measured()
        labels = [*(measured[0].labels if measured else ())]
        rows = [([*m.labels.values()], asdict(m.stats), m.latencies) for m in measured]
        for name, words in NOW.items():
            gauge = GaugeMetricFamily(f"mtmd_{name}", words, labels=labels)
            for row, stats, _ in rows:
                gauge.add_metric(row, stats[name])
            yield gauge
        for name, words in SINCE_START.items():
            counter = CounterMetricFamily(f"mtmd_{name}", words, labels=labels)
            for row, stats, _ in rows:
                counter.add_metric(row, stats[name])
            yield counter
        for name, (called, words) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"mtmd_{called}_seconds", words, labels=labels)
            for row, _, latencies in rows:
                histogram: Histogram = getattr(latencies, name)
                family.add_metric(row, _buckets(histogram), histogram.total_s)
            yield family
        for name, words in MILLISECONDS.items():
            stage = name.removesuffix("_ms")
            spent = f"Time spent {words}, summed over requests"
            counter = CounterMetricFamily(f"mtmd_{stage}_seconds", spent, labels=labels)
            for row, stats, _ in rows:
                counter.add_metric(row, stats[name] / 1e3)
            yield counter
        stored = GaugeMetricFamily(
            "mtmd_held_bytes", "Bytes that the server caches in memory", labels=["what"]
        )
        for what, stored_bytes in self._stored.items():
            stored.add_metric([what], stored_bytes())
        yield stored
        yield from self._of_models()

    def _of_models(self) -> Iterable[Metric]:
        """Return where there are several, which are in memory."""
        if not self._models.many:
            return
        loaded = GaugeMetricFamily(
            "mtmd_model_loaded", "1 where the model is in memory", labels=["model"]
        )
        loads = CounterMetricFamily("mtmd_model_loads", "How often it was loaded", labels=["model"])
        failed = CounterMetricFamily(
            "mtmd_model_load_failures", "How often it could not be loaded", labels=["model"]
        )
        spent = CounterMetricFamily(
            "mtmd_model_load_seconds", "Time spent loading it", labels=["model"]
        )
        waiting = GaugeMetricFamily(
            "mtmd_model_waiting", "Requests that wait until it is in memory", labels=["model"]
        )
        for name, life in self._models.lives().items():
            loaded.add_metric([name], int(life.loaded))
            loads.add_metric([name], life.loads)
            failed.add_metric([name], life.failures)
            spent.add_metric([name], life.load_seconds)
            waiting.add_metric([name], life.waiting)
        yield from (loaded, loads, failed, spent, waiting)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(float, histogram.bounds), math.inf]
    return [
        ("+Inf" if math.isinf(bound) else str(bound), count)
        for bound, count in zip(bounds, histogram.counts, strict=True)
    ]
