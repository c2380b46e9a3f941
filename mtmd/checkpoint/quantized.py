"""What a config.json says of how its weights were quantized by other programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.errors import ModelError


def quantization(settings: Settings) -> str:
    """Return how the weights of a config.json are quantized, such as "awq, 4 bits", in its own
    words; "" where it says nothing.
    """
    text = settings.values.get("text_config")
    for place in (settings.values, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            found = place.get(key)
            if isinstance(found, dict) and found:
                return _words(found, key)
    return ""


@contextmanager
def refused_by_name(settings: Settings, folder: Path) -> Iterator[None]:
    """Weights that do not fit their configuration because they are quantized in a way that is not
    read: raises ModelError naming it in place of the tensor.
    """
    try:
        yield
    except ModelError as error:
        if words := quantization(settings):
            raise ModelError(
                f"{folder}: its weights are quantized ({words}, says config.json) in a way that "
                "is not read; use the original checkpoint, or a GGUF of it"
            ) from error
        raise


def _words(found: dict[str, object], key: str) -> str:
    method = found.get("quant_method", found.get("method", found.get("quant_algo")))
    # MLX names no method, but the size of its groups
    name = method if isinstance(method, str) else "MLX" if "group_size" in found else key
    bits = found.get("bits", found.get("w_bit"))
    if bits is None:
        bits = next((n for n in (4, 8) if found.get(f"load_in_{n}bit") is True), None)
    return f"{name!s:.40}{f', {bits} bits' if type(bits) is int else ''}"
