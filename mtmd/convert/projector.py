"""The encoder of a checkpoint as the metadata and tensors of a GGUF projector."""

from __future__ import annotations

from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.gguf import PROJECTOR, TOWER
from mtmd.checkpoint.requantized import Requantized
from mtmd.clip.audio_family import gguf_of as audio_gguf_of
from mtmd.clip.family import gguf_of
from mtmd.convert.text import QUANTIZATION_VERSION, as_stored, planned
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.mixtures import MIXTURES, PLAIN, tensor_types
from mtmd.kernels.checkpoint.tensor_writer import Planned

FIRST = (
    "v.patch_embd.weight",
    "v.sam.patch_embd.weight",
    "v.msfa.ffn.pw_exp.conv.weight",
    "a.conv1d.1.weight",
    "a.conv2d.1.weight",
    "a.input_projection.weight",
    "a.pre_encode.out.weight",
)  # whose type is that of an encoder's numbers


def converted_projector(
    checkpoint: Checkpoint, mixture: str | None
) -> tuple[str, dict[str, Any], list[Planned], Requantized] | None:
    """Return the mixture, metadata, tensors, and the file that they are read from; None for a model
    that takes text alone. Without a mixture the numbers stay of the type that they are stored in.
    Raises ModelError for an encoder that no GGUF describes.
    """
    vision, audio = checkpoint.vision, checkpoint.audio
    weights = checkpoint.vision_weights or checkpoint.audio_weights
    if weights is None:
        return None
    file, where = weights.file, str(checkpoint.folder)
    added: dict[str, torch.Tensor] = {}
    if file.canonical and not isinstance(file, GgufFile):
        raise ModelError(
            f"{where} is laid out as no converter of llama.cpp does it, which is not converted; "
            "use the model in safetensors"
        )
    if isinstance(file, GgufFile):
        names = [name for name in file.names() if name.startswith(TOWER)]
        prefixes = ("clip.", "general.")
        metadata: dict[str, Any] = {
            key: file.metadata.raw(key) for key in file.metadata if key.startswith(prefixes)
        } | {"general.architecture": PROJECTOR}
        source, types = as_stored(file, names, where), {}
        if mixture is not None:
            types = tensor_types(mixture, source.shapes)
    else:
        described: dict[str, Any] = {}
        parameters: dict[str, Parameter] = {}
        unrounded: tuple[str, ...] = ()
        if vision is not None:
            described, tower = gguf_of(vision, where)
            added = {name: _row(checkpoint, token) for name, token in tower.rows.items()}
            added |= tower.tensors
            parameters |= vision.parameters()
        if audio is not None:
            keys, tower = audio_gguf_of(audio, where, alone=vision is None)
            added, unrounded = {**added, **tower.tensors}, tower.unrounded
            described = _of_both(described, keys) if vision is not None else keys
            parameters |= audio.parameters()
        weights = CanonicalWeights(file, parameters, where)
        metadata = {
            "general.architecture": PROJECTOR,
            "general.type": PROJECTOR,
            "general.name": checkpoint.folder.resolve().name,
            **described,
        }
        source = weights.as_gguf()
        first = next(name for name in FIRST if name in weights.stored)
        stored = file.kind(next(iter(weights.stored[first].names)))
        mixture = mixture or (stored if stored in PLAIN else "F16")
        types = dict.fromkeys(source.shapes, "F32") | tensor_types(mixture, source.shapes)
        # Some programs turn round what lies otherwise than they multiply it, in plain numbers only.
        types |= dict.fromkeys((*weights.turned_in_gguf, *unrounded), "F32")
    kind = mixture or "as stored"
    if mixture is not None:
        metadata["general.file_type"] = MIXTURES[mixture].file_type
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
    made = Requantized(source, types)
    return kind, metadata, list(planned(made, added)), made


def _of_both(seen: dict[str, Any], heard: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an encoder of pictures and one of audio. The type of one that names both
    stands by itself; otherwise each kind has a key of its own, as programs that find the common one
    look no further.
    """
    kinds = "clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type"
    both, of_pictures, of_audio = kinds
    if seen[both] == heard[of_audio]:
        return {key: value for key, value in (seen | heard).items() if key != of_audio}
    return {of_pictures: seen[both]} | {k: v for k, v in (seen | heard).items() if k != both}


def _row(checkpoint: Checkpoint, token: str) -> torch.Tensor:
    table = checkpoint.text_weights.without_blocks().read("token_embd.weight", torch.float32)
    return table[checkpoint.tokenizer.id(token)].clone()
