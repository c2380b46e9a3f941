"""Checkpoints in the layout in which mlx-vlm publishes them: its names of towers and decoders,
channels of convolutions last, experts of a layer in one tensor, some norms as they are applied.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import audio_cases
import pytest
import torch
from audio_oracle import AudioOracle
from common import Oracle
from gemma3 import gemma3
from gemma4 import ROW as GEMMA4
from glm4v import glm4v
from idefics3 import idefics3
from lfm2_vl import lfm2_vl
from pixtral import ROW as PIXTRAL
from qwen2_vl import qwen2_5_vl
from qwen3_5 import qwen3_5
from qwen3_vl import qwen3_vl
from safetensors.torch import load_file, save_file
from test_quantized import FAMILIES as FAMILIES_OF_WHOLE_BLOCKS
from torch import Tensor

from mtmd.checkpoint.open import open_checkpoint

Rename = tuple[tuple[str, str], ...]
DECODER: Rename = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (
        r"^model\.(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\.",
        r"\1.",
    ),
)
QWEN: Rename = ((r"^model\.visual\.", "vision_tower."), *DECODER)
FAMILIES: dict[str, tuple[Callable[[Path], Oracle | AudioOracle], Rename]] = {
    "gemma3": (gemma3, DECODER),
    "gemma4, experts": (GEMMA4.variants["experts"], DECODER),
    "gemma4, audio": (audio_cases.gemma4, DECODER),
    "glm4v": (glm4v, QWEN),
    "smolvlm": (
        lambda f: idefics3(f, kind="SmolVLM"),
        (
            (r"^model\.text_model\.", "language_model."),
            (r"^lm_head\.", "language_model.lm_head."),
            (r"^model\.", ""),
        ),
    ),
    "lfm2_vl": (lfm2_vl, ((r"vision_model\.", ""), *DECODER)),
    "mistral3": (
        PIXTRAL.variants["mistral3"],
        (*DECODER, (r"^vision_tower\.", "vision_tower.vision_model.")),
    ),
    "qwen2_5_vl": (qwen2_5_vl, QWEN),
    "qwen3_vl, experts": (lambda f: qwen3_vl(f, experts=True), QWEN),
    "qwen3_5, experts": (lambda f: qwen3_5(f, experts=True), QWEN),
}
SHIFTED = r"(input_layernorm|post_attention_layernorm|model\.norm|[qk]_norm)\.weight"


def as_mlx(name: str, tensor: Tensor, family: str) -> dict[str, Tensor]:
    """One tensor under the names, and in the layout, of MLX."""
    for pattern, theirs in FAMILIES[family][1]:
        name = re.sub(pattern, theirs, name)
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
        stacked = "experts.switch_glu" if family.startswith("gemma4") else "switch_mlp"
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        at = name.partition("experts.")[0]
        pieces = zip(parts, tensor.chunk(len(parts), 1), strict=True)
        return {f"{at}{stacked}.{part}.weight": piece for part, piece in pieces}
    if tensor.dim() > 3 or name.endswith(("conv1d.weight", "conv.conv.weight")):
        tensor = tensor.movedim(1, -1)
    if family.startswith("qwen3_5") and re.search(SHIFTED, name) and "vision" not in name:
        tensor = tensor + 1
    return {name: tensor}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_original(family: str, tmp_path: Path) -> None:
    source, mlx = tmp_path / "model", tmp_path / "mlx"
    FAMILIES[family][0](source)
    shutil.copytree(source, mlx, ignore=shutil.ignore_patterns("*.safetensors"))
    made = dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        made |= {n: t.contiguous() for n, t in as_mlx(name, tensor, family).items()}
    save_file(made, mlx / "model.safetensors", {"format": "mlx"})
    before = load_file(source / "model.safetensors").items()
    assert {(n, t.shape) for n, t in made.items()} != {(n, t.shape) for n, t in before}
    expected, actual = open_checkpoint(source), open_checkpoint(mlx)
    for part in ("text", "vision", "audio"):
        ours, theirs = (getattr(one, f"{part}_weights") for one in (actual, expected))
        if part == "audio" and theirs is None:
            assert ours is None
            continue
        assert ours.shapes == theirs.shapes
        for name in theirs.shapes:
            one, other = (w.read(name, torch.float32) for w in (ours, theirs))
            assert torch.allclose(one, other, rtol=0, atol=1e-6), name


def test_layers_are_quantized_by_their_names(tmp_path: Path) -> None:
    """Single layers may have bits of their own, by the names that MLX gives them."""
    import mlx.core as mx
    import numpy as np

    source = tmp_path / "model"
    FAMILIES_OF_WHOLE_BLOCKS["qwen2_5_vl"](source)
    held, kinds = dict[str, Tensor](), dict[str, dict[str, int]]()
    for name, tensor in load_file(source / "model.safetensors").items():
        ((name, weight),) = as_mlx(name, tensor, "qwen2_5_vl").items()
        if not (weight.dim() == 2 and "layers" in name and weight.shape[1] % 64 == 0):
            held[name] = weight.contiguous()
            continue
        base = name.removesuffix(".weight")
        bits = kinds.setdefault(base, {"group_size": 64, "bits": 8 if "v_proj" in name else 4})
        parts = mx.quantize(mx.array(weight.float().numpy()), **bits)
        named = zip(("weight", "scales", "biases"), parts, strict=True)
        held |= {f"{base}.{part}": torch.from_numpy(np.array(array)) for part, array in named}
    save_file(held, source / "model.safetensors", {"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4, **kinds}
    (source / "config.json").write_text(json.dumps(config))
    weights = open_checkpoint(source).text_weights
    assert {weights.quant(f"blk.0.attn_{part}.weight") for part in "qk"} == {"A4_64"}
    assert weights.quant("blk.0.attn_v.weight") == "A8_32"
