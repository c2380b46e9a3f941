"""Describes what a config.json says of its weights, against the tensors that are there: whether a
decoder's table of outputs is its token table, and whether they are quantized in a way that is not
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.family import ties_tables
from mtmd.kernels.checkpoint.canonical import WeightFile
from mtmd.kernels.checkpoint.quantized.scheme import READ, read_scheme
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import TextFamily, text_family
from mtmd.llm.parameters import LM_HEAD

SAMPLES = 64  # rows that are compared first: tables that differ do so nearly everywhere
BLOCK_NUMBERS = 1 << 24  # compared at once


def tying(settings: Settings, text: Settings) -> bool | None:
    """Return what a config.json says of the tables, or its model's default; None leaves it to the
    decoder's default.
    """
    result: bool | None = settings.get("tie_word_embeddings", None)
    if result is None and ties_tables(settings.get("model_type", None)):
        return True
    return text.get("tie_word_embeddings", None) if result is None else result


def text_as_stored(
    kind: str, config: Settings, file: WeightFile, stated: bool
) -> tuple[TextFamily, list[str]]:
    """Return the decoder that `config` describes, with a table of outputs of its own where the file
    has one that differs from the token table, as transformers' `tie_weights` decides; and notes
    for people, where it was `stated` that they are one. Both tables are read for that, until they
    differ: whole where they are equal, in blocks of the mapped file. Raises ModelError.
    """
    text, names = text_family(kind, config), set(file.names())
    parameters = text.parameters()
    head = next((name for name in LM_HEAD if name in names), None)
    sources = parameters["token_embd.weight"].sources
    table = next((name for name in sources if name in names), None)
    if head is None or table in (None, head) or "output.weight" in parameters:
        return text, []
    assert table is not None
    if _are_equal(file, head, table):
        return text, []
    untied = dict.fromkeys(("tie_word_embeddings", "tie_embedding"), False)
    note = (
        f"{head} differs from {table} and is used, though config.json says that they are one "
        "(tie_word_embeddings)"
    )
    text = text_family(kind, Settings({**config.values, **untied}, config.where))
    return text, [note] if stated else []


def _are_equal(file: WeightFile, a: str, b: str) -> bool:
    (shape, dtype), (other_shape, other_dtype) = file.meta(a), file.meta(b)
    if tuple(shape) != tuple(other_shape) or dtype != other_dtype or len(shape) != 2:
        return False
    first, second = file.read(a), file.read(b)
    return all(torch.equal(first[rows], second[rows]) for rows in _parts(*shape))


def _parts(rows: int, width: int) -> Iterator[torch.Tensor | slice]:
    yield torch.linspace(0, rows - 1, min(rows, SAMPLES)).long()
    step = max(BLOCK_NUMBERS // max(width, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


@contextmanager
def refused_by_name(folder: Path) -> Iterator[None]:
    """Weights that do not fit their configuration because they are quantized in a way that is not
    read: raises ModelError naming it in place of the tensor.
    """
    try:
        yield
    except ModelError as error:
        scheme = read_scheme(folder)
        if scheme.words and not scheme.is_read:
            raise ModelError(
                f"{folder}: its weights are quantized ({scheme.words}, says config.json) in a way "
                f"that is not read; this version reads {READ}; use such a checkpoint, the "
                "original one, or a GGUF of it"
            ) from error
        raise
