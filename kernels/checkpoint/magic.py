"""Formats of weight files, recognised by their first bytes. Loads without torch."""

from __future__ import annotations

from pathlib import Path

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.base.spelling import did_you_mean_path

GGUF = b"GGUF"
HEAD_BYTES = 64  # enough to tell the format
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
ADAPTER = frozenset((ADAPTER_CONFIG, ADAPTER_WEIGHTS))
ADD_ADAPTER = "give its base model as the model, and this as lora= (--lora)"
CONVERT = (
    "load it with transformers, and save it with save_pretrained(folder, safe_serialization=True)"
)
# What comes in place of a large file, by its first bytes in lower case, and what to do.
_STAND_INS = {
    b"version https://git-lfs": ("a Git LFS pointer", "fetch the file itself with `git lfs pull`"),
    b"<!doctype html": ("an HTML page", "download the file itself, not its page"),
    b"<html": ("an HTML page", "download the file itself, not its page"),
}


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file. Raises ModelError for a file that cannot be read."""
    return not path.is_dir() and first_bytes(path).startswith(GGUF)


def first_bytes(path: Path) -> bytes:
    """Enough to tell the format. Raises ModelError for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(HEAD_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(
            f"{path}: found no such file, expected a checkpoint folder, a GGUF or a safetensors "
            f"file{did_you_mean_path(path)}"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a checkpoint folder, a GGUF or a "
            "safetensors file"
        ) from error


def stand_in(head: bytes) -> tuple[str, str] | None:
    """Return what a file of weights is that holds none, by its first bytes, and what to do; None
    for one that may hold some.
    """
    text = head.lstrip().lower()
    return next((words for begin, words in _STAND_INS.items() if text.startswith(begin)), None)
