"""Random LoRA adapters, as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYER = "language_model.model.layers.1."
DEMO = {  # of the demo model: names of modules, and the shapes of their weights
    f"{LAYER}self_attn.q_proj": (256, 256),
    f"{LAYER}mlp.up_proj": (768, 256),
}


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]] = DEMO,
    rank: int = 4,
    seed: int = 0,
    gain: float = 2.0,
    **config: Any,
) -> Path:
    """`gain`: how large what is added is, by the size of rows of numbers of unit size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in modules.items():
        a = torch.randn(rank, columns, generator=generator) * columns**-0.5
        b = torch.randn(rows, rank, generator=generator) * gain * rank**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
