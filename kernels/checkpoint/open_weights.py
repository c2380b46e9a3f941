"""Weight files, told apart by their first bytes, not by their names."""

from __future__ import annotations

from pathlib import Path

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.magic import GGUF, first_bytes
from mtmd.kernels.checkpoint.quantized.scheme import read_scheme
from mtmd.kernels.checkpoint.quantized.weights import QuantizedWeights
from mtmd.kernels.checkpoint.safetensors_file import SafetensorsWeights

__all__ = ["GgufFile", "QuantizedWeights", "SafetensorsWeights", "open_weights"]

_ZIP = b"PK\x03\x04"


def open_weights(path: Path) -> QuantizedWeights | SafetensorsWeights | GgufFile:
    """Open a checkpoint folder, quantized or not, or one weight file. Raises ModelError, also for
    formats that are not loaded.
    """
    if path.is_dir():
        file, scheme = SafetensorsWeights(path), read_scheme(path)
        return QuantizedWeights(file, scheme) if scheme.is_read else file
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
