"""Counters of a service: what it was asked for, what came of it, and how long callers waited."""

from __future__ import annotations

import threading
import time

from mtmd.service.latencies import Latencies
from mtmd.service.request import Request
from mtmd.service.stats import ServiceStats


class Counters:
    """The thread of the device counts; any thread may call `one_more`."""

    def __init__(self, stats: ServiceStats) -> None:
        self.stats, self.latencies = stats, Latencies()
        self._lock = threading.Lock()

    def one_more(self, statistic: str) -> None:
        with self._lock:
            setattr(self.stats, statistic, getattr(self.stats, statistic) + 1)

    def taken(self, request: Request) -> None:
        """Count a request, and what its prompt has."""
        stats, prompt = self.stats, request.prompt
        stats.requests += 1
        stats.preprocess_ms += request.preprocess_ms
        stats.images += len(prompt.images)
        stats.images_shrunk += sum(p.plan.shrunk_from is not None for p in prompt.images)
        stats.image_cache_hits += sum(p.receipt.cached for p in prompt.images)
        stats.audio += len(prompt.audio)
        stats.audio_cache_hits += sum(one.receipt.cached for one in prompt.audio)
        stats.videos += len(prompt.videos)
        stats.video_frames += sum(len(video.frames) for video in prompt.videos)

    def tokens(self, request: Request, count: int, queued_ms: float) -> None:
        """Note how long its caller waited for so many new tokens."""
        if not count:
            return
        now, reported, latencies = time.perf_counter(), request.reported, self.latencies
        if reported is None:
            latencies.first_token.add(now - request.began + request.preprocess_ms / 1e3)
            latencies.queue.add(queued_ms / 1e3)
            if count > 1:
                latencies.between_tokens.add(0.0, count - 1)
        else:
            latencies.between_tokens.add((now - reported) / count, count)
        request.reported = now

    def ended(self, request: Request, finish: str) -> None:
        """Count the end of an answer, and what it took."""
        stats, sequence = self.stats, request.sequence
        if finish == "cancelled":
            stats.cancelled += 1
        else:
            stats.finished += 1
            took_s = time.perf_counter() - request.began + request.preprocess_ms / 1e3
            self.latencies.whole.add(took_s)
        if sequence is not None:
            stats.prompt_tokens += sequence.prompt_tokens
            stats.reused_tokens += sequence.reused
            stats.preemptions += sequence.preemptions
            stats.proposed_tokens += sequence.proposed
            stats.accepted_tokens += sequence.accepted
            stats.queued_ms += sequence.queued_ms
            stats.prefill_ms += sequence.prefill_ms
            stats.decode_ms += sequence.decode_ms
        stats.output_tokens += len(request.tokens)
        heard = sum(one.plan.tokens for one in request.prompt.audio)
        stats.audio_tokens += heard
        stats.image_tokens += sum(p.plan.tokens for p in request.prompt.pictures) - heard
