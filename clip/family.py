"""Interface of a vision family to the encoder, and the table of families."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.base.spelling import expected_type
from mtmd.clip.blocks import GgufTower
from mtmd.clip.resolution.resolution import ImagePlan, Resolution
from mtmd.clip.video.family import VideoFamily
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.plan.flash_choice import AttentionForm


@dataclass(frozen=True)
class Entry:
    """A family's file, and the names its models go by: model_type in a config.json, followed by a
    slash and that of its vision_config where one model_type has towers of several families;
    clip.projector_type in a GGUF, with "/wide" where its first layer widens to another width than
    the decoder's. The decoders of those in `ties` have one table of tokens for both
    ends unless config.json says otherwise, as transformers' configuration classes (5.23) do.
    """

    module: str
    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()


# How pictures and videos are cut is for the program that reads the file; what a vocabulary calls
# them stands in the decoder's, and whether there are ears, too, is no matter of the eyes.
NOT_IN_GGUF = ("resolution", "video", "bidirectional", "marker", "marks", "hears")
FAMILIES = (
    Entry("mtmd.clip.families.gemma3", ("gemma3",), ("gemma3",), ("gemma3",)),
    Entry("mtmd.clip.families.paligemma", ("paligemma",), ties=("paligemma",)),
    Entry("mtmd.clip.families.gemma3n.vision", ("gemma3n",), ("gemma3nv",), ("gemma3n",)),
    Entry("mtmd.clip.families.gemma4.vision", ("gemma4",), ("gemma4v",), ("gemma4",)),
    Entry(
        "mtmd.clip.families.gemma4.unified", ("gemma4_unified",), ("gemma4uv",), ("gemma4_unified",)
    ),
    Entry("mtmd.clip.families.blip.blip2", ("blip-2",)),
    Entry("mtmd.clip.families.blip.captions", ("blip",), ties=("blip",)),
    Entry("mtmd.clip.families.blip.instructblip", ("instructblip", "instructblipvideo")),
    Entry("mtmd.clip.families.moondream", ("moondream1",), ("mlp/wide",)),
    Entry("mtmd.clip.families.idefics2", ("idefics2",)),
    Entry("mtmd.clip.families.ovis2", ("ovis2",), ties=("ovis2",)),
    Entry("mtmd.clip.families.mllama", ("mllama",)),
    Entry("mtmd.clip.families.encoder_decoder.trocr", ("vision-encoder-decoder",)),
    Entry("mtmd.clip.families.encoder_decoder.donut", ("vision-encoder-decoder/donut-swin",)),
    Entry("mtmd.clip.families.florence2.vision", ("florence2",), ties=("florence2",)),
    Entry("mtmd.clip.families.granite_docling", ("granite_docling",), ties=("granite_docling",)),
    Entry("mtmd.clip.families.idefics3", ("idefics3", "smolvlm"), ("idefics3",)),
    Entry("mtmd.clip.families.llava.vision", ("llava", "llava_next", "vipllava"), ("mlp",)),
    Entry("mtmd.clip.families.llava.video", ("llava_next_video", "video_llava")),
    Entry("mtmd.clip.families.llava.granite4", ("granite4_vision",), ("granite4_vision",)),
    Entry("mtmd.clip.families.llava.onevision", ("llava_onevision",)),
    Entry(
        "mtmd.clip.families.qwen3_vl",
        (
            *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker"),
            "cohere_compass",
        ),
        ("qwen3vl_merger",),
    ),
    Entry("mtmd.clip.families.qwen2_vl", ("qwen2_vl",), ("qwen2vl_merger",)),
    Entry(
        "mtmd.clip.families.qwen2_5_vl",
        ("qwen2_5_vl", "qwen2_5_omni_thinker", "exaone4_5", "hyperclovax_vision_v2", "vlm"),
        ("qwen2.5vl_merger", "qwen2.5o", "exaone4_5"),
        ("hyperclovax_vision_v2", "vlm"),
    ),
    Entry("mtmd.clip.families.lfm3_vl", ("lfm3_vl",), ties=("lfm3_vl",)),
    Entry("mtmd.clip.families.lfm2_vl", ("lfm2_vl",), ("lfm2",), ("lfm2_vl",)),
    Entry(
        "mtmd.clip.families.pixtral",
        ("llava/pixtral", "mistral3", "lighton_ocr"),
        ("pixtral", "lightonocr"),
        ("mistral3", "lighton_ocr"),
    ),
    Entry("mtmd.clip.families.internvl", ("internvl", "qianfan_ocr"), ("internvl",), ("internvl",)),
    Entry(
        "mtmd.clip.families.glm4v", ("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr"), ("glm4v",)
    ),
    Entry(
        "mtmd.clip.families.kimi_vl",
        ("kimi_k25", "kimi_vl"),
        ("kimik25", "kimivl"),
        ties=("kimi_k25",),
    ),
    Entry("mtmd.clip.families.llama4", ("llama4",), ("llama4",)),
    Entry(
        "mtmd.clip.families.deepseek_ocr.vision",
        ("deepseek_vl_v2", "unlimited_ocr"),
        ("deepseekocr",),
    ),
    Entry("mtmd.clip.families.deepseek_ocr.ocr2", ("deepseek_ocr2",), ("deepseekocr2",)),
    Entry("mtmd.clip.families.got_ocr2", ("got_ocr2",), ties=("got_ocr2",)),
    Entry("mtmd.clip.families.dots_ocr", ("dots_ocr",), ("dots_ocr",)),
    Entry(
        "mtmd.clip.families.aya_vision",
        ("aya_vision", "cohere2_vision"),
        ties=("aya_vision", "cohere2_vision"),
    ),
    Entry(
        "mtmd.clip.families.janus",
        ("janus", "deepseek_vl"),
        ("janus_pro",),
        ("janus", "deepseek_vl"),
    ),
    Entry("mtmd.clip.families.phi4_siglip", ("phi4-siglip",), ("phi4",)),
    Entry("mtmd.clip.families.phi4_multimodal.vision", ("phi4_multimodal", "phi4mm")),
    Entry("mtmd.clip.families.minicpmv", ("minicpmv", "minicpmo"), ("resampler",)),
    Entry(
        "mtmd.clip.families.minicpmv4_6",
        ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
        ("minicpmv4_6",),
        ties=("minicpm_ocr",),
    ),
    Entry("mtmd.clip.families.hunyuan_vl", ("hunyuan_vl",), ("hunyuanvl",), ("hunyuan_vl",)),
    Entry("mtmd.clip.families.paddleocr_vl", ("paddleocr_vl",), ("paddleocr",), ("paddleocr_vl",)),
    Entry("mtmd.clip.families.aria", ("aria",)),
    Entry("mtmd.clip.families.video_llama3", ("video_llama_3",)),
    Entry(
        "mtmd.clip.families.nemotron_vl",
        ("nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3"),
        ("nemotron_v2_vl",),
    ),
    Entry("mtmd.clip.families.step3_vl", ("step_robotics",), ("step3vl",)),
    Entry("mtmd.clip.families.ernie4_5_vl", ("ernie4_5_vl_moe",), ties=("ernie4_5_vl_moe",)),
)


class Tower(Protocol):
    """Network that encodes tiles. A tile's type decides its graph; tiles of equal type are encoded
    as one batch, small ones of any sizes in one run where it reads packs, too (`packing.Packs`).
    """

    @property
    def resolution(self) -> Resolution:
        """Return how a picture of any size becomes tiles."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Canonical names and the checkpoint's."""

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> embeddings [B, T, D], or [B, D] where a tower
        gives one vector for a picture
        """


class VisionFamily(Tower, Protocol):
    """One picture model, whose embeddings a decoder reads."""

    marker: str
    """What the chat template writes where a picture belongs."""
    around: tuple[str, str]
    """The texts that templates of this family write before and after the marker."""
    image_token: str
    """The token whose place the picture's embeddings take."""
    bidirectional: bool
    """Whether the tokens of one picture see each other in both directions."""
    separator: str | None
    """The parameter [D] that stands between tokens of tiles, where an `ImagePlan.order` has -1."""
    unused: tuple[str, ...]
    """Patterns of tensors that checkpoints may hold and that answering does not need."""
    video: VideoFamily | None
    """How it reads videos; None for one that was made for pictures alone."""

    def prompt(self, plan: ImagePlan) -> str:
        """The text that stands for a picture, in which each of the plan's `tokens` is written as
        `image_token`; other text may stand between them.
        """


@runtime_checkable
class Numbered(Protocol):
    """A family whose prompt counts a conversation's pictures, and perhaps its videos."""

    def numbered(self, index: int, video: bool) -> str:
        """The text before a picture's own, or a video's, that says which it is, from 0."""


@runtime_checkable
class PrefixFamily(Protocol):
    """A family made for one question, not for conversations: the tokens of a prompt with pictures
    see each other in both directions.
    """

    whole_prompt: bool
    """Whether all of them do, or only those up to its last picture."""


@runtime_checkable
class PicturesFirst(Protocol):
    """A family whose pictures stand before the tokens that begin a prompt."""

    before_bos: bool


@runtime_checkable
class BarePrompt(Protocol):
    """A family whose template writes the whole prompt: nothing that its tokenizer puts around a
    text stands around it.
    """

    bare_prompt: bool


@runtime_checkable
class TemplatedFamily(Protocol):
    """A family whose published checkpoints have no chat template."""

    template: str | Mapping[str, str]
    """How messages become a prompt, where a checkpoint has no chat template; of several that of the
    first token that the vocabulary has, or of "".
    """


@runtime_checkable
class OwnTokens(Protocol):
    """A family whose files do not say which tokens matter, and have none that stands for pictures:
    one is added.
    """

    end: str
    """The token that ends an answer, whatever the files say."""
    control: tuple[str, ...]
    """Tokens that its template writes, and users must not."""


@runtime_checkable
class BeginsText(Protocol):
    """A family whose `image_token` is the one that begins the decoder's texts."""

    begin_key: str
    """The key of text_config that has its id."""


@runtime_checkable
class MarkedFamily(Protocol):
    """A family with embeddings of its own for tokens around what it encodes."""

    mark_tokens: tuple[int, ...] | tuple[str, ...]
    """The ids of those tokens, or their texts."""
    marks: str
    """The parameter [N, D] whose rows are their embeddings, in the same order."""


@runtime_checkable
class ContextFamily(Protocol):
    """A family whose pictures are one token each, and from which a decoder's tokens attend to the
    embeddings (cross attention).
    """

    pictures: int
    """The most pictures of a prompt."""

    def real_rows(self, plan: ImagePlan) -> int:
        """Return how many of a picture's embeddings, the first ones, are no padding."""


@runtime_checkable
class HasAdapter(Protocol):
    """A family whose published models have a LoRA adapter of the decoder, for answers about what it
    encodes, in a folder of its own.
    """

    adapter: str
    """The name of that folder."""


@runtime_checkable
class InLine(Protocol):
    """A family whose pictures stand in one line with the text beside them, where a chat template
    reads contents as strings; in those of other families a line ends there.
    """

    in_line: bool


@runtime_checkable
class ScalesBoxes(Protocol):
    """A family whose authors say what the numbers of boxes and points in its answers mean."""

    box_scale: str
    """Which scale of `display.grounding.Region` that is."""


@runtime_checkable
class ShowsTokens(Protocol):
    """A family in whose answers some special tokens are text."""

    shown_tokens: re.Pattern[str]
    """Which those are, by their whole spelling."""


@runtime_checkable
class OnCanvases(Protocol):
    """A family whose pictures are canvases: each token of one, those before, between and behind its
    tiles included, has a row and a column on it as positions.
    """

    def canvas(self, plan: ImagePlan) -> np.ndarray | None:
        """Return the times, rows and columns, int64 [3, T], of all tokens of a picture's text,
        from those of its first place on; None where tokens have no places.
        """


@runtime_checkable
class RewritesPrompt(Protocol):
    """A family whose reference processor changes the prompt's text after pictures are in it."""

    def rewritten(self, text: str) -> str:
        """Return the text of a prompt, those of its pictures included, as the model reads it."""


def in_line(family: object) -> bool:
    """Return whether no line ends beside a family's pictures in a string."""
    return isinstance(family, InLine) and family.in_line


def own_template(family: object, knows: Callable[[str], bool]) -> str | None:
    """Return how messages become a prompt of a family that needs no chat template, None of others,
    which do.
    """
    if not isinstance(family, TemplatedFamily):
        return None
    texts = {"": family.template} if isinstance(family.template, str) else family.template
    return next(text for mark, text in texts.items() if not mark or knows(mark))


def in_usual_words(config: Settings) -> Settings:
    """Return a config.json in transformers' words, where its authors have words of their own and no
    vision_config. Raises ModelError for one that is not read.
    """
    module = None if config.get("vision_config", None) is not None else _module(config)
    words = getattr(module, "usual_words", None)
    return Settings(words(config), config.where) if words else config


@dataclass(frozen=True)
class Borrowed:
    """A tokenizer that lies in another repository of the hub than its model, which has an older one
    without the token `mark`.
    """

    repo: str
    mark: str


def borrowed_tokenizer(config: Settings) -> Borrowed | None:
    """Return where the tokenizer of a checkpoint is, None where it is its own."""
    stated = getattr(_module(config), "borrowed_tokenizer", lambda _: None)(config)
    return Borrowed(*stated) if stated else None


def _module(config: Settings) -> ModuleType | None:
    """The module of the family that a config.json names by its model_type alone."""
    kind = config.get("model_type", None)
    entry = next((e for e in FAMILIES if kind in e.model_types), None)
    return None if entry is None else import_module(entry.module)


def vision_family(model_type: str, config: Settings, image: Settings) -> VisionFamily:
    """The family of a checkpoint; `image` are its image processor's settings, in which those of its
    video processor are `video_processor`. Raises ModelError for one we do not know, naming those
    we do.
    """
    tower = config.part("vision_config").get("model_type", None)
    for name in (f"{model_type}/{tower}", model_type):
        entry = next((e for e in FAMILIES if name in e.model_types), None)
        if entry is not None:
            break
    else:
        known = (t for e in FAMILIES for t in e.model_types)
        raise ModelError(
            f"{config.where}: architecture {model_type!r:.60} is not supported; "
            f"{expected_type(model_type, known)}"
        )
    family: VisionFamily = import_module(entry.module).read(config, image)
    return family


def ties_tables(model_type: str | None) -> bool:
    """Return whether the tables of such a model are one where its config.json does not say."""
    return any(model_type in entry.ties for entry in FAMILIES)


def gguf_of(family: VisionFamily, where: str) -> tuple[dict[str, Any], GgufTower]:
    """Return the keys with which a GGUF describes an encoder, and what has tensors beside its
    parameters. Raises ModelError for one that
    llama.cpp has no projector for, and for what it would read otherwise: `where` names the
    checkpoint.
    """
    module = import_module(type(family).__module__)
    made: GgufTower | None = getattr(module, "to_gguf", lambda _: None)(family)
    if made is None or not made.projector:
        raise ModelError(
            f"{where}: no GGUF holds its image encoder; convert the decoder alone with --text-only"
        )
    normalize = family.resolution.normalize
    per_byte = 255.0 if normalize.scale == 1 else 1.0  # of means and deviations of bytes
    keys = {
        "has_vision_encoder": True,
        "projector_type": made.projector,
        "vision.image_mean": [mean / per_byte for mean in normalize.mean],
        "vision.image_std": [std / per_byte for std in normalize.std],
        **made.keys,
    }
    metadata = {f"clip.{key}": value for key, value in keys.items()}
    shapes = {
        name: shape
        for canonical, parameter in family.parameters().items()
        for name, shape in next(parameter.ways(canonical, canonical=True)).each()
    }
    read = gguf_vision_family(made.projector, metadata, shapes, where)
    for name, one in getattr(family, "__dataclass_fields__", {}).items():
        a, b = getattr(family, name), getattr(read, name)
        if one.compare and name not in NOT_IN_GGUF and not _alike(a, b):
            raise ModelError(
                f"{where}: a GGUF with projector {made.projector} does not say {name} {a!r:.60} "
                f"(it would be {b!r:.60}); use the model in safetensors"
            )
    return metadata, made


def _alike(a: Any, b: Any) -> bool:
    """Return whether two values are the same but for rounding to four bytes."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    if is_dataclass(a) and type(a) is type(b):
        return all(_alike(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    return bool(a == b)


def gguf_vision_family(
    projector: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    where: str,
    template: str = "",
) -> VisionFamily:
    """The family of a GGUF projector file (mmproj), from its metadata, the shapes of its tensors by
    name, and the chat template of its decoder. Raises ModelError for one we do not know, naming
    those we do.

    A family's `from_gguf(keys, shapes)` says what config.json and the image processor's settings
    would; the rest is as with any checkpoint.
    """
    widths = shapes.get("mm.2.weight", (0, 0))
    names = [f"{projector}/wide", projector] if widths[:1] != widths[1:] else [projector]
    entries = (next((e for e in FAMILIES if name in e.gguf), None) for name in names)
    entry = next((e for e in entries if e), None)
    if entry is None:
        known = {t.partition("/")[0] for e in FAMILIES for t in e.gguf}
        raise ModelError(
            f"{where}: projector type {projector!r:.60} is not supported; "
            f"{expected_type(projector, known)}"
        )
    module = import_module(entry.module)
    keys = Settings(
        {k.removeprefix("clip."): metadata[k] for k in metadata if k.startswith("clip.")}
        | {"chat_template": template},
        f"{where}: clip",
    )
    config, image = module.from_gguf(keys, shapes)
    # Of videos a GGUF says no more than how their pixels are normalised.
    same = {key: image[key] for key in ("image_mean", "image_std") if image.get(key) is not None}
    image = {"video_processor": same, **image}
    family: VisionFamily = module.read(Settings(config, keys.where), Settings(image, keys.where))
    return family
