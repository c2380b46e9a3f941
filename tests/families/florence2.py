"""Florence-2: DaViT, and an encoder that reads a picture with the prompt, to whose states BART's
decoder attends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Messages, Oracle, Row, picture, randomize, save, tokenizer, write
from instructblip import lines
from safetensors.torch import load_file, save_file
from tokenizers import processors
from trocr import NAMES
from trocr import SPECIAL as USUAL

PLACES = tuple(f"<loc_{n}>" for n in range(0, 1000, 9))
SPECIAL = (*USUAL, *PLACES, "<poly>", "</poly>", "<image>")
VISION = {
    "depths": [1, 2, 1],
    "patch_size": [7, 3, 3],
    "patch_stride": [4, 2, 2],
    "patch_padding": [3, 1, 1],
    "patch_prenorm": [False, True, True],
    "embed_dim": [24, 36, 60],
    "num_heads": [2, 3, 4],
    "num_groups": [3, 2, 5],
    "window_size": 4,
    "projection_dim": 80,
    "max_position_embeddings": 7,
    "max_temporal_embeddings": 9,
}
TEXT = {
    "d_model": 80,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 90,
    "decoder_ffn_dim": 118,
    "max_position_embeddings": 128,
}
SIDE = 44
QUESTIONS = (
    "<OD>",
    "Locate a red circle in the image.",
    "<REGION_TO_OCR><loc_9><loc_18><loc_27><loc_81>",
)
# What is seen of the picture is nearly the same for every token: it may not drown the rest, nor may
# what a token is, as the table of outputs is that of tokens.
TABLES = {
    "decoder.embed_positions": (0, 3.0),
    "layernorm_embedding.bias": (0, 0.02),
    "layer_norm.bias": (0, 0.02),
    "fc1.bias": (0, 0.5),
    "fc2.bias": (0, 0.01),
    "fc2.weight": (0, 0.1),
    "proj.bias": (0, 0.02),
    "self_attn.out_proj.weight": (0, 0.05),
    "encoder_attn.out_proj.weight": (0, 0.05),
    "shared": (0, 0.1),
    "embed_positions": (0, 1.0),
    "conv1.weight": (0, 0.3),
    "conv2.weight": (0, 0.3),
}
# From transformers' names to the authors'
AUTHORS = (
    (r"^model\.vision_tower", "vision_tower"),
    (r"(convs\.\d+)\.conv\.", r"\1.proj."),
    (r"(spatial_block)\.norm1", r"\1.window_attn.norm"),
    (r"(channel_block)\.norm1", r"\1.channel_attn.norm"),
    (r"\.norm2", ".ffn.norm"),
    (r"(window_attn|channel_attn)\.(qkv|proj)", r"\1.fn.\2"),
    (r"\.conv([12])\.", r".conv\1.fn.dw."),
    (r"\.ffn\.fc([12])", r".ffn.fn.net.fc\1"),
    (r"^model\.language_model", "language_model.model"),
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.multi_modal_projector\.image_projection\.weight", "image_projection"),
    (r"^model\.multi_modal_projector\.image_position_embed", "image_pos_embed"),
    (r"^model\.multi_modal_projector\.", ""),
)


@dataclass
class Read(Oracle):
    """The prompt of the decoder is two tokens; the encoder reads the picture and the text."""

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        made = self.processor(images=list(images), text=lines(messages[-1:]), return_tensors="pt")
        begin = [self.image_token, self.model.config.text_config.bos_token_id]
        return {
            "input_ids": made["input_ids"],
            "pixel_values": made["pixel_values"],
            "decoder_input_ids": torch.tensor([begin]),
        }

    def prompt_ids(self, inputs: Any) -> list[int]:
        return [int(i) for i in inputs["decoder_input_ids"][0]]

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        result: torch.Tensor = self.model.model(**inputs).encoder_last_hidden_state
        return result.flatten(0, 1)

    @torch.no_grad()
    def greedy(self, inputs: Any, n: int = 48) -> list[int]:
        more = {"max_new_tokens": n, "do_sample": False, "num_beams": 1}
        result = self.once(n, inputs, lambda: self.model.generate(**inputs, **more)[0])
        return [int(i) for i in result[inputs["decoder_input_ids"].shape[1] :]]


def florence2(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    authors: bool = False,
) -> Read:
    from transformers import (
        Florence2Config,
        Florence2ForConditionalGeneration,
        Florence2Processor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokens = tokenizer(SPECIAL, bos="<s>")
    around = [(name, tokens.token_to_id(name)) for name in ("<s>", "</s>")]
    tokens.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=around)
    ids = {
        f"{name}_token_id": tokens.token_to_id(NAMES[f"{name}_token"])
        for name in ("bos", "eos", "pad")
    }
    start = ids["eos_token_id"]
    config = Florence2Config(
        vision_config=VISION | (vision or {}),
        text_config={
            "model_type": "bart",
            **(TEXT | ids | (text or {})),
            "vocab_size": tokens.get_vocab_size(),
            "decoder_start_token_id": start,
            "forced_bos_token_id": ids["bos_token_id"],
        },
        image_token_id=tokens.token_to_id("<image>"),
    )
    model = randomize(Florence2ForConditionalGeneration(config), seed, **TABLES)
    names = {**NAMES, "image_token": "<image>"}
    model = save(folder, model, tokens, "", names, eos="</s>")
    (folder / "chat_template.jinja").unlink()
    model.generation_config.forced_eos_token_id = None  # the end is a token like any other
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": False,
            "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "resample": 3,
            "size": {"height": SIDE, "width": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
        },
    )
    images = CLIPImageProcessorPil.from_pretrained(folder)
    images.image_seq_length = 10
    read = PreTrainedTokenizerFast.from_pretrained(
        folder, extra_special_tokens={"image_token": "<image>"}
    )
    if authors:
        as_authors(folder)
    result = Read(folder, model, Florence2Processor(images, read), start, authors=authors)
    first = {"role": "user", "content": QUESTIONS[0]}
    result.rows_of_token = result.inputs([first], [picture(0, 70, 50)])["input_ids"].shape[1]
    return result


def as_authors(folder: Path) -> None:
    """Names and settings as in microsoft/Florence-2-base, whose tokenizer has no <image>."""
    tensors = load_file(folder / "model.safetensors")
    for pattern, new in AUTHORS:
        tensors = {re.sub(pattern, new, name): t for name, t in tensors.items()}
    tensors["image_projection"] = tensors["image_projection"].t().contiguous()
    table = tensors["language_model.model.shared.weight"]
    tensors["language_model.final_logits_bias"] = torch.zeros(1, len(table))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    for key in ("max_temporal_embeddings", "max_position_embeddings", "activation_function"):
        vision.pop(key)
    vision |= {
        "model_type": "davit",
        "dim_embed": vision.pop("embed_dim"),
        "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 7},
        "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 9},
    }
    text["model_type"] = "florence2_language"
    config.pop("image_token_id")
    write(folder, "config.json", config)


ROW = Row(
    "Florence-2",
    {
        "windows of 4": florence2,
        "no biases of queries, scaled embeddings, as its authors": lambda f: florence2(
            f,
            seed=1,
            vision={
                "qkv_bias": False,
                "num_heads": [3, 2, 5],
                "depths": [1, 1, 1],
                "window_size": 5,
            },
            text={"scale_embedding": True, "activation_function": "gelu_new"},
            authors=True,
        ),
    },
    notes="windows and channels by turns; an encoder that reads the prompt with the picture",
    bare=True,
    asks=((0, QUESTIONS[0]), (1, QUESTIONS[1]), (0, QUESTIONS[2])),
)
