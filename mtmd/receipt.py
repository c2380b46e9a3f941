"""What an answer comes with: what the model saw, where it ran, and how long each part took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ImageReceipt:
    """One picture: sizes are (width, height) in pixels; `notes` say what was done to it that its
    owner may not expect.
    """

    original_size: tuple[int, int]
    processed_size: tuple[int, int]
    tiles: int
    tokens: int
    sha256: str
    cached: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Receipt:
    """Times are wall time in milliseconds; `reused_tokens` of the prompt were known from before;
    `proposed_tokens` were read out of the text and verified, `accepted_tokens` of them were right;
    `speculation` says how many are proposed, or why none.

    `threads` of the CPU decoded last, where machine code decodes, else None. `attention` tells by
    which kernel it runs, for each graph; `warnings` what was refused. `ranks` processes shared the
    model."""

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

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """One or a few lines for a terminal."""
        lines = [
            f"image {i}: {_size(r.original_size)} seen as {_size(r.processed_size)}, {r.tiles} "
            f"tile{'s' if r.tiles > 1 else ''}, "
            f"{r.tokens} tokens{', from the cache' if r.cached else ''}"
            f"{''.join(f'; {note}' for note in r.notes)}"
            for i, r in enumerate(self.images, 1)
        ]
        per_second = (
            f", {self.output_tokens / self.decode_ms * 1e3:.0f} tokens/s" if self.decode_ms else ""
        )
        reused = f" ({self.reused_tokens} known from before)" if self.reused_tokens else ""
        proposed = (
            f", {self.accepted_tokens} of {self.proposed_tokens} proposed tokens accepted"
            if self.proposed_tokens
            else ""
        )
        waited = f"waited {self.queued_ms:.0f} ms, " if self.queued_ms >= 1 else ""
        lines.append(
            f"{self.prompt_tokens} prompt tokens{reused}, {self.output_tokens} output tokens "
            f"({self.finish}); "
            f"{waited}preprocess {self.preprocess_ms:.0f} ms, encode {self.encode_ms:.0f} ms, "
            f"prefill {self.prefill_ms:.0f} ms, decode {self.decode_ms:.0f} ms{per_second}"
            f"{proposed}"
        )
        where = "; ".join(f"{part}: {kernel} attention" for part, kernel in self.attention.items())
        seed = "" if self.seed is None else f"; seed {self.seed}"
        threads = (
            ""
            if self.threads is None
            else f" ({self.threads} thread{'s' if self.threads > 1 else ''})"
        )
        ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        lines.append(f"{self.model} on {self.device}{threads}{ranks}, {self.dtype}; {where}{seed}")
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
