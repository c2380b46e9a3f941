"""Models that give a vector for each token of a page or a query, as ColPali does
(arXiv:2407.01449): a model that sees, inside of one that projects its last states.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter, WeightFile
from mtmd.kernels.checkpoint.inside import Inside
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings, read_json
from mtmd.llm.family import TextFamily

INNER, PREFIX = "vlm_config", "vlm."
LAYER = "embedding_proj_layer"
PROCESSOR = "processor_config.json"


@dataclass(frozen=True)
class TokenVectors:
    """`weights`: of the projection. `page`: what is written around a picture, and `query` before a
    query; "" where the processor's settings do not say.
    """

    width: int
    weights: CanonicalWeights
    page: str
    query: str

    def projection(self) -> tuple[Tensor, Tensor]:
        """fp32 [width, D] and [width]"""
        weight, bias = (self.weights.read(name, torch.float32) for name in ("weight", "bias"))
        return weight, bias


def gives_token_vectors(config: Settings) -> bool:
    """Return whether a config.json is such a model's."""
    return config.get(INNER, None) is not None and config.get("embedding_dim", None) is not None


def gives_token_vectors_in(folder: Path) -> bool:
    """Return whether a folder is such a model's; False for one without a config.json."""
    values = read_json(folder / "config.json", required=False)
    return gives_token_vectors(Settings(values, "config.json"))


def inner_file(file: WeightFile) -> Inside:
    """Return the tensors of the model inside. transformers 5 saves it without its head, and so
    without the "model." that its names begin with alone.
    """
    decoder = f"{PREFIX}language_model."
    bare = any(
        name.startswith(decoder) and not name.startswith((f"{decoder}model.", f"{decoder}lm_head"))
        for name in file.names()
    )
    return Inside(file, PREFIX, "model." if bare else "")


def read_token_vectors(
    folder: Path, config: Settings, file: WeightFile, text: TextFamily
) -> TokenVectors:
    """Raises ModelError for a projection that is not there or does not fit."""
    width = config.count("embedding_dim", maximum=MAX_WIDTH)
    parameters = {
        "weight": Parameter((width, text.width), (f"{LAYER}.weight",)),
        "bias": Parameter((width,), (f"{LAYER}.bias",)),
    }
    settings = Settings(read_json(folder / PROCESSOR, required=False), PROCESSOR)
    page, query = (settings.get(key, "") for key in ("visual_prompt_prefix", "query_prefix"))
    weights = CanonicalWeights(file, parameters, str(folder))
    return TokenVectors(
        width,
        weights,
        page if isinstance(page, str) else "",
        query if isinstance(query, str) else "",
    )
