"""The config.json of an encoder and a decoder (`vision-encoder-decoder`) in the words of other
models.
"""

from __future__ import annotations

from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.families.encoder_decoder.swin import read_swin
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings

SWIN = "donut-swin"
# Tokens before those of patches: a class token, and DeiT's, which learned from a teacher
FIRST = {"vit": ("cls_token",), "deit": ("cls_token", "distillation_token")}
DECODERS = {"vit": ("trocr",), "deit": ("trocr",), SWIN: ("mbart",)}


def usual_words(config: Settings) -> dict[str, Any]:
    """Return what config.json says of an encoder and a decoder in the words of other models, and to
    how many states of what width tokens attend. Raises ModelError for what cannot be followed.
    """
    encoder, decoder = config.part("encoder"), config.part("decoder")
    kind = encoder.choice("model_type", DECODERS, "")
    decoder.choice("model_type", DECODERS[kind], "")
    width, rows = (_of_swin if kind == SWIN else _of_vit)(encoder)
    read = decoder.get("cross_attention_hidden_size", None)
    if read not in (None, width):
        raise ModelError(
            f"{decoder.where}: cross_attention_hidden_size is {read!r:.20}, expected {width}, the "
            "encoder's hidden_size"
        )
    shared = {k: v for k, v in config.values.items() if k not in ("encoder", "decoder")}
    shared.pop("tie_word_embeddings", None)  # of the two; the decoder says it of its own tables
    if kind != SWIN or config.get("decoder_start_token_id", None) is not None:
        shared["image_token_id"] = config.token_id("decoder_start_token_id", 2)
    return {
        **shared,
        "is_encoder_decoder": True,
        "eos_token_id": config.get("eos_token_id", decoder.get("eos_token_id", 2)),
        "vision_config": encoder.values,
        "text_config": {**decoder.values, "encoder_rows": rows},
    }


def _of_vit(encoder: Settings) -> tuple[int, int]:
    """Width and number of the states of a picture."""
    side, patch = square_sizes(encoder)
    first = FIRST[encoder.choice("model_type", FIRST, "")]
    return encoder.count("hidden_size", 768, maximum=MAX_WIDTH), len(first) + (side // patch) ** 2


def _of_swin(encoder: Settings) -> tuple[int, int]:
    swin = read_swin(encoder)
    rows, columns = swin.grids[-1]
    return swin.widths[-1], rows * columns


def square_sizes(encoder: Settings) -> tuple[int, int]:
    """Pixels on a side of the picture, and of a patch. Raises ModelError where they do not fit."""
    sizes = []
    for key, default in (("image_size", 224), ("patch_size", 16)):
        value = encoder.get(key, default)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        sizes.append(Settings({key: value}, encoder.where).count(key))
    side, patch = sizes
    if side % patch:
        raise ModelError(
            f"{encoder.where}: image_size {side} is no whole number of patches of {patch} pixels"
        )
    return side, patch
