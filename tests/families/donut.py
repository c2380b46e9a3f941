"""Donut: Swin over a page, to whose states mBART's kind of decoder attends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Messages, Row, load_tokenizer, randomize, save, tokenizer, write
from instructblip import lines
from trocr import NAMES, Attended
from trocr import SPECIAL as USUAL

SPECIAL = (
    *USUAL,
    *("<sep/>", "<yes/>", "<s_iitcdip>", "<s_synthdog>"),
    *("<s_menu>", "</s_menu>", "<s_nm>", "</s_nm>"),
)
QUESTIONS = ("<s_docvqa>", "<s_question>", "</s_question>", "<s_answer>", "</s_answer>")
ENCODER = {
    "image_size": [56, 40],
    "patch_size": 4,
    "embed_dim": 24,
    "depths": [2, 4, 2],
    "num_heads": [2, 3, 6],
    "window_size": 3,
}
DECODER = {
    "d_model": 96,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 118,
    "max_position_embeddings": 128,
    "scale_embedding": True,
    "is_decoder": True,
    "add_cross_attention": True,
}
# What is seen of the picture is nearly the same for every token: it may not drown the rest, nor may
# what a token is, as the table of outputs is that of tokens.
TABLES = {
    "embed_positions": (0, 5.0),
    "layernorm_embedding.bias": (0, 0.02),
    "layer_norm.bias": (0, 0.02),
    "fc1.bias": (0, 0.5),
    "fc2.bias": (0, 0.01),
    "fc2.weight": (0, 0.05),
    "self_attn.out_proj.weight": (0, 0.02),
    "encoder_attn.out_proj.weight": (0, 0.05),
    "out_proj.bias": (0, 0.02),
    "embed_tokens": (0, 0.02),
    "relative_position_bias_table": (0, 1.0),
}


@dataclass
class Pages(Attended):
    """The prompt is what begins an answer, with the last question where there are any."""

    asked: bool = True

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        pixels = self.processor(images=list(images), return_tensors="pt")["pixel_values"]
        read = load_tokenizer(self.folder)
        text = read.convert_ids_to_tokens(self.image_token)
        if self.asked:
            text += f"<s_question>{lines(messages[-1:])}</s_question><s_answer>"
        ids = read(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {"pixel_values": pixels, "decoder_input_ids": ids}


def donut(
    folder: Path,
    *,
    seed: int = 0,
    encoder: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    start: str = "<s_docvqa>",
    stated: bool = False,
    image: dict[str, Any] | None = None,
) -> Pages:
    from transformers import (
        DonutSwinConfig,
        MBartConfig,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
    )
    from transformers.models.donut.image_processing_pil_donut import DonutImageProcessorPil

    asked = start == QUESTIONS[0]
    tokens = tokenizer((*SPECIAL, *(QUESTIONS if asked else (start,))), bos="<s>")
    ids = {
        f"{name}_token_id": tokens.token_to_id(NAMES[f"{name}_token"])
        for name in ("bos", "eos", "pad")
    }
    tower = ENCODER | (encoder or {})
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        DonutSwinConfig(**tower),
        MBartConfig(**(DECODER | ids | (decoder or {})), vocab_size=tokens.get_vocab_size()),
        **ids,
    )
    model = randomize(VisionEncoderDecoderModel(config), seed, **TABLES)
    model = save(folder, model, tokens, "", NAMES, eos="</s>")
    (folder / "chat_template.jinja").unlink()
    model.generation_config.forced_eos_token_id = None  # the end is a token like any other
    height, width = tower["image_size"]
    write(
        folder,
        "preprocessor_config.json",
        {
            "do_align_long_axis": False,
            "do_normalize": True,
            "do_pad": True,
            "do_resize": True,
            "do_thumbnail": True,
            "feature_extractor_type": "DonutFeatureExtractor",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
            "size": [width, height],
            **(image or {}),
        },
    )
    if stated:
        values = json.loads((folder / "config.json").read_text())
        write(
            folder, "config.json", {**values, "decoder_start_token_id": tokens.token_to_id(start)}
        )
    else:  # as published: the files name tokens by their ids, and none as the first
        added = SPECIAL[len(USUAL) :] + (QUESTIONS if asked else (start,))
        write(folder, "added_tokens.json", {t: tokens.token_to_id(t) for t in added})
    rows = 4 * 3
    processor = DonutImageProcessorPil.from_pretrained(folder)
    model.config.decoder_start_token_id = tokens.token_to_id(start)
    return Pages(
        folder, model, processor, tokens.token_to_id(start), rows_of_token=rows, asked=asked
    )


ROW = Row(
    "Donut",
    {
        "questions in tags, as published": donut,
        "pages turned, no biases of queries, untied": lambda f: donut(
            f,
            encoder={"qkv_bias": False, "num_heads": [3, 4, 2], "mlp_ratio": 2.5},
            decoder={
                "tie_word_embeddings": False,
                "scale_embedding": False,
                "activation_function": "relu",
            },
            stated=True,
            image={"do_align_long_axis": True},
        ),
    },
    notes="shifted windows with a learned bias for each distance; answers in tags",
    bare=True,
    asks=((0, "What is the total?"), (1, ""), (0, "Who?")),
)
