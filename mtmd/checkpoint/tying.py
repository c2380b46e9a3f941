"""Whether a decoder's table of outputs is its token table: what a configuration says, against the
tensors that are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtmd.kernels.checkpoint.canonical import WeightFile
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import TextFamily, text_family
from mtmd.llm.parameters import LM_HEAD

# Models whose configuration class of transformers (5.23) ties the tables unless config.json says
# otherwise, whatever its text_config says.
TIED = ("aya_vision", "gemma3", "gemma4", "internvl", "lfm2_vl", "mistral3")
SAMPLES = 64  # rows that are compared first: tables that differ do so nearly everywhere
BLOCK_NUMBERS = 1 << 24  # compared at once


def tying(settings: Settings, text: Settings) -> bool | None:
    """Return what a config.json says of the tables, or its model's default; None leaves it to the
    decoder's default.
    """
    found: bool | None = settings.get("tie_word_embeddings", None)
    if found is None and settings.get("model_type", None) in TIED:
        return True
    return text.get("tie_word_embeddings", None) if found is None else found


def text_as_stored(kind: str, config: Settings, file: WeightFile) -> tuple[TextFamily, list[str]]:
    """Return the decoder that `config` describes, with a table of outputs of its own where the file
    has one that differs from the token table, as transformers' `tie_weights` decides; and notes
    for people. Raises ModelError.
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
    return text_family(kind, Settings({**config.values, **untied}, config.where)), [
        f"{head} differs from {table} and is used, though config.json says that they are one "
        "(tie_word_embeddings)"
    ]


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
