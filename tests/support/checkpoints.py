"""Random tiny checkpoints in the Hugging Face layout, made by transformers, and what transformers
answers from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
)
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}\
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}<start_of_image>{% else %}\
{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


@lru_cache
def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["Describe the image. What do you see here? a red circle at the left, user model"] * 4,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def gemma3(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    tokens: int = 4,
) -> Any:
    """Write a checkpoint to `folder` and return transformers' model of it, in fp32, weights at unit
    gain so that logits say something.
    """
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = small_tokenizer()
    token = {s: tokenizer.token_to_id(s) for s in SPECIAL}
    torch.manual_seed(seed)
    vision = {
        "hidden_size": 144,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    } | (vision or {})
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 512,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": token["<bos>"],
        "eos_token_id": token["<end_of_turn>"],
        "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    } | (text or {})
    config = Gemma3Config(
        vision_config=vision,
        text_config=text,
        mm_tokens_per_image=tokens,
        boi_token_index=token["<start_of_image>"],
        eoi_token_index=token["<end_of_image>"],
        image_token_index=token["<image_soft_token>"],
        pad_token_id=0,
        bos_token_id=token["<bos>"],
        eos_token_id=token["<end_of_turn>"],
    )
    model = _save(Gemma3ForConditionalGeneration(config), tokenizer, folder, dtype)
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "size": {"height": vision["image_size"], "width": vision["image_size"]},
            "resample": 2,
            "rescale_factor": 1 / 255,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_seq_length": tokens,
        },
    )
    return model


def gemma3_text(folder: Path, *, seed: int = 0) -> Any:
    """As `gemma3`, of text alone. As in what is published, the tokenizer has an image token, with
    an id beyond the token table.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = Tokenizer.from_str(
        small_tokenizer().to_str().replace("<image_soft_token>", "<unused>")
    )
    rows = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<image_soft_token>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<image_soft_token>") == rows
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
        max_position_embeddings=512,
        pad_token_id=0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=tokenizer.token_to_id("<bos>"),
        eos_token_id=tokenizer.token_to_id("<end_of_turn>"),
    )
    return _save(Gemma3ForCausalLM(config), tokenizer, folder, torch.float32)


def _save(model: Any, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> Any:
    """The model with new weights, written with its tokenizer and template."""
    for name, p in model.eval().named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        elif p.ndim >= 2:
            torch.nn.init.normal_(p, std=1 / math.sqrt(p[0].numel()))
        elif "post_" in name and "layernorm.weight" in name and "vision_tower" not in name:
            torch.nn.init.normal_(
                p, mean=2.0, std=0.2
            )  # the layers outweigh the token itself, else it is just repeated
        else:
            torch.nn.init.normal_(p, std=0.2)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    write(
        folder,
        "tokenizer_config.json",
        {
            "bos_token": "<bos>",
            "eos_token": "<end_of_turn>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 512,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model.float()


def gemma3_inputs(folder: Path, messages: list[dict[str, Any]], images: list[np.ndarray]) -> Any:
    """What transformers' own processor makes of a conversation: input_ids, pixel_values and the
    rest.
    """
    from PIL import Image
    from transformers import Gemma3Processor, PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images_ = Gemma3ImageProcessorPil.from_pretrained(folder)
    tokens = json.loads((folder / "preprocessor_config.json").read_text())["image_seq_length"]
    processor = Gemma3Processor(
        images_,
        PreTrainedTokenizerFast.from_pretrained(folder),
        image_seq_length=tokens,
        chat_template=(folder / "chat_template.jinja").read_text(),
    )
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pictures = [[Image.fromarray(i) for i in images]] if images else None
    return processor(text=text, images=pictures, return_tensors="pt", add_special_tokens=False)


def write(folder: Path, name: str, values: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(values))


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected|^2 / |expected|^2"""
    result, expected = result.double(), expected.double()
    return float((result - expected).square().sum() / expected.square().sum())


def too_far(
    result: Iterable[torch.Tensor], expected: torch.Tensor, maximum: float
) -> tuple[float, bool]:
    """The largest `nmse`, and whether it is more than `maximum`, as it is where one is no number."""
    far = [nmse(one, expected) for one in result]
    return max(far, key=lambda value: (math.isnan(value), value)), not all(
        f <= maximum for f in far
    )


def picture(seed: int, width: int, height: int) -> np.ndarray:
    """A random uint8 picture [height, width, 3] with large and small structure."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3)).astype(np.float32)
    rows, columns = (
        np.linspace(0, 3.999, height).astype(int),
        np.linspace(0, 4.999, width).astype(int),
    )
    return np.clip(coarse[rows][:, columns] + rng.normal(0, 25, (height, width, 3)), 0, 255).astype(
        np.uint8
    )
