"""The pieces that text families are made of."""
from __future__ import annotations

import torch

from mtmd.kernels import ops
from mtmd.kernels.graph import Node, WeightSource, weight
from mtmd.llm.inputs import TextInputs


class Weights:
    """A family's parameters by canonical name, in the types their ops want."""

    def __init__(self, source: WeightSource, dtype: torch.dtype):
        self.source, self.dtype = source, dtype

    def matrix(self, name: str) -> Node:
        return weight(f"{name}.weight", self.source, self.dtype)

    def linear(self, x: Node, name: str) -> Node:
        return ops.matmul(x, self.matrix(name), name=name)

    def rms_norm(self, x: Node, name: str, eps: float) -> Node:
        return ops.rms_norm(x, weight(f"{name}.weight", self.source, torch.float32), eps=eps, name=name)


def token_embeddings(inputs: TextInputs, weights: Weights, scale: float) -> Node:
    """Rows of the token table times `scale`, images put in unscaled          -> [T, D]"""
    x = ops.embed(inputs.token_ids(), weights.matrix("token_embd"), scale=scale, name="token_embd")
    return ops.place_rows(x, inputs.image_rows(), inputs.image_at(), name="image_embd") if inputs.images else x


def remember(k: Node, v: Node, layer: int, inputs: TextInputs) -> tuple[Node, Node]:
    """k, v [T, G, K] written to the layer's cache -> all keys and values, [1, S, G, K] each"""
    cache = inputs.cache(layer, k.shape[1], k.shape[2])
    kv = ops.kv_store(cache, k, v, inputs.cache_slots(), name=f"blk.{layer}.kv_store")
    return ops.kv_half(kv, which=0, name=f"blk.{layer}.keys"), ops.kv_half(kv, which=1, name=f"blk.{layer}.values")


def heads(x: Node, count: int, name: str) -> Node:
    """[T, H * K] -> [T, H, K]"""
    return ops.reshape(x, shape=(x.shape[0], count, x.shape[1] // count), name=f"{name}.heads")
