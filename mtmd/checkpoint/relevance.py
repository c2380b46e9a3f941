"""Models that score how relevant a document is to a query by the logits of "yes" and "no": tells
them from those that write answers, and finds the weights that a score is read with.

Nothing in a config.json says that a decoder was trained for it. sentence-transformers has a file
for it, llama.cpp a kind of pooling; else the model's name is all there is, as for llama.cpp's
converter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import ModelError, RerankerError
from mtmd.base.files import open_regular
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter, WeightFile
from mtmd.kernels.checkpoint.settings import Settings, read_json
from mtmd.llm.family import TextFamily
from mtmd.llm.tokenizer.tokenizer import Tokenizer

LOGIT_SCORE = Path("1_LogitScore", "config.json")
YES, NO = "yes", "no"
HEAD = "cls.output.weight"
SCORE = "score.weight"
RANK = 4  # LLAMA_POOLING_TYPE_RANK
GGUF_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
HEADING = re.compile(rb"^# [^\n]{0,80}\breranker\b", re.I | re.M)
README_BYTES = 1 << 16


def scores_relevance(folder: Path) -> bool:
    """Return whether a checkpoint folder is such a model's. Raises ModelError for a file that is no
    JSON object.
    """
    if (folder / LOGIT_SCORE).is_file() or _classifies(folder):
        return True
    resolved = folder.resolve()
    # In the hub's cache a folder is called by its commit: models--org--name/snapshots/commit
    names = (resolved.name, *(p.name for p in resolved.parents[1:2] if "--" in p.name))
    return any("reranker" in name.lower() for name in names) or _is_heading(folder / "README.md")


def _classifies(folder: Path) -> bool:
    config = Settings(read_json(folder / "config.json", required=False), "config.json")
    named = config.get("architectures", None)
    kinds = named if isinstance(named, list) else []
    return any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


def _is_heading(readme: Path) -> bool:
    if not readme.is_file():
        return False
    with open_regular(readme) as file:
        return HEADING.search(file.read(README_BYTES)) is not None


def gguf_scores_relevance(metadata: Mapping[str, Any], architecture: str) -> bool:
    """Return whether a GGUF is such a model's."""
    return metadata.get(f"{architecture}.pooling_type") == RANK


def refuse_to_write(where: object) -> None:
    """Raises RerankerError: a model that writes answers was expected."""
    raise RerankerError(
        f"{where} is a reranker, which scores documents and writes no answers; use `mtmd rerank`, "
        "or `mtmd.load_reranker`"
    )


def head_of_folder(file: WeightFile, text: TextFamily, where: str) -> CanonicalWeights | None:
    """Return the difference of both rows, fp [1, D], where a checkpoint was converted to a
    classifier of one class; None for one that has its table of outputs. Raises ModelError.
    """
    if SCORE not in file.names():
        return None
    return CanonicalWeights(file, {HEAD: Parameter((1, text.width), (SCORE,))}, where)


def head_of_gguf(
    file: WeightFile, metadata: Mapping[str, Any], architecture: str, text: TextFamily, where: str
) -> CanonicalWeights | None:
    """Return both rows, "yes" first, fp [2, D], as llama.cpp's converter writes them; None for a
    file without. Raises ModelError for rows of other labels.
    """
    if HEAD not in file.names():
        return None
    labels = metadata.get(f"{architecture}.classifier.output_labels")
    if labels != [YES, NO]:
        raise ModelError(
            f"{where}: classifier.output_labels is {labels!r:.60}, expected ['yes', 'no']; other "
            "classifiers are not read"
        )
    return CanonicalWeights(file, {HEAD: Parameter((2, text.width), (HEAD,))}, where)


def check_labels(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises ModelError for a model that is read by other tokens than "yes" and "no", and so was
    trained with another prompt.
    """
    stated = read_json(folder / LOGIT_SCORE, required=False) if folder.is_dir() else {}
    expected = [tokenizer.id(word) if tokenizer.knows(word) else None for word in (YES, NO)]
    actual = (
        [stated.get(key) for key in ("true_token_id", "false_token_id")] if stated else expected
    )
    if None in expected or actual != expected:
        raise ModelError(
            f"{folder}: its score is read by the tokens {actual}, expected those of 'yes' and "
            f"'no', {expected}; rerankers that answer otherwise are not read"
        )


def score_rows(
    head: CanonicalWeights | None, weights: CanonicalWeights, tokenizer: Tokenizer
) -> Tensor:
    """fp32 [2, D]: what the last token's state is multiplied by for the logits of "yes" and "no";
    [1, D] where a file has their difference alone. `weights`: the decoder's.
    """
    if head is not None:
        return head.without_blocks().read(HEAD, torch.float32)
    table = "output.weight" if "output.weight" in weights.shapes else "token_embd.weight"
    return weights.rows(table, [tokenizer.id(YES), tokenizer.id(NO)])


def gguf_keys(architecture: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes for such a model, of whichever kind."""
    return {
        f"{architecture}.pooling_type": RANK,
        f"{architecture}.classifier.output_labels": [YES, NO],
        "tokenizer.chat_templates": ["rerank"],
        "tokenizer.chat_template.rerank": GGUF_PROMPT,
    }
