"""The decoder of a checkpoint as the metadata and tensors of a GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.checkpoint import relevance
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.gguf import TOWER
from mtmd.checkpoint.requantized import Requantized
from mtmd.checkpoint.sampling import gguf_sampling
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.mixtures import MIXTURES, tensor_types
from mtmd.kernels.checkpoint.tensor_writer import Planned
from mtmd.llm.family import gguf_of
from mtmd.llm.tokenizer.gguf_tokenizer import TEMPLATE

QUANTIZATION_VERSION = 2  # ggml's GGML_QNT_VERSION
LARGE = ("per_layer_model_proj",)  # not quantized, and not made larger


def converted_text(
    checkpoint: Checkpoint, mixture: str, importance: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[Planned], Requantized]:
    """Return metadata, the tensors, and the file that quantizes them when they are read. Raises
    ModelError for a decoder that no GGUF describes.
    """
    file = checkpoint.text_weights.file
    if file.canonical and not isinstance(file, GgufFile):
        raise ModelError(
            f"{checkpoint.folder} is laid out as no converter of llama.cpp does it, which is not "
            "converted; use the model in safetensors"
        )
    added: dict[str, torch.Tensor] = {}
    if isinstance(file, GgufFile):
        names = [name for name in file.names() if not name.startswith(TOWER)]
        metadata: dict[str, Any] = {
            key: file.metadata.raw(key)
            for key in file.metadata
            if not key.startswith(("split.", "clip."))
        }
        source = as_stored(file, names, str(checkpoint.folder))
    else:
        metadata, added = _described(checkpoint)
        source = checkpoint.text_weights.as_gguf()
        if relevance.scores_relevance(checkpoint.folder):
            source = _as_reranker(checkpoint, source, metadata, added)
    types = tensor_types(mixture, source.shapes, weighted=bool(importance))
    if not isinstance(file, GgufFile):
        small = (n for n in source.shapes if n not in types and not any(p in n for p in LARGE))
        types |= dict.fromkeys(small, "F32")
    made = Requantized(source, types, importance)
    number = MIXTURES[mixture].file_type
    assert number is not None
    metadata |= {"general.file_type": number, "general.quantization_version": QUANTIZATION_VERSION}
    return metadata, list(planned(made, added)), made


def _described(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    where, text = str(checkpoint.folder), checkpoint.text
    architecture, keys, added = gguf_of(text, where)
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": checkpoint.folder.resolve().name,
        **gguf_sampling(checkpoint.sampling),
        **checkpoint.tokenizer.gguf_keys(
            checkpoint.stop_tokens, text.vocabulary, architecture, where
        ),
        **keys,
    }
    if not checkpoint.template.missing:
        metadata[TEMPLATE] = checkpoint.template.source
    return metadata, added


def _as_reranker(
    checkpoint: Checkpoint,
    source: CanonicalWeights,
    metadata: dict[str, Any],
    added: dict[str, torch.Tensor],
) -> CanonicalWeights:
    """Put in what a GGUF of a reranker has in place of the table of outputs, and return its other
    weights. Raises ModelError for one whose rows were made one.
    """
    rows = relevance.score_rows(checkpoint.relevance, checkpoint.text_weights, checkpoint.tokenizer)
    if len(rows) < 2:
        raise ModelError(
            f"{checkpoint.folder}: a GGUF has a row for 'yes' and one for 'no', found their "
            "difference; convert the original checkpoint"
        )
    metadata |= relevance.gguf_keys(metadata["general.architecture"])
    added[relevance.HEAD] = rows
    return source.without(("output.weight",))


def as_stored(file: GgufFile, names: list[str], where: str) -> CanonicalWeights:
    """Return tensors of a GGUF under the names and in the shapes that it has."""
    return CanonicalWeights(file, {n: Parameter(file.shape(n), (n,)) for n in names}, where)


def planned(made: Requantized, added: Mapping[str, torch.Tensor]) -> Iterator[Planned]:
    """Yield the tensors of a file, and those `added` to them, to be written as they are."""
    for name in made.names():
        yield Planned(name, made.meta(name)[0], made.kind(name), partial(made.read, name))
    for name, tensor in added.items():
        yield Planned(name, tuple(tensor.shape), "F32", tensor.float)
