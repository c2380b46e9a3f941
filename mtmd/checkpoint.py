"""A checkpoint folder in the Hugging Face layout, opened: families, weights, tokenizer, template, stop tokens. No weight is read yet."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmd.chat import ChatTemplate
from mtmd.clip.family import VisionFamily, vision_family
from mtmd.kernels.errors import ModelError
from mtmd.kernels.settings import Settings, read_json
from mtmd.kernels.weights import open_weights
from mtmd.kernels.weights.canonical import CanonicalWeights, check_no_extra
from mtmd.llm.family import TextFamily, text_family
from mtmd.llm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    vision: VisionFamily | None
    text: TextFamily
    vision_weights: CanonicalWeights | None
    text_weights: CanonicalWeights
    weight_bytes: int
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: frozenset[int]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Everything checked that can be without reading weights. Raises ModelError saying which file is wrong and how."""
    file = open_weights(folder)
    config = read_json(folder / "config.json")
    settings = Settings(config, "config.json")
    vision, text = _families(folder, config, settings)
    where = str(folder)
    text_weights = CanonicalWeights(file, text.parameters(), where)
    vision_weights = CanonicalWeights(file, vision.parameters(), where) if vision else None
    used = text_weights.sources | (vision_weights.sources if vision_weights else set())
    check_no_extra(file, used, (*text.unused, *(vision.unused if vision else ())), where)
    tokenizer = Tokenizer.from_folder(folder, reserved=(vision.marker, vision.image_token) if vision else ())
    if len(tokenizer) > text.vocabulary:
        raise ModelError(f"{folder}: tokenizer.json has {len(tokenizer)} tokens, config.json a vocabulary of {text.vocabulary}; "
                         "they belong to different models")
    if vision:
        tokenizer.id(vision.image_token)
    template = ChatTemplate.from_folder(folder, tokenizer.special_text)
    return Checkpoint(folder, vision, text, vision_weights, text_weights, file.bytes, tokenizer, template, _stop_tokens(folder, settings))


def _families(folder: Path, config: Mapping[str, Any], settings: Settings) -> tuple[VisionFamily | None, TextFamily]:
    kind = settings.get("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(f"{folder / 'config.json'}: model_type is {kind!r:.60}, expected the name of an architecture")
    if settings.get("vision_config", None) is None:
        return None, text_family(kind, config)
    text = settings.part("text_config")
    text_kind = text.get("model_type", f"{kind}_text")
    if not isinstance(text_kind, str):
        raise ModelError(f"{folder / 'config.json'}: text_config: model_type is {text_kind!r:.60}, expected the name of an architecture")
    places = (folder / "preprocessor_config.json", folder / "processor_config.json")
    processor = next(filter(None, (read_json(path, required=False) for path in places)), {})
    return vision_family(kind, config, processor), text_family(text_kind, text.values)


def _stop_tokens(folder: Path, config: Settings) -> frozenset[int]:
    """End-of-sequence ids of the generation settings, else of the configuration."""
    generation = read_json(folder / "generation_config.json", required=False)
    for values in (generation, config.values, config.part("text_config").values):
        ids = values.get("eos_token_id")
        ids = [ids] if isinstance(ids, int) else ids
        if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
            return frozenset(ids)
    raise ModelError(f"{folder}: no eos_token_id in generation_config.json or config.json; answers could not end")
