"""The same request through two models: where their values part, from the pixels to the tokens.

Node by node the second run is compared with what was kept of the first, which has been freed by
then: of every node at most `SAVED` values, evenly spread.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike

import torch
from torch import Tensor

from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.finding import find_checkpoint
from mtmd.inspect.comparison import (
    SAVED,
    ImageDifference,
    LogitDifference,
    ModelComparison,
    NodeDifference,
    OneSided,
    PromptDifference,
    SideFacts,
    agreed,
    beyond,
    nmse,
    saved,
    to_fp32,
)
from mtmd.inspect.info import stored_bytes, weights_of
from mtmd.inspect.observing import Key, See, observer
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node
from mtmd.kernels.quantization.blocks import BLOCKS
from mtmd.llm.engine.spans import Span
from mtmd.llm.family import default_context
from mtmd.loaded.device_and_dtype import device_name
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.conversation import Message

GRAPHS = ("pixels", "encoder", "decoder")
# NMSE that rounding comes to over all layers. Seen in models of 4 to 7 layers: 2e-12 and 5e-4 at
# most.
ROUNDING = {"fp32": 1e-8, "bf16": 1e-2}
# A matrix stored with b bits a value is off by about 4 * 4^-b of its power; layers add theirs up.
# Seen: 20 to 190 times 4^-b.
LOSS = 200.0


@dataclass(frozen=True)
class Source:
    """A model as `load` takes it."""

    model: str | PathLike[str] | None
    options: LoadOptions


def open_both(a: Source, b: Source) -> list[Model]:
    """Both models, no weight of them read yet. They get a cache of the same shape: one sequence,
    and the context of the model that was made for less. Raises MtmdError.
    """
    result = [
        (source.options, *find_checkpoint(source.model, source.options, answers=False))
        for source in (a, b)
    ]
    context = min(*(default_context(checkpoint.text) for _, checkpoint, _ in result))
    return [
        Model(
            checkpoint,
            dataclasses.replace(options, context=options.context or context, parallel=1),
            name=name,
        )
        for options, checkpoint, name in result
    ]


def compare_models(
    models: list[Model],
    messages: Sequence[Message],
    *,
    tokens: int = 16,
    tolerance: float | None = None,
) -> ModelComparison:
    """The first model against the second. They are taken out of the list, so that the first is
    freed before the second runs.

    messages: as `Model.stream` takes them. tokens: greedy ones to be compared, the end-of-answer
    token being one like any other. tolerance: an NMSE, None for what fits the types of both. Raises
    MtmdError; for a conversation that either cannot read before anything is run.
    """
    for index in range(2):
        models[index].prompts.read(messages)
    facts = _facts(models[0]), _facts(models[1])
    watch = _Watch(
        fitting_tolerance(*facts) if tolerance is None else dict.fromkeys(GRAPHS, tolerance)
    )
    run_a = _run(models.pop(0), messages, tokens, watch.keep)
    gc.collect()  # plans and their caches refer to each other in circles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    run_b = _run(models.pop(0), messages, tokens, watch.compare)
    return _comparison(facts, run_a, run_b, watch)


def fitting_tolerance(a: SideFacts, b: SideFacts) -> dict[str, float]:
    """Return what the types of both explain: pixels are prepared in fp32 whatever the rest;
    rounding in the compute types; and, where a graph's weights are stored in different block types,
    what the coarser ones lose. The decoder reads what the encoder gives.
    """
    result = {"pixels": ROUNDING["fp32"], "encoder": 0.0, "decoder": 0.0}
    for graph in ("encoder", "decoder"):
        kinds = set(a.types.get(graph, ())) ^ set(b.types.get(graph, ()))
        lost = [
            min(1.0, LOSS * 4.0 ** -(8 * BLOCKS[k].bytes / BLOCKS[k].values))
            for k in kinds
            if k in BLOCKS
        ]
        result[graph] = max(result["encoder"], ROUNDING[a.dtype], ROUNDING[b.dtype], *lost)
    return result


def _facts(model: Model) -> SideFacts:
    flash = {"encoder": model.encoder.flash.state} if model.encoder else {}
    types: dict[str, Counter[str]] = {}
    for graph, weights in weights_of(model):
        for source in weights.sources:
            types.setdefault(graph, Counter())[weights.file.kind(source)] += stored_bytes(
                weights, source
            )
    return SideFacts(
        model.name,
        model.backends[0].name,
        device_name(model.backends[0]),
        name_of(model.dtype),
        {graph: tuple(kind for kind, _ in kinds.most_common()) for graph, kinds in types.items()},
        flash | {"decoder": model.runner.flash.state},
    )


@dataclass(frozen=True)
class _Run:
    """Describes what is kept of one run: `logits` [V] after the prompt and after each token chosen
    but the last, in fp32 on the CPU.
    """

    prompt: tuple[int, ...]
    images: list[tuple[ImagePlan, Tensor]]
    logits: list[Tensor]
    tokens: tuple[int, ...]
    text: str


def _run(model: Model, messages: Sequence[Message], tokens: int, see: See) -> _Run:
    return model.exclusively(lambda: _run_on_device(model, messages, tokens, see))


def _run_on_device(model: Model, messages: Sequence[Message], tokens: int, see: See) -> _Run:
    prompt, runner = model.prompt(messages, observer("encoder", see)), model.runner
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    logits = [to_fp32(runner.prefill(prompt.spans, cache, sequence, observer("decoder", see)))]
    chosen = [int(logits[0].argmax())]
    while len(chosen) < tokens and sequence.done + 1 < runner.context:
        logits.append(to_fp32(runner.read([(sequence, [Span((chosen[-1],))])], cache)[0]))
        chosen.append(int(logits[-1].argmax()))
    text = model.checkpoint.tokenizer.decode(chosen, skip_special=False)
    images = [(p.plan, to_fp32(e)) for p, e in zip(prompt.pictures, prompt.embeddings, strict=True)]
    return _Run(prompt.tokens, images, logits, tuple(chosen), text)


@dataclass
class _Node:
    op: str
    dtype: str
    shape: tuple[int, ...]
    values: Tensor


@dataclass
class _Watch:
    """Nodes of the first run, to be met by those of the second."""

    tolerance: dict[str, float]
    waiting: dict[Key, _Node] = field(default_factory=dict)
    compared: int = 0
    in_part: int = 0
    only_b: list[tuple[str, str, str]] = field(default_factory=list)
    first: NodeDifference | None = None
    largest: NodeDifference | None = None

    def keep(self, key: Key, node: Node, value: Tensor) -> None:
        self.waiting[key] = _Node(node.op, name_of(value.dtype), tuple(value.shape), saved(value))

    def compare(self, key: Key, node: Node, value: Tensor) -> None:
        known = self.waiting.pop(key, None)
        if known is None:
            self.only_b.append((*key[:2], node.op))
            return
        ours, same_shape = saved(value), tuple(value.shape) == known.shape
        error = nmse(ours, known.values) if same_shape else None
        result = NodeDifference(
            *key,
            node.op,
            known.dtype,
            name_of(value.dtype),
            known.shape,
            tuple(value.shape),
            len(ours),
            value.numel(),
            float(known.values.norm(dtype=torch.float64)),
            float(ours.norm(dtype=torch.float64)),
            error,
        )
        self.compared += 1
        self.in_part += value.numel() > SAVED
        if self.first is None and beyond(error, self.tolerance[key[0]]):
            self.first = result
        if error is not None and (
            self.largest is None or self.largest.nmse is None or not error <= self.largest.nmse
        ):
            self.largest = result


def _comparison(
    facts: tuple[SideFacts, SideFacts], a: _Run, b: _Run, watch: _Watch
) -> ModelComparison:
    only_a = [(*key[:2], node.op) for key, node in watch.waiting.items()]
    return ModelComparison(
        *facts,
        watch.tolerance,
        _prompts(a.prompt, b.prompt),
        tuple(map(_image, a.images, b.images)),
        _logits(a, b),
        a.tokens,
        b.tokens,
        (a.text, b.text),
        watch.compared,
        watch.in_part,
        OneSided(len(only_a), next(iter(only_a), None)),
        OneSided(len(watch.only_b), next(iter(watch.only_b), None)),
        watch.first,
        watch.largest,
    )


def _prompts(a: tuple[int, ...], b: tuple[int, ...]) -> PromptDifference:
    at = agreed(a, b)
    if len(a) == len(b) == at:
        return PromptDifference(len(a), len(b), None)
    return PromptDifference(
        len(a), len(b), (at, a[at] if at < len(a) else None, b[at] if at < len(b) else None)
    )


def _image(a: tuple[ImagePlan, Tensor], b: tuple[ImagePlan, Tensor]) -> ImageDifference:
    """Each tile as it was prepared, and all embeddings [T, D] of the picture."""
    (plan_a, rows_a), (plan_b, rows_b) = a, b
    same_tiles = [t.shape for t in plan_a.tiles] == [t.shape for t in plan_b.tiles]
    pixels = (
        nmse(
            *(
                torch.cat([torch.from_numpy(t).flatten() for t in p.numbers()])
                for p in (plan_b, plan_a)
            )
        )
        if same_tiles
        else None
    )
    return ImageDifference(
        plan_a.sizes,
        plan_b.sizes,
        plan_a.tokens,
        plan_b.tokens,
        pixels,
        nmse(rows_b, rows_a) if rows_a.shape == rows_b.shape else None,
    )


def _logits(a: _Run, b: _Run) -> LogitDifference:
    """Steps count as long as both have read the same tokens."""
    steps = min(agreed(a.tokens, b.tokens) + 1, len(a.logits), len(b.logits))
    if a.logits[0].shape != b.logits[0].shape:
        return LogitDifference(None, None, steps, a.tokens[0], b.tokens[0])
    errors = [nmse(y, x) for x, y in zip(a.logits[:steps], b.logits[:steps], strict=True)]
    return LogitDifference(errors[0], max(errors), steps, a.tokens[0], b.tokens[0])
