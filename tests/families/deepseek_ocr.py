"""DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR: SAM's encoder, behind it CLIP's or Qwen2 with
learned queries; DeepSeek-V2's experts with plain attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from torchvision_stand_in import torchvision_here

SPECIAL = ("<s>", "</s>", "<pad>", "<image>", "<|grounding|>")
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}\
{% if c.type == 'image' %}{{ '<image>\\n' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
SAM = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "mlp_dim": 50,
    "global_attn_indexes": [1],
    "window_size": 5,
    "output_channels": 22,
    "image_size": 80,
    "patch_size": 4,
    "downsample_channels": [26, 40],
}
CLIP = {
    "hidden_size": 40,
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 22,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
IMAGES = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "crop_to_patches": True,
    "background_color": [127] * 3,
}


def views(inputs: Any) -> list[np.ndarray]:
    """Of each picture its tiles, then the whole."""
    local, result = iter(inputs.get("pixel_values_local", ())), []
    for whole, count in zip(inputs["pixel_values"], inputs["num_local_patches"], strict=True):
        result += [next(local).numpy() for _ in range(int(count))]
        result.append(whole.numpy())
    return result


AUTHORS_SAM = SAM | {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "mlp_dim": 4 * 32,
    "window_size": 14,
    "output_channels": 256,
    "image_size": 128,
    "patch_size": 16,
    "num_hidden_layers": 2,
    "downsample_channels": [4, 40],
}
LAYOUT = "one array [3, H, W] a tile, each picture's whole last"


def unlimited(
    folder: Path,
    *,
    seed: int = 0,
    window: int = 9,
    authors: bool = False,
    clip: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    """`authors`: DeepSeek-OCR with its authors' configuration, resized by Pillow."""
    with torchvision_here():
        from transformers import (
            UnlimitedOcrConfig,
            UnlimitedOcrForConditionalGeneration,
            UnlimitedOcrProcessor,
        )
        from transformers.models.unlimited_ocr.image_processing_unlimited_ocr import (
            UnlimitedOcrImageProcessor,
        )
    tokens, sam = tokenizer(SPECIAL), AUTHORS_SAM if authors else SAM
    image, side = tokens.token_to_id("<image>"), sam["image_size"]
    config = UnlimitedOcrConfig(
        vision_config={"sam_config": sam, "encoder_config": CLIP | (clip or {})},
        text_config=TEXT
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": window,
        }
        | (text or {}),
        image_token_id=image,
    )
    model = randomize(UnlimitedOcrForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="</s>")
    settings = IMAGES | {"size": {"height": side, "width": side}, "max_patches": 4}
    settings |= {"tile_size": 64 if authors else 48}
    kind = {"image_processor_type": "UnlimitedOcrImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings | {"min_patches": 2})
    if authors:
        _as_authors(folder)
    images = by_pillow(settings) if authors else UnlimitedOcrImageProcessor(**settings)
    processor = build_processor(UnlimitedOcrProcessor, folder, images, patch_size=sam["patch_size"])
    return Oracle(folder, model, processor, image, LAYOUT, views, authors=authors)


def by_pillow(settings: dict[str, Any]) -> Any:
    """DeepSeek-OCR-2's image processor, which says of a picture how it is cut, too."""
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
        DeepseekOcr2ImageProcessorPil,
        get_optimal_tiled_canvas,
    )

    class Processor(DeepseekOcr2ImageProcessorPil):  # type: ignore[misc]
        def _preprocess(self, images: Any, *args: Any, **kwargs: Any) -> Any:
            made = super()._preprocess(images, *args, **kwargs)
            tile = kwargs["tile_size"]
            made["patches_grid"] = [
                get_optimal_tiled_canvas(
                    image.shape[-2:], (tile, tile), kwargs["min_patches"], kwargs["max_patches"]
                )
                for image in images
            ]
            # transformers splits by counts that are a list, as Unlimited-OCR's own makes them
            made["num_local_patches"] = [int(count) for count in made["num_local_patches"]]
            return made

    return Processor(**settings)


def _as_authors(folder: Path) -> None:
    """config.json with the keys of DeepSeek-OCR's authors."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text, sam = config.pop("text_config"), config["vision_config"]["sam_config"]
    clip = config["vision_config"]["encoder_config"]
    for key in ("model_type", "layer_types", "mlp_layer_types", "sliding_window"):
        text.pop(key)
    text |= {"first_k_dense_replace": 1, "use_mla": False, "v_head_dim": 0, "kv_lora_rank": None}
    rope = text.pop("rope_parameters")
    names = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
    towers = [{key: tower[theirs] for key, theirs in names.items()} for tower in (sam, clip)]
    towers[0] |= {key: sam[key] for key in ("downsample_channels", "global_attn_indexes")}
    towers[1] |= {key: clip[key] for key in ("image_size", "patch_size")}
    config |= {
        "model_type": "deepseek_vl_v2",
        "language_config": text | {"rope_theta": rope["rope_theta"]},
        "vision_config": {
            "image_size": sam["image_size"],
            "model_type": "vision",
            "width": {"sam_vit_b": towers[0], "clip-l-14-224": towers[1]},
        },
        "projector_config": {"projector_type": "linear"},
    }
    path.write_text(json.dumps(config, indent=1))


def deepseek_ocr2(folder: Path, seed: int = 0) -> Oracle:
    """Pictures no larger than a tile: a page's whole has 4096 patches whatever its size."""
    from transformers import (
        DeepseekOcr2Config,
        DeepseekOcr2ForConditionalGeneration,
        DeepseekOcr2Processor,
    )
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
        DeepseekOcr2ImageProcessorPil,
    )

    tokens = tokenizer(SPECIAL)
    image = tokens.token_to_id("<image>")
    sam = SAM | {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
        "output_channels": 10,
        "image_size": 128,
        "patch_size": 2,
        "downsample_channels": [14, 64],
    }
    encoder = {
        "hidden_size": 64,
        "intermediate_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder},
        text_config=TEXT
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "mlp_layer_types": ["sparse", "sparse", "sparse"],
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        image_token_id=image,
    )
    model = randomize(DeepseekOcr2ForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="</s>")
    settings = IMAGES | {"size": {"height": 128, "width": 128}, "tile_size": 96}
    kind = {"image_processor_type": "DeepseekOcr2ImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)
    images = DeepseekOcr2ImageProcessorPil(**settings)
    processor = build_processor(DeepseekOcr2Processor, folder, images, patch_size=2)
    return Oracle(folder, model, processor, image, LAYOUT, views)


ROW = Row(
    "DeepSeek-OCR, DeepSeek-OCR-2, Unlimited-OCR",
    {
        "DeepSeek-OCR-2": deepseek_ocr2,
        "DeepSeek-OCR, as its authors": lambda folder: unlimited(
            folder,
            seed=1,
            window=10000,
            authors=True,
            clip={"image_size": 14, "intermediate_size": 160, "num_hidden_layers": 1},
            text={"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
        ),
        "Unlimited-OCR": unlimited,
    },
    notes="SAM, behind it CLIP or learned queries; tiles and the whole page",
)
