"""What the service counts, for Prometheus. A registry of our own: no other library's numbers,
nothing of the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mtmd.service.measures.latencies import Histogram

if TYPE_CHECKING:
    from mtmd import Service


CONTENT_TYPE = CONTENT_TYPE_LATEST
NOW = {  # field of ServiceStats -> what it is
    "slots": "Sequences that can be answered at once",
    "running": "Sequences being answered",
    "waiting": "Requests that wait for a place",
    "clients_waiting": "Clients whose requests wait for a place",
    "encoding": "Pictures being encoded or waiting for it",
    "pages": "Pages of the key-value cache",
    "pages_used": "Pages of it in use",
}
SINCE_START = {
    "requests": "Requests taken",
    "finished": "Answers finished",
    "cancelled": "Requests given up by their clients",
    "failed": "Requests that failed",
    "rejected": "Requests turned away because too many waited",
    "images": "Pictures in requests",
    "image_cache_hits": "Pictures whose embeddings were known",
    "images_shrunk": "Pictures made smaller for want of memory",
    "images_refused": "Pictures refused for want of memory",
    "videos": "Videos in requests",
    "video_frames": "Frames of videos that were seen",
    "image_tokens": "Tokens of pictures",
    "prompt_tokens": "Tokens of prompts",
    "reused_tokens": "Tokens of prompts known from before",
    "output_tokens": "Tokens of answers",
    "proposed_tokens": "Tokens proposed for answers, out of their own texts",
    "accepted_tokens": "Tokens of those that were accepted",
    "batches": "Batches of the decoder",
    "batch_rows": "Sequences in the decoder's batches, summed up",
    "encode_batches": "Batches of the encoder",
    "encode_tiles": "Tiles encoded",
    "preemptions": "Sequences that had to make room",
    "made_way": "Sequences that gave their place to another client's",
}
HISTOGRAMS = {  # field of Latencies -> (name, what it is)
    "first_token": ("time_to_first_token", "From a request to the first token of its answer"),
    "between_tokens": ("inter_token", "From one token of an answer to the next"),
    "queue": ("queue_time", "Until a request had a place in the batch"),
}
MILLISECONDS = {
    "queued_ms": "waiting for a place",
    "preprocess_ms": "making pictures and prompts ready",
    "encode_ms": "encoding pictures",
    "prefill_ms": "reading prompts",
    "decode_ms": "writing answers",
}


class Metrics:
    """`count`: one response, by its status, and by the name of the key it was asked for with.
    `text`: everything, as Prometheus reads it.
    """

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Stats(service))
        self._responses = Counter(
            "mtmd_http_responses", "Responses by status", ["status"], registry=self._registry
        )
        self._callers = Counter(
            "mtmd_key_responses", "Responses by name of the key", ["key"], registry=self._registry
        )

    def count(self, status: int, caller: str | None) -> None:
        self._responses.labels(str(status)).inc()
        if caller is not None:
            self._callers.labels(caller).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Stats(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        stats = asdict(self._service.stats())
        yield GaugeMetricFamily(
            "mtmd_device_failed",
            "1 where nothing can be answered any more, as /health says",
            value=int(self._service.fault is not None),
        )
        for name, words in NOW.items():
            yield GaugeMetricFamily(f"mtmd_{name}", words, value=stats[name])
        for name, words in SINCE_START.items():
            yield CounterMetricFamily(f"mtmd_{name}", words, value=stats[name])
        latencies = self._service.latencies
        for name, (called, words) in HISTOGRAMS.items():
            histogram: Histogram = getattr(latencies, name)
            bounds = [*map(float, histogram.bounds), math.inf]
            yield HistogramMetricFamily(
                f"mtmd_{called}_seconds",
                words,
                buckets=[
                    ("+Inf" if math.isinf(bound) else str(bound), count)
                    for bound, count in zip(bounds, histogram.counts, strict=True)
                ],
                sum_value=histogram.total_s,
            )
        for name, words in MILLISECONDS.items():
            stage = name.removesuffix("_ms")
            yield CounterMetricFamily(
                f"mtmd_{stage}_seconds",
                f"Time spent {words}, summed over requests",
                value=stats[name] / 1e3,
            )
