"""Interface of a family that takes audio, and the table of families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from mtmd.base.errors import ModelError
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.windows import AudioResolution
from mtmd.clip.blocks import GgufTower
from mtmd.clip.family import Tower
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Shape


@dataclass(frozen=True)
class Entry:
    """A family's file, and the names its models go by: model_type in a config.json;
    clip.audio.projector_type, or clip.projector_type, in a GGUF; `architecture` in a config.json
    that has no model_type.
    """

    module: str
    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    architecture: str = ""


FAMILIES = (
    Entry(
        "mtmd.clip.families.audio_flamingo3",
        ("audioflamingo3", "musicflamingo"),
        ("musicflamingo",),
    ),
    Entry("mtmd.clip.families.gemma3n.audio", ("gemma3n",), ("gemma3na",)),
    Entry("mtmd.clip.families.gemma4.audio", ("gemma4",), ("gemma4a",)),
    Entry("mtmd.clip.families.gemma4.unified_audio", ("gemma4_unified",), ("gemma4ua",)),
    Entry("mtmd.clip.families.glm_asr", ("glmasr",), ("glma",)),
    Entry("mtmd.clip.families.granite_speech", ("granite_speech",), ("granite_speech",)),
    Entry(
        "mtmd.clip.families.lfm2_audio",
        ("lfm2_audio",),
        ("lfm2a",),
        "Lfm2AudioForConditionalGeneration",
    ),
    Entry("mtmd.clip.families.meralion", ("meralion2", "meralion3"), ("meralion",)),
    Entry("mtmd.clip.families.phi4_multimodal.audio", ("phi4_multimodal",)),
    Entry("mtmd.clip.families.qwen2_5_omni_audio", ("qwen2_5_omni_thinker",), ("qwen2.5o",)),
    Entry("mtmd.clip.families.qwen2_audio", ("qwen2_audio",), ("qwen2a",)),
    Entry(
        "mtmd.clip.families.qwen3_asr",
        ("qwen3_asr", "qwen3_asr_thinker", "qwen3_forced_aligner", "qwen3_omni_moe_thinker"),
        ("qwen3a",),
    ),
    Entry("mtmd.clip.families.ultravox", ("ultravox",), ("ultravox",)),
    Entry("mtmd.clip.families.voxtral", ("voxtral",), ("voxtral",)),
)


class AudioFamily(Tower, Protocol):
    """One audio model, whose embeddings a decoder reads. Its tiles are fp32 [1, Y, X]."""

    @property
    def resolution(self) -> AudioResolution:
        """Return how samples become tiles."""

    marker: str
    """What the chat template writes where audio belongs."""
    token: str
    """The token whose place the embeddings take."""
    rate: int
    """Samples a second."""
    instructions: Instructions
    unused: tuple[str, ...]
    """Patterns of tensors that checkpoints may hold and that answering does not need."""

    def prompt(self, plan: ImagePlan) -> str:
        """The text that stands for audio, in which each of the plan's `tokens` is written as
        `token`; other text may stand between them.
        """


@runtime_checkable
class HearsAlongsidePictures(Protocol):
    """A family that encodes audio in another way where pictures or videos stand in the prompt."""

    @property
    def alongside_pictures(self) -> AudioResolution:
        """Return how samples become tiles then."""


@runtime_checkable
class HasSeparator(Protocol):
    """A family whose `ImagePlan.order` may have -1."""

    separator: str
    """The parameter whose last row stands there."""


def hears(config: Settings) -> bool:
    """Return whether a config.json describes an audio encoder."""
    keys = "audio_config", "encoder_config", "speech_config"
    return any(config.get(key, None) is not None for key in keys)


def with_model_type(config: Settings) -> Settings:
    """Return a config.json in transformers' words, where its authors have words of their own and
    name an architecture alone.
    """
    if config.get("model_type", None) is not None:
        return config
    named = config.get("architectures", None)
    entry = next(
        (e for e in FAMILIES if e.architecture and named in ([e.architecture], e.architecture)),
        None,
    )
    if entry is None:
        return config
    return Settings(import_module(entry.module).usual_words(config), config.where)


def audio_family(model_type: str, config: Settings, features: Settings) -> AudioFamily | None:
    """The family of a checkpoint; `features` are its feature extractor's settings. None where it
    has no weights for audio, or none that are read. Raises ModelError for settings that cannot be
    followed.
    """
    entry = next((e for e in FAMILIES if model_type in e.model_types), None)
    if entry is None or not hears(config):
        return None
    family: AudioFamily = import_module(entry.module).read(config, features)
    return family


def gguf_audio_family(
    projector: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    where: str,
    template: str = "",
) -> AudioFamily | None:
    """The family of a GGUF projector file (mmproj) that says it has an audio encoder, and the chat
    template of its decoder; None where that is of no family that is read.
    """
    entry = next((e for e in FAMILIES if projector in e.gguf), None)
    if entry is None:
        return None
    module = import_module(entry.module)
    keys = Settings(
        {k.removeprefix("clip."): metadata[k] for k in metadata if k.startswith("clip.")}
        | {"chat_template": template},
        f"{where}: clip",
    )
    config, features = module.from_gguf(keys, shapes)
    family: AudioFamily = module.read(Settings(config, keys.where), Settings(features, keys.where))
    return family


def gguf_of(family: AudioFamily, where: str, alone: bool) -> tuple[dict[str, Any], GgufTower]:
    """Return the keys with which a GGUF describes an audio encoder, beside those of an image
    encoder in the same file, or `alone`, and its tower, which says what else is in the file. Raises
    ModelError for one that llama.cpp has no projector for: `where` names the checkpoint.
    """
    module = import_module(type(family).__module__)
    made: GgufTower | None = getattr(module, "to_gguf", lambda _: None)(family)
    if made is None:
        raise ModelError(
            f"{where}: no GGUF holds its audio encoder; convert the decoder alone with --text-only"
        )
    kind = "projector_type" if alone else "audio.projector_type"
    keys = {"has_audio_encoder": True, kind: made.projector, **made.keys}
    return {f"clip.{key}": value for key, value in keys.items()}, made
