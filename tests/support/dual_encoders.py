"""Random tiny dual encoders in the layout of published ones, with transformers' model of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "a photo of a cat, two dogs; a red circle beside it. été Straße 日本語 0123456789 !?",
    "the quick brown fox jumps over the lazy dog",
] * 4
CONTEXT = 20
TOWER = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}  # fmt: skip


def clip(folder: Path, **changed: Any) -> Any:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    inner = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="</w>"))
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|startoftext|>", "<|endoftext|>"]
    _train(inner, special)
    start, end = (inner.token_to_id(s) for s in special)
    inner.post_processor = processors.RobertaProcessing(
        (special[1], end), (special[0], start), trim_offsets=False, add_prefix_space=False
    )
    config = CLIPConfig(
        text_config={
            **TOWER,
            "vocab_size": inner.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "eos_token_id": end,
            "bos_token_id": start,
            "pad_token_id": end,
        },
        vision_config={**TOWER, "hidden_size": 64, "image_size": 32, "patch_size": 8, **changed},
        projection_dim=24,
    )
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    return _save(folder, CLIPModel, config, processor, inner, names)


def siglip(folder: Path, **changed: Any) -> Any:
    """Like the first published ones, and like those of SigLIP 2 with pictures of one size."""
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel

    inner = _sentencepieces()
    size = changed.pop("image_size", 32)
    config = SiglipConfig(
        text_config={
            **TOWER,
            "vocab_size": inner.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "pad_token_id": 0,
        },
        vision_config={**TOWER, "image_size": size, "patch_size": 8, **changed},
    )
    processor = SiglipImageProcessorPil(size={"height": size, "width": size})
    return _save(folder, SiglipModel, config, processor, inner, SENTENCEPIECE)


def siglip2(folder: Path, **changed: Any) -> Any:
    """With pictures of any shape."""
    from transformers import Siglip2Config, Siglip2Model
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    inner = _sentencepieces()
    config = Siglip2Config(
        text_config={
            **TOWER,
            "vocab_size": inner.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "pad_token_id": 0,
        },
        vision_config={**TOWER, "num_patches": 16, "patch_size": 8, **changed},
    )
    processor = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=12)
    return _save(folder, Siglip2Model, config, processor, inner, SENTENCEPIECE)


FAMILIES: dict[str, Callable[..., Any]] = {"clip": clip, "siglip": siglip, "siglip2": siglip2}
SENTENCEPIECE = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}  # fmt: skip


def _sentencepieces() -> Tokenizer:
    """As Gemma's, with an end of text."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _train(inner, list(dict.fromkeys(["<pad>", "<eos>", "<bos>", "<unk>"])))
    inner.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", inner.token_to_id("<eos>"))]
    )
    return inner


def _train(inner: Tokenizer, special: list[str]) -> None:
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    if isinstance(inner.pre_tokenizer, pre_tokenizers.ByteLevel):
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS, trainer)


def _save(
    folder: Path, kind: Any, config: Any, processor: Any, inner: Tokenizer, names: dict[str, str]
) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() >= 2 and "embedding" not in name:
                value.normal_(std=1.5 * value.shape[-1] ** -0.5)
            elif value.dim() and "norm" not in name:
                value.normal_(std=0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return model
