"""`mtmd convert MODEL OUT.gguf`: a decoder and its projector as two GGUF files side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mtmd.base.errors import ModelError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.convert.projector import converted_projector
from mtmd.convert.text import converted_text
from mtmd.kernels.checkpoint.gguf_writer import write_gguf
from mtmd.kernels.checkpoint.tensor_writer import Progress

PREFIX = "mmproj-"  # by which llama.cpp's tools and ours find a projector beside a decoder


@dataclass(frozen=True)
class Written:
    """A file that was written. `nmse`: what weights lost that were quantized before, None where
    there were none. `left_out`: what of the model is not in it, "" where nothing is.
    """

    path: Path
    kind: str
    bytes: int
    nmse: float | None
    left_out: str = ""


def convert_to_gguf(
    checkpoint: Checkpoint,
    out: Path,
    mixture: str,
    *,
    projector: str | None = None,
    importance: Mapping[str, torch.Tensor] | None = None,
    text_only: bool = False,
    progress: Progress | None = None,
) -> list[Written]:
    """Write the decoder to `out`, and, where the model sees, unless `text_only`, its projector
    beside it, in plain numbers as it is stored or in the mixture `projector`. Raises ModelError for
    a model that llama.cpp has no architecture for, before anything is written; OSError.
    """
    decoder = converted_text(checkpoint, mixture, importance or {})
    tower = None if text_only else converted_projector(checkpoint, projector)
    made = [(out, mixture, *decoder)]
    if tower:
        made.append((out.with_name(PREFIX + out.name), *tower))
    for path, *_ in made:
        if path.exists():
            raise ModelError(f"{path} is there already; remove it, or choose another name")
    written = []
    for path, kind, metadata, tensors, source in made:
        write_gguf(path, metadata, tensors, source.files, progress)
        left_out = _adapters_left_out(checkpoint) if path == out else ""
        written.append(Written(path, kind, path.stat().st_size, source.nmse, left_out))
    return written


def _adapters_left_out(checkpoint: Checkpoint) -> str:
    """Return how to load the adapter that lies in a model's own folder beside the file."""
    return "; ".join(
        f"without the adapter for {one.name}: load it with --lora {one.name}={one.path} and choose "
        f"it with --adapter {one.name}"
        for one in checkpoint.adapters
        if one.with_audio or one.with_pictures
    )
