"""Describes what a model is and what it takes, by the headers of its files and without running
anything.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mtmd.base.errors import ImageError, OptionError
from mtmd.base.text import mib, plural
from mtmd.checkpoint.requantize import weights_note
from mtmd.clip.audio_family import AudioFamily
from mtmd.clip.family import VisionFamily
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.clip.tasks import tasks_of
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.canonical import PLAIN_KINDS, CanonicalWeights, WeightFile
from mtmd.kernels.checkpoint.magic import is_gguf
from mtmd.kernels.dtype import name_of
from mtmd.kernels.report.facts import AdapterFacts, DequantizedTensor, GraphFacts
from mtmd.llm.batch import BatchShape
from mtmd.llm.sampling.options import ModelSampling
from mtmd.loaded.device_and_dtype import device_name
from mtmd.model import Model

SIZES = (
    (224, 224),
    (640, 480),
    (1024, 768),
    (1920, 1080),
    (1080, 1920),
    (3840, 2160),
)  # (width, height) of pictures, in pixels
MAX_PARTS = 8  # that are named of those that are not used
SECONDS = (1.0, 30.0, 600.0)  # of audio
STATES = {
    "kv": "keys and values",
    "context": "keys and values of pictures",
    "conv": "convolution windows",
    "matrix": "matrices of linear attention",
}  # by `State.name`


@dataclass(frozen=True)
class Part:
    """The encoder or the decoder. `family` is the name of its module; `facts` are what the family
    tells of its sizes, by its names.
    """

    part: str
    family: str
    facts: dict[str, int]


@dataclass(frozen=True)
class StoredType:
    """Tensors of one part and one type of the file. `used` is "as stored", or the type that they
    are kept in; where block types are not used as stored, they are `dequantized`. Each tensor is
    counted once, however many parameters it holds.
    """

    part: str
    kind: str
    used: str
    dequantized: bool
    tensors: int
    parameters: int
    stored_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class PictureCost:
    """Describes what a picture of `size` becomes: tiles of `tile_sizes` (width, height), in order.
    `refused` says why it is not taken, else None.
    """

    size: tuple[int, int]
    tokens: int
    tile_sizes: tuple[tuple[int, int], ...]
    refused: str | None = None


@dataclass(frozen=True)
class AudioCost:
    """Tokens that `seconds` of audio take."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class TokenFact:
    name: str
    text: str
    id: int


@dataclass(frozen=True)
class ModelInfo:
    """Describes what `mtmd info` tells. The cache holds `sequences` of `context` tokens each. Bytes
    are per memory space where they are dictionaries; `peak_bytes` is all weights, a full cache and
    the larger of what the largest image and the largest prefill take to compute. `max_tokens` is 0
    without an encoder. `audio` is empty for a model that takes none. `notes` say where the files
    contradict themselves, how they are read, and how weights are quantized.
    """

    model: str
    format: str
    files: tuple[str, ...]
    device: str
    device_name: str
    dtype: str
    sequences: int
    context: int
    context_most: int
    vocabulary: int
    parameters: int
    stored_bytes: int
    parts: tuple[Part, ...]
    types: tuple[StoredType, ...]
    dequantized: tuple[DequantizedTensor, ...]
    pictures: tuple[PictureCost, ...]
    most_tokens: int
    graphs: tuple[GraphFacts, ...]
    cache_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    tokens: tuple[TokenFact, ...]
    image_token: TokenFact | None
    stop_tokens: tuple[TokenFact, ...]
    chat_template: str
    sampling: ModelSampling
    notes: tuple[str, ...] = ()
    adapters: tuple[AdapterFacts, ...] = ()
    audio: tuple[AudioCost, ...] = ()
    audio_token: TokenFact | None = None
    tasks: tuple[str, ...] = ()

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def model_info(model: Model) -> ModelInfo:
    """Raises OptionError where the budget of image tokens is one that the model cannot keep for any
    picture.
    """
    checkpoint, report = model.checkpoint, model.warmup_report
    tokenizer, vision, audio = checkpoint.tokenizer, checkpoint.vision, checkpoint.audio
    types = tuple(t for part, weights in weights_of(model) for t in _types(part, weights, model))
    budget = Budget(model.options.image_min_tokens, model.options.image_max_tokens)
    notes = (*checkpoint.notes, weights_note(checkpoint), _left_out(model))
    named = tuple(
        TokenFact(name, text, tokenizer.special[name])
        for name, text in tokenizer.special_text.items()
    )
    return ModelInfo(
        model=model.name,
        format=_format(checkpoint.folder),
        files=tuple(f.name for f in _files(model)),
        device=report.device,
        device_name=device_name(model.backends[0]),
        dtype=report.dtype,
        sequences=model.runner.sequences,
        context=model.runner.context,
        context_most=checkpoint.text.context,
        vocabulary=checkpoint.text.vocabulary,
        parameters=sum(t.parameters for t in types),
        stored_bytes=sum(t.stored_bytes for t in types),
        parts=tuple(_parts(model)),
        types=types,
        dequantized=report.dequantized,
        adapters=report.adapters,
        pictures=_pictures(vision, budget) if vision else (),
        most_tokens=vision.resolution.max_tokens(budget) if vision else 0,
        graphs=report.graphs,
        cache_bytes=_cache_bytes(model),
        peak_bytes=_peak(report.graphs),
        tokens=named,
        image_token=TokenFact("image token", vision.image_token, tokenizer.id(vision.image_token))
        if vision
        else None,
        stop_tokens=tuple(
            TokenFact("stop", tokenizer.decode([i], skip_special=False), i)
            for i in sorted(checkpoint.stop_tokens)
        ),
        chat_template=model.options.chat_template
        or ("none; " if checkpoint.template.missing else "the model's own")
        + checkpoint.template.missing.partition(": ")[2],
        sampling=checkpoint.sampling,
        notes=tuple(note for note in notes if note),
        audio=_audio(audio) if audio else (),
        audio_token=TokenFact("audio token", audio.token, tokenizer.id(audio.token))
        if audio
        else None,
        tasks=tuple(tasks_of(checkpoint.vision)),
    )


def _left_out(model: Model) -> str:
    """Return which parts of the files are not used, such as ears and a voice, by the shortest
    beginnings of names that no tensor in use has; "" where all are.
    """
    used: dict[int, tuple[WeightFile, set[str]]] = {}
    for _, weights in weights_of(model):
        used.setdefault(id(weights.file), (weights.file, set()))[1].update(weights.sources)
    parts, count, size = set[str](), 0, 0
    for file, names in used.values():
        begun = {name[:end] for name in names for end in _dots(name)}
        for name in set(file.names()) - names:
            parts.add(next((name[:i] for i in _dots(name) if name[:i] not in begun), name))
            count, size = count + 1, size + file.stored_bytes(name)
    if not parts:
        return ""
    shown = sorted(parts)
    more = f" and {len(shown) - MAX_PARTS} more" if len(shown) > MAX_PARTS else ""
    return (
        f"not used: {', '.join(shown[:MAX_PARTS])}{more} ({plural(count, 'tensor')}, {mib(size)})"
    )


def _dots(name: str) -> Iterator[int]:
    """Yield where a tensor's name has a dot."""
    return (i for i, character in enumerate(name) if character == ".")


def stored_bytes(weights: CanonicalWeights, source: str) -> int:
    """Bytes of one tensor of the file."""
    return weights.file.stored_bytes(source)


def weights_of(model: Model) -> Iterator[tuple[str, CanonicalWeights]]:
    """Return the weights by graph."""
    if model.encoder and model.checkpoint.vision_weights:
        yield "encoder", model.checkpoint.vision_weights
    if model.loaded.audio_encoder and model.checkpoint.audio_weights:
        yield "audio encoder", model.checkpoint.audio_weights
    yield "decoder", model.checkpoint.text_weights


def _types(part: str, weights: CanonicalWeights, model: Model) -> list[StoredType]:
    """The part's tensors by type and use, most bytes first."""
    requested = _requested(part, model)
    rows: dict[tuple[str, str, bool], Counter[str]] = {}
    counted: set[str] = set()
    for name, stored in weights.stored.items():
        kind, dtype = weights.file.kind(stored.names[0]), requested.get(name, model.dtype)
        is_block, as_it_is = kind not in PLAIN_KINDS, weights.quant(name) is not None
        used = (
            "as stored"
            if as_it_is or (not is_block and dtype == weights.file.meta(stored.names[0])[1])
            else name_of(dtype)
        )
        row = rows.setdefault((kind, used, is_block and not as_it_is), Counter())
        row["memory"] += weights.type_of(name, dtype).bytes
        for source in (s for s in stored.names if s not in counted):
            counted.add(source)
            row.update(
                tensors=1,
                parameters=prod(weights.file.meta(source)[0]),
                stored=stored_bytes(weights, source),
            )
    ordered = sorted(rows.items(), key=lambda item: -item[1]["stored"])
    return [
        StoredType(part, *key, row["tensors"], row["parameters"], row["stored"], row["memory"])
        for key, row in ordered
    ]


def _requested(part: str, model: Model) -> dict[str, torch.dtype]:
    """The type in which a part's graph asks for each parameter, by name."""
    if part == "encoder" and model.encoder:
        plans = model.encoder.weight_plans()
    elif part == "audio encoder" and (audio := model.loaded.audio_encoder):
        plans = audio.weight_plans()
    else:
        plans = [model.runner.plan(BatchShape(1, images=1 if model.loaded.encoders else 0))]
    leaves = (node for plan in plans for node, _ in plan.leaves)
    return {node.name: node.dtype for node in leaves if node.op == "weight"}


def _parts(model: Model) -> Iterator[Part]:
    if model.checkpoint.vision:
        yield Part(
            "encoder", _module(model.checkpoint.vision), dict(_numbers(model.checkpoint.vision))
        )
    if audio := model.checkpoint.audio:
        yield Part("audio encoder", _module(audio), dict(_numbers(audio)))
    text = model.checkpoint.text
    states = Counter(
        f"layers with {STATES[state.name]}" for layer in text.layers for state in layer
    )
    yield Part(
        "decoder", _module(text), {"layers": len(text.layers), **states, **dict(_numbers(text))}
    )


def _module(family: object) -> str:
    return type(family).__module__.partition(".families.")[2].partition(".")[0]


def _numbers(family: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number that a family's dataclass holds, those of dataclasses in it as
    `vit.layers`.
    """
    for field in dataclasses.fields(family):
        value = getattr(family, field.name)
        if type(value) is int:
            yield f"{prefix}{field.name}", value
        elif dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")


def _pictures(vision: VisionFamily, budget: Budget) -> tuple[PictureCost, ...]:
    result, errors = [], []
    for width, height in SIZES:
        try:
            plan = prepare_blank(vision.resolution, width, height, budget)
            result.append(PictureCost((width, height), plan.tokens, plan.sizes))
        except (ImageError, OptionError) as error:
            errors.append(error)
            result.append(PictureCost((width, height), 0, (), str(error)))
    if len(errors) == len(SIZES):
        raise errors[0]
    return tuple(result)


def _audio(audio: AudioFamily) -> tuple[AudioCost, ...]:
    return tuple(
        AudioCost(seconds, audio.resolution.token_count(round(seconds * audio.rate)))
        for seconds in SECONDS
    )


def _cache_bytes(model: Model) -> dict[str, int]:
    """Bytes of a full cache by what is kept."""
    result: Counter[str] = Counter()
    for node, _ in model.runner.plan(BatchShape(1)).leaves:
        if node.attrs.get("state"):
            result[STATES[node.name.partition(".")[0]]] += node.type.bytes
    return dict(result)


def _peak(graphs: Sequence[GraphFacts]) -> dict[str, int]:
    """Per memory space: the weights of all graphs, the cache, and the most that one of them
    computes with.
    """
    spaces = dict.fromkeys(
        s for g in graphs for s in (*g.weight_bytes, *g.cache_bytes, *g.compute_bytes)
    )
    result = {}
    for space in spaces:
        weights = {
            g.graph: max(o.weight_bytes.get(space, 0) for o in graphs if o.graph == g.graph)
            for g in graphs
        }
        cache, compute = (
            max(getattr(g, name).get(space, 0) for g in graphs)
            for name in ("cache_bytes", "compute_bytes")
        )
        result[space] = sum(weights.values()) + cache + compute
    return result


def _format(path: Path) -> str:
    """The version is the second word of a GGUF's header."""
    if path.is_dir() or not is_gguf(path):
        return "Hugging Face folder"
    with path.open("rb") as file:
        return f"GGUF v{int.from_bytes(file.read(8)[4:], 'little')}"


def _files(model: Model) -> list[Path]:
    """The decoder's first: it is what a model is given by."""
    return list(
        dict.fromkeys(
            path for _, weights in reversed(list(weights_of(model))) for path in weights.file.files
        )
    )
