"""SmolVLM, SmolVLM2 and Idefics3: SigLIP over tiles and an overview, pixel shuffle, row and column
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

TILES = tuple(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6))
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *TILES,
)
TEMPLATE = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}\
{{':'}}{% else %}{{': '}}{% endif %}{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}\
{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
NAMES = {
    "bos_token": "<|im_start|>",
    "eos_token": "<end_of_utterance>",
    "pad_token": "<|endoftext|>",
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiles(inputs: Any) -> list[np.ndarray]:
    """Each tile without the padding that its mask tells."""
    result = []
    for pixels, mask in zip(
        inputs["pixel_values"][0], inputs["pixel_attention_mask"][0], strict=True
    ):
        height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
        if height and width:
            result.append(pixels[:, :height, :width].numpy())
    return result


def idefics3(
    folder: Path,
    *,
    kind: str = "Idefics3",
    seed: int = 0,
    tile: int = 24,
    patch: int = 6,
    longest: int = 72,
    scale: int = 2,
    splitting: bool = True,
    tied: bool = False,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    """`kind`: Idefics3 or SmolVLM; `tile`: side of a tile; `longest`: the edge that pictures are
    scaled to before they are cut.
    """
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    # writes out how many frames a video has; SmolVLM's processor insists on it
    processing_smolvlm.num2words = str
    tokens = tokenizer(SPECIAL)
    image = tokens.token_to_id("<image>")
    tower = {
        "hidden_size": 72,
        "intermediate_size": 110,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "image_size": tile,
        "patch_size": patch,
    } | (vision or {})
    settings = (
        TEXT
        | {
            "vocab_size": tokens.get_vocab_size() + 3,
            "pad_token_id": 0,
            "tie_word_embeddings": tied,
        }
        | (text or {})
    )
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower,
        text_config=settings,
        image_token_id=image,
        scale_factor=scale,
        tie_word_embeddings=tied,
        pad_token_id=tokens.token_to_id("<|endoftext|>"),
    )
    model = randomize(getattr(transformers, f"{kind}ForConditionalGeneration")(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<end_of_utterance>")
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": f"{kind}ImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_pad": True,
            "do_image_splitting": splitting,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "rescale_factor": 1 / 255,
            "resample": 1,
            "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": tile},
        },
    )
    count = (tile // patch) ** 2 // scale**2
    write(
        folder,
        "processor_config.json",
        {"image_seq_len": count, "processor_class": f"{kind}Processor"},
    )
    smol = kind == "SmolVLM"
    images = (SmolVLMImageProcessorPil if smol else Idefics3ImageProcessorPil).from_pretrained(
        folder
    )
    processor = build_processor(
        getattr(transformers, f"{kind}Processor"), folder, images, videos=smol, image_seq_len=count
    )
    return Oracle(
        folder,
        model,
        processor,
        image,
        "one array [3, h, w] a tile, its padding cut off, in the order of the prompt",
        tiles,
    )


ROW = Row(
    "SmolVLM, Idefics3",
    {
        "smolvlm": lambda f: idefics3(f, kind="SmolVLM"),
        "smolvlm, tied, shuffle of 3, 6 heads on 2, as published": published(
            lambda f: idefics3(
                f,
                kind="SmolVLM",
                seed=1,
                tile=36,
                patch=6,
                longest=108,
                scale=3,
                tied=True,
                vision={"hidden_size": 80, "num_attention_heads": 2},
                text={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            )
        ),
        "smolvlm, whole pictures": lambda f: idefics3(
            f, kind="SmolVLM", seed=2, splitting=False, longest=48
        ),
        "idefics3, llama3 rope, as published": published(
            lambda f: idefics3(
                f,
                seed=3,
                tile=28,
                patch=7,
                longest=84,
                vision={"hidden_size": 48, "num_attention_heads": 2},
                text={
                    "rope_parameters": LLAMA3,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "hidden_size": 64,
                },
            )
        ),
    },
    notes="tiles and overview, pixel shuffle, row and column tokens",
)
