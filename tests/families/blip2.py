"""BLIP-2: a vision transformer, a Q-Former, and OPT, which continues a text behind the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from common import Messages, Oracle, Row, build_processor, randomize, save, tokenizer, write
from tokenizers import Tokenizer

SPECIAL = ("<pad>", "</s>", "<image>")
NAMES = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
VISION = {
    "hidden_size": 80,
    "intermediate_size": 118,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 42,
    "patch_size": 14,
}
QFORMER = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
}
TEXT = {
    "model_type": "opt",
    "hidden_size": 96,
    "word_embed_proj_dim": 96,
    "ffn_dim": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 512,
}
IMAGE = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
TABLES = {"embed_tokens": (0, 0.1), "embed_positions": (0, 0.3)}
TABLES |= {"query_tokens": (0, 0.5), "class_embedding": (0, 0.5), "LayerNorm.weight": (1, 0.2)}


def questions(messages: Messages) -> str:
    """The prompt behind the pictures, as the authors write it."""
    result = ""
    for message in messages:
        parts = message["content"]
        texts = [parts] if isinstance(parts, str) else [p["text"] for p in parts if "text" in p]
        text = "\n".join(texts)
        result += f" {text}. " if message["role"] == "assistant" else f"Question: {text} Answer:"
    return result


@dataclass
class Alone(Oracle):
    """There is no chat template: the processor has pictures and a text. It takes one picture; the
    model takes what is there.
    """

    queries: int = 0

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        if any(message["role"] == "system" for message in messages):
            raise jinja2.TemplateError("no system text")
        return self.put_together(questions(messages), images)

    def put_together(self, text: str, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        if not images:
            ids = self.processor.tokenizer(text, return_tensors="pt")["input_ids"]
            return {"input_ids": ids}
        parts = [self.processor(images=image, text=text, return_tensors="pt") for image in images]
        ids = parts[0]["input_ids"]
        front = ids.new_full((1, self.queries * (len(images) - 1)), self.image_token)
        pixels = torch.cat([part["pixel_values"] for part in parts])
        read = {key: value for key, value in parts[0].items() if key.startswith("qformer")}
        return {"input_ids": torch.cat((front, ids), 1), "pixel_values": pixels, **read}

    @torch.no_grad()
    def logits(self, inputs: Any) -> torch.Tensor:
        """The model wants a picture; its decoder does not."""
        model = self.model if "pixel_values" in inputs else self.model.language_model
        result: torch.Tensor = self.once("logits", inputs, lambda: model(**inputs).logits[0, -1])
        return result

    @torch.no_grad()
    def greedy(self, inputs: Any, n: int = 48) -> list[int]:
        model = self.model if "pixel_values" in inputs else self.model.language_model
        result = self.once(
            n, inputs, lambda: model.generate(**inputs, max_new_tokens=n, do_sample=False)[0]
        )
        return [int(i) for i in result[inputs["input_ids"].shape[1] :]]


def text_config(tokens: Tokenizer, text: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the decoder, with the ids of the tokenizer."""
    end = tokens.token_to_id("</s>")
    return {
        "vocab_size": tokens.get_vocab_size(),
        "pad_token_id": tokens.token_to_id("<pad>"),
        "bos_token_id": end,
        "eos_token_id": end,
        **text,
    }


def save_bare(folder: Path, model: Any, tokens: Tokenizer, side: int, queries: int) -> Any:
    """Write the checkpoint without a chat template, for pictures of `side` pixels; return the model
    in fp32.
    """
    result = save(folder, model, tokens, "", NAMES, eos="</s>")
    result.language_model.generation_config.eos_token_id = None
    square(folder, side)
    write(folder, "processor_config.json", {"num_query_tokens": queries})
    return result


def square(folder: Path, side: int) -> None:
    """Settings of the image processor."""
    settings = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": side, "width": side},
    }
    write(folder, "preprocessor_config.json", IMAGE | settings)


def blip2(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    qformer: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    queries: int = 5,
) -> Oracle:
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokens, tower = tokenizer(SPECIAL, bos="</s>"), VISION | (vision or {})
    config = Blip2Config(
        vision_config=tower,
        qformer_config=QFORMER | (qformer or {}),
        text_config=text_config(tokens, TEXT | (text or {})),
        num_query_tokens=queries,
        image_token_index=tokens.token_to_id("<image>"),
    )
    model = randomize(Blip2ForConditionalGeneration(config), seed, **TABLES)
    model = save_bare(folder, model, tokens, tower["image_size"], queries)
    images = BlipImageProcessorPil.from_pretrained(folder)
    processor = build_processor(Blip2Processor, folder, images, num_query_tokens=queries)
    (folder / "chat_template.jinja").unlink()
    return Alone(folder, model, processor, config.image_token_index, queries=queries)


ROW = Row(
    "BLIP-2",
    {
        "opt, cross attention in every second layer": blip2,
        "llama, 4 heads on 2, cross attention in each third": lambda f: blip2(
            f,
            seed=1,
            vision={"hidden_size": 72, "num_attention_heads": 3, "layer_norm_eps": 1e-5},
            qformer={"cross_attention_frequency": 3, "num_attention_heads": 4},
            text={
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 90,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "word_embed_proj_dim": None,
            },
            queries=8,
        ),
    },
    notes="a Q-Former's queries are a picture's tokens, before the text; one question",
    bare=True,
)
