"""Weight files. `open_weights` is the one door; it looks at a file's first bytes, not at its name."""
from __future__ import annotations

from pathlib import Path

from mtmd.kernels.errors import ModelError
from mtmd.kernels.weights.safetensors_file import SafetensorsWeights

__all__ = ["SafetensorsWeights", "open_weights"]

_ZIP, _GGUF = b"PK\x03\x04", b"GGUF"


def open_weights(path: Path) -> SafetensorsWeights:
    """Open a checkpoint folder or one weight file. Raises ModelError, also for formats that are not loaded."""
    if path.is_dir():
        files = [file for file in sorted(path.glob("*.gguf")) if not any(path.glob("*.safetensors*"))]
        if files:
            raise _refuse_gguf(files[0])
        return SafetensorsWeights(path)
    try:
        with path.open("rb") as file:
            magic = file.read(16)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); expected a checkpoint folder or a safetensors file") from error
    if magic.startswith(_GGUF):
        raise _refuse_gguf(path)
    # A pickle begins with its protocol: 0x80, then 2 to 5. A safetensors file has its "{" at byte 8.
    if magic.startswith(_ZIP) or (magic[:1] == b"\x80" and magic[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and magic[8:9] != b"{"):
        raise ModelError(f"{path} is a pickle, which can run code when loaded, so none is loaded; use the safetensors files of the model")
    return SafetensorsWeights(path)


def _refuse_gguf(path: Path) -> ModelError:
    return ModelError(f"{path}: GGUF is not read by this version yet; use the safetensors folder")
