"""Idefics2: SigLIP over pictures in their own shape, a perceiver resampler, Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from idefics3 import tiles
from published import published

SPECIAL = ("<unk>", "<s>", "</s>", "<fake_token_around_image>", "<image>", "<end_of_utterance>")
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<unk>",
    "unk_token": "<unk>",
    "image_token": "<image>",
    "image_boundary_token": "<fake_token_around_image>",
}
TEMPLATE = """{% for message in messages %}{{message['role'].capitalize()}}{% if message['content'][0]['type'] == 'image' %}{{':'}}\
{% else %}{{': '}}{% endif %}{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for line in message['content'] %}\
{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}\
<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
TEXT = {
    "model_type": "mistral",
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
PATCH = 7


def whole_patches(inputs: Any) -> list[np.ndarray]:
    """Each tile without what is less than a patch, which the tower leaves out."""
    return [
        tile[:, : tile.shape[1] // PATCH * PATCH, : tile.shape[2] // PATCH * PATCH]
        for tile in tiles(inputs)
    ]


def idefics2(
    folder: Path,
    *,
    seed: int = 0,
    splitting: bool = False,
    vision: dict[str, Any] | None = None,
    perceiver: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    """`splitting`: quarters of a picture stand before it."""
    from transformers import Idefics2Config, Idefics2ForConditionalGeneration, Idefics2Processor
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    tokens = tokenizer(SPECIAL, "<s>")
    image = tokens.token_to_id("<image>")
    decoder = TEXT | {"vocab_size": tokens.get_vocab_size() + 3, "pad_token_id": 0} | (text or {})
    resampler = {
        "hidden_size": decoder["hidden_size"],
        "resampler_n_latents": 5,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "resampler_head_dim": 20,
        "num_key_value_heads": 2,
    } | (perceiver or {})
    config = Idefics2Config(
        vision_config={
            "hidden_size": 72,
            "intermediate_size": 110,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 84,
            "patch_size": PATCH,
            **(vision or {}),
        },
        perceiver_config=resampler,
        text_config=decoder,
        image_token_id=image,
    )
    model = randomize(Idefics2ForConditionalGeneration(config), seed, latents=(0, 0.2))
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos=["</s>", "<end_of_utterance>"])
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "Idefics2ImageProcessor",
            "do_convert_rgb": True,
            "do_image_splitting": splitting,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": 80, "shortest_edge": 38},
        },
    )
    processor = build_processor(
        Idefics2Processor,
        folder,
        Idefics2ImageProcessorPil.from_pretrained(folder),
        image_seq_len=resampler["resampler_n_latents"],
    )
    return Oracle(
        folder, model, processor, image, "tiles of whole patches, quarters first", whole_patches
    )


ROW = Row(
    "Idefics2",
    {
        "whole pictures, 4 heads on 2, as published": published(idefics2),
        "quarters, a window, one group": lambda f: idefics2(
            f,
            seed=1,
            splitting=True,
            vision={"hidden_size": 80, "num_attention_heads": 1, "num_hidden_layers": 3},
            perceiver={"num_key_value_heads": 1, "resampler_depth": 3, "resampler_head_dim": 18},
            text={"sliding_window": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
        ),
    },
    notes="pictures in their own shape and perhaps their quarters, learned queries",
)
