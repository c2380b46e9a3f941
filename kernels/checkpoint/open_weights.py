"""Weight files, told apart by their first bytes, not by their names."""

from __future__ import annotations

from pathlib import Path

from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.safetensors_file import SafetensorsWeights
from mtmd.kernels.errors import ModelError
from mtmd.kernels.files import open_regular

__all__ = ["GgufFile", "SafetensorsWeights", "is_gguf", "open_weights"]

_ZIP, _GGUF = b"PK\x03\x04", b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file. Raises ModelError for a file that cannot be read."""
    return not path.is_dir() and _magic(path).startswith(_GGUF)


def open_weights(path: Path) -> SafetensorsWeights | GgufFile:
    """Open a checkpoint folder or one weight file. Raises ModelError, also for formats that are not
    loaded.
    """
    if path.is_dir():
        return SafetensorsWeights(path)
    magic = _magic(path)
    if magic.startswith(_GGUF):
        return GgufFile(path)
    # A pickle begins with its protocol: 0x80, then 2 to 5. A safetensors file has its "{" at byte
    # 8.
    if magic.startswith(_ZIP) or (
        magic[:1] == b"\x80"
        and magic[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
        and magic[8:9] != b"{"
    ):
        raise ModelError(
            f"{path} is a pickle, which can run code when loaded, so none is loaded; use the "
            "safetensors files of the model"
        )
    return SafetensorsWeights(path)


def _magic(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(16)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a checkpoint folder, a GGUF or a "
            "safetensors file"
        ) from error
