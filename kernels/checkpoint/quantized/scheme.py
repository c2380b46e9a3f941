"""Settings of quantized weights, in the files of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings, read_json

CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"
KEYS = ("quantization_config", "compression_config", "quantization")
GROUP_MAX = 1 << 20  # as wide as a layer may be

# Formats by the methods that config.json names, and how they are called in texts.
METHODS = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "auto-round": "AutoRound",
    "bitsandbytes": "bitsandbytes",
    "mlx": "MLX",
}
READ = "FP8, AWQ, GPTQ, AutoRound, compressed-tensors, ModelOpt, bitsandbytes and MLX"


@dataclass(frozen=True)
class Scheme:
    """The way in which weights are quantized, in the words of their folder. `method` is "" where it
    says nothing, and one of METHODS or another that is not read; `settings` are those of the
    method.
    """

    method: str
    settings: Settings

    @property
    def is_read(self) -> bool:
        return self.method in METHODS

    @property
    def words(self) -> str:
        """The method and its bits, such as "awq, 4 bits"; "" where the folder says nothing."""
        if not self.method:
            return ""
        bits = self.settings.get("bits", self.settings.get("w_bit", None))
        if bits is None:
            flags = (n for n in (4, 8) if self.settings.get(f"load_in_{n}bit", False) is True)
            bits = next(flags, None)
        return f"{self.method:.40}{f', {bits} bits' if type(bits) is int else ''}"


def read_scheme(folder: Path) -> Scheme:
    """The scheme of a checkpoint folder: `quantization_config` of config.json, of its text_config,
    or ModelOpt's own file. Raises ModelError for files that are not JSON.
    """
    config = read_json(folder / CONFIG, required=False)
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for key in KEYS:
            result = values.get(key)
            if isinstance(result, dict) and result:
                return Scheme(_method(result, key), Settings(result, f"{folder / CONFIG}: {key}"))
    modelopt = read_json(folder / MODELOPT, required=False).get("quantization")
    if isinstance(modelopt, dict) and modelopt:
        return Scheme("modelopt", Settings(modelopt, f"{folder / MODELOPT}: quantization"))
    return Scheme("", Settings({}, str(folder / CONFIG)))


def sizes(values: Settings, key: str, length: int) -> tuple[int, ...] | None:
    """`length` sizes of a block, None where they are absent. Raises ModelError."""
    value = values.get(key, None)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != length
        or not all(type(n) is int and 0 < n <= GROUP_MAX for n in value)
    ):
        raise ModelError(
            f"{values.where}: {key} is {value!r:.40}, expected {length} sizes from 1 to {GROUP_MAX}"
        )
    return tuple(value)


def _method(result: Mapping[str, Any], key: str) -> str:
    method = result.get("quant_method", result.get("method", result.get("quant_algo")))
    if isinstance(method, str) and method:
        return method.lower()
    # MLX names no method, but the size of its groups.
    return "mlx" if "group_size" in result else key
