"""InstructBLIP: BLIP-2 whose Q-Former reads the prompt, with a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from blip2 import QFORMER, SPECIAL, TABLES, VISION, Alone, save_bare, text_config
from common import Messages, Row, load_tokenizer, randomize, tokenizer, write
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

WORDS = "describe the image what do you see here a red circle at left and blue square ? . who is"
TEXT = {
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
RANGES = TABLES | {"word_embeddings": (0, 0.5), "position_embeddings": (0, 0.3)}


def words() -> Tokenizer:
    """A small tokenizer of BERT's kind."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS.split()]
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces += [p for c in letters for p in (c, f"##{c}") if p not in pieces]
    result = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    result.normalizer = normalizers.BertNormalizer(lowercase=True)
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.decoder = decoders.WordPiece()
    result.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    result.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return result


def lines(messages: Messages) -> str:
    """The prompt behind the pictures: turns are lines."""
    texts = (
        [m["content"]]
        if isinstance(m["content"], str)
        else [part["text"] for part in m["content"] if "text" in part]
        for m in messages
    )
    return "\n".join("\n".join(each) for each in texts)


@dataclass
class Instructed(Alone):
    """Of several pictures each is seen with the whole prompt."""

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        if any(message["role"] == "system" for message in messages):
            raise jinja2.TemplateError("no system text")
        inputs = self.put_together(lines(messages), images)
        if len(images) > 1:
            for key in ("qformer_input_ids", "qformer_attention_mask"):
                inputs[key] = inputs[key].repeat(len(images), 1)
        return inputs


class OfFrames(Instructed):
    """Pictures are frames of one video."""

    def put_together(self, text: str, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        inputs = super().put_together(text, images)
        if images:
            inputs["pixel_values"] = inputs["pixel_values"][None]
        return inputs

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        inputs = super().inputs(messages, images)
        return {k: v[:1] if k.startswith("qformer") else v for k, v in inputs.items()}

    def pixels(self, inputs: Any) -> list[np.ndarray]:
        return [t.numpy() for t in inputs["pixel_values"][0]] if "pixel_values" in inputs else []


def instructblip(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    qformer: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    queries: int = 5,
    video: bool = False,
) -> Instructed:
    import transformers
    from transformers import InstructBlipProcessor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    kind, what = ("InstructBlipVideo", "video") if video else ("InstructBlip", "image")
    special = (*SPECIAL[:-1], f"<{what}>")
    tokens, read, tower = tokenizer(special, bos="</s>"), words(), VISION | (vision or {})
    image = tokens.token_to_id(f"<{what}>")
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower,
        qformer_config=QFORMER
        | {"vocab_size": read.get_vocab_size(), "max_position_embeddings": 40}
        | (qformer or {}),
        text_config=text_config(tokens, TEXT | (text or {})),
        num_query_tokens=queries,
        **{f"{what}_token_index": image},
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model = randomize(model, seed, **RANGES)
    model = save_bare(folder, model, tokens, tower["image_size"], queries)
    (folder / "chat_template.jinja").unlink()
    inner = folder / "qformer_tokenizer"
    inner.mkdir()
    read.save(str(inner / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    write(inner, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    processor = InstructBlipProcessor(
        BlipImageProcessorPil.from_pretrained(folder),
        load_tokenizer(folder),
        PreTrainedTokenizerFast.from_pretrained(inner),
        num_query_tokens=queries,
    )
    processor.image_token = AddedToken(f"<{what}>")
    oracle = OfFrames if video else Instructed
    return oracle(folder, model, processor, image, queries=queries)


ROW = Row(
    "InstructBLIP",
    {
        "vicuna's llama, 3 heads": instructblip,
        "opt, 4 heads, cross attention in each third": lambda f: instructblip(
            f,
            seed=1,
            vision={"hidden_size": 72, "num_attention_heads": 3, "layer_norm_eps": 1e-5},
            qformer={"cross_attention_frequency": 3, "num_attention_heads": 4},
            text={
                "model_type": "opt",
                "hidden_size": 64,
                "word_embed_proj_dim": 64,
                "ffn_dim": 90,
                "num_attention_heads": 4,
            },
            queries=8,
        ),
        "video": lambda f: instructblip(f, seed=2, video=True),
    },
    notes="a Q-Former that reads the prompt with the picture; frames of a video as pictures",
    bare=True,
)
