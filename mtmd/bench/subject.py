"""Describes what is measured: one model, its stages apart. Everything of the engine that the
benchmark uses goes through here.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import OptionError
from mtmd.base.process_memory import resident_bytes
from mtmd.bench.forced import Forced
from mtmd.bench.measure import HostPeak
from mtmd.bench.shapes import random_checkpoint, type_of_random_weights
from mtmd.chat_template.built_in_templates import built_in_file
from mtmd.chat_template.template import ChatTemplate
from mtmd.clip.encoder import BATCH, Encoder
from mtmd.clip.family import ContextFamily
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import Budget
from mtmd.events import Finished
from mtmd.finding import find_checkpoint
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.measured_speeds import Ceilings, measure_ceilings
from mtmd.kernels.resources.threads import ask_threads
from mtmd.llm.batch import Batch, BatchShape
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence as Running
from mtmd.llm.engine.spans import Span, cut, lay_out
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.loaded.device_and_dtype import device_name
from mtmd.model import Model
from mtmd.options.keywords import Detail
from mtmd.options.load import LoadOptions

SLACK = 256  # tokens that a chat template may put around a prompt
INSTRUCTION = 16  # tokens of a text, for an encoder that reads it with a picture
COPIED = 120  # tokens, with which a prompt and its copy fit into the slack
SEED = 20
Work = list[tuple[int, int]]  # flops, and bytes of weights and of the past read, of each node
PASSES = 3  # of a graph that is watched node by node: each node's best counts


@dataclass(frozen=True)
class OpCost:
    """Nodes of one op and size: how often, how long all of them took, and what they have to do at
    least.
    """

    graph: str
    op: str
    size: str
    count: int
    ms: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Prefilled:
    """Sequences that have read their prompts, ready to decode."""

    running: tuple[Running, ...]
    tokens: tuple[int, ...]


class Subject:
    """A model as the benchmark sees it. It is used from one thread; what takes the device is done
    on the model's own, as answers are.
    """

    def __init__(
        self,
        model: str | None,
        random_weights: str | None,
        options: LoadOptions,
        *,
        prompt: int,
        resolution: int,
        images: int | None,
        decode: int,
        detail: str,
    ):
        """Loads; the context is made to hold `images` pictures of `resolution` pixels a side (None:
        one, where the model sees), `prompt` tokens of text and `decode` tokens of an answer.
        Raises MtmdError.
        """
        start = time.perf_counter()
        if random_weights is not None:
            weights = type_of_random_weights(options)
            checkpoint = random_checkpoint(random_weights, weights)
            name: str | None = f"{checkpoint.folder.name}, random {weights}"
        else:
            checkpoint, name = find_checkpoint(model, options)
        if checkpoint.template.missing:  # times do not depend on what stands around a text
            special = checkpoint.tokenizer.special_text
            template = ChatTemplate.from_file(built_in_file("vicuna"), special)
            checkpoint = replace(checkpoint, template=template)
        self.budget = Budget(options.image_min_tokens, options.image_max_tokens, detail)
        pictured, images = 0, int(checkpoint.vision is not None) if images is None else images
        if images:
            if checkpoint.vision is None:
                raise OptionError(
                    f"images is {images}, and {name or model} has no image encoder; expected 0"
                )
            plan = checkpoint.vision.resolution.prepare(picture(resolution), self.budget)
            pictured = images * plan.tokens
        context = pictured + prompt + decode + SLACK
        if context > checkpoint.text.context:
            alongside = f"{decode} decoded and {SLACK} for the chat template"
            alongside = f"{pictured} of pictures, {alongside}" if pictured else alongside
            raise OptionError(
                f"context: found {prompt} tokens of text, beside {alongside}, expected at most "
                f"{checkpoint.text.context} in all, which {name or model or 'demo model'} was made "
                "for"
            )
        self.model = Model(checkpoint, replace(options, context=context), name=name)
        self.detail = detail
        self.runner, self.encoder = self.model.runner, self.model.encoder
        self.backend = self.model.backends[0]
        self.device, self.dtype = self.backend.device, self.model.dtype
        self.open_ms = (time.perf_counter() - start) * 1e3
        self._cache = self.model.exclusively(self.runner.new_cache)
        self._random = np.random.default_rng(SEED)
        self._engines: dict[str, Engine] = {}  # that copy

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    @property
    def device_name(self) -> str:
        return device_name(self.backend)

    @property
    def backend_name(self) -> str:
        return self.backend.name

    @property
    def weight_bytes(self) -> int:
        return self.model.checkpoint.weight_bytes

    def threads(self, count: int | None) -> None:
        """Set the threads for what follows, None for what torch and machine code choose: the
        device's thread has had its own number since it began.
        """
        ask_threads(count)
        self.model.exclusively(lambda: ask_threads(count))

    def ceilings(self, runs: int) -> Ceilings:
        """The machine's, measured where the model runs."""
        return self.model.exclusively(lambda: measure_ceilings(self.device, runs))

    def synchronize(self) -> None:
        self.backend.synchronize()

    # Stages

    def prepare(self, resolution: int, images: int) -> list[ImagePlan]:
        assert self.encoder is not None
        ways, pixels = self.encoder.preprocessing, picture(resolution)

        def make() -> ImagePlan:
            return ways.resolution.prepare(pixels, self.budget)

        return [ways.prepare(make) for _ in range(images)]

    def encode(self, plans: Sequence[ImagePlan]) -> list[Tensor]:
        """Embeddings [T, D] of each picture, the tiles of all encoded together."""
        encoder = self.encoder
        assert encoder is not None

        def work() -> list[Tensor]:
            way = plans[0].normalize if plans else None
            every = [tile for plan in plans for tile in plan.tiles]
            tiles = iter(encoder.encode(every, way=way))
            rows = [encoder.join(plan, [next(tiles) for _ in plan.tiles]) for plan in plans]
            reader = encoder.reader
            return [reader.rows(one, (0,) * INSTRUCTION) for one in rows] if reader else rows

        return self.model.exclusively(work)

    def prompt(
        self, length: int, plans: Sequence[ImagePlan], pictures: Sequence[Tensor]
    ) -> list[Span]:
        """`length` random tokens of text after pictures."""
        spans: list[Span] = []
        for plan, rows in zip(plans, pictures, strict=True):
            spans += self._picture_spans(plan, rows)
        tokens = self._random.integers(0, self.runner.family.vocabulary, length).tolist()
        return [*spans, Span(tuple(tokens))] if tokens else spans

    def _picture_spans(self, plan: ImagePlan, rows: Tensor) -> Iterator[Span]:
        assert self.encoder is not None
        family = self.encoder.family
        if isinstance(family, ContextFamily):
            yield Span((0,), rows, real=family.real_rows(plan))
            return
        block, start = self.encoder.family.bidirectional, 0
        for grid in plan.grids or (None,):
            count = plan.tokens if grid is None else grid[0] * grid[1]
            yield Span((0,) * count, rows[start : start + count], block, grid)
            start += count

    def prefill(self, spans: Sequence[Span], slot: int) -> tuple[Running, int]:
        """The sequence in `slot`, read, and its first token."""

        def work() -> tuple[Running, int]:
            running = self.runner.begin(self._cache, slot)
            return running, int(self.runner.prefill(spans, self._cache, running).argmax())

        return self.model.exclusively(work)

    def decode(self, sequences: Prefilled, steps: int) -> None:
        """Decode so many tokens for each sequence, the most probable ones; the sequences stay where
        they were.
        """

        def work() -> None:
            running = [replace(r) for r in sequences.running]
            tokens = list(sequences.tokens)
            for _ in range(steps):
                parts = [(r, [Span((t,))]) for r, t in zip(running, tokens, strict=True)]
                tokens = _max_probable(self.runner.read(parts, self._cache))

        self.model.exclusively(work)

    def copy(self, mode: str) -> float:
        """Milliseconds a token of an answer that is `COPIED` tokens of its prompt, `speculate` as
        the option of that name. The answer is given: a model that can do it is not needed.
        """

        def work() -> float:
            if mode not in self._engines:
                self._engines[mode] = Engine(self.runner, speculate=mode)
            engine = self._engines[mode]
            drawn = self._random.integers(0, self.runner.family.vocabulary, COPIED).tolist()
            prompt = Prompt(
                [Span(tuple(drawn))],
                Sampler(Sampling()),
                max_tokens=COPIED,
                constraint=Forced(drawn),
            )
            sequence = engine.submit(prompt)
            while engine.busy:
                engine.step()
            if sequence.error is not None:
                raise sequence.error
            return sequence.decode_ms / (len(sequence.tokens) - 1)

        return self.model.exclusively(work)

    def first_token(self, resolution: int, images: int, length: int) -> int:
        """Measure from a picture's pixels to the first token of an answer, as an application would.
        How many tokens the prompt had: `length` of text are met nearly, and a chat template has its
        own.
        """
        text = self._text(length)
        content = [
            *({"type": "image", "image": self._new_picture(resolution)} for _ in range(images)),
            {"type": "text", "text": text},
        ]
        *_, last = self.model.stream(
            [{"role": "user", "content": content}],
            max_tokens=1,
            ignore_eos=True,
            detail=cast(Detail, self.detail),
        )
        assert isinstance(last, Finished)
        return last.answer.receipt.prompt_tokens

    def start_service(self) -> None:
        """Start the service and fill its caches before anything is timed."""
        _ = self.model.service

    def stop_service(self) -> None:
        self.model.release()
        gc.collect()

    def _new_picture(self, resolution: int) -> np.ndarray:
        """One that nobody has seen: what is known is not encoded again."""
        pixels = np.array(picture(resolution))
        pixels[0, :8] = self._random.integers(0, 256, (8, 3))
        return pixels

    def _text(self, length: int) -> str:
        """About `length` tokens; random from the first letter on, so that no prefix is known."""
        tokenizer = self.model.checkpoint.tokenizer
        letters = self._random.integers(97, 123, max(length, 1) * 4).astype(np.uint8)
        text = letters.tobytes().decode()
        share = len(tokenizer.encode(text)) / len(text)
        return text[: max(1, round(length / share))]

    # Costs

    def encode_work(self, plans: Sequence[ImagePlan]) -> Work:
        """Return the work of encoding these pictures."""
        assert self.encoder is not None
        return [
            cost
            for count, shape in _batches(plans)
            for cost in _work(self.encoder.plan(count, shape))
        ]

    def prefill_work(self, spans: Sequence[Span]) -> Work:
        """Return the prefill work of reading a prompt in batches as the runner does."""
        sequence, result = self.runner.begin(self._cache, 0), list[tuple[int, int]]()
        batches = cut(lay_out(spans, 0)[0], self.runner.prefill_tokens)
        for part in batches:
            last = part is batches[-1]
            batch = make_batch([(sequence, part)], self._cache, needs_logits=last)
            sequence.done += sum(map(len, part))
            result += _work(self.runner.plan(batch.shape))
        return result

    def decode_work(self, sequences: Prefilled) -> Work:
        """Return the work of one step."""
        return _work(self.runner.plan(self.decode_shape(sequences)))

    def decode_shape(self, sequences: Prefilled) -> BatchShape:
        """Return the shape of the batch of one step."""
        return self._step(sequences).shape

    def encode_shapes(self, plans: Sequence[ImagePlan]) -> list[tuple[int, tuple[int, ...]]]:
        """Return how the encoder shares out the pictures' tiles: how many at once, and their
        shape.
        """
        return _batches(plans)

    def _step(self, sequences: Prefilled) -> Batch:
        parts = [
            (replace(r), [Span((t,))])
            for r, t in zip(sequences.running, sequences.tokens, strict=True)
        ]
        return make_batch(parts, self._cache)

    def watch_encode(self) -> list[OpCost]:
        """One tile of the usual size, node by node."""
        encoder = self.encoder
        if encoder is None:
            return []
        tile = np.zeros(encoder.family.resolution.tile_type().shape, np.float32)

        def work() -> list[OpCost]:
            watch = _Watch(self.backend.synchronize)
            for _ in range(PASSES):
                watch.start()
                encoder.encode([tile], watch)
            return watch.costs("encode")

        return self.model.exclusively(work)

    def watch_decode(self, sequences: Prefilled) -> list[OpCost]:
        """One step, node by node."""

        def work() -> list[OpCost]:
            watch = _Watch(self.backend.synchronize)
            for _ in range(PASSES):
                batch = self._step(sequences)
                watch.start()
                self.runner.forward(batch, watch)
            return watch.costs("decode")

        return self.model.exclusively(work)

    def patches(self, plans: Sequence[ImagePlan]) -> int:
        """Return what the encoder's attention sees of these pictures, all tiles together."""
        assert self.encoder is not None
        return sum(_patches(self.encoder.plan(*batch)) for batch in _batches(plans))

    def predicted_encode_bytes(self, resolution: int, flash_attn: str) -> tuple[int, int, int]:
        """Peak bytes on the device while a picture of so many pixels a side is encoded, beyond
        weights; its patches; its tiles. Nothing is run.
        """
        assert self.encoder is not None
        encoder = self._encoder(flash_attn)
        plans = self.prepare(resolution, 1)
        batches = _batches(plans)
        peak = max(
            encoder.plan(count, shape).compute_bytes.get(self.backend.space, 0)
            for count, shape in batches
        )
        return peak, self.patches(plans), sum(count for count, _ in batches)

    def _encoder(self, flash_attn: str) -> Encoder:
        assert self.encoder is not None
        return Encoder(
            self.encoder.family,
            self.encoder.weights,
            self.encoder.backends,
            dtype=self.dtype,
            flash_attn=flash_attn,
            int8=self.encoder.int8,
            overrides=self.encoder.overrides,
            residency=self.encoder.residency,
        )

    def give_back(self) -> None:
        """Memory that is free goes back to the system, so that using it again counts."""
        gc.collect()
        if self.device.type != "cpu":
            getattr(torch, self.device.type).empty_cache()
        else:
            with suppress(OSError, AttributeError):  # of glibc alone
                ctypes.CDLL(None).malloc_trim(0)

    @contextmanager
    def peak(self, into: list[tuple[int, int]]) -> Iterator[None]:
        """Appends the most memory held while its body runs, and how much of it was not held before:
        of the process on a CPU, of the device otherwise; nothing where the system does not tell.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            yield
            maximum = torch.cuda.max_memory_allocated(self.device)
            into.append((maximum, maximum - before))
            return
        if self.device.type != "cpu":
            yield
            return
        host, stored = HostPeak(), resident_bytes()
        host.restart()
        yield
        result = host.read()
        if result is not None and stored is not None:
            into.append((result, max(result - stored, 0)))


def _max_probable(logits: Tensor) -> list[int]:
    """Return the most probable of each row [S, V]; on a CPU by numpy, as the sampler does: torch
    takes ten times as long.
    """
    if logits.device.type != "cpu":
        return [int(token) for token in logits.argmax(-1).tolist()]
    return [int(token) for token in logits.float().numpy().argmax(-1)]


class _Watch:
    """An observer that notes how long each node took, at best of several passes."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._passes: list[list[tuple[Node, float]]] = []
        self._last = 0.0

    def start(self) -> None:
        self._passes.append([])
        self._synchronize()
        self._last = time.perf_counter()

    def __call__(self, node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:  # noqa: ARG002
        self._synchronize()
        self._passes[-1].append((node, time.perf_counter() - self._last))
        self._last = time.perf_counter()

    def costs(self, graph: str) -> list[OpCost]:
        """Return the costs by op and size, those that take most time first."""
        groups: dict[tuple[str, str], list[tuple[Node, float]]] = {}
        for runs in zip(*self._passes, strict=True):
            node = runs[0][0]
            if node.op != "copy":
                groups.setdefault((node.op, _size(node)), []).append(
                    (node, min(s for _, s in runs))
                )
        rows = [
            OpCost(
                graph,
                op,
                size,
                len(result),
                sum(s for _, s in result) * 1e3,
                sum(OPS[op].flops(n) for n, _ in result),
                sum(OPS[op].bytes(n) for n, _ in result),
            )
            for (op, size), result in groups.items()
        ]
        return sorted(rows, key=lambda row: -row.ms)


@lru_cache(maxsize=4)
def picture(resolution: int) -> np.ndarray:
    """A square of gradients, uint8 [Y, X, 3], not to be written to."""
    ramp = np.linspace(0, 255, resolution)
    planes = np.broadcast_arrays(ramp[:, None], ramp[None, :], ramp[::-1, None])
    return np.stack(planes, -1).astype(np.uint8)


def _batches(plans: Sequence[ImagePlan]) -> list[tuple[int, tuple[int, ...]]]:
    """Return how the encoder shares out tiles: (batch, shape of a tile) of each run."""
    counts: dict[tuple[int, ...], int] = {}
    for plan in plans:
        for tile in plan.tiles:
            counts[tuple(tile.shape)] = counts.get(tuple(tile.shape), 0) + 1
    return [
        (min(BATCH, count - start), shape)
        for shape, count in counts.items()
        for start in range(0, count, BATCH)
    ]


def _patches(plan: Plan) -> int:
    """Return the patches of all tiles, the rows of the widest attention."""
    seen = (
        step.node.inputs[0] for step in plan.steps if step.node.op in ("attention", "attn_scores")
    )
    return max((q.shape[0] * q.shape[1] for q in seen if q is not None), default=0)


def _work(plan: Plan) -> Work:
    """Return what stays in a processor's caches costs no reading."""
    nodes = [step.node for step in plan.steps if step.node.op != "copy"]
    return [
        (OPS[n.op].flops(n), OPS[n.op].bytes(n) if _reads_memory(n) else 0)
        for n in nodes
        if OPS[n.op].flops(n) or _reads_memory(n)
    ]


def _reads_memory(node: Node) -> bool:
    """Return whether it reads weights or the past, which are larger than caches; a table is read by
    rows alone.
    """
    return node.op in ("attention", "paged_attention") or (
        node.op != "embed" and any(i.op == "weight" for i in node.operands)
    )


def _size(node: Node) -> str:
    """Return what tells nodes of one op apart: the weight's size and type, or the result's."""
    weight = next((i for i in node.operands if i.op == "weight"), None)
    if not node.op.startswith("matmul") or weight is None:
        return "×".join(map(str, node.shape))
    kind = node.attrs.get("quant") or name_of(weight.dtype)
    columns = next(node.operands).shape[-1]
    return f"{weight.shape[-2] if len(weight.shape) > 1 else 1}×{columns} {kind}"
