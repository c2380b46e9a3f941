"""BLIP that writes captions: a vision transformer, to whose states BERT's kind of decoder attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blip2 import VISION, square
from common import Messages, Oracle, Row, build_processor, load_tokenizer, randomize, save, write
from instructblip import lines, words

NAMES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
}
# What is seen of the picture is the same for every token: it may not drown the rest.
RANGES = {
    "crossattention.output.dense.weight": (0, 0.03),
    "predictions.bias": (0, 0.02),
    "predictions.decoder.bias": (0, 0.02),
    "LayerNorm.weight": (1, 0.2),
    "word_embeddings": (0, 0.1),
    "text_decoder.bert.embeddings.position_embeddings": (0, 1.0),
    "class_embedding": (0, 0.5),
    "self.query": (0, 0.2),
    "self.key": (0, 0.2),
}


@dataclass
class Captions(Oracle):
    """`generate` puts its own token before the text, and takes the last one away."""

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        (image,) = images
        inputs = self.processor(images=image, text=lines(messages), return_tensors="pt")
        ids = inputs["input_ids"][:, :-1]
        ids[:, 0] = self.image_token
        return {"input_ids": ids, "pixel_values": inputs["pixel_values"]}

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        result: torch.Tensor = self.model.vision_model(inputs["pixel_values"])[0]
        return result.flatten(0, 1)

    @torch.no_grad()
    def greedy(self, inputs: Any, n: int = 48) -> list[int]:
        def answer() -> Any:
            ids = torch.nn.functional.pad(inputs["input_ids"], (0, 1))
            self.model.config.text_config.sep_token_id = None  # the end is a token like any other
            more = {"max_new_tokens": n, "do_sample": False}
            return self.model.generate(inputs["pixel_values"], ids, **more)[0]

        result = self.once(n, inputs, answer)
        return [int(i) for i in result[inputs["input_ids"].shape[1] :]]


def blip(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Captions:
    from transformers import BlipConfig, BlipForConditionalGeneration, BlipProcessor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokens, tower = words(), VISION | (vision or {})
    begin, end = tokens.get_vocab_size(), tokens.token_to_id("[SEP]")
    config = BlipConfig(
        vision_config=tower,
        text_config={
            "vocab_size": begin + 2,
            "bos_token_id": begin,
            "sep_token_id": end,
            **(TEXT | (text or {})),
        },
    )
    model = randomize(BlipForConditionalGeneration(config), seed, **RANGES)
    model = save(folder, model, tokens, "", NAMES, eos="[SEP]")
    model.text_decoder.generation_config.eos_token_id = None
    square(folder, tower["image_size"])
    write(folder, "generation_config.json", {"eos_token_id": 2})  # the wrong one, as published
    images = BlipImageProcessorPil.from_pretrained(folder)
    processor = build_processor(BlipProcessor, folder, images)
    processor.tokenizer = load_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    rows = (tower["image_size"] // tower["patch_size"]) ** 2 + 1
    return Captions(folder, model, processor, begin, rows_of_token=rows)


ROW = Row(
    "BLIP",
    {
        "3 heads": lambda f: blip(f, seed=2),
        "4 heads, a narrower tower": lambda f: blip(
            f,
            seed=1,
            vision={"hidden_size": 72, "num_attention_heads": 3, "image_size": 28},
            text={"num_attention_heads": 4, "num_hidden_layers": 2},
        ),
    },
    notes="captions, begun or not; layers that attend to a picture's states",
    bare=True,
    asks=(("a red circle", 0), (1,), (0, "what do you see here ?")),
)
