"""What the first bytes of a weight file say. Loads without torch."""

from __future__ import annotations

from pathlib import Path

from mtmd.kernels.errors import ModelError
from mtmd.kernels.files import open_regular

GGUF = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file. Raises ModelError for a file that cannot be read."""
    return not path.is_dir() and first_bytes(path).startswith(GGUF)


def first_bytes(path: Path) -> bytes:
    """Enough to tell the format. Raises ModelError for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(16)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a checkpoint folder, a GGUF or a "
            "safetensors file"
        ) from error
