"""Describes what a service tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenCount:
    """Describes what a prompt would take, its pictures not encoded."""

    prompt_tokens: int
    image_tokens: tuple[int, ...]
    context: int
    video_tokens: tuple[int, ...] = ()
    audio_tokens: tuple[int, ...] = ()


@dataclass
class ServiceStats:
    """Plain numbers since the service began; those of running, waiting, clients_waiting, encoding,
    pages_used and of bytes are of this moment. `engine_bytes` resident and `engine_cpu_seconds` of
    processor time are of the engine's process, where it has one of its own.
    Pictures, which frames of videos are not among, are shrunk and refused for want of memory. Of
    tokens that were proposed for answers, some were accepted. `programs_compiled`, for a GPU, while
    answers waited for them. `preemptions`: of those finished; `made_way` for another client, of
    all. `plans_waited_for`, of those made, by answers in the midst of being written.
    """

    slots: int = 0
    running: int = 0
    waiting: int = 0
    clients_waiting: int = 0
    encoding: int = 0
    pages: int = 0
    pages_used: int = 0
    image_cache_bytes: int = 0
    processed_bytes: int = 0
    video_cache_bytes: int = 0
    engine_bytes: int = 0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    images: int = 0
    image_cache_hits: int = 0
    images_shrunk: int = 0
    images_refused: int = 0
    videos: int = 0
    video_frames: int = 0
    audio: int = 0
    audio_cache_hits: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    batches: int = 0
    batch_rows: int = 0
    encode_batches: int = 0
    encode_tiles: int = 0
    encode_packed: int = 0
    preemptions: int = 0
    made_way: int = 0
    programs_compiled: int = 0
    plans_made: int = 0
    plans_waited_for: int = 0
    engine_cpu_seconds: float = 0.0
    queued_ms: float = 0.0
    preprocess_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
