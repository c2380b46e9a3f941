"""One forward of a text family on its backends: from a batch to logits."""

from __future__ import annotations

import copy
from collections import abc
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from mtmd.base.errors import ContextError, ModelError
from mtmd.base.made_once import MadeOnce
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.checkpoint.adapter import Adapter
from mtmd.kernels.checkpoint.halves import in_halves
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import AdaptedWeights, AppliedAdapter
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.plan.executor import Executor, Observer, Residency, memory_for
from mtmd.kernels.plan.flash_choice import AttentionForm, FlashChoice, choose
from mtmd.kernels.plan.layer_split import LayerSplit
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan
from mtmd.llm.batch import Batch, BatchShape
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span, context_of, cut, lay_out, seen_in
from mtmd.llm.engine.speculation import Pace
from mtmd.llm.family import TextFamily
from mtmd.llm.inputs import TextInputs
from mtmd.llm.state import KV, PAGE, Cache, KVType, Layers, Mirror, context_rows, states_by_name

# Tokens of a prefill batch: of a device that needs many to be busy, 2,048 take a quarter of the
# launches, and of the reads of weights.
PREFILL, LARGE_PREFILL = 512, 2048
ATTENTION = ("attention", "paged_attention")
LAST_NORM = "output_norm"  # node whose rows are the states that logits are computed from
PLANS = 128  # kept for shapes that come again; some MiB each, of a large model
FALLBACKS = 16  # every length of prompt has a plan of its own; what they refuse is much the same


# A row more of a small batch, in rows, until it is measured: products read weights once for all.
ROW = {"cpu": 0.15, "gpu": 0.01}


class Readable(Protocol):
    """Part of a prompt: a span, or what is yet to become one."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def is_text(self) -> bool: ...


class Lead(Protocol):
    """Interface that makes the other ranks of a model do what the first one does."""

    def forward(self, batch: Batch) -> AbstractContextManager[None]:
        """Around a run of the batch."""

    def new_cache(self) -> Mirror: ...


class Runner:
    """A text family on its backends. `context` is the longest sequence, in tokens, and `sequences`
    the number its cache holds at once; `image_tokens` the most tokens that one picture takes, 0
    where there are none. `cuts_images`: a picture may be read in several batches.
    """

    def __init__(
        self,
        family: TextFamily,
        weights: WeightSource,
        backends: abc.Sequence[Backend],
        *,
        dtype: torch.dtype,
        context: int,
        sequences: int = 1,
        image_tokens: int = 0,
        cuts_images: bool = False,
        flash_attn: str = "auto",
        kv_type: str = "auto",
        int8: bool = False,
        overrides: abc.Sequence[Override] = (),
        residency: Residency | None = None,
        sharding: Sharding | None = None,
        split: LayerSplit | None = None,
        adapters: abc.Sequence[Adapter] = (),
        always: abc.Sequence[tuple[Adapter, float]] = (),
    ):
        """`sharding`: this is one rank of several, which has a part of the model. `split`: which of
        the first of the backends each layer prefers. `adapters` that sequences may choose; those of
        `always` change products in every batch, each as much as its scale says. `int8`: products of
        many rows may round activations to 8 bits.
        """
        self._gives_states = False
        self.adapters, self.always = tuple(adapters), tuple(always)
        self.sharding, self.split = sharding, split
        self.devices: tuple[Backend, ...] = split.devices if split else (backends[0],)
        """That nodes are meant for; what runs elsewhere was refused, or placed there by name."""
        self.lead: Lead | None = None
        self.family, self.weights, self.backends, self.overrides = (
            family,
            weights,
            backends,
            tuple(overrides),
        )
        self.dtype, self.context, self.sequences = dtype, context, sequences
        self.int8 = int8
        self.kv = KVType.of(kv_type, dtype)
        self._image_tokens, self._cuts_images = image_tokens, cuts_images
        self.pages = 1 + sequences * self.pages_for(context)
        self.residency = residency or Residency()
        self.flash: FlashChoice = choose(self._probes, backends, overrides, flash_attn, split)
        self.threads: int | None = None
        """Of the CPU, by which machine code ran last; None before that."""
        self._noting = Lock()
        self.fallbacks: dict[BatchShape, Plan] = {}
        """Plans in use in which the preferred backend refused something, the last `FALLBACKS` of
        them.
        """
        self.pace = Pace(ROW["cpu" if backends[0].device.type == "cpu" else "gpu"])
        """What batches of several rows cost, as far as it has been measured."""
        # By shape, and whether every value is kept
        self._plan = MadeOnce(self._make_plan, PLANS)
        self._executor = MadeOnce(self._make_executor, PLANS)

    def graph(
        self,
        batch: BatchShape,
        form: AttentionForm | None = None,
        only: Collection[int] | None = None,
    ) -> list[Node]:
        """-> what is kept for later, then logits [R, V]; of a rank, its part of the graph. `only`:
        the layers that it has.
        """
        outputs = self.whole_graph(batch, form, only)
        if self.sharding:
            outputs = self.sharding.rewrite(outputs)
        if self.int8:
            from mtmd.kernels.plan.int8_products import marked  # loads LLVM

            outputs = marked(outputs)
        return outputs

    def whole_graph(
        self,
        batch: BatchShape,
        form: AttentionForm | None = None,
        only: Collection[int] | None = None,
    ) -> list[Node]:
        """The graph as if there were one rank."""
        inputs = TextInputs(
            batch, self.family.image_width, self.sequences, self.pages, self.dtype, self.kv, only
        )
        weights = AdaptedWeights(
            self.weights,
            [
                *(AppliedAdapter(a, inputs.always(a.name, scale)) for a, scale in self.always),
                *(
                    AppliedAdapter(self.adapters[i], inputs.adapter_scale(i))
                    for i in batch.adapters
                ),
            ],
        )
        output = self.family.graph(inputs, weights, form or self.flash.form)
        if self._gives_states:
            while output.name != LAST_NORM:
                first = output.inputs[0]
                assert first is not None
                output = first
        return [*inputs.saved, output]

    def keep_halves(self) -> None:
        """Keep weights of 16 bits as they are stored, for a CPU that computes in fp32. Not on one
        of several ranks, whose shares may begin inside a block.
        """
        if self.sharding:
            return

        def graph(source: WeightSource) -> None:
            self.weights = source
            self.whole_graph(BatchShape(1))

        self.weights = in_halves(self.weights, graph)

    @property
    def all_adapters(self) -> tuple[int, ...]:
        """Return all of them, as `BatchShape.adapters` has them."""
        return tuple(range(len(self.adapters)))

    @property
    def prefill_tokens(self) -> int:
        """Return the prefill tokens of a batch of prompts, as far as pictures do not make it
        larger.
        """
        return LARGE_PREFILL if self._reads_many else PREFILL

    @cached_property
    def _reads_many(self) -> bool:
        """Return whether prompts are read by thousands of tokens: where that is what keeps all
        devices busy, and attention runs there. Explicit attention keeps the scores of all of them
        at once, and a CPU that has the cache takes memory and time for each.
        """
        form = self.flash.form
        if form.all_explicit or form.explicit or not self._many_at_most:
            return False
        steps = self.plan(self._sizes(PREFILL)["decode"]).steps
        return all(s.backend.large_batches for s in steps if s.node.op in ATTENTION)

    @property
    def _many_at_most(self) -> bool:
        return all(device.large_batches for device in self.devices)

    @property
    def image_tokens(self) -> int:
        """The most of one picture in one batch."""
        return self._image_tokens_of(self.prefill_tokens)

    def _image_tokens_of(self, prefill: int) -> int:
        return min(self._image_tokens, prefill) if self._cuts_images else self._image_tokens

    def sizes(self) -> dict[str, BatchShape]:
        """Batches by label: a step of decode, and the largest prefill."""
        return self._sizes(self.prefill_tokens)

    def _sizes(self, prefill: int) -> dict[str, BatchShape]:
        images, pages = self._image_tokens_of(prefill), self.pages_for(self.context)
        maximum = min(max(prefill, images), self.context)
        return {
            "decode": BatchShape(1, pages=pages, adapters=self.all_adapters),
            "prefill": BatchShape(
                maximum,
                min(images, maximum),
                pages=pages,
                adapters=self.all_adapters,
                context=context_rows(self.family.layers),
            ),
        }

    @staticmethod
    def pages_for(tokens: int) -> int:
        return -(-tokens // PAGE)

    def plan(self, batch: BatchShape, overwrite: bool = True) -> Plan:
        """The plan of one shape of batch. `overwrite=False` keeps every value intact, for looking
        on.
        """
        executor = self._executor.saved((batch, not overwrite))
        return self._plan((batch, not overwrite)) if executor is None else executor.plan

    def new_plan(self, batch: BatchShape) -> Plan:
        """The same, not kept: for looking at many shapes."""
        return self._make_plan((batch, False))

    def plan_of_layers(self, batch: BatchShape, layers: Collection[int]) -> Plan:
        """The same of some layers: what one launches, all of its kind do."""
        graph = self.graph(batch, only=layers)
        return make_plan(graph, self.backends, self.overrides, True, self.split)

    def _make_plan(self, key: tuple[BatchShape, bool]) -> Plan:
        batch, intact = key
        graph = self.graph(batch)
        return make_plan(graph, self.backends, self.overrides, not intact, self.split)

    @property
    def plans_made(self) -> int:
        """Number of plans made so far, to be run."""
        return self._executor.begun

    def is_ready(self, batch: BatchShape) -> bool:
        """Return whether a batch of this shape can run without a plan being made first, or waited
        for.
        """
        executor = self._executor.saved((batch, False))
        return executor is not None and executor.is_prepared

    def _probes(self, form: AttentionForm) -> list[list[Node]]:
        largest = self._sizes(LARGE_PREFILL if self._many_at_most else PREFILL)
        return [self.graph(batch, form) for batch in largest.values()]

    def _make_executor(self, key: tuple[BatchShape, bool]) -> Executor:
        batch, intact = key
        plan = self.plan(batch, not intact)
        if any(r.backend in {d.name for d in self.devices} for r in plan.refusals):
            with self._noting:
                saved = list({**self.fallbacks, batch: plan}.items())[-FALLBACKS:]
                self.fallbacks = dict(saved)  # whole: other threads may be reading
        return Executor(plan, self.residency)

    def plans_alongside(self, cache: Cache) -> bool:
        """Return whether another thread may make plans while batches run: on a CPU, and without
        ranks, which make each at once together.
        """
        on_cpu = all(backend.device.type == "cpu" for backend in self.backends)
        return cache.in_place and on_cpu and self.lead is None

    def prepare(self, batch: BatchShape) -> None:
        """Have the weights and the plan of a shape of batch in memory, ready to run. Any thread may
        do that, beside one that runs other batches.
        """
        self._executor((batch, False)).prepare()

    def new_cache(self) -> Cache:
        """Memory for every layer's states, where the nodes run that write them. It is taken as
        slots are written, not before.
        """
        where = self._state_backends()
        with memory_for(
            f"the cache of {self.sequences} x {self.context} tokens",
            lambda: sum(self.cache_bytes().values()),
        ):
            return Cache(
                self.layers,
                self.sequences,
                self.pages,
                self.dtype,
                self.kv,
                lambda name: where[name].device,
                in_place=all(backend.native for backend in where.values()),
                mirror=self.lead.new_cache() if self.lead else None,
                paged=self.reads_pages,
            )

    @property
    def has_lasting_cache(self) -> bool:
        """Return whether a cache takes all of its memory when it is made, and not as it is
        written.
        """
        return not all(backend.native for backend in self._state_backends().values())

    def small(self, tokens: int) -> Runner:
        """The same with a cache of one sequence of so many tokens, for trials beside the real one.
        Weights and measurements are shared, plans are its own.
        """
        result = copy.copy(self)
        result.context, result.sequences = min(tokens, self.context), 1
        result.pages = 1 + self.pages_for(result.context)
        result._plan = MadeOnce(result._make_plan, PLANS)
        result._executor = MadeOnce(result._make_executor, PLANS)
        return result

    def states(self, sequences: int = 1) -> Runner:
        """The same with a cache of one context, which several sequences may share, giving what the
        last norm makes of a row, the state [D] that logits are computed from, in place of the
        logits: a vector of all that was read up to there.
        """
        result = self.small(self.context)
        result.sequences, result._gives_states = sequences, True
        return result

    @property
    def reads_pages(self) -> bool:
        """Return whether attention reads the cache's pages where they lie, in batches of any
        size.
        """
        ops = {s.node.op for batch in self.sizes().values() for s in self.plan(batch).steps}
        return "paged_attention" in ops and "gather_pages" not in ops

    def cache_bytes(
        self, context: int | None = None, sequences: int | None = None
    ) -> dict[str, int]:
        """Bytes of a full cache, per memory space; of so many sequences of `context` tokens in
        place of the runner's own.
        """
        where, spaces = self._state_backends(), dict[str, int]()
        for name, size in self.state_bytes(context, sequences).items():
            spaces[where[name].space] = spaces.get(where[name].space, 0) + size
        return spaces

    def state_bytes(
        self, context: int | None = None, sequences: int | None = None
    ) -> dict[str, int]:
        """Do what `cache_bytes` does, by the name of each state."""
        sequences = sequences or self.sequences
        pages = 1 + sequences * self.pages_for(context or self.context)
        return {
            name: state.type(sequences + 1, pages, self.dtype, self.kv).bytes
            for name, state in states_by_name(self.layers).items()
        }

    @property
    def recurrent_bytes(self) -> int:
        """Return the recurrent bytes of the states of all sequences that are known only as a
        whole.
        """
        return sum(
            state.type(self.sequences, 0, self.dtype, self.kv).bytes
            for states in self.layers
            for state in states
            if not isinstance(state, KV)
        )

    @cached_property
    def layers(self) -> Layers:
        """The states of every layer; of a rank, its part of them."""
        if self.sharding is None:
            return self.family.layers
        self.plan(BatchShape(1))
        parts = self.sharding.states
        return [
            [state.part(parts[f"{state.name}.{layer}"].shape[2]) for state in states]
            for layer, states in enumerate(self.family.layers)
        ]

    def _state_backends(self) -> dict[str, Backend]:
        """Return where each state is written, by its name."""
        return {
            node.name: step.backend
            for step in self.plan(BatchShape(1)).steps
            for node in step.inputs[:1]
            if node is not None and node.attrs.get("state") and step.node.alias
        }

    def forward(self, batch: Batch, observe: Observer | None = None) -> Tensor:
        """Logits [R, V] of the last token of each of the batch's sequences, where they are
        wanted.
        """
        # Whoever looks on wants to see the nodes that the family has, and no others in their place.
        looks_on = observe is not None and any(d.fuses for d in self.devices)
        executor = self._executor((batch.shape, looks_on))
        with self.lead.forward(batch) if self.lead else nullcontext():
            logits = executor.run(batch, observe)[-1]
        if len(logits) > batch.answers:
            logits = logits[: batch.answers]
        if executor.threads is not None:
            self.threads = executor.threads.best
        return logits

    def read(
        self,
        parts: abc.Sequence[tuple[Sequence, abc.Sequence[Span]]],
        cache: Cache,
        observe: Observer | None = None,
        *,
        needs_logits: bool = True,
        rows: abc.Sequence[int] | None = None,
        context: abc.Mapping[Sequence, abc.Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """The next spans of sequences, in one batch; the sequences move on by them. Logits [S, V]
        after each, or with `rows` after so many of its last tokens, of none without
        `needs_logits`. `context`: what their tokens attend to, where
        it is more than what the spans show.
        """
        context = dict(context or {})
        for sequence, spans in parts:
            if not sequence.context_stored and sequence not in context:
                sequence.pictures = seen_in(spans, sequence.done)
                context[sequence] = context_of(spans)
        for sequence, spans in parts:  # what is read first is the prompt, unless `prefill` knows
            sequence.prompt_tokens = sequence.prompt_tokens or sum(map(len, spans))
        laid_out = [(sequence, *_located(spans, sequence.position)) for sequence, spans in parts]
        batch = make_batch(
            [(s, spans) for s, spans, _ in laid_out], cache, needs_logits, rows, context
        )
        logits = self.forward(batch, observe)
        for sequence, spans, position in laid_out:
            sequence.done = sequence.total = sequence.done + sum(map(len, spans))
            sequence.position, sequence.context_stored = position, True
        return logits

    def prefill(
        self,
        spans: abc.Sequence[Span],
        cache: Cache,
        sequence: Sequence | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Logits [V] after the last token of the spans, which go on where `sequence` is; without
        it, one begins in slot 0.

        Raises what `check` does.
        """
        sequence = sequence or self.begin(cache, 0)
        self.check(spans, sequence.done)
        sequence.pictures = seen_in(spans, sequence.done)
        context = {sequence: context_of(spans)}
        if not sequence.prompt_tokens:
            sequence.prompt_tokens = sequence.done + sum(map(len, spans))
        *before, last = cut(lay_out(spans, sequence.position)[0], self.prefill_tokens)
        for part in before:
            self.read([(sequence, part)], cache, observe, needs_logits=False, context=context)
            context = {}
        return self.read([(sequence, last)], cache, observe, context=context)[0]

    def begin(self, cache: Cache, slot: int) -> Sequence:
        """A new sequence in a slot of the cache, with a context of pages of its own: for those who
        drive the runner by hand, without an engine.
        """
        cache.clear(slot)
        count = self.pages_for(self.context)
        return Sequence(0, slot=slot, pages=list(range(1 + slot * count, 1 + (slot + 1) * count)))

    def check(self, prompt: abc.Sequence[Readable], length: int = 0) -> None:
        """Check whether a prompt can be read after the first `length` tokens of a sequence; it need
        not be encoded yet.

        Raises ContextError where there is nothing to read or it does not fit, with the numbers;
        ModelError for a token of its text without an embedding.
        """
        total = length + sum(len(part.tokens) for part in prompt)
        if total <= length:
            raise ContextError(
                "the prompt takes no tokens: nothing is written for the model to read; say what "
                "you want to know, or use another chat template",
                total,
                self.context,
            )
        if total >= self.context:
            maximum = self.family.context
            is_all, longer = "", ""
            if self.context < maximum:
                longer = (
                    ", or load the model with a longer context (context=, --context, up to "
                    f"{maximum})"
                )
            else:
                is_all = ", which is all that the model was made for"
            shown = any(not part.is_text for part in prompt)
            raise ContextError(
                f"the prompt takes {total} tokens{', images included,' if shown else ''} and the "
                f"context holds {self.context}, answer included{is_all}",
                total,
                self.context,
                f"shorten the prompt{' or use fewer images' if shown else ''}{longer}",
            )
        highest = max((max(p.tokens, default=0) for p in prompt if p.is_text), default=0)
        if highest >= self.family.vocabulary:
            raise ModelError(
                f"the prompt has token {highest}, and the model's table ends at "
                f"{self.family.vocabulary - 1}; "
                "the tokenizer does not fit this model"
            )


def _located(spans: abc.Sequence[Span], position: int) -> tuple[abc.Sequence[Span], int]:
    """Do what `lay_out` does; text is left as it is: where it begins is known, and tensors of one
    position each take longer than the rest of a step's preparation.
    """
    if all(
        span.grid is None and span.on_canvas is None and span.positions is None for span in spans
    ):
        return spans, position + sum(map(len, spans))
    return lay_out(spans, position)
