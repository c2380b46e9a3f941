"""Weight files, told apart by their first bytes, not by their names."""

from __future__ import annotations

from pathlib import Path

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.magic import GGUF, first_bytes
from mtmd.kernels.checkpoint.safetensors_file import SafetensorsWeights

__all__ = ["GgufFile", "SafetensorsWeights", "open_weights"]

_ZIP = b"PK\x03\x04"


def open_weights(path: Path) -> SafetensorsWeights | GgufFile:
    """Open a checkpoint folder or one weight file. Raises ModelError, also for formats that are not
    loaded.
    """
    if path.is_dir():
        return SafetensorsWeights(path)
    magic = first_bytes(path)
    if magic.startswith(GGUF):
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
