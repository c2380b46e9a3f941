"""Gemma 3, small enough to train on two CPU cores; parameter names are the published checkpoint's.

Written for training (torch.compile, packed questions, explicit masks); answers come from mtmd
itself. Source of every formula: transformers' `modeling_gemma3.py` and `modeling_siglip.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SIZE, PATCH, GRID, IMAGE_TOKENS = 96, 16, 6, 9
VISION = {
    "hidden_size": 144,
    "intermediate_size": 576,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


LOCAL_BASE = "rope_local_base_freq"


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))  # stored as w, applied as 1 + w

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)).to(
            x.dtype
        )


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.6 / math.sqrt(inputs))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            _linear(width, width, bias=True) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = _linear(width, inner, bias=True), _linear(inner, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int):
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (
            nn.LayerNorm(width, eps=1e-6),
            nn.LayerNorm(width, eps=1e-6),
        )
        self.self_attn, self.mlp = VisionAttention(width, heads), VisionMLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = VISION["hidden_size"]
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(3, width, PATCH, PATCH)
        self.embeddings.position_embedding = nn.Embedding(GRID * GRID, width)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            VisionLayer(width, VISION["intermediate_size"], VISION["num_attention_heads"])
            for _ in range(VISION["num_hidden_layers"])
        )
        self.post_layernorm = nn.LayerNorm(width, eps=1e-6)
        nn.init.normal_(self.embeddings.position_embedding.weight, std=0.3)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, 96, 96] in -1..1 -> patch features [B, 36, C]"""
        x = (
            self.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
            + self.embeddings.position_embedding.weight
        )
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


def pooled(patches: Tensor) -> Tensor:
    """patches [B, 36, C] -> the mean of each cell's four [B, 9, C]"""
    grid = patches.transpose(1, 2).unflatten(2, (GRID, GRID))
    return F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)


class Projector(nn.Module):
    def __init__(self, vision: int, text: int):
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(
            torch.randn(vision, text) / math.sqrt(vision)
        )
        self.mm_soft_emb_norm = RMSNorm(vision)

    def forward(self, patches: Tensor) -> Tensor:
        """patches [B, 36, C] -> image embeddings [B, 9, D]"""
        return self.mm_soft_emb_norm(pooled(patches)) @ self.mm_input_projection_weight.to(
            patches.dtype
        )


def angles(positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """positions [B, T] -> for each kind of layer the cosine and sine [B, 1, T, K / 2] of its
    rotation. Apart from the model, that a compiled one need not make them again in each layer.
    """
    half = TEXT["head_dim"] // 2
    result = {}
    for kind, base in (("full_attention", "rope_theta"), ("sliding_attention", LOCAL_BASE)):
        turn = TEXT[base] ** (-torch.arange(half).float() / half)
        angle = positions[:, None, :, None].float() * turn
        result[kind] = angle.cos(), angle.sin()
    return result


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, K] rotated; the two halves of K are the two coordinates."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class TextAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, heads, groups, head = (
            TEXT[k]
            for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.heads, self.groups = heads, groups
        self.q_proj, self.o_proj = _linear(width, heads * head), _linear(heads * head, width)
        self.k_proj, self.v_proj = _linear(width, groups * head), _linear(width, groups * head)
        self.q_norm, self.k_norm = RMSNorm(head), RMSNorm(head)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, -1))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        q, k = rope(q, *turn), rope(k, *turn)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class TextMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(width, inner),
            _linear(width, inner),
            _linear(inner, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        width = TEXT["hidden_size"]
        self.kind, self.self_attn = kind, TextAttention()
        self.mlp = TextMLP(width, TEXT["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            RMSNorm(width),
            RMSNorm(width),
        )

    def forward(self, x: Tensor, turns: dict[str, tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(
            self.self_attn(self.input_layernorm(x), turns[self.kind], mask)
        )
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class TextModel(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        width = TEXT["hidden_size"]
        self.embed_tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed_tokens.weight, std=1 / math.sqrt(width))
        self.layers = nn.ModuleList(TextLayer(kind) for kind in TEXT["layer_types"])
        self.norm = RMSNorm(width)

    def forward(
        self,
        tokens: Tensor,
        images: Tensor,
        slots: Tensor,
        turns: dict[str, tuple[Tensor, Tensor]],
        mask: Tensor,
    ) -> Tensor:
        """tokens [B, T]; images [S, D], the image tokens of all pictures; slots [B, T] says which
        of them stands at a place, -1 for text; turns as from `angles`; mask [B, 1, T, T] added to
        the scores -> features [B, T, D]
        """
        x = self.embed_tokens(tokens) * math.sqrt(TEXT["hidden_size"])
        x = torch.where((slots >= 0)[..., None], images.to(x.dtype)[slots.clamp(min=0)], x)
        for layer in self.layers:
            x = layer(x, turns, mask)
        return self.norm(x)


class Gemma3(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.vision_tower = nn.Module()
        self.vision_tower.vision_model = VisionTower()
        self.multi_modal_projector = Projector(VISION["hidden_size"], TEXT["hidden_size"])
        self.language_model = nn.Module()
        self.language_model.model = TextModel(vocabulary)

    def see(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.vision_tower.vision_model(pixels)
        return features

    def features(
        self, patches: Tensor, batch: dict[str, Tensor], turns: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """patches [P, 36, C] of all pictures -> [B, T, D]"""
        mask = torch.where(batch["sees"], 0.0, -1e9)[:, None].to(patches.dtype)
        images = self.multi_modal_projector(patches).flatten(0, 1)
        x: Tensor = self.language_model.model(batch["tokens"], images, batch["slots"], turns, mask)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]"""
        return x @ self.language_model.model.embed_tokens.weight.to(x.dtype).T

    def loss(
        self, patches: Tensor, batch: dict[str, Tensor], turns: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Mean cross-entropy of the answers' tokens. `learnt` [K] are the places, in [B * T], that
        `labels` [K] follow, -100 where there is none.
        """
        x = self.features(patches, batch, turns).flatten(0, 1)[batch["learnt"]]
        return F.cross_entropy(self.logits(x).float(), batch["labels"], ignore_index=-100)


def config(vocabulary: int, token: dict[str, int]) -> dict[str, Any]:
    """`config.json` of the checkpoint. token maps the special tokens to their ids."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "mm_tokens_per_image": IMAGE_TOKENS,
        "tie_word_embeddings": True,
        "boi_token_index": token["<start_of_image>"],
        "eoi_token_index": token["<end_of_image>"],
        "image_token_index": token["<image_soft_token>"],
        "bos_token_id": token["<bos>"],
        "eos_token_id": token["<end_of_turn>"],
        "pad_token_id": token["<pad>"],
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "num_channels": 3,
            **VISION,
        },
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": vocabulary,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": token["<bos>"],
            "eos_token_id": token["<end_of_turn>"],
            "pad_token_id": token["<pad>"],
            **TEXT,
        },
    }
