"""Nemotron 3 Nano Omni's eyes: C-RADIO over pictures in their shape, Nemotron-H's decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from nemotron_h import EXPERTS, TEXT
from safetensors.torch import load_file, save_file
from torchvision_stand_in import torchvision_here

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>")
NAMES = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "</s>"}
TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}{{ '<image>\\n' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
VISION = {
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "mlp_ratio": 1.5,
    "patch_size": 6,
    "max_img_size": 72,
    "num_cls_tokens": 2,
    "num_registers": 3,
    "video_temporal_patch_size": 2,
    "dtype": "float32",
}
LAYOUT = "one array [3, H, W] a picture"


def nemotron_vl(
    folder: Path,
    *,
    seed: int = 0,
    published: bool = False,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    limits: tuple[int, int] = (40, 150),
) -> Oracle:
    """`published`: the authors' names of settings, and experts."""
    with torchvision_here():
        from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import (
            NemotronH_Omni_Reasoning_V3ImageProcessor as Images,
        )
        from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import (
            NemotronH_Omni_Reasoning_V3Processor as Base,
        )
    from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3_Config as Config,
    )
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3 as Model,
    )

    tokens, tower = tokenizer(SPECIAL), VISION | (vision or {})
    image = tokens.token_to_id("<image>")
    config = Config(
        vision_config=tower,
        text_config=TEXT | {"vocab_size": tokens.get_vocab_size() + 3} | (text or {}),
        downsample_ratio=0.5,
        projector_hidden_size=70,
        vision_hidden_size=tower["hidden_size"],
        image_token_id=image,
        audio_config=None,
    )
    model = randomize(Model(config), seed, lambda1=(1.0, 0.0))
    if model.vision_final_layernorm is not None:
        torch.nn.init.ones_(model.vision_final_layernorm.weight)
        torch.nn.init.zeros_(model.vision_final_layernorm.bias)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    settings = {
        "patch_size": tower["patch_size"],
        "downsample_ratio": 0.5,
        "min_num_patches": limits[0],
        "max_num_patches": limits[1],
        "max_model_len": 4096,
    }
    means = {"norm_mean": [0.48145466, 0.4578275, 0.40821073]}
    means |= {"norm_std": [0.26862954, 0.26130258, 0.27577711]}
    write(folder, "preprocessor_config.json", settings | means)
    if published:
        _as_published(folder)

    class Processor(Base):  # type: ignore[misc]
        """It reads pictures in one list, and no video."""

        def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
            if images is not None:
                images = [i for one in images for i in (one if isinstance(one, list) else [one])]
            return super().__call__(images=images or None, text=text, **kwargs)

    images = Images(**settings, **means)
    processor = build_processor(Processor, folder, images, videos=True)

    def unpack(inputs: Any) -> list[np.ndarray]:
        counts = [int(rows * columns) for rows, columns in inputs["image_grid_hw"]]
        return [
            _picture(patches, *map(int, grid), tower["patch_size"])
            for patches, grid in zip(
                inputs["pixel_values"].split(counts), inputs["image_grid_hw"], strict=True
            )
        ]

    return Oracle(folder, model, processor, image, LAYOUT, unpack, authors=published)


def _picture(patches: Any, rows: int, columns: int, patch: int) -> np.ndarray:
    cells = patches.reshape(rows, columns, 3, patch, patch).permute(2, 0, 3, 1, 4)
    result: np.ndarray = cells.reshape(3, rows * patch, columns * patch).numpy()
    return result


def _as_published(folder: Path) -> None:
    """The authors' keys, and no norm of the tower, whose weights are one."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "vision_final_layernorm" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = "NemotronH_Nano_Omni_Reasoning_V3"
    for theirs, ours in (
        ("llm_config", "text_config"),
        ("img_context_token_id", "image_token_id"),
        ("vit_hidden_size", "vision_hidden_size"),
    ):
        config[theirs] = config.pop(ours)
    path.write_text(json.dumps(config, indent=1))


ROW = Row(
    "Nemotron 3 Nano Omni",
    {
        "heads of 20": nemotron_vl,
        "experts, layers that draft, as published": lambda folder: nemotron_vl(
            folder,
            seed=1,
            published=True,
            vision={"hidden_size": 48, "num_attention_heads": 4, "max_img_size": 60},
            text=EXPERTS | {"num_nextn_predict_layers": 1},
            limits=(16, 64),
        ),
    },
    notes="any resolution, scaled as fractions; C-RADIO with learned rows before the patches",
)
