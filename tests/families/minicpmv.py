"""MiniCPM-V 2.6, 4.0 and 4.5: SigLIP over a picture and its slices, a resampler, and Qwen2's,
Llama's or Qwen3's decoder.

transformers has no class of them: the resampler is written here after the papers and the published
configuration (torch's own multi-head attention), the slices after the rules of LLaVA-UHD, and the
tower and the decoders are transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Messages, Oracle, Row, load_tokenizer, randomize, save, tokenizer, write
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

MARKER, UNKNOWN = "(<image>./</image>)", "<unk>"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    UNKNOWN,
    *("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
)
NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": UNKNOWN}
QWEN2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and enable_thinking is false %}\
{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% if enable_thinking is defined and enable_thinking is true %}{{ '<think>\\n' }}{% endif %}\
{% endif %}"""
PATCH, SIDE, TOKENS = 6, 42, 5
TOWER = {
    "hidden_size": 72,
    "image_size": 60,
    "intermediate_size": 58,
    "model_type": "siglip",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "patch_size": PATCH,
}
TEXT = {
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
LONG = {
    "rope_type": "longrope",
    "factor": 1.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.5 + 0.3 * i for i in range(16)],
    "original_max_position_embeddings": 4100,
}


class Resampler(nn.Module):
    """Queries attend once to the patches, whose keys know where they are."""

    def __init__(self, tokens: int, width: int, inner: int):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(tokens, width))
        self.kv_proj = nn.Linear(inner, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor, rows: int, columns: int, seconds: Sequence[int] = ()) -> Tensor:
        """x [frames, P, C] -> [tokens, D]; `seconds`: tenths of those at which frames are."""
        value = self.ln_kv(self.kv_proj(x))
        width = value.shape[-1]
        where = (
            sines(width // 2, np.arange(columns))[None].repeat(rows, 0),
            sines(width // 2, np.arange(rows))[:, None].repeat(columns, 1),
        )
        key = value + torch.from_numpy(np.concatenate(where, -1).reshape(rows * columns, width))
        if seconds:
            key = key + torch.from_numpy(sines(width, np.array(seconds)))[:, None]
        key, value = (y.reshape(-1, 1, width) for y in (key, value))
        result: Tensor = self.attn(self.ln_q(self.query)[:, None], key, value)[0]
        return self.ln_post(result[:, 0]) @ self.proj


def sines(width: int, at: np.ndarray) -> np.ndarray:
    """[N, width] of numbers [N]"""
    speed = 10000.0 ** -(np.arange(width // 2) / (width / 2))
    angle = at[:, None] * speed
    return np.concatenate((np.sin(angle), np.cos(angle)), 1).astype(np.float32)


class MiniCpmV(nn.Module):
    def __init__(self, config: dict[str, Any], llm: Any, image_token: int):
        super().__init__()
        from transformers import Idefics2Config
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        tower = Idefics2Config(vision_config=config["vision_config"]).vision_config
        self.config, self.llm, self.image_token = config, llm, image_token
        self.vpm = Idefics2VisionTransformer(tower)
        self.resampler = Resampler(
            config["query_num"], config["hidden_size"], config["vision_config"]["hidden_size"]
        )
        self.generation_config = llm.generation_config

    @property
    def language_model(self) -> Any:
        return self.llm

    def set_attn_implementation(self, how: str) -> None:
        self.llm.set_attn_implementation(how)
        self.vpm.set_attn_implementation(how)

    def set_experts_implementation(self, how: str) -> None:
        pass

    def save_pretrained(self, folder: Path) -> None:
        tensors = {name: t.detach().clone().contiguous() for name, t in self.state_dict().items()}
        if self.llm.config.tie_word_embeddings:
            del tensors["llm.lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write(folder, "config.json", self.config)
        self.generation_config.save_pretrained(folder)

    def encoded(self, tile: Tensor) -> tuple[Tensor, int, int]:
        """The tower's output for a tile [3, Y, X], its patches in rows and columns."""
        vpm, side = self.vpm, self.config["vision_config"]["image_size"] // PATCH
        x = vpm.embeddings.patch_embedding(tile[None])
        rows, columns = x.shape[2:]
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        row, column = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / n), bounds, right=True)
            for n in (rows, columns)
        )
        at = (row[:, None] * side + column).flatten()
        x = x.flatten(2).transpose(1, 2) + vpm.embeddings.position_embedding(at)
        x = vpm.encoder(inputs_embeds=x).last_hidden_state
        return vpm.post_layernorm(x), rows, columns

    def embedded(self, input_ids: Tensor, pixel_values: Sequence[Tensor]) -> Tensor:
        x = self.llm.get_input_embeddings()(input_ids)
        if pixel_values:
            shown = [self.resampler(*self.encoded(tile)) for tile in pixel_values]
            x = x.masked_scatter((input_ids == self.image_token)[..., None], torch.cat(shown))
        return x

    def forward(self, input_ids: Tensor, pixel_values: Sequence[Tensor] = ()) -> Any:
        return self.llm(inputs_embeds=self.embedded(input_ids, pixel_values))

    def generate(self, input_ids: Tensor, pixel_values: Sequence[Tensor] = (), **how: Any) -> Any:
        x = self.embedded(input_ids, pixel_values)
        made = self.llm.generate(
            inputs_embeds=x, attention_mask=torch.ones(x.shape[:2], dtype=torch.long), **how
        )
        return torch.cat((input_ids, made), 1)


class Processor:
    """Content joined by line breaks as the authors' `chat` does; LLaVA-UHD's slices
    (arXiv:2403.11703).
    """

    def __init__(self, folder: Path, slices: int = 9):
        self.tokenizer, self.slices = load_tokenizer(folder), slices

    def apply_chat_template(self, messages: Messages, **_: Any) -> dict[str, Any]:
        pictures, plain = [], []
        for message in messages:
            parts = []
            for part in message["content"]:
                if part["type"] == "image":
                    pictures.append(part["image"])
                    parts.append(MARKER)
                else:
                    parts.append(part["text"])
            plain.append({"role": message["role"], "content": "\n".join(parts)})
        text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        tiles = []
        for index, image in enumerate(pictures):
            made, (columns, rows) = sliced(image, self.slices)
            tiles += made
            one, piece = (f"<{at}>{UNKNOWN * TOKENS}</{at}>" for at in ("image", "slice"))
            written = "\n".join([piece * columns] * rows) if len(made) > 1 else ""
            text = text.replace(MARKER, f"<image_id>{index}</image_id>{one}{written}", 1)
        inputs = {"input_ids": self.tokenizer(text, return_tensors="pt")["input_ids"]}
        return inputs | ({"pixel_values": tiles} if tiles else {})


def sliced(image: Image.Image, most: int) -> tuple[list[Tensor], tuple[int, int]]:
    """The whole, then slices line by line, and how many columns and rows of those."""
    width, height = image.size
    ideal = min(math.ceil(width * height / SIDE**2), most)
    whole = prepared(image.resize(fitting(width, height), Image.Resampling.BICUBIC))
    if ideal <= 1:
        return [whole], (1, 1)
    counts = [n for n in (ideal - 1, ideal, ideal + 1) if 1 < n <= most]
    grids = [(m, n // m) for n in counts for m in range(1, n + 1) if n % m == 0]
    columns, rows = min(grids, key=lambda g: abs(math.log(width / height) - math.log(g[0] / g[1])))
    across, down = fitting(nearest(width, columns) / columns, nearest(height, rows) / rows)
    large = image.resize((across * columns, down * rows), Image.Resampling.BICUBIC)
    boxes = [(x * across, y * down) for y in range(rows) for x in range(columns)]
    pieces = [prepared(large.crop((x, y, x + across, y + down))) for x, y in boxes]
    return [whole, *pieces], (columns, rows)


def nearest(length: float, step: int) -> int:
    return max(round(length / step) * step, step)


def fitting(width: float, height: float) -> tuple[int, int]:
    """About SIDE x SIDE pixels in that shape, in whole patches."""
    ratio = width / height
    down = int(SIDE / math.sqrt(ratio))
    return nearest(int(down * ratio), PATCH), nearest(down, PATCH)


def prepared(image: Image.Image) -> Tensor:
    values = (np.asarray(image).astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


def minicpmv(
    folder: Path,
    *,
    version: float,
    width: int = 128,
    seed: int = 0,
    template: str = PLAIN,
    text: dict[str, Any] | None = None,
) -> Oracle:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    decoders = {
        2.6: (Qwen2Config, Qwen2ForCausalLM),
        4.0: (LlamaConfig, LlamaForCausalLM),
        4.5: (Qwen3Config, Qwen3ForCausalLM),
    }
    tokens = tokenizer(SPECIAL)
    settings = TEXT | {"hidden_size": width, "vocab_size": tokens.get_vocab_size() + 3}
    settings |= {"tie_word_embeddings": False, "rope_theta": 1e4, "rope_scaling": None}
    settings |= text or {}
    kind, decoder = decoders[version]
    rope = {"rope_type": "default", **(settings["rope_scaling"] or {})}
    own = {key: value for key, value in settings.items() if key != "rope_scaling"}
    rope["rope_theta"] = own.pop("rope_theta")
    llm = decoder(kind(**own, rope_parameters=rope))
    config = settings | {
        "architectures": ["MiniCPMV"],
        "drop_vision_last_layer": False,
        "image_size": SIDE,
        "model_type": "minicpmv",
        "patch_size": PATCH,
        "query_num": TOKENS,
        "slice_mode": True,
        "torch_dtype": "bfloat16",
        "use_image_id": True,
        "version": version,
        "vision_config": TOWER,
    }
    unknown = tokens.token_to_id(UNKNOWN)
    model = randomize(
        MiniCpmV(config, llm, unknown),
        seed,
        in_proj_weight=(0, 2 * width**-0.5),
        query=(0, 1),
        **{"resampler.proj": (0, width**-0.5)},
        **{f"ln_{at}.weight": (1, 0.2) for at in ("q", "kv", "post")},
    )
    model = save(folder, model, tokens, template, NAMES, eos="<|im_end|>")
    names = {"im_start": "<image>", "im_end": "</image>", "unk": UNKNOWN}
    write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "MiniCPMVImageProcessor",
            "processor_class": "MiniCPMVProcessor",
            "max_slice_nums": 9,
            "scale_resolution": SIDE,
            "patch_size": PATCH,
            "use_image_id": True,
            "image_feature_size": TOKENS,
            **names,
            "slice_mode": True,
            "norm_mean": [0.5, 0.5, 0.5],
            "norm_std": [0.5, 0.5, 0.5],
            "version": version,
        },
    )
    return Oracle(folder, model, Processor(folder), unknown, authors=True)


ROW = Row(
    "MiniCPM-V 2.6, 4 and 4.5",
    {
        "2.6": lambda folder: minicpmv(folder, version=2.6, template=QWEN2),
        "4, longrope": lambda folder: minicpmv(
            folder, version=4.0, seed=1, text={"rope_scaling": LONG, "head_dim": 32}
        ),
        "4.5, two heads": lambda folder: minicpmv(
            folder,
            version=4.5,
            seed=6,
            width=256,
            text={"head_dim": 36, "num_attention_heads": 2, "num_key_value_heads": 1},
        ),
    },
    notes="a picture and its slices, each read into 64 tokens by learned queries",
)
