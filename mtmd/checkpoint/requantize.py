"""The decoder of an opened checkpoint, quantized when it is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mtmd.checkpoint.checkpoint import RANDOM, Checkpoint
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter
from mtmd.kernels.checkpoint.mixtures import MIXTURES, PLAIN, tensor_types
from mtmd.kernels.checkpoint.requantized import Requantized


def with_weights(checkpoint: Checkpoint, weights: str | None) -> Checkpoint:
    """Return the checkpoint whose decoder is of the mixture `weights` in memory; as it is where
    that is None, and where its weights are random, which have been made so.
    """
    if weights is None or RANDOM in checkpoint.opened_from[:1]:
        return checkpoint
    source = checkpoint.text_weights
    types = tensor_types(weights, source.shapes)
    made = CanonicalWeights(
        Requantized(source, types),
        {name: Parameter(shape, (name,)) for name, shape in source.shapes.items()},
        str(checkpoint.folder),
    )
    file_type = MIXTURES[weights].file_type
    return replace(
        checkpoint,
        text_weights=made,
        weight_bytes=checkpoint.weight_bytes - source.bytes + made.bytes,
        file_type=-1 if file_type is None else file_type,
        weights=weights,
    )


def weights_note(checkpoint: Checkpoint) -> str:
    """Return what was done to the decoder's weights, and, once they have been read, what it cost
    those that were quantized before; "" where they are as stored.
    """
    file = checkpoint.text_weights.file
    if not isinstance(file, Requantized):
        return ""
    kinds = Counter(file.source.file.kind(name) for name in file.source.sources)
    stored = kinds.most_common(1)[0][0]
    how = "converted" if checkpoint.weights in PLAIN else "quantized"
    note = f"the decoder's weights, stored as {stored}, are {how} to {checkpoint.weights}"
    if not file.requantized:
        return note
    cost = "" if file.nmse is None else f", which lost an NMSE of {file.nmse:.2g} more"
    return f"{note}, for the second time{cost}"
