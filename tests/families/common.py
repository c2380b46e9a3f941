"""What the families' oracles share: the tokenizer, random weights that matter, writing a
checkpoint, asking transformers.

An oracle is a random tiny checkpoint in the layout of published ones, with transformers' model and
processor of it. Only transformers' own code prepares, encodes and answers here: nothing of ours is
imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Pixels = Callable[[Any], list[np.ndarray]]
Messages = list[dict[str, Any]]

WORDS = [
    "Describe the image. What do you see here? a red circle at the left, and a blue square; user "
    "assistant system"
] * 4
# At unit gain attention is nearly an average, and a model says little about where it looks: make it
# choose.
GAIN = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2.0, "qkv": 1.6}
# State that lasts for some tokens, in each head another number of them.
RANGES = {"A_log": (-1.5, 1.0), "dt_bias": (-1.0, 1.0)}


@dataclass
class Oracle:
    """A checkpoint in `folder` and what transformers answers from it, in fp32 on the CPU.

    `pixel_layout` says what `pixels` returns; `image_token` is the id that stands for one image
    embedding in `input_ids` (None: text only), or for `rows_of_token` of them, `video_token` for
    one of a video where that is another.
    """

    folder: Path
    model: Any
    processor: Any
    image_token: int | None
    pixel_layout: str = "one array [3, H, W] a tile, in the order of the prompt"
    unpack: Pixels = field(
        default=lambda inputs: [t.numpy() for t in inputs["pixel_values"]], repr=False
    )
    video_token: int | None = None
    rows_of_token: int = 1
    authors: bool = False
    """Whether the folder has a configuration of the authors, which transformers does not read."""
    answered: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What this model was asked before, as several tests ask the same."""

    def once(self, question: Any, inputs: Any, answer: Callable[[], Any]) -> Any:
        """The answer to a question about inputs, computed the first time."""
        key = question, tuple((k, digest(v)) for k, v in sorted(inputs.items()))
        if key not in self.answered:
            self.answered[key] = answer()
        return self.answered[key]

    def inputs(self, messages: Messages, images: Sequence[np.ndarray] = ()) -> Any:
        """What transformers' processor and chat template make of a conversation: input_ids [1, T],
        pixel_values and the rest.

        `messages` as mtmd takes them ({"type": "image"} parts, with or without pixels); `images`
        uint8 [H, W, 3], in their order.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # transformers' use of numpy
            result = self.processor.apply_chat_template(
                _with_pictures(messages, images),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        return {key: value for key, value in result.items() if key != "labels"}

    def prompt_ids(self, inputs: Any) -> list[int]:
        return [int(i) for i in inputs["input_ids"][0]]

    def pixels(self, inputs: Any) -> list[np.ndarray]:
        """The prepared pixels, laid out as `pixel_layout` says."""
        return self.unpack(inputs) if "pixel_values" in inputs else []

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        """[image tokens, D]: what stands at the image tokens where the text model begins; deepstack
        features follow along D.
        """
        seen: dict[str, Any] = {}

        def look(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.update(kwargs)

        body = getattr(self.model, "model", self.model)
        text = getattr(body, "text_model", getattr(body, "language_model", body))
        hook = text.register_forward_pre_hook(look, with_kwargs=True)
        try:
            self.model(**inputs)
        finally:
            hook.remove()
        tokens = [t for t in (self.image_token, self.video_token) if t is not None]
        rows = seen["inputs_embeds"][torch.isin(inputs["input_ids"], torch.tensor(tokens))]
        return torch.cat([rows, *(seen.get("deepstack_visual_embeds") or [])], dim=-1)

    @torch.no_grad()
    def logits(self, inputs: Any) -> torch.Tensor:
        """[V]: the logits after the last token."""
        result: torch.Tensor = self.once(
            "logits", inputs, lambda: self.model(**inputs).logits[0, -1]
        )
        return result

    @torch.no_grad()
    def greedy(self, inputs: Any, n: int = 48) -> list[int]:
        """`n` new token ids by transformers' own loop and cache; the end of sequence is a token
        like any other.
        """
        result = self.once(
            n, inputs, lambda: self.model.generate(**inputs, max_new_tokens=n, do_sample=False)[0]
        )
        return [int(i) for i in result[inputs["input_ids"].shape[1] :]]


def digest(value: Any) -> bytes:
    """Tells inputs of a model apart."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    told = [(str(t.dtype), t.shape) for t in tensors] if len(tensors) == len(parts) else value
    result = hashlib.sha256(repr(told).encode())
    for tensor in tensors:
        result.update(tensor.numpy().tobytes())
    return result.digest()


@dataclass(frozen=True)
class Row:
    """One row of the family table: `variants` build a checkpoint in a folder, by name. `bare`:
    published ones have neither a chat template nor an image processor's settings. `asks`: the parts
    of three conversations, texts and pictures by their number, where not any are allowed.
    """

    name: str
    variants: dict[str, Callable[[Path], Oracle]]
    vision: bool = True
    notes: str = ""
    bare: bool = False
    asks: tuple[tuple[str | int, ...], ...] = ()


@lru_cache
def tokenizer(special: tuple[str, ...], bos: str | None = None) -> Tokenizer:
    """A small byte-level BPE whose special tokens come last, as in most published files. `bos` is
    put first by its post-processor.
    """
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=331,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    result.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    if bos:
        result.post_processor = processors.TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", [(bos, result.token_to_id(bos))]
        )
    return result


def randomize(model: Any, seed: int, **ranges: tuple[float, float]) -> Any:
    """Weights at which every part of a model counts: matrices at unit gain (see GAIN), norms near
    their neutral value, the rest at random.

    `ranges`: (mean, deviation) for the parameters whose name contains the key; the first key that
    matches wins.
    """
    torch.manual_seed(seed)
    literal(model)
    for name, p in model.eval().named_parameters():
        chosen = next((r for key, r in (RANGES | ranges).items() if key in name), None)
        with torch.no_grad():
            if chosen:
                p.normal_(*chosen)
            elif "position_embed" in name or "pos_emb" in name:
                p.normal_(std=0.5)
            elif "embed_tokens" in name or ("embedding.weight" in name and "patch" not in name):
                p.normal_(std=p.shape[-1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                p.normal_(
                    float(p.mean().round()), 0.2
                )  # new norms hold their neutral value: 1, or 0 where the model adds 1
            elif p.ndim >= 2:
                p.normal_(
                    std=next((g for key, g in GAIN.items() if key in name), 1)
                    / math.sqrt(_fan_in(name, p))
                )
            else:
                p.normal_(std=0.2)
    for name, b in model.named_buffers():  # correction biases of routers
        if name.endswith("bias"):
            torch.nn.init.normal_(b, std=0.2)
    return model


def literal(model: Any) -> Any:
    """The model with its plain implementations: the grouped product of experts takes sizes that are
    multiples of 4 only.
    """
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def _fan_in(name: str, p: torch.Tensor) -> int:
    return (
        int(p.shape[-1]) if "experts." in name and p.ndim == 3 else int(p[0].numel())
    )  # experts: [E, out, in]


def save(
    folder: Path,
    model: Any,
    tokens: Tokenizer,
    template: str,
    names: Mapping[str, Any],
    *,
    eos: str | list[str],
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Write the model, its tokenizer and its template; returns the model in fp32. `names` go into
    tokenizer_config.json.
    """
    from transformers.utils.logging import disable_progress_bar

    folder.mkdir(parents=True, exist_ok=True)
    ends = [tokens.token_to_id(e) for e in ([eos] if isinstance(eos, str) else eos)]
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.bos_token_id = (
        tokens.token_to_id(names["bos_token"]) if names.get("bos_token") else None
    )
    model.generation_config.pad_token_id = (
        tokens.token_to_id(names["pad_token"]) if names.get("pad_token") else None
    )
    disable_progress_bar()
    if dtype != torch.float32:  # which would make complex buffers real
        model.to(dtype)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None  # `greedy` goes on after the end of sequence
    tokens.save(str(folder / "tokenizer.json"))
    write(
        folder,
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names},
    )
    (folder / "chat_template.jinja").write_text(template)
    return model.float()


def load_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def template_of(folder: Path) -> str:
    return (folder / "chat_template.jinja").read_text()


def build_processor(
    kind: Any, folder: Path, images: Any, *, videos: bool = False, **settings: Any
) -> Any:
    """The processor of class `kind` with the folder's tokenizer and template. Those with `videos`
    ask for a video processor, which needs torchvision and is not called for pictures: they get a
    stand-in, unchecked.
    """
    stand_in = SimpleNamespace(num_frames=1, fps=1, merge_size=2, model_input_names=[])
    unchecked = type(
        kind.__name__,
        (kind,),
        {"check_argument_for_proper_class": lambda *result: type(result[-1])},
    )
    more = {"video_processor": stand_in} if videos else {}
    return unchecked(
        image_processor=images,
        tokenizer=load_tokenizer(folder),
        chat_template=template_of(folder),
        **more,
        **settings,
    )


def write(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    (folder / name).write_text(json.dumps(values, indent=1))


def picture(seed: int, width: int, height: int) -> np.ndarray:
    """A random uint8 picture [height, width, 3] with large and small structure."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3)).astype(np.float32)
    rows, columns = (
        np.linspace(0, 3.999, height).astype(int),
        np.linspace(0, 4.999, width).astype(int),
    )
    return np.clip(coarse[rows][:, columns] + rng.normal(0, 25, (height, width, 3)), 0, 255).astype(
        np.uint8
    )


def _with_pictures(messages: Messages, images: Sequence[np.ndarray]) -> Messages:
    """The messages with each image part holding the next picture, texts as lists of parts
    (processors refuse plain strings).
    """
    from PIL import Image

    pictures = iter(images)
    result = []
    for message in messages:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        result.append(
            message
            | {
                "content": [
                    {"type": "image", "image": Image.fromarray(next(pictures))}
                    if part["type"] == "image"
                    else part
                    for part in parts
                ]
            }
        )
    if next(pictures, None) is not None:
        raise ValueError("more pictures than image parts")
    return result
