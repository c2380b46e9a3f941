"""Describes what an answer comes with: what the model saw, where it ran, and how long each part
took.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from mtmd.base.text import mib, plural


@dataclass(frozen=True)
class ImageReceipt:
    """One picture: sizes are (width, height) in pixels; `notes` say what was done to it that its
    owner may not expect. `box_scale`: what numbers of boxes in the answer mean, by the model's
    authors, "processed" for pixels of the processed size; "" where they do not say.
    """

    original_size: tuple[int, int]
    processed_size: tuple[int, int]
    tiles: int
    tokens: int
    sha256: str
    cached: bool
    notes: tuple[str, ...]
    box_scale: str = ""


@dataclass(frozen=True)
class FrameReceipt:
    """One frame that the model saw: its number in the file, from 0, and its time in seconds.
    `sha256` is of the pixels that were encoded together, of which it is the one at `location`;
    `tokens` are those of all of them.
    """

    index: int
    time: float
    sha256: str
    place: int
    tokens: int
    cached: bool


@dataclass(frozen=True)
class VideoReceipt:
    """One video: sizes are (width, height) in pixels, `fps` frames a second in the file, `sha256`
    that of the file. `read_ms`: to decode the frames, of the answer's `preprocess_ms`;
    `read_before`: they were here from another question. `how` says in which way the model takes
    videos; `notes` as for pictures.
    """

    seconds: float
    fps: float
    frames_in_file: int
    codec: str
    original_size: tuple[int, int]
    processed_size: tuple[int, int]
    frames: tuple[FrameReceipt, ...]
    tokens: int
    sha256: str
    read_ms: float
    read_before: bool
    how: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.frames[0].time, self.frames[-1].time
        number = len(self.frames)
        cached = sum(frame.cached for frame in self.frames)
        known = ", from the cache" if cached == number else f", {cached} from the cache"
        return (
            f"{self.seconds:.1f} s of {_size(self.original_size)} at {self.fps:.4g} fps "
            f"({self.codec}), {plural(number, 'frame')} from {first:.1f} to "
            f"{last:.1f} s seen as {_size(self.processed_size)}, {plural(self.tokens, 'token')}"
            f"{known if cached else ''}, read in {self.read_ms:.0f} ms"
            f"{''.join(f'; {note}' for note in (self.how, *self.notes))}"
        )


@dataclass(frozen=True)
class AudioReceipt:
    """One recording: `rate` samples a second and `channels` in the file, `sha256` that of the file.
    `read_ms`: to decode it, of the answer's `preprocess_ms`; `notes` as for pictures.
    """

    seconds: float
    rate: int
    channels: int
    codec: str
    tokens: int
    sha256: str
    cached: bool
    read_ms: float
    notes: tuple[str, ...]

    def __str__(self) -> str:
        channels = {1: "mono", 2: "stereo"}.get(self.channels, f"{self.channels} channels")
        known = ", from the cache" if self.cached else f", read in {self.read_ms:.0f} ms"
        return (
            f"{self.seconds:.1f} s of {channels} at {self.rate:,} Hz ({self.codec}), "
            f"{plural(self.tokens, 'token')}{known}{''.join(f'; {note}' for note in self.notes)}"
        )


@dataclass(frozen=True)
class SamplingReceipt:
    """A setting by which tokens were chosen. `source`: "request" where the request or the command
    gave it, "preset" where a preset or an option of `mtmd serve` did, "default", or the file of the
    model that holds it.
    """

    value: float
    source: str


@dataclass(frozen=True)
class Receipt:
    """Times are wall time in milliseconds; `reused_tokens` of the prompt were from the cache;
    `proposed_tokens` were read out of the text and verified, `accepted_tokens` of them were right;
    `speculation` says how many are proposed, or why none.

    `threads` of the CPU decoded last, where machine code decodes, else None. `attention` tells by
    which kernel it runs, for each graph; `warnings` what was refused. `ranks` processes shared the
    model; `layout` says which layers each of several devices has, and what `fit` chose, "" where
    there was nothing to choose. `preprocessed` says where pictures and frames that were not known
    from before were resized and normalised, "" where that was the host. Frames of `videos` are not
    among the `images`, their tokens among the `image_tokens`, those of `audio` are `audio_tokens`.
    `kernels_compiled` for the CPU while it was under way, by whichever request, took `compile_ms`.
    `thinking_tokens` of the output are those of the thought before the answer, its marks among
    them.

    `sampling` has the settings by which tokens were chosen, by the names of the options;
    `sampling_unused` names settings of the model's files that were not applied, each with the
    reason. `repeated_tokens` at the end of the answer say the same again and again, 0 where none
    do. `model_notes` say where the model's files contradict themselves, how they are read, and what
    its weights were quantized to. `adapters`: LoRA adapters that the answer was computed with, each
    with its scale. `kv_type` is the type in which keys and values are stored, and `kv_bytes` what
    those of the prompt and the answer take. `activations` is "int8" where products of many rows
    rounded them to that, "int8 (encoder)" where those of the encoder alone did, else "auto"."""

    model: str
    images: tuple[ImageReceipt, ...]
    image_tokens: int
    prompt_tokens: int
    reused_tokens: int
    output_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    finish: str
    queued_ms: float
    preprocess_ms: float
    encode_ms: float
    prefill_ms: float
    decode_ms: float
    device: str
    dtype: str
    attention: dict[str, str]
    speculation: str
    seed: int | None
    warnings: tuple[str, ...]
    threads: int | None = None
    ranks: int = 1
    layout: str = ""
    videos: tuple[VideoReceipt, ...] = ()
    preprocessed: str = ""
    kernels_compiled: int = 0
    compile_ms: float = 0.0
    sampling: dict[str, SamplingReceipt] = field(default_factory=dict)
    sampling_unused: tuple[str, ...] = ()
    repeated_tokens: int = 0
    thinking_tokens: int = 0
    model_notes: tuple[str, ...] = ()
    adapters: dict[str, float] = field(default_factory=dict)
    kv_type: str = ""
    kv_bytes: int = 0
    activations: str = "auto"
    audio: tuple[AudioReceipt, ...] = ()
    audio_tokens: int = 0

    def asdict(self) -> dict[str, Any]:
        """Return it as `dataclasses.asdict` does, which copies every number for itself."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    @property
    def sampling_text(self) -> str:
        """The settings by where they come from; "" where the most probable token was taken, and
        nothing else was said.
        """
        by_source: dict[str, list[str]] = {}
        for name, one in self.sampling.items():
            if one.source != "default" or self.sampling["temperature"].value:
                by_source.setdefault(one.source, []).append(f"{name} {one.value:g}")
        reported = {"request": "as requested", "preset": "by the preset", "default": "by default"}
        parts = [
            f"{', '.join(names)} {reported.get(source) or f'from {source}'}"
            for source, names in by_source.items()
            if by_source.keys() != {"default"}
        ]
        if self.sampling_unused:
            parts.append(f"not applied: {', '.join(self.sampling_unused)}")
        return "; ".join(parts)

    def __str__(self) -> str:
        """One or a few lines for a terminal."""
        lines = [
            f"image {i}: {_size(r.original_size)} seen as {_size(r.processed_size)}, "
            f"{plural(r.tiles, 'tile')}, "
            f"{plural(r.tokens, 'token')}{', from the cache' if r.cached else ''}"
            f"{''.join(f'; {note}' for note in r.notes)}"
            for i, r in enumerate(self.images, 1)
        ]
        lines += [f"video {i}: {video}" for i, video in enumerate(self.videos, 1)]
        lines += [f"audio {i}: {audio}" for i, audio in enumerate(self.audio, 1)]
        per_second = (
            f", {self.output_tokens / self.decode_ms * 1e3:.0f} tokens/s" if self.decode_ms else ""
        )
        reused = f" ({self.reused_tokens} from the cache)" if self.reused_tokens else ""
        proposed = (
            f", {self.accepted_tokens} of {plural(self.proposed_tokens, 'proposed token')} accepted"
            if self.proposed_tokens
            else ""
        )
        thought = f", {self.thinking_tokens} of them thought" if self.thinking_tokens else ""
        location = f" ({self.preprocessed})" if self.preprocessed else ""
        compiled = (
            f"; meanwhile {self.kernels_compiled} "
            f"kernel{'s were' if self.kernels_compiled > 1 else ' was'} compiled in "
            f"{self.compile_ms:.0f} ms, kept for later answers"
            if self.kernels_compiled
            else ""
        )
        waited = f"waited {self.queued_ms:.0f} ms, " if self.queued_ms >= 1 else ""
        lines.append(
            f"{plural(self.prompt_tokens, 'prompt token')}{reused}, "
            f"{plural(self.output_tokens, 'output token')}{thought} ({self.finish}); "
            f"{waited}preprocess {self.preprocess_ms:.0f} ms{location}, encode "
            f"{self.encode_ms:.0f} ms, prefill {self.prefill_ms:.0f} ms, decode "
            f"{self.decode_ms:.0f} ms{per_second}{proposed}{compiled}"
        )
        where = "; ".join(f"{part}: {kernel} attention" for part, kernel in self.attention.items())
        seed = "" if self.seed is None else f"; seed {self.seed}"
        threads = "" if self.threads is None else f" ({plural(self.threads, 'thread')})"
        ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        stored = ""
        if self.kv_type not in ("", self.dtype):
            stored = f", keys and values in {self.kv_type} ({mib(self.kv_bytes)})"
        if self.activations != "auto":
            stored += f", activations: {self.activations}"
        lines.append(
            f"{self.model} on {self.device}{threads}{ranks}, {self.dtype}{stored}; {where}{seed}"
        )
        if self.layout:
            lines.append(self.layout)
        if self.adapters:
            each = (f"{name} (scale {scale:g})" for name, scale in self.adapters.items())
            lines.append(f"adapters: {', '.join(each)}")
        if sampling := self.sampling_text:
            lines.append(f"sampling: {sampling}")
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _plain(value: Any) -> Any:
    """Return a field's value with mappings and tuples of their own, and records as mappings."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
