"""Describes what a checkpoint says of itself, for lists of models. Loads without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from mtmd.clip.tasks import tasks_of
from mtmd.kernels.checkpoint.mixtures import MIXTURES
from mtmd.llm.sampling.options import NOTHING_RECOMMENDED, ModelSampling

if TYPE_CHECKING:
    from mtmd.checkpoint.checkpoint import Checkpoint
    from mtmd.kernels.checkpoint.canonical import CanonicalWeights

# general.file_type of a GGUF: llama.cpp, include/llama.h, llama_ftype
_FILE_TYPES = {
    **{m.file_type: name for name, m in MIXTURES.items() if m.file_type is not None},
    19: "IQ2_XXS",
    20: "IQ2_XS",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    31: "IQ1_M",
    36: "TQ1_0",
    37: "TQ2_0",
    39: "NVFP4",
    40: "Q1_0",
}


@dataclass(frozen=True)
class ServedAdapter:
    """A LoRA adapter that answers may choose by name. `file`: the name of its file or folder."""

    name: str
    file: str
    scale: float


@dataclass(frozen=True)
class CheckpointFacts:
    """`format`: of its files, "gguf" or "safetensors". `architecture`: model_type of a config.json,
    general.architecture of a GGUF. `parameters`: numbers that are stored, of encoder and decoder.
    `width`: of the decoder, of vectors where there is none. `weight_type`: BF16, Q4_K_M; of several
    types the one that holds most of the parameters, where the file has no name for the mixture.
    `sampling`: how the files recommend to choose tokens. `adapters` that answers may choose.
    `tasks`: prompts of the model's authors, by task. `video_sound`: it hears videos with their
    frames.
    """

    format: str
    architecture: str
    parameters: int
    width: int
    weight_type: str
    sampling: ModelSampling = NOTHING_RECOMMENDED
    adapters: tuple[ServedAdapter, ...] = ()
    tasks: Mapping[str, str] = field(default_factory=dict)
    video_sound: bool = False


def facts_of(checkpoint: Checkpoint) -> CheckpointFacts:
    """Return the facts of a checkpoint that was opened; no weight is read."""
    parts = (checkpoint.text_weights, checkpoint.vision_weights, checkpoint.audio_weights)
    facts = facts_of_weights(
        [part for part in parts if part is not None],
        checkpoint.architecture,
        checkpoint.text.width,
        checkpoint.file_type,
    )
    adapters = tuple(
        ServedAdapter(one.name, one.path.name, one.scale) for one in checkpoint.chosen_adapters
    )
    video = checkpoint.vision.video if checkpoint.vision else None
    return replace(
        facts,
        sampling=checkpoint.sampling,
        adapters=adapters,
        tasks=tasks_of(checkpoint.vision),
        video_sound=checkpoint.audio is not None and video is not None and video.sound is not None,
    )


def facts_of_weights(
    parts: Sequence[CanonicalWeights], architecture: str, width: int, file_type: int = -1
) -> CheckpointFacts:
    """The same of its parts; `file_type` as a GGUF has it, -1 for none."""
    from mtmd.kernels.checkpoint.quantized.weights import QuantizedWeights

    kinds: Counter[str] = Counter()
    for weights in parts:
        for source in weights.sources:
            file = weights.file
            kind = file.form(source) if isinstance(file, QuantizedWeights) else file.kind(source)
            kinds[kind] += prod(file.meta(source)[0])
    return CheckpointFacts(
        "gguf" if parts[0].file.canonical else "safetensors",
        architecture,
        kinds.total(),
        width,
        _FILE_TYPES.get(file_type) or kinds.most_common(1)[0][0],
    )
