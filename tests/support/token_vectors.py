"""Oracles of models that give a vector for each token: ColQwen2 and ColPali, by transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paligemma
import qwen2_vl
import torch
from common import build_processor, randomize, save, tokenizer, write


@dataclass
class Late:
    """`grid`: whether a page's tokens have rows and columns as positions."""

    folder: Path
    model: Any
    processor: Any
    grid: bool

    @torch.no_grad()
    def vectors(self, **shown: Any) -> np.ndarray:
        """[T, D] of `images=[...]` or `text=[...]`."""
        inputs = self.processor(**shown, return_tensors="pt")
        inputs.pop("labels", None)
        more = {}
        if self.grid and "image_grid_thw" in inputs:
            ids = inputs["input_ids"]
            kinds = (ids == self.processor.image_token_id).int()
            # Its forward leaves them out (5.23), with which these models were trained.
            more["position_ids"], _ = self.model.vlm.get_rope_index(
                ids, image_grid_thw=inputs["image_grid_thw"], mm_token_type_ids=kinds
            )
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "token_type_ids")
        kept = {name: inputs[name] for name in names if name in inputs}
        return self.model(**kept, **more).embeddings[0].numpy()


def colqwen2(folder: Path) -> Late:
    from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor, Qwen2VLConfig

    text = qwen2_vl.TEXT | {"vocab_size": qwen2_vl.rows(), "tie_word_embeddings": True}
    vision = {
        "depth": 3,
        "embed_dim": 80,
        "hidden_size": text["hidden_size"],
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    inner = Qwen2VLConfig(
        vision_config=vision, text_config=text, tie_word_embeddings=True, **qwen2_vl.token_ids()
    )
    model = ColQwen2ForRetrieval(ColQwen2Config(vlm_config=inner, embedding_dim=24))
    model.generation_config = SimpleNamespace()  # which `save` fills in; it writes nothing
    names, tokens = qwen2_vl.NAMES, tokenizer(qwen2_vl.SPECIAL)
    model = save(folder, randomize(model, 8), tokens, qwen2_vl.TEMPLATE, names, eos="<|im_end|>")
    images = qwen2_vl.prepare(folder, 14, (28 * 28 * 2, 28 * 28 * 30))
    write(folder, "processor_config.json", {"processor_class": "ColQwen2Processor"})
    return Late(folder, model, build_processor(ColQwen2Processor, folder, images), grid=True)


def colpali(folder: Path) -> Late:
    from transformers import ColPaliConfig, ColPaliForRetrieval, ColPaliProcessor, PaliGemmaConfig
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    oracle = paligemma.paligemma(folder, seed=9)
    inner = PaliGemmaConfig(**oracle.model.config.to_dict())
    model = ColPaliForRetrieval(ColPaliConfig(vlm_config=inner, embedding_dim=24))
    model = randomize(model, 9, **paligemma.NEUTRAL)
    model.generation_config = SimpleNamespace()
    tokens = tokenizer(paligemma.SPECIAL)
    model = save(folder, model, tokens, paligemma.TEMPLATE, paligemma.NAMES, eos="<eos>")
    images = SiglipImageProcessorPil.from_pretrained(folder)
    images.image_seq_length = oracle.processor.image_seq_length
    names = {"visual_prompt_prefix": "Describe the image.", "query_prefix": "Question: "}
    processor = build_processor(ColPaliProcessor, folder, images, **names)
    return Late(folder, model, processor, grid=False)


BUILDERS: dict[str, Callable[[Path], Late]] = {"colqwen2": colqwen2, "colpali": colpali}
