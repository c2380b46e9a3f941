"""A checkpoint opened, by its format. No weight is read yet."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mtmd.base.errors import ModelError
from mtmd.checkpoint.checkpoint import FILES, Checkpoint
from mtmd.kernels.checkpoint.magic import is_gguf


def open_checkpoint(
    path: Path, projector: Path | None = None, template: Path | None = None, *, answers: bool = True
) -> Checkpoint:
    """A folder in the Hugging Face layout, or a GGUF file, or a folder of one, with its `projector`
    (mmproj).

    `template` is a file with a chat template to use in place of the checkpoint's. Everything is
    checked that can be without reading weights. `answers`: a model is expected that writes them.
    Raises ModelError saying which file is wrong and how, DualEncoderError for a model that gives
    vectors or scores where one is expected that writes.
    """
    if path.is_dir() and not any(path.glob("*.safetensors*")) and any(path.glob("*.gguf")):
        path = _decoder_in(path)
    if is_gguf(path):
        from mtmd.checkpoint.gguf import open_gguf  # here: a start reads the code of one format

        checkpoint = open_gguf(path, projector, template, answers=answers)
        return replace(checkpoint, opened_from=_paths(path, projector, template))
    if projector is not None:
        raise ModelError(
            f"projector {projector}: {path} is a checkpoint folder, which has its own; give it "
            "with a GGUF file only"
        )
    from mtmd.checkpoint.folder import open_folder

    checkpoint = open_folder(path, template, answers=answers)
    return replace(checkpoint, opened_from=_paths(path, None, template))


def _paths(*paths: Path | None) -> tuple[str | None, ...]:
    return (FILES, *(None if p is None else str(p.absolute()) for p in paths))


def _decoder_in(folder: Path) -> Path:
    """The one decoder among the GGUF files of a folder; of its parts the first."""
    later_part = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf")
    files = sorted(
        p
        for p in folder.glob("*.gguf")
        if "mmproj" not in p.name.lower() and not later_part.search(p.name)
    )
    if len(files) != 1:
        names = ", ".join(p.name for p in files[:6]) or "none but projectors"
        raise ModelError(
            f"{folder} holds several GGUF models ({names}); expected one, or the file itself as "
            "the model"
        )
    return files[0]
