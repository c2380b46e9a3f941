"""Gemma 3's eye: a SigLIP tower, its patches averaged down to a fixed number of tokens, one projection (arXiv:2503.19786)."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch

from mtmd.clip.blocks import VitParams, layer_norm, vit_block, vit_parameters
from mtmd.clip.family import ImagePlan
from mtmd.clip.image import resize
from mtmd.kernels import ops
from mtmd.kernels.errors import ModelError
from mtmd.kernels.flash import AttentionForm
from mtmd.kernels.graph import Node, Type, WeightSource, weight
from mtmd.kernels.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.weights.canonical import Parameter, plus_one

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers
GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True)
class Gemma3Vision:
    vit: VitParams
    image_size: int
    patch: int
    tokens: int
    text_width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    resample: str

    marker = "<start_of_image>"
    image_token = "<image_soft_token>"
    bidirectional = True
    unused = (r"(model\.)?vision_tower\.(vision_model\.)?head\..*",)  # SigLIP's pooling head

    @property
    def grid(self) -> int:
        return self.image_size // self.patch

    @property
    def pool(self) -> int:
        return self.grid // isqrt(self.tokens)

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        found = vit_parameters(self.vit, _tower)
        found["v.patch_embd.weight"] = Parameter((width, 3, self.patch, self.patch), _tower("embeddings.patch_embedding.weight"))
        found["v.patch_embd.bias"] = Parameter((width,), _tower("embeddings.patch_embedding.bias"))
        found["v.position_embd.weight"] = Parameter((self.grid ** 2, width), _tower("embeddings.position_embedding.weight"))
        found["v.post_ln.weight"] = Parameter((width,), _tower("post_layernorm.weight"))
        found["v.post_ln.bias"] = Parameter((width,), _tower("post_layernorm.bias"))
        found["mm.soft_emb_norm.weight"] = Parameter((width,), _anywhere("multi_modal_projector.mm_soft_emb_norm.weight"), convert=plus_one)
        found["mm.input_projection.weight"] = Parameter(
            (self.text_width, width), _anywhere("multi_modal_projector.mm_input_projection_weight"),
            stored=(width, self.text_width), convert=torch.Tensor.t)
        return found

    def prepare(self, pixels: np.ndarray) -> ImagePlan:
        """Stretched to a square, whatever its shape, as the reference does."""
        size = self.image_size
        values = resize(pixels, size, size, self.resample).astype(np.float32) * np.float32(self.scale)
        values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        prompt = f"\n\n<start_of_image>{self.image_token * self.tokens}<end_of_image>\n\n"
        return ImagePlan((np.ascontiguousarray(values.transpose(2, 0, 1)),), ((size, size),), self.tokens, prompt)

    def most_tokens(self) -> int:
        return self.tokens

    def tile_type(self) -> Type:
        return Type.contiguous((3, self.image_size, self.image_size), torch.float32)

    largest_tile_type = tile_type

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        dtype = tiles.dtype
        kernel, bias = weight("v.patch_embd.weight", weights, dtype), weight("v.patch_embd.bias", weights, dtype)
        x = ops.patch_embed(tiles, kernel, bias, name="v.patch_embd")
        x = ops.add(x, weight("v.position_embd.weight", weights, dtype), name="v.position_embd")
        for index in range(self.vit.layers):
            x = vit_block(x, index, self.vit, weights, attention)
        x = layer_norm(x, "v.post_ln", self.vit.eps, weights)
        x = ops.pool2d(x, grid=(self.grid, self.grid), kernel=self.pool, name="mm.pool")
        x = ops.rms_norm(x, weight("mm.soft_emb_norm.weight", weights, torch.float32), eps=self.vit.eps, name="mm.soft_emb_norm")
        return ops.matmul(x, weight("mm.input_projection.weight", weights, dtype), name="mm.input_projection")


def read(config: Mapping[str, Any], image: Settings) -> Gemma3Vision:
    """From config.json and the image processor's settings, with transformers' defaults; ModelError where a value cannot be followed."""
    top = Settings(config, "config.json")
    vision, text_width = top.part("vision_config"), top.part("text_config").count("hidden_size", 2304, most=MAX_WIDTH)
    vit = VitParams(vision.count("num_hidden_layers", 12, most=MAX_LAYERS), vision.count("hidden_size", 768, most=MAX_WIDTH),
                    vision.count("intermediate_size", 3072, most=MAX_WIDTH), vision.count("num_attention_heads", 12, most=MAX_HEADS),
                    vision.number("layer_norm_eps", 1e-6), GELU[vision.choice("hidden_act", GELU, "gelu_pytorch_tanh")])
    vision.choice("num_channels", (3,), 3)
    size, patch, tokens = vision.count("image_size", 224), vision.count("patch_size", 16), top.count("mm_tokens_per_image", 256)
    side = isqrt(tokens)
    if side * side != tokens or size % patch or (size // patch) % side or vit.width % vit.heads:
        raise ModelError(f"config.json: image_size {size}, patch_size {patch}, mm_tokens_per_image {tokens} and {vit.heads} heads of width "
                         f"{vit.width} do not fit together; expected a square grid of patches that divides into the tokens")
    _check_steps(image, size)
    mean, std = (image.numbers(key, 3, (0.5, 0.5, 0.5)) for key in ("image_mean", "image_std"))
    if min(std) <= 0:
        raise ModelError(f"{image.where}: image_std is {list(std)}, expected 3 numbers above 0, as it is divided by")
    return Gemma3Vision(vit, size, patch, tokens, text_width, mean, std, image.number("rescale_factor", 1 / 255),
                        RESAMPLE[image.choice("resample", RESAMPLE, 2)])


def _check_steps(image: Settings, side: int) -> None:
    """The one way from a picture to the tower: stretched to its square, scaled, normalised. ModelError where the settings leave it."""
    for key, expected in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("do_pan_and_scan", False)):
        if image.flag(key, expected) != expected:
            raise ModelError(f"{image.where}: {key} {str(not expected).lower()} is not supported; set it to {str(expected).lower()}")
    found = image.get("size", 224)
    size = Settings({"height": found, "width": found} if type(found) is int else found, f"{image.where}: size")
    given = {key for key, value in size.values.items() if value is not None}
    if given != {"height", "width"}:
        raise ModelError(f"{size.where} has {', '.join(sorted(given)) or 'nothing'}, expected height and width; set both to {side}")
    height, width = size.count("height"), size.count("width")
    if (height, width) != (side, side):
        raise ModelError(f"{size.where} is {height} x {width}, expected {side} x {side} as config.json's image_size; correct one of them")


def _tower(name: str) -> tuple[str, ...]:
    return _anywhere(f"vision_tower.vision_model.{name}") + _anywhere(f"vision_tower.{name}")


def _anywhere(name: str) -> tuple[str, ...]:
    return name, f"model.{name}"
