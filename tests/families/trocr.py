"""TrOCR: a plain vision transformer, to whose states BART's kind of decoder attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Messages, Oracle, Row, randomize, save, tokenizer, write

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
}
ENCODER = {
    "model_type": "vit",
    "hidden_size": 72,
    "intermediate_size": 110,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 48,
    "patch_size": 8,
    "qkv_bias": False,
}
DECODER = {
    "model_type": "trocr",
    "d_model": 80,
    "decoder_layers": 3,
    "decoder_attention_heads": 5,
    "decoder_ffn_dim": 118,
    "max_position_embeddings": 128,
    "cross_attention_hidden_size": 72,
    "use_cache": True,
}
# What is seen of the picture is the same for every token: it may not drown the rest.
TABLES = {
    "encoder_attn.out_proj.weight": (0, 0.05),
    "out_proj": (0, 0.1),
    "fc2.bias": (0, 0.05),
    "embed_tokens": (0, 0.1),
    "embed_positions": (0, 1.0),
    "cls_token": (0, 0.5),
    "distillation_token": (0, 0.5),
    "position_embeddings": (0, 0.5),
    "layernorm_embedding.weight": (1, 0.2),
}


@dataclass
class Attended(Oracle):
    """The prompt is one token, and the picture beside it."""

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:  # noqa: ARG002
        pixels = self.processor(images=list(images), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "decoder_input_ids": torch.tensor([[self.image_token]])}

    def prompt_ids(self, inputs: Any) -> list[int]:
        return [int(i) for i in inputs["decoder_input_ids"][0]]

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        states = self.model.encoder(inputs["pixel_values"])[0]
        if hasattr(self.model, "enc_to_dec_proj"):
            states = self.model.enc_to_dec_proj(states)
        return states.flatten(0, 1)

    @torch.no_grad()
    def greedy(self, inputs: Any, n: int = 48) -> list[int]:
        result = self.once(
            n,
            inputs,
            lambda: self.model.generate(**inputs, max_new_tokens=n, do_sample=False, num_beams=1)[
                0
            ],
        )
        return [int(i) for i in result[inputs["decoder_input_ids"].shape[1] :]]


def trocr(
    folder: Path,
    *,
    seed: int = 0,
    encoder: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    start: str = "</s>",
) -> Oracle:
    from transformers import (
        DeiTConfig,
        TrOCRConfig,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
    )
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    tokens = tokenizer(SPECIAL, bos="<s>")
    ids = {
        f"{name}_token_id": tokens.token_to_id(NAMES[f"{name}_token"])
        for name in ("bos", "eos", "pad")
    }
    tower = ENCODER | (encoder or {})
    kinds = {"vit": ViTConfig, "deit": DeiTConfig}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        kinds[tower["model_type"]](**{k: v for k, v in tower.items() if k != "model_type"}),
        TrOCRConfig(
            **{k: v for k, v in (DECODER | ids | (decoder or {})).items() if k != "model_type"},
            vocab_size=tokens.get_vocab_size(),
        ),
        decoder_start_token_id=tokens.token_to_id(start),
        **ids,
    )
    model = randomize(VisionEncoderDecoderModel(config), seed, **TABLES)
    model = save(folder, model, tokens, "", NAMES, eos="</s>")
    (folder / "chat_template.jinja").unlink()
    write(
        folder,
        "preprocessor_config.json",
        {
            "feature_extractor_type": "ViTFeatureExtractor",
            "do_normalize": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
            "size": tower["image_size"],
        },
    )
    first = 2 if tower["model_type"] == "deit" else 1
    rows = (tower["image_size"] // tower["patch_size"]) ** 2 + first
    processor = ViTImageProcessorPil.from_pretrained(folder)
    return Attended(folder, model, processor, config.decoder_start_token_id, rows_of_token=rows)


ROW = Row(
    "TrOCR",
    {
        "learned positions, no biases of queries, as published": trocr,
        "deit, sines, relu, projected": lambda f: trocr(
            f,
            seed=1,
            encoder={
                "model_type": "deit",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "qkv_bias": True,
            },
            decoder={
                "cross_attention_hidden_size": None,
                "activation_function": "relu",
                "use_learned_position_embeddings": False,
                "layernorm_embedding": False,
                "scale_embedding": True,
                "tie_word_embeddings": False,
            },
            start="<s>",
        ),
    },
    notes="a line of text, to whose states each layer of the decoder attends; takes no words",
    bare=True,
    asks=((0,), (1,), (0,)),
)
