"""Embedder of one kind of media: what an encoder gives, and tokens with numbers above those of
text, into the decoder's width (transformers' Gemma3nMultimodalEmbedder).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import checkpoint_names
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights

MAX_TOKENS = 1 << 16  # a table has 128
TABLE = ("embedding", "hard_embedding_norm", "embedding_projection")


@dataclass(frozen=True)
class Embedder:
    """`width`: of what the encoder gives; the table has `tokens` rows of that width, the first of
    which is that of the token `first`.
    """

    module: str
    width: int
    tokens: int
    eps: float
    text_width: int
    first: int = field(compare=False)  # which no GGUF says

    def parameters(self, at: str) -> dict[str, Parameter]:
        """Return the parameters by their names below `at`."""
        shapes: dict[str, tuple[str, Shape]] = {
            "embedding": ("embedding", (self.tokens, self.width)),
            "hard_emb_norm": ("hard_embedding_norm", (self.width,)),
            "soft_emb_norm": ("soft_embedding_norm", (self.width,)),
            "input_projection": ("embedding_projection", (self.text_width, self.width)),
        }
        return {
            f"{at}.{name}.weight": Parameter(shape, self._names(theirs))
            for name, (theirs, shape) in shapes.items()
        }

    def tokens_parameter(self, at: str, ids: Sequence[int]) -> Parameter:
        """Return the embeddings [N, D] of tokens, made of the table when they are loaded. Raises
        ModelError for ids that the table does not have.
        """
        rows = [token - self.first for token in ids]
        if bad := [i for i, row in zip(ids, rows, strict=True) if not 0 <= row < self.tokens]:
            raise ModelError(
                f"token {bad[0]} is not among the {self.tokens} from {self.first} on that "
                f"{self.module} has embeddings for"
            )
        shapes = (self.tokens, self.width), (self.width,), (self.text_width, self.width)
        made = _made(rows, self.eps)
        ours = tuple(f"{at}.{n}.weight" for n in ("embedding", "hard_emb_norm", "input_projection"))
        theirs = zip(*(self._names(name) for name in TABLE), strict=True)
        return Parameter(
            (len(rows), self.text_width),
            (),
            others=tuple(Stored(n, shapes[0], made, shapes=shapes) for n in theirs),
            gguf=(Stored(ours, shapes[0], made, shapes=shapes),),
        )

    def graph(self, x: Node, at: str, w: Weights, scale: float = 1.0) -> Node:
        """Embeddings of what the encoder gives, times `scale`          [B, T, C] -> [B, T, D]"""
        x = w.rms_norm(x, f"{at}.soft_emb_norm", self.eps / scale**2)
        x = w.linear(x, f"{at}.input_projection")
        return ops.rms_norm(x, eps=self.eps, name=f"{at}.post_norm")

    def _names(self, name: str) -> tuple[str, ...]:
        return checkpoint_names(f"{self.module}.{name}.weight")


def read_embedder(part: Settings, text: Settings, module: str, width: int, first: int) -> Embedder:
    """Read it from the part of config.json that describes an encoder of `width`, and from that of
    the decoder; `first` is the default of vocab_offset. Raises ModelError for numbers that cannot
    be followed.
    """
    return Embedder(
        module=module,
        width=part.count("hidden_size", width, maximum=MAX_WIDTH),
        tokens=part.count("vocab_size", 128, maximum=MAX_TOKENS),
        first=part.token_id("vocab_offset", first),
        eps=part.number("rms_norm_eps", 1e-6),
        text_width=text.count("hidden_size", 2048, maximum=MAX_WIDTH),
    )


def _made(rows: list[int], eps: float) -> Callable[..., torch.Tensor]:
    def made(table: torch.Tensor, norm: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
        x = _normed(table[rows].float(), eps) * norm.float()
        return _normed(x @ projection.float().t(), eps)

    return made


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
