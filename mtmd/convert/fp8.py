"""A checkpoint folder with its decoder in FP8, as transformers' `quant_method: fp8` has it: 8-bit
floats of e4m3 in blocks of 128 x 128, each with a scale in NAME_scale_inv.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.convert.gguf import Written
from mtmd.finding import find_checkpoint
from mtmd.kernels.checkpoint.mixtures import MIXTURES, tensor_types
from mtmd.kernels.checkpoint.safetensors_file import SINGLE, SafetensorsWeights
from mtmd.kernels.checkpoint.settings import read_json
from mtmd.kernels.checkpoint.tensor_writer import Planned, Progress, write_tensors
from mtmd.kernels.cpu.quantize import E4M3_MAX
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.options.load import LoadOptions

BLOCK, FP8, CONFIG = 128, "FP8", "config.json"
COPIED = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "adapter_model.safetensors",
)  # of a folder: what is beside the weights


def convert_to_fp8(
    model: str | PathLike[str], out: Path, progress: Progress | None
) -> list[Written]:
    """Write the folder `out`. Raises ModelError for a model that is no folder of plain
    safetensors, OptionError for a folder that holds something, OSError.
    """
    if (out / CONFIG).exists() or (out.exists() and not out.is_dir()):
        raise OptionError(f"out: {out} is there already; remove it, or choose another name")
    with made_on_the_host():
        checkpoint, _ = find_checkpoint(model, LoadOptions(), progress is not None, answers=False)
        file = checkpoint.text_weights.file
        config = read_json(checkpoint.folder / CONFIG, required=False)
        if not isinstance(file, SafetensorsWeights):  # one of quantized tensors is wrapped
            raise ModelError(
                f"{checkpoint.folder} holds no safetensors in plain numbers, which FP8 is made "
                "from; give the original checkpoint"
            )
        chosen = _chosen(checkpoint)
        tensors = [made for name in file.names() for made in _planned(file, name, name in chosen)]
        out.mkdir(parents=True, exist_ok=True)
        write_tensors(out / SINGLE, _header(tensors), tensors, origin=file.files, progress=progress)
        for pattern in COPIED:
            for path in sorted(checkpoint.folder.glob(pattern)):
                if path.name != CONFIG and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, out / path.name)
        plain = [n for n in file.names() if n not in chosen and len(file.meta(n)[0]) == 2]
        described = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(
                {"lm_head", *(n.removesuffix(".weight") for n in plain)}
            ),
        }
        written = json.dumps({**config, "quantization_config": described}, indent=2)
        (out / CONFIG).write_text(written + "\n", encoding="utf-8")
    return [Written(out, FP8, sum(t.bytes for t in tensors), None)]


def _chosen(checkpoint: Checkpoint) -> frozenset[str]:
    """Names in the file of the decoder's matrices that become FP8."""
    weights = checkpoint.text_weights
    types = tensor_types(FP8, weights.shapes)
    return frozenset(
        name
        for parameter, kind in types.items()
        if kind == MIXTURES[FP8].base
        for name in weights.stored[parameter].names
    )


def _planned(file: SafetensorsWeights, name: str, chosen: bool) -> list[Planned]:
    shape, kind = file.meta(name)[0], file.kind(name)
    if not chosen:
        return [Planned(name, shape, kind, partial(file.read, name))]
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return [
        Planned(name, shape, "F8_E4M3", lambda: _codes(file.read(name))),
        Planned(f"{name}_scale_inv", blocks, "F32", lambda: _scales(file.read(name))),
    ]


def _scales(weight: Tensor) -> Tensor:
    """fp32 [..., N, K] -> [..., N / 128, K / 128]: with each the largest number becomes 448."""
    rows, columns = (-size % BLOCK for size in weight.shape[-2:])
    padded = torch.nn.functional.pad(weight.float(), (0, columns, 0, rows))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    largest = blocks.abs().amax((-3, -1))
    return torch.where(largest == 0, 1.0, largest / E4M3_MAX)


def _codes(weight: Tensor) -> Tensor:
    scales = _scales(weight).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    scales = scales[..., : weight.shape[-2], : weight.shape[-1]]
    return (weight.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _header(tensors: list[Planned]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.bytes]
        entries[tensor.name] = {
            "dtype": tensor.kind,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
