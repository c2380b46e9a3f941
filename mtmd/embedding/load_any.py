"""Goes from a name to a model that gives vectors or scores, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mtmd.base.errors import DualEncoderError, OptionError, RerankerError
from mtmd.base.options import defaults_of
from mtmd.embedding.decoder_embedder import DecoderEmbedder
from mtmd.embedding.embedder import Embedder, load_embedder
from mtmd.embedding.reranker import Reranker, load_reranker
from mtmd.embedding.token_embedder import TokenEmbedder
from mtmd.options.load import EMBEDDER_OPTIONS, RERANKER_OPTIONS, LoadOptions

Retriever: TypeAlias = "Embedder | DecoderEmbedder | TokenEmbedder | Reranker"
RETRIEVERS = (Embedder, DecoderEmbedder, TokenEmbedder, Reranker)
_OF_A_SERVER = ("parallel", "isolate")  # options that `mtmd serve` sets for any model


def load_retriever(
    model: str, kind: DualEncoderError, chosen: Mapping[str, Any], *, progress: bool = False
) -> Retriever:
    """Do what `load_embedder` or `load_reranker` does, with the fields of `LoadOptions` that a
    command line has. `kind`: what `load` raised for the model. Raises OptionError for an option
    that is set, and that such a model has no use for.
    """
    scores = isinstance(kind, RerankerError)
    names = RERANKER_OPTIONS if scores else EMBEDDER_OPTIONS
    for name, usual in defaults_of(LoadOptions).items():
        if name in (*names, *_OF_A_SERVER) or chosen.get(name) in (usual, None, "", [], ()):
            continue
        raise OptionError(
            f"--{name.replace('_', '-')}: {model} is a {'reranker' if scores else 'dual encoder'}, "
            "which has no use for it; leave it out"
        )
    load = load_reranker if scores else load_embedder
    return load(model, progress=progress, **{n: chosen[n] for n in names if n in chosen})
