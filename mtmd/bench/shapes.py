"""Models by their shape alone: a published configuration, random weights, and a stand-in for the
tokenizer and the chat template, so that nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mtmd.base.errors import ModelError, OptionError
from mtmd.base.options import refuse
from mtmd.base.spelling import did_you_mean
from mtmd.bench.random_weights import RandomFile, plain_kinds, text_kinds
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint.checkpoint import RANDOM, Checkpoint
from mtmd.checkpoint.folder import answering_part, text_settings
from mtmd.clip.family import VisionFamily, vision_family
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings, read_json
from mtmd.llm.family import text_family
from mtmd.llm.tokenizer.tokenizer import Tokenizer
from mtmd.options.load import LoadOptions

TABLE = Path(__file__).parent / "shapes.json"
END = "<|end|>"
SAME_SHAPE = frozenset(  # parts of names on the hub that make no other shape
    ("it", "pt", "instruct", "thinking", "base", "chat", "hf", "ov", "2507")
)
MIN_VOCABULARY = 512  # the stand-in's bytes and control tokens
LOOKED_AT = 1024  # pixels a side of the picture whose text tells the control tokens
CONTROL = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_]{2,40}\]")
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ image_marker }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def random_checkpoint(shape: str, weights: str) -> Checkpoint:
    """A model in the shape of a name in shapes.json, or of a config.json or a folder with one.

    `weights` is the type of the decoder's weights. Raises OptionError for a name or type that is
    not known, ModelError for a configuration that is not read.
    """
    name, config, image = read_shape(shape)
    kind = config.get("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(
            f"{config.where}: model_type is {kind!r:.60}, expected the name of an architecture"
        )
    text_config = text_settings(config)
    sees = config.get("vision_config", None) is not None
    vision = vision_family(kind, config, image) if sees else None
    usual = f"{kind}_text" if sees else kind
    text_kind = usual if text_config is config else text_config.get("model_type", usual)
    text = text_family(str(text_kind), text_config)
    text_parameters = text.parameters()
    decoder = RandomFile(text_parameters, text_kinds(weights, text_parameters))
    encoder = RandomFile(vision.parameters(), plain_kinds(weights)) if vision else None
    tokenizer = _tokenizer(vision, text.vocabulary, config.where)
    return Checkpoint(
        Path(name),
        vision,
        text,
        CanonicalWeights(encoder, vision.parameters(), name) if encoder and vision else None,
        CanonicalWeights(decoder, text_parameters, name),
        decoder.bytes + (encoder.bytes if encoder else 0),
        tokenizer,
        ChatTemplate(TEMPLATE, {"image_marker": vision.marker if vision else ""}, "stand-in"),
        frozenset({tokenizer.id(END)}),
        opened_from=(RANDOM, shape, weights),
        architecture=kind,
    )


def type_of_random_weights(settings: LoadOptions) -> str:
    """Return the type that is asked for, or what would be stored for the type computed in."""
    return settings.weights or ("F32" if settings.dtype == "fp32" else "BF16")


def shape_names() -> list[str]:
    return list(_table())


def read_shape(shape: str) -> tuple[str, Settings, Settings]:
    """A name for people, the configuration and the image processor's settings."""
    if not isinstance(shape, str) or not shape:
        refuse("random_weights", shape, "a config.json, or a name")
    known, path = _table(), Path(shape).expanduser()
    name = shape if shape in known or path.exists() else _short_name(shape, known)
    if name in known:
        result = known[name]
        return (
            name,
            Settings(result["config"], name),
            Settings(result.get("image", {}), f"{name}: image processor"),
        )
    if not path.exists():
        near = did_you_mean(name, known)
        raise OptionError(
            f"random-weights {shape!r:.80}: expected a config.json, a folder with one, or one of "
            f"{', '.join(known)}{near}"
        )
    file = path / "config.json" if path.is_dir() else path
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    config = answering_part(Settings(read_json(file), file.name))
    return name, config, _image_settings(file.parent)


def _short_name(name: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the short name of a model as the hub calls it: google/gemma-3-4b-it is gemma-3-4b."""
    parts = name.rpartition("/")[2].lower().split("-")
    short = "-".join(part for part in parts if part not in SAME_SHAPE)
    return next((name for name, shape in known.items() if shape.get("hub") == short), short)


def _image_settings(folder: Path) -> Settings:
    """Return what lies beside the configuration; without it, the families' defaults."""
    processor = read_json(folder / "processor_config.json", required=False)
    if isinstance(result := processor.get("image_processor"), Mapping):
        return Settings(result, "processor_config.json")
    return Settings(
        read_json(folder / "preprocessor_config.json", required=False), "preprocessor_config.json"
    )


def _table() -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return result


def _tokenizer(vision: VisionFamily | None, vocabulary: int, where: str) -> Tokenizer:
    """One token for each byte, and the control tokens that the family writes around pictures."""
    if vocabulary < MIN_VOCABULARY:
        raise ModelError(
            f"{where}: vocab_size is {vocabulary}, expected at least {MIN_VOCABULARY} for the "
            "stand-in tokenizer"
        )
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    control = [END]
    if vision:
        pixels = np.zeros((LOOKED_AT, LOOKED_AT, 3), np.uint8)
        control += [vision.marker, vision.image_token]
        control += CONTROL.findall(vision.prompt(vision.resolution.prepare(pixels)))
    inner.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in dict.fromkeys(control)]
    )
    return Tokenizer(inner, {"eos_token": END})
