"""Phi-4-reasoning-vision: SigLIP 2's tower without its last layer, two layers, Phi-3's decoder.

transformers has no class of the whole; tower, image processor and decoder are its own. The authors'
processor resizes to as many patches as a picture has itself, within two bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Messages, Oracle, Row, load_tokenizer, randomize, save, tokenizer, write
from phi3 import TEXT
from safetensors.torch import save_file
from torch import Tensor, nn

MARKER, PADDING = "<image>", "<|dummy_85|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", PADDING)
NAMES = {"eos_token": "<|im_end|>", "pad_token": PADDING}
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
PATCH = 6
TOWER = {
    "hidden_size": 72,
    "intermediate_size": 58,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "num_patches": 49,
    "patch_size": PATCH,
}
SAVED = "model.vision_tower.vision_tower.vision_model."


class Phi4Vision(nn.Module):
    def __init__(self, config: dict[str, Any], llm: Any, image_token: int):
        super().__init__()
        from transformers import Siglip2VisionConfig, Siglip2VisionModel

        self.config, self.llm, self.image_token = config, llm, image_token
        self.tower = Siglip2VisionModel(Siglip2VisionConfig(**config["vision_config"]))
        width, inner = config["hidden_size"], config["vision_config"]["hidden_size"]
        self.mm = nn.Sequential(nn.Linear(inner, width), nn.GELU(), nn.Linear(width, width))
        self.generation_config = llm.generation_config

    @property
    def language_model(self) -> Any:
        return self.llm

    def set_attn_implementation(self, how: str) -> None:
        self.llm.set_attn_implementation(how)
        self.tower.set_attn_implementation(how)

    def set_experts_implementation(self, how: str) -> None:
        pass

    def save_pretrained(self, folder: Path) -> None:
        named = {
            **self.llm.state_dict(),
            **{
                SAVED + name.removeprefix("vision_model."): t
                for name, t in self.tower.state_dict().items()
            },
            **{f"model.mm_projector.{name}": t for name, t in self.mm.state_dict().items()},
        }
        tensors = {name: t.detach().clone().contiguous() for name, t in named.items()}
        if self.llm.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write(folder, "config.json", self.config)
        self.generation_config.save_pretrained(folder)

    def embedded(self, input_ids: Tensor, pixel_values: Sequence[Tensor]) -> Tensor:
        x = self.llm.get_input_embeddings()(input_ids)
        for tile in pixel_values:
            rows, columns = (side // PATCH for side in tile.shape[1:])
            cells = tile.reshape(3, rows, PATCH, columns, PATCH).permute(1, 3, 2, 4, 0)
            seen = self.tower(
                pixel_values=cells.reshape(1, rows * columns, -1),
                pixel_attention_mask=torch.ones(1, rows * columns, dtype=torch.int64),
                spatial_shapes=torch.tensor([[rows, columns]]),
                output_hidden_states=True,
            ).hidden_states[-2]
            free = (input_ids == self.image_token) & (x == self._row).all(-1)
            at = free.nonzero()[: rows * columns]
            x = x.clone()
            x[at[:, 0], at[:, 1]] = self.mm(seen[0])
        return x

    @property
    def _row(self) -> Tensor:
        result: Tensor = self.llm.get_input_embeddings().weight[self.image_token]
        return result

    def forward(self, input_ids: Tensor, pixel_values: Sequence[Tensor] = ()) -> Any:
        return self.llm(inputs_embeds=self.embedded(input_ids, pixel_values))

    def generate(self, input_ids: Tensor, pixel_values: Sequence[Tensor] = (), **how: Any) -> Any:
        x = self.embedded(input_ids, pixel_values)
        made = self.llm.generate(
            inputs_embeds=x, attention_mask=torch.ones(x.shape[:2], dtype=torch.long), **how
        )
        return torch.cat((input_ids, made), 1)


class Processor:
    """Content joined by line breaks, each picture as many tokens as it has patches."""

    def __init__(self, folder: Path, low: int, high: int):
        self.tokenizer, self.low, self.high = load_tokenizer(folder), low, high

    def apply_chat_template(self, messages: Messages, **_: Any) -> dict[str, Any]:
        pictures, plain = [], []
        for message in messages:
            parts = []
            for part in message["content"]:
                if part["type"] == "image":
                    pictures.append(part["image"])
                parts.append(MARKER if part["type"] == "image" else part["text"])
            plain.append({"role": message["role"], "content": "\n".join(parts)})
        text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        tiles = [self._tile(image) for image in pictures]
        for tile in tiles:
            count = tile.shape[1] * tile.shape[2] // PATCH**2
            text = text.replace(MARKER, PADDING * count, 1)
        inputs = {"input_ids": self.tokenizer(text, return_tensors="pt")["input_ids"]}
        return inputs | ({"pixel_values": tiles} if tiles else {})

    def _tile(self, image: Any) -> Tensor:
        from transformers.models.siglip2.image_processing_pil_siglip2 import (
            Siglip2ImageProcessorPil,
        )

        own = (image.width // PATCH) * (image.height // PATCH)
        count = min(max(own, self.low), self.high)
        made = Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=count)(
            [image], return_tensors="pt"
        )
        rows, columns = made["spatial_shapes"][0].tolist()
        cells = made["pixel_values"][0, : rows * columns].reshape(rows, columns, PATCH, PATCH, 3)
        return cells.permute(4, 0, 2, 1, 3).reshape(3, rows * PATCH, columns * PATCH)


def phi4(
    folder: Path,
    *,
    seed: int = 0,
    low: int = 30,
    high: int = 60,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import Phi3Config, Phi3ForCausalLM

    tokens = tokenizer(SPECIAL)
    settings = TEXT | {"vocab_size": tokens.get_vocab_size() + 3, "rms_norm_eps": 1e-5}
    settings |= {"tie_word_embeddings": False, **(text or {})}
    padding = tokens.token_to_id(PADDING)
    config = settings | {
        "architectures": ["Phi4ForCausalLMV"],
        "hidden_act": "silu",
        "max_num_patches": high,
        "min_num_patches": low,
        "mm_hidden_size": TOWER["hidden_size"],
        "mm_projector_type": "mlp2x_gelu",
        "model_type": "phi4-siglip",
        "vision_config": TOWER | {"model_type": "siglip2_vision_model"} | (vision or {}),
    }
    model = randomize(Phi4Vision(config, Phi3ForCausalLM(Phi3Config(**settings)), padding), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    kind = {"image_processor_type": "Siglip2ImageProcessorNoUpscale", "patch_size": PATCH}
    write(
        folder,
        "preprocessor_config.json",
        kind
        | {
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "max_num_patches": high,
            "min_num_patches": low,
            "resample": 2,
            "rescale_factor": 1 / 255,
        },
    )
    processor = Processor(folder, low, high)
    return Oracle(folder, model, processor, padding, unpack=_numpy, authors=True)


def _numpy(inputs: Any) -> list[np.ndarray]:
    return [tile.numpy() for tile in inputs["pixel_values"]]


ROW = Row(
    "Phi-4-reasoning-vision",
    {
        "pictures enlarged and shrunk": phi4,
        "pictures in their own size, two layers read of a tower of one head": lambda folder: phi4(
            folder,
            seed=3,
            low=2,
            high=200,
            vision={"num_attention_heads": 1, "hidden_size": 40, "num_patches": 25},
            text={"num_attention_heads": 2, "num_key_value_heads": 2},
        ),
    },
    notes="SigLIP 2 in a picture's own shape, without its last layer",
)
