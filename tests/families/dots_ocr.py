"""dots.ocr and dots.mocr: a tower with RMS norms, SwiGLU and rotary positions, and Qwen2's decoder.

transformers has no class of the tower. The one here is written from the published description, with
the published names; llama.cpp answers alike on a checkpoint of it (docs/fidelity.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Messages, Oracle, Row, build_processor, randomize, save, tokenizer
from published import published
from qwen2_vl import CLIP, LAYOUT, per_picture, prepare
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2VLProcessor

SPECIAL = (
    "<|endoftext|>",
    "<|img|>",
    "<|imgpad|>",
    "<|endofimg|>",
    "<|system|>",
    "<|endofsystem|>",
    "<|user|>",
    "<|endofuser|>",
    "<|assistant|>",
    "<|endofassistant|>",
)
NAMES = {
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "bos_token": None,
    "image_token": "<|imgpad|>",
}
PICTURE = "<|img|><|imgpad|><|endofimg|>"
# Of the tokenizer and of the processor: a list of parts has no marks of a turn in the second. The
# authors serve the model with strings.
STRINGS = """{%- for m in messages %}{%- if m.role == 'system' %}{{- '<|system|>' + m.content + '<|endofsystem|>\\n' }}\
{%- elif m.role == 'user' %}{{- '<|user|>' + m.content + '<|endofuser|>' }}\
{%- elif m.role == 'assistant' %}{{- '<|assistant|>' + m.content }}{%- if not loop.last %}{{- '<|endofassistant|>' }}{%- endif %}{%- endif %}{%- endfor %}\
{%- if messages[-1].role != 'assistant' %}{{- '<|assistant|>' }}{%- endif %}"""
EITHER = STRINGS.replace(
    "{{- '<|user|>' + m.content + '<|endofuser|>' }}",
    "{% if m.content is string %}{{- '<|user|>' + m.content + '<|endofuser|>' }}{% else %} {% for c in m.content %}"
    "{% if c['type'] == 'image' or 'image' in c %}"
    + PICTURE
    + "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{%- endif %}",
)
VISION = {
    "embed_dim": 80,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 6,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_channels": 3,
    "rms_norm_eps": 1e-5,
    "use_bias": False,
    "post_norm": True,
    "is_causal": False,
    "model_type": "dots_vit",
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": True,
    "bos_token_id": None,
}


class Block(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, ffn, eps = c["embed_dim"], c["intermediate_size"], c["rms_norm_eps"]
        self.heads = c["num_attention_heads"]
        self.norm1, self.norm2 = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn.proj = nn.Linear(width, width, bias=False)
        self.mlp.fc1 = nn.Linear(width, ffn, bias=False)
        self.mlp.fc2 = nn.Linear(ffn, width, bias=False)
        self.mlp.fc3 = nn.Linear(width, ffn, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """x [P, C], turns complex [P, K / 2]: the pairs of a head are its halves."""
        parts = self.attn.qkv(self.norm1(x)).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q, k, v = parts
        q, k = (self._turned(part, turns) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.attn.proj(mixed.transpose(0, 1).flatten(1))
        y = self.norm2(x)
        return x + self.mlp.fc2(F.silu(self.mlp.fc1(y)) * self.mlp.fc3(y))

    @staticmethod
    def _turned(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat((pairs.real, pairs.imag), -1)


class Tower(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, patch, eps = c["embed_dim"], c["patch_size"], c["rms_norm_eps"]
        self.merge, merged = c["spatial_merge_size"], width * c["spatial_merge_size"] ** 2
        self.patch_embed = nn.Module()
        self.patch_embed.patchifier = nn.Module()
        self.patch_embed.patchifier.proj = nn.Conv2d(3, width, patch, patch)
        self.patch_embed.patchifier.norm = nn.RMSNorm(width, eps)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.post_trunk_norm = nn.RMSNorm(width, eps)
        self.merger = nn.Module()
        self.merger.ln_q = nn.LayerNorm(width, 1e-6)
        self.merger.mlp = nn.Sequential(
            nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, c["hidden_size"])
        )
        head = width // c["num_attention_heads"]
        self.speeds = 1e4 ** -(torch.arange(0, head // 2, 2).float() / (head // 2))

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """patches [P, 3 * patch * patch] in blocks of merge x merge -> [P / merge^2, D]"""
        m, first = self.merge, self.patch_embed.patchifier
        x = first.norm(F.linear(patches, first.proj.weight.flatten(1), first.proj.bias))
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        grid = grid.reshape(2, rows // m, m, columns // m, m).transpose(2, 3).flatten(1)
        angles = torch.cat([at[:, None] * self.speeds for at in grid], 1)
        turns = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            x = block(x, turns)
        x = self.merger.ln_q(self.post_trunk_norm(x))
        merged: Tensor = self.merger.mlp(x.reshape(len(x) // m**2, -1))
        return merged


class Config(Qwen2Config):  # type: ignore[misc]
    model_type = "dots_ocr"


class Dots(Qwen2ForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_tower = Tower(config.vision_config)

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,  # noqa: ARG002  # which the processor gives
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        more.pop("inputs_embeds", None)
        x = self.model.embed_tokens(input_ids)
        begun = past_key_values is not None and past_key_values.get_seq_length() > 0
        if pixel_values is not None and image_grid_thw is not None and not begun:
            grids = image_grid_thw.tolist()
            pictures = pixel_values.split([rows * columns for _, rows, columns in grids])
            seen = [
                self.vision_tower(picture, rows, columns)
                for picture, (_, rows, columns) in zip(pictures, grids, strict=True)
            ]
            x[input_ids == self.config.image_token_id] = torch.cat(seen)
        return super().forward(inputs_embeds=x, past_key_values=past_key_values, **more)


@dataclass
class DotsOracle(Oracle):
    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        """As llama.cpp and the authors have it: contents as strings, pictures in a line with what
        stands beside them.
        """
        from PIL import Image

        stated = [m | {"content": _joined(m["content"])} for m in messages]
        if "".join(m["content"] for m in stated).count(PICTURE) != len(images):
            raise ValueError("more pictures than image parts")
        text = self.processor.tokenizer.apply_chat_template(
            stated, add_generation_prompt=True, tokenize=False
        )
        pictures = [Image.fromarray(image) for image in images] or None
        return dict(self.processor(text=[text], images=pictures, return_tensors="pt"))


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    text, seen = "", True
    for part in content:
        shown = part["type"] == "image"
        text += PICTURE if shown else ("" if seen else "\n") + part["text"]
        seen = shown
    return text


def dots_ocr(
    folder: Path,
    *,
    seed: int = 0,
    template: str = EITHER,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    tokens, settings = tokenizer(SPECIAL), TEXT | (text or {})
    tower = VISION | {"hidden_size": settings["hidden_size"]} | (vision or {})
    image = tokens.token_to_id("<|imgpad|>")
    config = Config(
        **settings | {"vocab_size": tokens.get_vocab_size() + 3, "tie_word_embeddings": False},
        vision_config=tower,
        image_token_id=image,
    )
    model = save(folder, randomize(Dots(config), seed), tokens, template, NAMES, eos=list(ENDS))
    patch = tower["patch_size"]
    images = prepare(
        folder, patch, (8 * 4 * patch**2, 30 * 4 * patch**2), temporal_patch_size=1, **CLIP
    )
    processor = build_processor(Qwen2VLProcessor, folder, images, videos=True)
    return DotsOracle(folder, model, processor, image, LAYOUT, per_picture, authors=True)


ENDS = "<|endoftext|>", "<|endofassistant|>"
ROW = Row(
    "dots.ocr, dots.mocr",
    {
        "heads of 40 and 24": dots_ocr,
        "heads of 32 and 12, 6 on 2, a template of strings, as published": published(
            lambda f: dots_ocr(
                f,
                seed=1,
                template=STRINGS,
                vision={"embed_dim": 96, "num_attention_heads": 3, "patch_size": 4},
                text={"num_attention_heads": 6, "num_key_value_heads": 2},
            )
        ),
    },
    notes="dynamic resolution, RMS norms and SwiGLU in a tower with 2-D rotary positions",
)
