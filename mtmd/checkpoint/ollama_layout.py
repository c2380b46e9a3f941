"""GGUF files of Ollama's own converter, which hold the decoder and its eyes in one file, under keys
and names of their own, shown as the two files that llama.cpp's converter would write.

The layouts are those of ollama/ollama, convert/convert_*.go, in its versions of 2025 and 2026, and
of what its llama/compat translates for llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD
from mtmd.kernels.checkpoint.canonical import adjacent_pairs
from mtmd.kernels.checkpoint.gguf_file import DTYPES, GgufFile
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize

Shape = tuple[int, ...]
TOWER = ("v.", "mm.", "a.", "model.vision_tower.")
AHEAD = "mtp."  # layers that draft, which older files have beside the others
HALF = [0.5, 0.5, 0.5]
BLOCKS_MAX = 1 << 10  # of a tower, as its keys say
NOTE = (
    "laid out by Ollama's converter, and read as if llama.cpp's had written it; Ollama's own "
    "template, system prompt and sampling parameters are not used"
)
WITHOUT_TEMPLATE = (
    "it has no chat template; the built-in one that its vocabulary was made for is used: {} "
    "(--chat-template chooses another)"
)


@dataclass(frozen=True)
class _Piece:
    """A tensor made of others: their `sources`, its `shape`, and what makes it of them: rows as
    they are stored where all are of one type, else fp32.
    """

    sources: tuple[str, ...]
    shape: Shape
    convert: Callable[..., Tensor]
    rows: bool = False


Pieces = dict[str, "_Piece | str"]  # or the name in the file of one that stays as it is


class View:
    """Some tensors of a GGUF file under other names, with metadata of their own: a WeightFile, as
    GgufFile is.
    """

    canonical = True

    def __init__(self, file: GgufFile, metadata: Mapping[str, Any], pieces: Pieces) -> None:
        self.metadata = MappingProxyType(dict(metadata))
        self._file, self._pieces = file, pieces

    @property
    def files(self) -> list[Path]:
        return self._file.files

    @property
    def bytes(self) -> int:
        """Size of the file's tensors together: those of all views."""
        return self._file.bytes

    def names(self) -> list[str]:
        return sorted(self._pieces)

    def shape(self, name: str) -> Shape:
        piece = self._piece(name)
        return self._file.shape(piece) if isinstance(piece, str) else piece.shape

    def kind(self, name: str) -> str:
        piece = self._piece(name)
        if isinstance(piece, str):
            return self._file.kind(piece)
        kinds = {self._file.kind(source) for source in piece.sources}
        return kinds.pop() if piece.rows and len(kinds) == 1 else "F32"

    def meta(self, name: str) -> tuple[Shape, torch.dtype]:
        return self.shape(name), DTYPES.get(self.kind(name), torch.uint8)

    def stored_bytes(self, name: str) -> int:
        """Size of one tensor, or of those that it is a piece of or made of."""
        piece = self._piece(name)
        sources = (piece,) if isinstance(piece, str) else piece.sources
        return sum(self._file.stored_bytes(source) for source in sources)

    def read(self, name: str) -> Tensor:
        piece = self._piece(name)
        if isinstance(piece, str):
            return self._file.read(piece)
        tensors = [self._file.read(source) for source in piece.sources]
        if self.kind(name) == "F32":
            kinds = [self._file.kind(source) for source in piece.sources]
            pairs = zip(tensors, kinds, strict=True)
            tensors = [dequantize(t, k) if k in BLOCKS else t.float() for t, k in pairs]
        return piece.convert(*tensors).contiguous()

    def rearranged(self, name: str, turned: bool) -> None:
        """Return None: every tensor is stored as it is read."""

    def _piece(self, name: str) -> _Piece | str:
        if name not in self._pieces:
            raise ModelError(
                f"{self.files[0]} has no tensor {name!r:.80}; it has {len(self._pieces)} others"
            )
        return self._pieces[name]


@dataclass(frozen=True)
class _Layout:
    """Describes how an architecture is laid out.

    `decoder`: its name in llama.cpp, where that is another. `tokenizer`: a key below
    `tokenizer.ggml.`, values of it that are wrong, and the right one. `text`: keys of the decoder,
    ours by theirs; `defaults`: of keys that are left out. `projector`, `vision`: the projector's
    type, and keys below `clip.` that are left out. `renamed`: patterns of the tower's tensors, all
    applied in order. `more` gives further keys of decoder and tower, `tensors` further tensors of
    the tower.
    """

    projector: str
    decoder: str = ""
    tokenizer: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    text: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    more: Callable[[_Source], tuple[dict[str, Any], dict[str, Any]]] | None = None
    tensors: Callable[[_Source], Pieces] | None = None


class _Source:
    """A file and the keys of its architecture, without that name before them."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.where = file, file.files[0].name
        metadata, prefix = file.metadata, f"{architecture}."
        self.keys = {k.removeprefix(prefix): metadata[k] for k in metadata if k.startswith(prefix)}
        self.names = frozenset(file.names())

    def count(self, key: str, default: int = 0) -> int:
        """Raises ModelError for a value that is no small whole number."""
        value = self.keys.get(key, default)
        if type(value) is not int or not 0 <= value <= 1 << 20:
            raise ModelError(
                f"{self.where}: {key} is {value!r:.40}, expected a whole number; fetch the model "
                "again"
            )
        return value

    def numbers(self, key: str) -> list[int]:
        """Raises ModelError for a value that is no list of whole numbers."""
        value = self.keys.get(key, [])
        value = value if isinstance(value, list) else [value]
        if not all(type(n) is int for n in value) or len(value) > BLOCKS_MAX:
            raise ModelError(
                f"{self.where}: {key} is {value!r:.40}, expected whole numbers; fetch the model "
                "again"
            )
        return value

    def blocks(self) -> int:
        return min(self.count("vision.block_count"), BLOCKS_MAX)


def is_one_file(file: GgufFile, architecture: str) -> bool:
    """Return whether a file is laid out in Ollama's way: it says nothing of its tower under
    `clip.`, and has a tower or a key that llama.cpp's converter does not write.
    """
    layout = _LAYOUTS.get(architecture)
    if layout is None or any(key.startswith("clip.") for key in file.metadata):
        return False
    theirs = (f"{architecture}.{key}" for key in layout.text)
    has_tower = any(name.startswith(TOWER[0]) for name in file.names())
    return bool(layout.decoder) or has_tower or any(key in file.metadata for key in theirs)


def decoder_of(file: GgufFile, architecture: str) -> tuple[str, View]:
    """The decoder's architecture in llama.cpp, and the decoder. Raises ModelError."""
    source, layout = _Source(file, architecture), _LAYOUTS[architecture]
    ours = layout.decoder or architecture
    keys = dict(source.keys)
    for theirs, name in layout.text.items():
        if theirs in keys:
            keys.setdefault(name, keys[theirs])
    more = layout.more(source)[0] if layout.more else {}
    keys = {**_as_stored(layout.defaults), **keys, **more}
    metadata = {key: file.metadata[key] for key in file.metadata if "." in key}
    metadata |= {f"{ours}.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = ours
    for key, wrong, right in layout.tokenizer:
        if metadata.get(f"tokenizer.ggml.{key}") in wrong:
            metadata[f"tokenizer.ggml.{key}"] = right
    names = [n for n in source.names if not n.startswith((*TOWER, AHEAD))]
    table = file.shape("token_embd.weight")[0] if "token_embd.weight" in source.names else 0
    for key in ("tokens", "scores", "token_type"):  # of pictures, without rows of the table
        values = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and table and len(values) > table:
            metadata[f"tokenizer.ggml.{key}"] = values[:table]
    return ours, View(file, metadata, {_decoder_name(name): name for name in names})


def _decoder_name(name: str) -> str:
    name = name.replace(".ffn_gate_inp.per_expert_scale", ".ffn_down_exps.scale")
    return re.sub(r"\.ssm_dt$", ".ssm_dt.bias", name)


def tower_of(file: GgufFile, architecture: str) -> View | None:
    """The encoder and projector, None where the file has none. Raises ModelError."""
    source, layout = _Source(file, architecture), _LAYOUTS[architecture]
    names = [name for name in source.names if name.startswith(TOWER)]
    if not any(name.startswith(TOWER[0]) for name in names):
        return None
    keys = {key: value for key, value in source.keys.items() if key.startswith("vision.")}
    keys = {**_as_stored(layout.vision), **keys, "projector_type": layout.projector}
    keys.setdefault("vision.projection_dim", source.keys.get("embedding_length"))
    keys |= layout.more(source)[1] if layout.more else {}
    metadata = {"general.architecture": "clip", "clip.has_vision_encoder": True}
    metadata |= {f"clip.{key}": value for key, value in keys.items() if value is not None}
    made = layout.tensors(source) if layout.tensors else {}
    used = {s for p in made.values() for s in ((p,) if isinstance(p, str) else p.sources)}
    pieces: Pieces = {_renamed(layout, name): name for name in names if name not in used}
    pieces |= {_renamed(layout, name): piece for name, piece in made.items()}
    return View(file, metadata, pieces)


def _as_stored(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with numbers rounded to fp32, as a file has them."""
    wide = {key: np.asarray(value) for key, value in keys.items()}
    return {
        key: value.astype(np.float32).tolist() if value.dtype == np.float64 else keys[key]
        for key, value in wide.items()
    }


def _renamed(layout: _Layout, name: str) -> str:
    for pattern, text in layout.renamed:
        name = re.sub(pattern, text, name)
    return name


# Qwen -------------------------------------------------------------------------------------------


def _sections(source: _Source) -> dict[str, Any]:
    """The parts of rotary positions for time, height and width, four in llama.cpp's files."""
    parts = source.numbers("rope.dimension_sections") or source.numbers("rope.mrope_section")
    return {"rope.dimension_sections": [*parts, 0, 0, 0, 0][:4]} if parts else {}


def _qwen25_keys(source: _Source) -> tuple[dict[str, Any], dict[str, Any]]:
    whole, ups = source.numbers("vision.fullatt_block_indexes"), "v.blk.0.ffn_up.weight"
    vision: dict[str, Any] = {"vision.n_wa_pattern": whole[0] + 1 if whole else 8}
    if "vision.feed_forward_length" not in source.keys and ups in source.names:
        vision["vision.feed_forward_length"] = source.file.shape(ups)[0]
    return _sections(source), vision


def _qwen3_keys(source: _Source) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _sections(source)
    heads = source.keys.get("attention.head_count_kv")
    if isinstance(heads, list):  # by layer, 0 for those without attention
        text["attention.head_count_kv"] = max(source.numbers("attention.head_count_kv"), default=0)
    deep = source.numbers("vision.deepstack_visual_indexes")
    text["n_deepstack_layers"] = len(deep)
    ups, table = "v.blk.0.mlp.linear_fc1.weight", "v.pos_embed.weight"
    vision: dict[str, Any] = {
        "vision.is_deepstack_layers": [i in deep for i in range(source.blocks())],
        "vision.image_min_pixels": source.keys.get("vision.shortest_edge"),
        "vision.image_max_pixels": source.keys.get("vision.longest_edge"),
    }
    if ups in source.names:
        vision["vision.feed_forward_length"] = source.file.shape(ups)[0]
    if table in source.names:
        side = isqrt(source.file.shape(table)[0])
        vision["vision.image_size"] = side * source.count("vision.patch_size", 16)
    return text, vision


def _qwen3_tensors(source: _Source) -> Pieces:
    """Queries, keys and values of a block as one; the patches of two frames as two tensors."""
    pieces: Pieces = {}
    file = source.file
    for block in range(source.blocks()):
        for end in ("weight", "bias"):
            parts = tuple(f"v.blk.{block}.attn_{one}.{end}" for one in "qkv")
            if source.names.issuperset(parts):
                shape = file.shape(parts[0])
                rows = sum(file.shape(part)[0] for part in parts)
                pieces[f"v.blk.{block}.attn_qkv.{end}"] = _Piece(
                    parts, (rows, *shape[1:]), _joined, rows=True
                )
    for index, layer in enumerate(source.numbers("vision.deepstack_visual_indexes")):
        start = f"v.deepstack_merger.{index}."
        for name in source.names:
            if name.startswith(start):
                pieces[f"v.deepstack.{layer}.{name.removeprefix(start)}"] = name
    patches = "v.patch_embed.weight"
    if patches in source.names:
        packed, frames, *size = file.shape(patches)
        shape = (packed // 3, 3, *size)
        for frame, end in enumerate(("", ".1")[:frames]):
            pieces[f"v.patch_embd.weight{end}"] = _Piece((patches,), shape, _Frame(frame, shape))
    return pieces


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


@dataclass(frozen=True)
class _Frame:
    """One frame's weights out of [channels out times in, frames, height, width]."""

    frame: int
    shape: Shape

    def __call__(self, weights: Tensor) -> Tensor:
        return weights[:, self.frame].reshape(self.shape)


# Mistral ----------------------------------------------------------------------------------------


def _mistral_tensors(source: _Source) -> Pieces:
    """Queries and keys with rotary pairs side by side. Rows of pictures end without a token."""
    file, heads = source.file, source.count("vision.attention.head_count")
    pieces: Pieces = {}
    for name in source.names:
        if re.fullmatch(r"v\.blk\.\d+\.attn_[qk]\.weight", name):
            shape = file.shape(name)
            if not heads or shape[0] % (2 * heads):
                raise ModelError(
                    f"{source.where}: {name} has {shape[0]} rows for {heads} heads; expected an "
                    "even number for each; fetch the model again"
                )
            pieces[name] = _Piece((name,), shape, _Rows(heads), rows=True)
    return pieces


@dataclass(frozen=True)
class _Rows:
    heads: int

    def __call__(self, rows: Tensor) -> Tensor:
        return adjacent_pairs(self.heads)(rows)


_QWEN3 = _Layout(
    "qwen3vl_merger",
    text={"rope.mrope_section": "rope.dimension_sections"},
    defaults={"rope.dimension_sections": [24, 20, 20, 0]},
    vision={
        "vision.image_mean": HALF,
        "vision.image_std": HALF,
        "vision.image_size": 768,
        "vision.feed_forward_length": 4304,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "use_gelu": True,
    },
    renamed=(
        (r"^v\.merger\.norm", "v.post_ln"),
        (r"^v\.merger\.linear_fc1", "mm.0"),
        (r"^v\.merger\.linear_fc2", "mm.2"),
        (r"^(v\.deepstack\.\d+)\.linear_", r"\1."),
        (r"^v\.patch_embed\.", "v.patch_embd."),
        (r"^v\.pos_embed", "v.position_embd"),
        (r"\.norm([12])\.", r".ln\1."),
        (r"\.mlp\.linear_fc1", ".ffn_up"),
        (r"\.mlp\.linear_fc2", ".ffn_down"),
    ),
    more=_qwen3_keys,
    tensors=_qwen3_tensors,
)

_LAYOUTS: Mapping[str, _Layout] = {
    "gemma3": _Layout(
        "gemma3",
        text={
            "rope.global.freq_base": "rope.freq_base",
            "rope.local.freq_base": "rope.freq_base_swa",
        },
        defaults={
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
        vision={"vision.image_mean": HALF, "vision.image_std": HALF, "use_gelu": True},
        renamed=(
            (r"^v\.patch_embedding", "v.patch_embd"),
            (r"^v\.position_embedding", "v.position_embd"),
            (r"^v\.post_layernorm", "v.post_ln"),
            (r"\.layer_norm([12])", r".ln\1"),
            (r"\.attn_output", ".attn_out"),
            (r"\.mlp\.fc1", ".ffn_up"),
            (r"\.mlp\.fc2", ".ffn_down"),
            (r"^mm\.mm_", "mm."),
        ),
    ),
    "qwen25vl": _Layout(
        "qwen2.5vl_merger",
        decoder="qwen2vl",
        vision={
            "vision.image_mean": list(CLIP_MEAN),
            "vision.image_std": list(CLIP_STD),
            "vision.image_size": 560,
            "use_silu": True,
        },
        renamed=(
            (r"^v\.merger\.ln_q", "v.post_ln"),
            (r"^v\.merger\.mlp\.([02])", r"mm.\1"),
            (r"^v\.patch_embd_0\.weight", "v.patch_embd.weight"),
            (r"^v\.patch_embd_1\.weight", "v.patch_embd.weight.1"),
        ),
        more=_qwen25_keys,
    ),
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3,
    "qwen35": _QWEN3,
    "qwen35moe": _QWEN3,
    "mistral3": _Layout(
        "pixtral",
        tokenizer=(("pre", (None, "", "default"), "tekken"),),
        text={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
        vision={
            "vision.image_mean": list(CLIP_MEAN),
            "vision.image_std": list(CLIP_STD),
            "vision.attention.layer_norm_epsilon": 1e-5,
            "use_silu": True,
        },
        renamed=(
            (r"^v\.patch_conv", "v.patch_embd"),
            (r"^v\.encoder_norm", "v.pre_ln"),
            (r"\.attn_output", ".attn_out"),
            (r"\.attn_norm", ".ln1"),
            (r"\.ffn_norm", ".ln2"),
            (r"^mm\.linear_([12])", r"mm.\1"),
            (r"^mm\.patch_merger\.merging_layer", "mm.patch_merger"),
            (r"^mm\.norm", "mm.input_norm"),
        ),
        more=lambda source: (
            {},
            {
                "vision.spatial_merge_size": source.keys.get("spatial_merge_size"),
                "rope.freq_base": source.keys.get("vision.rope.freq_base"),
            },
        ),
        tensors=_mistral_tensors,
    ),
    "gemma4": _Layout(
        "gemma4v",
        tokenizer=(("model", ("llama",), "gemma4"),),
        vision={
            "vision.image_mean": [0.0, 0.0, 0.0],
            "vision.image_std": [1.0, 1.0, 1.0],
            "vision.image_size": 224,
        },
    ),
}
