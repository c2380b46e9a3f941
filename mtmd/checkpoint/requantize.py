"""The parts of an opened checkpoint, quantized when they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from mtmd.checkpoint.checkpoint import RANDOM, Checkpoint
from mtmd.checkpoint.requantized import Requantized
from mtmd.clip.family import Tower
from mtmd.kernels.checkpoint.canonical import PLAIN_KINDS, CanonicalWeights, Parameter
from mtmd.kernels.checkpoint.mixtures import MIXTURES, PLAIN, tensor_types
from mtmd.kernels.checkpoint.quantized.weights import QuantizedWeights
from mtmd.kernels.graph import graph_input
from mtmd.kernels.layers import AdaptedWeights
from mtmd.kernels.plan.flash_choice import AttentionForm

LOST_MAX = 1e-9  # an NMSE that no answer shows


def with_weights(checkpoint: Checkpoint, weights: str | None) -> Checkpoint:
    """Return the checkpoint whose decoder is of the mixture `weights` in memory; as it is where
    that is None, and where its weights are random, which have been made so.
    """
    if weights is None or RANDOM in checkpoint.opened_from[:1]:
        return checkpoint
    source = checkpoint.text_weights
    made = _requantized(checkpoint, source, tensor_types(weights, source.shapes))
    file_type = MIXTURES[weights].file_type
    return replace(
        checkpoint,
        text_weights=made,
        weight_bytes=checkpoint.weight_bytes - source.bytes + made.bytes,
        file_type=-1 if file_type is None else file_type,
        weights=weights,
    )


def with_int8_towers(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint whose encoders have weights that products with activations in 8 bits
    read: plain ones are quantized when they are read, others stay as they are.
    """
    before = checkpoint.vision_weights, checkpoint.audio_weights
    families = checkpoint.vision, checkpoint.audio
    vision, audio = (
        None if family is None or source is None else _int8_tower(checkpoint, family, source)
        for family, source in zip(families, before, strict=True)
    )
    sizes = [sum(one.bytes for one in some if one) for some in (before, (vision, audio))]
    return replace(
        checkpoint,
        vision_weights=vision,
        audio_weights=audio,
        weight_bytes=checkpoint.weight_bytes - sizes[0] + sizes[1],
    )


def _int8_tower(
    checkpoint: Checkpoint, family: Tower, source: CanonicalWeights
) -> CanonicalWeights:
    from mtmd.kernels.plan.int8_products import weights_to_quantize  # loads LLVM

    tile = family.resolution.tile_type().shape
    pixels = graph_input("inp.pixels", (1, *tile), torch.float32, lambda tiles: tiles)
    graph = family.graph(pixels, AdaptedWeights(source, ()), AttentionForm())
    return _requantized(checkpoint, source, weights_to_quantize([graph]))


def _requantized(
    checkpoint: Checkpoint, source: CanonicalWeights, types: Mapping[str, str]
) -> CanonicalWeights:
    file = Requantized(source, types)
    parameters = {name: Parameter(file.meta(name)[0], (name,)) for name in file.names()}
    return CanonicalWeights(file, parameters, str(checkpoint.folder))


def weights_note(checkpoint: Checkpoint) -> str:
    """Return how the weights of quantized safetensors are stored, or what was done to the decoder's
    weights, and, once they have been read, what it cost those that were quantized before; "" where
    there is nothing to say.
    """
    file = checkpoint.text_weights.file
    if isinstance(file, QuantizedWeights):
        return _stored_note(file, checkpoint)
    if not isinstance(file, Requantized):
        return ""
    source = file.source.file
    kinds = Counter(source.kind(name) for name in file.source.sources)
    stored = source.quantized if isinstance(source, QuantizedWeights) else ""
    stored = stored or kinds.most_common(1)[0][0]
    how = "converted" if checkpoint.weights in PLAIN else "quantized"
    note = f"the decoder's weights, stored as {stored}, are {how} to {checkpoint.weights}"
    if not file.requantized:
        return note
    cost = "" if file.nmse is None else f", which lost an NMSE of {file.nmse:.2g} more"
    return f"{note}, for the second time{cost}"


def _stored_note(file: QuantizedWeights, checkpoint: Checkpoint) -> str:
    quantized = file.quantized
    if not quantized:
        return ""
    every = checkpoint.text_weights, checkpoint.vision_weights, checkpoint.audio_weights
    parts = [part for part in every if part is not None]
    kinds = [part.file.kind(name) for part in parts for name in part.sources]
    tensors = sum(kind not in PLAIN_KINDS for kind in kinds)
    dequantized = sum(len(part.dequantized) for part in parts)
    if not dequantized:
        lost = file.rounded
        cost = f" but for scales in fp16, which lose an NMSE of up to {lost:.2g}"
        return f"weights: {quantized}, kept as stored{cost if lost > LOST_MAX else ''}"
    how = "" if dequantized == tensors else f"{dequantized} of {tensors} tensors "
    return f"weights: {quantized}, {how}dequantized when they are read"
