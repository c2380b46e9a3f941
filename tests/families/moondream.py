"""Moondream 2 as its authors publish it: SigLIP over a picture and crops of it that overlap, and a
decoder that began as Phi-1.5, in which a picture and what stands before it see each other.

transformers has no class of it: tower, projection and decoder are written here after the published
description (github.com/vikhyat/moondream), in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import torch
import torch.nn.functional as F
from common import Messages, Oracle, Row, load_tokenizer, randomize, save, tokenizer, write
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

END, SKILL, ARGUMENT, ANSWER = "<|endoftext|>", *(f"<|md_reserved_{i}|>" for i in range(3))
VISION = {
    "enc_dim": 80,
    "enc_ff_dim": 58,
    "enc_n_heads": 2,
    "enc_n_layers": 2,
    "enc_patch_size": 4,
    "crop_size": 20,
    "overlap_margin": 1,
    "max_crops": 12,
    "proj_inner_dim": 70,
}
TEXT = {"dim": 96, "ff_dim": 130, "n_layers": 3, "n_heads": 3, "max_context": 4096}
LENGTHS = {"": "normal", "Caption": "normal", "Short caption": "short", "Long caption": "long"}


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def mlp(inputs: int, inner: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"fc1": linear(inputs, inner), "fc2": linear(inner, outputs)})


def through(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    result: Tensor = layers["fc2"](F.gelu(layers["fc1"](x), approximate="tanh"))
    return result


def heads_of(x: Tensor, count: int) -> Tensor:
    """[..., T, H * K] -> [..., H, T, K]"""
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


class Model(nn.Module):
    """The sizes as the authors' config.json has them, below `config`."""

    def __init__(self, vision: dict[str, Any], text: dict[str, Any]) -> None:
        super().__init__()
        self.v, self.t = vision, text
        width, patch, dim = vision["enc_dim"], vision["enc_patch_size"], text["dim"]
        side = vision["crop_size"] // patch
        self.vision = nn.ModuleDict(
            {
                "patch_emb": linear(3 * patch * patch, width),
                "blocks": nn.ModuleList(self._layer() for _ in range(vision["enc_n_layers"])),
                "post_ln": nn.LayerNorm(width),
                "proj_mlp": mlp(2 * width, vision["proj_inner_dim"], dim),
            }
        )
        self.vision.pos_emb = nn.Parameter(torch.zeros(1, side**2, width))
        groups = text.get("n_kv_heads", text["n_heads"])
        qkv = dim + 2 * groups * (dim // text["n_heads"])
        self.text = nn.ModuleDict(
            {
                "blocks": nn.ModuleList(
                    nn.ModuleDict(
                        {
                            "ln": nn.LayerNorm(dim),
                            "attn": nn.ModuleDict(
                                {"qkv": linear(dim, qkv), "proj": linear(dim, dim)}
                            ),
                            "mlp": mlp(dim, text["ff_dim"], dim),
                        }
                    )
                    for _ in range(text["n_layers"])
                ),
                "post_ln": nn.LayerNorm(dim),
                "lm_head": linear(dim, text["vocab_size"]),
            }
        )
        self.text.wte = nn.Parameter(torch.zeros(text["vocab_size"], dim))
        self.region = nn.ModuleDict({"coord_encoder": linear(6, dim)})  # not read here

    def _layer(self) -> nn.ModuleDict:
        width = self.v["enc_dim"]
        return nn.ModuleDict(
            {
                "ln1": nn.LayerNorm(width),
                "attn": nn.ModuleDict(
                    {"qkv": linear(width, 3 * width), "proj": linear(width, width)}
                ),
                "ln2": nn.LayerNorm(width),
                "mlp": mlp(width, self.v["enc_ff_dim"], width),
            }
        )

    def encoded(self, crops: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, P, C]"""
        patch, count = self.v["enc_patch_size"], self.v["enc_n_heads"]
        x = F.unfold(crops, patch, stride=patch).transpose(1, 2)
        x = self.vision["patch_emb"](x) + self.vision.pos_emb
        for block in self.vision["blocks"]:
            q, k, v = (
                heads_of(part, count) for part in block["attn"]["qkv"](block["ln1"](x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + block["attn"]["proj"](mixed)
            x = x + through(block["ln2"](x), block["mlp"])
        result: Tensor = self.vision["post_ln"](x)
        return result

    def seen(self, crops: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The whole and the crops of a picture [1 + N, 3, S, S] -> [T, D]"""
        side, margin = self.v["crop_size"] // self.v["enc_patch_size"], self.v["overlap_margin"]
        step, width = side - 2 * margin, self.v["enc_dim"]
        whole, *parts = self.encoded(crops)
        rows, columns = (n * step + 2 * margin for n in tiling)
        picture = torch.zeros(rows, columns, width)
        for i, part in enumerate(parts):
            y, x = divmod(i, tiling[1])
            top, left = margin * (y > 0), margin * (x > 0)  # of these a neighbour has more around
            kept = part.view(side, side, width)[top:, left:]
            picture[y * step + top : y * step + side, x * step + left : x * step + side] = kept
        pooled = F.adaptive_avg_pool2d(picture.permute(2, 0, 1), (side, side)).flatten(1).T
        return through(torch.cat((whole, pooled), 1), self.vision["proj_mlp"])

    def forward(
        self, input_ids: Tensor, pixel_values: Sequence[Tensor], tilings: Sequence[tuple[int, int]]
    ) -> Any:
        ids = input_ids[0]
        is_picture = ids == self.image_token
        x = self.text.wte[ids.masked_fill(is_picture, 0)]
        shown = [self.seen(c, t) for c, t in zip(pixel_values, tilings, strict=True)]
        if shown:
            x = x.masked_scatter(is_picture[:, None], torch.cat(shown))
        prefix = int(is_picture.nonzero().max()) + 1 if shown else 0
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        mask[:prefix, :prefix] = True
        count = self.t["n_heads"]
        groups, head = self.t.get("n_kv_heads", count), self.t["dim"] // count
        turns = head // 2
        speed = 10000.0 ** -(torch.arange(0, turns, 2).float() / turns)
        angle = torch.outer(torch.arange(len(ids)).float(), speed)
        for block in self.text["blocks"]:
            y = block["ln"](x)
            sizes = (count * head, groups * head, groups * head)
            q, k, v = (
                heads_of(part, n)
                for part, n in zip(
                    block["attn"]["qkv"](y).split(sizes, -1), (count, groups, groups), strict=True
                )
            )
            q, k = (turned(part, angle) for part in (q, k))
            k, v = (part.repeat_interleave(count // groups, 0) for part in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).flatten(1)
            x = x + block["attn"]["proj"](mixed) + through(y, block["mlp"])
        return SimpleNamespace(logits=self.text["lm_head"](self.text["post_ln"](x))[None])


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """The first half of each head turns, its two quarters being the coordinates."""
    a, b = x[..., : angle.shape[1]], x[..., angle.shape[1] : 2 * angle.shape[1]]
    sin, cos = angle.sin(), angle.cos()
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., 2 * angle.shape[1] :]), -1)


class Moondream(nn.Module):
    def __init__(self, config: dict[str, Any], image_token: int) -> None:
        from transformers import GenerationConfig

        super().__init__()
        self.config, self.generation_config = config, GenerationConfig()
        self.model = Model(config["config"]["vision"], config["config"]["text"])
        self.model.image_token = image_token

    def set_attn_implementation(self, how: str) -> None:
        pass

    set_experts_implementation = set_attn_implementation

    def save_pretrained(self, folder: Path) -> None:
        tensors = {name: t.detach().clone() for name, t in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write(folder, "config.json", self.config)
        # The published one is an older model's.
        write(folder, "generation_config.json", {"eos_token_id": 5, "bos_token_id": 5})


@dataclass
class MoondreamOracle(Oracle):
    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        """As the authors put token ids together: pictures behind the first token, then questions
        and answers.
        """
        if any(message["role"] == "system" for message in messages):
            raise jinja2.TemplateError("no system text")
        side = self.model.config["config"]["vision"]["crop_size"]
        patches = (side // self.model.config["config"]["vision"]["enc_patch_size"]) ** 2
        ids = [*self._ids(END), *[self.image_token] * (patches * len(images))]
        for index, message in enumerate(messages):
            parts = message["content"]
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
            ids += self._turn(message["role"], text, index)
        cropped = [self._cropped(image) for image in images]
        return {
            "input_ids": torch.tensor([ids]),
            "pixel_values": [crops for crops, _ in cropped],
            "tilings": [tiling for _, tiling in cropped],
        }

    def _ids(self, text: str) -> list[int]:
        result: list[int] = self.processor(text, add_special_tokens=False)["input_ids"]
        return result

    def _turn(self, role: str, text: str, index: int) -> list[int]:
        if SKILL in self.processor.get_vocab():
            if role == "assistant":
                return self._ids(text) + self._ids(END)
            if text in LENGTHS:
                return self._ids(f"{SKILL}describe{ARGUMENT}{LENGTHS[text]}{ANSWER}")
            return self._ids(f"{SKILL}query{ARGUMENT}") + self._ids(text) + self._ids(ANSWER) * 2
        start = [] if index else self._ids("\n\n")
        if role == "assistant":
            return self._ids(f" {text}") + self._ids("\n\n")
        if text in LENGTHS:
            return start + self._ids(f"{text or 'Caption'}:")
        return start + self._ids("Question:") + self._ids(f" {text}") + self._ids("\n\nAnswer:")

    def _cropped(self, image: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
        """The whole and the crops, [1 + N, 3, S, S], and how many rows and columns of crops."""
        c = self.model.config["config"]["vision"]
        side, margin = c["crop_size"], c["overlap_margin"] * c["enc_patch_size"]
        step = side - 2 * margin
        tiling = tiled(
            image.shape[0] - 2 * margin, image.shape[1] - 2 * margin, step, c["max_crops"]
        )
        rows, columns = (n * step + 2 * margin for n in tiling)
        large, small = (
            np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
            for size in ((columns, rows), (side, side))
        )
        cut = [
            large[y * step : y * step + side, x * step : x * step + side]
            for y in range(tiling[0])
            for x in range(tiling[1])
        ]
        bytes_ = torch.from_numpy(np.stack([small, *cut])).permute(0, 3, 1, 2)
        half = getattr(torch, self.model.config["torch_dtype"])
        return bytes_.to(half).div_(255.0).sub_(0.5).div_(0.5).float().contiguous(), tiling

    def pixels(self, inputs: Any) -> list[np.ndarray]:
        """The whole, and below it what the crops are cut from."""
        c = self.model.config["config"]["vision"]
        side, margin = c["crop_size"], c["overlap_margin"] * c["enc_patch_size"]
        step, result = side - 2 * margin, []
        for crops, tiling in zip(inputs["pixel_values"], inputs["tilings"], strict=True):
            rows, columns = (n * step + 2 * margin for n in tiling)
            tile = np.full((3, side + rows, columns), -1, np.float32)
            tile[:, :side, :side] = crops[0]
            for i, crop in enumerate(crops[1:]):
                y, x = i // tiling[1] * step, i % tiling[1] * step
                tile[:, side + y : 2 * side + y, x : x + side] = crop
            result.append(tile)
        return result

    @torch.no_grad()
    def image_features(self, inputs: Any) -> Tensor:
        pictures = zip(inputs["pixel_values"], inputs["tilings"], strict=True)
        return torch.cat([self.model.model.seen(crops, tiling) for crops, tiling in pictures])

    @torch.no_grad()
    def logits(self, inputs: Any) -> Tensor:
        result: Tensor = self.once(
            "logits", inputs, lambda: self.model.model(**inputs).logits[0, -1]
        )
        return result

    @torch.no_grad()
    def greedy(self, inputs: Any, n: int = 48) -> list[int]:
        result: list[int] = self.once(n, inputs, lambda: self._greedy(inputs, n))
        return result

    def _greedy(self, inputs: Any, n: int) -> list[int]:
        ids, start = inputs["input_ids"], inputs["input_ids"].shape[1]
        for _ in range(n):
            logits = self.model.model(**inputs | {"input_ids": ids}).logits[0, -1]
            ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
        return [int(i) for i in ids[0, start:]]


def tiled(height: int, width: int, step: int, most: int) -> tuple[int, int]:
    """How many rows and columns of crops a picture is cut into, its margins left out."""
    if height <= step or width <= step:
        return 1, 1
    needed = math.ceil(height / step), math.ceil(width / step)
    if needed[0] * needed[1] > most:
        factor = math.sqrt(most / (needed[0] * needed[1]))
        return max(1, math.floor(needed[0] * factor)), max(1, math.floor(needed[1] * factor))
    rows = max(math.floor(math.sqrt(most * height / width)), needed[0])
    columns = max(math.floor(math.sqrt(most * width / height)), needed[1])
    if rows * columns <= most:
        return rows, columns
    return (rows, most // rows) if columns > rows else (most // columns, columns)


def moondream(
    folder: Path,
    *,
    seed: int = 2,
    special: tuple[str, ...] = (END, SKILL, ARGUMENT, ANSWER),
    names: dict[str, Any] | None = None,
    half: str = "bfloat16",
    spare: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> MoondreamOracle:
    tokens = tokenizer(special)
    rows = tokens.get_vocab_size() + spare
    config = {
        "architectures": ["HfMoondream"],
        "auto_map": {"AutoConfig": "hf_moondream.HfConfig"},
        "config": {
            "vision": VISION | (vision or {}),
            "text": TEXT | {"vocab_size": rows} | (text or {}),
        },
        "model_type": "moondream1",
        "torch_dtype": half,
    }
    model = randomize(
        Moondream(config, tokens.get_vocab_size()),
        seed,
        wte=(0.0, 96**-0.5),
        bias=(0.0, 0.1),
        **{"attn.proj.weight": (0.0, 2 * 96**-0.5), "mlp.fc2.weight": (0.0, 2 * 130**-0.5)},
        **{f"{norm}.weight": (1.0, 0.2) for norm in ("ln", "ln1", "ln2", "post_ln")},
    )
    with torch.no_grad():
        model.model.text["lm_head"].bias[tokens.get_vocab_size() :] = -30  # no token's rows
    save(folder, model, tokens, "", names or {}, eos=END)
    (folder / "chat_template.jinja").unlink()
    return MoondreamOracle(
        folder, model, load_tokenizer(folder), tokens.get_vocab_size(), authors=True
    )


ROW = Row(
    "Moondream 2",
    {
        "2025-06-21, 3 heads": moondream,
        "2025-04-14, 4 heads on 2, other crops": lambda folder: moondream(
            folder,
            seed=8,
            special=(END,),
            names={"bos_token": END, "eos_token": END, "unk_token": END},
            half="float16",
            spare=5,
            vision={"enc_n_heads": 5, "enc_patch_size": 6, "crop_size": 30},
            text={"n_heads": 4, "n_kv_heads": 2},
        ),
    },
    notes="a picture and crops that overlap, averaged to as many tokens; a picture and what stands "
    "before it attend in both directions",
    bare=True,
)
