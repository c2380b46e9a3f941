"""Describes what was loaded: encoder and decoder on their backends, tokenizer, template, and the
limits that answers are computed within. Prompts, services and `mtmd.model.Model` stand on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from mtmd.base.errors import ModelError, OptionError, PromptError
from mtmd.base.isolation.limits import available as can_isolate
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.requantize import weights_note, with_int8_towers, with_weights
from mtmd.clip.encoder import AudioEncoder, Encoder
from mtmd.clip.image.isolated import start as start_picture_workers
from mtmd.clip.tasks import check_task, tasks_of
from mtmd.clip.token_budget import Budget
from mtmd.clip.warmup import encoder_placement
from mtmd.environment import launcher
from mtmd.kernels.backends import Backend, backends_for, several_backends
from mtmd.kernels.backends.side_stream import SideStream
from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node
from mtmd.kernels.plan.scheduler import Override
from mtmd.kernels.report.facts import FitFacts, KVFacts, LayersFacts, Placement
from mtmd.kernels.resources.threads import ask_threads, settle_cores
from mtmd.llm.batch import BatchShape
from mtmd.llm.family import default_context, for_context
from mtmd.llm.sampling.constraint import Grammars
from mtmd.llm.sampling.grammar_notations import grammar_source
from mtmd.llm.sampling.isolated_grammar import IsolatedGrammars
from mtmd.llm.sampling.json_schema import CheckedSchema
from mtmd.llm.sampling.options import WAYS, AppliedSampling
from mtmd.llm.warmup import decoder_placement, kv_facts
from mtmd.loaded.device_and_dtype import choose_dtype, own_threads
from mtmd.loaded.device_thread import DeviceThread
from mtmd.loaded.fitting.alternatives import Way, Ways, choose, chosen_by, layers_facts
from mtmd.loaded.fitting.context import check_length, check_room, min_bytes, what_fits
from mtmd.loaded.fitting.layouts import Graphs, Layout, are_ranks, devices_of, make_graphs
from mtmd.loaded.fitting.needed_memory import CACHE_BYTES, lazy_memories
from mtmd.loaded.fitting.needed_memory import limits as memory_limits
from mtmd.loaded.fitting.pictures import Pictures
from mtmd.loaded.memory_admission import Admission
from mtmd.loaded.programs import saved_programs
from mtmd.loaded.vision_attention import ask_for, know_shapes
from mtmd.options.adapters import AdapterChoice
from mtmd.options.answer import AnswerOptions, PresetSampling
from mtmd.options.by_name import given, options
from mtmd.options.load import LoadOptions

if TYPE_CHECKING:  # torch.distributed takes its time to load
    from mtmd.kernels.parallel.distributed import DistributedGroup
    from mtmd.ranks.leader import Ranks

T = TypeVar("T")


class LoadedModel:
    """`backends` in order of preference replaces what `chosen.device` and `chosen.refuse` ask for;
    `name` is for people. Raises MtmdError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
        group: DistributedGroup | None = None,
    ):
        """`group`: this is one of the other ranks of a model that several processes share."""
        self.checkpoint = checkpoint = with_weights(checkpoint, chosen.weights)
        self.options = chosen
        self.name = name or checkpoint.folder.resolve().name
        if chosen.isolate and not can_isolate():
            raise OptionError(
                "isolate: this system has no limits for processes, expected Linux or macOS"
            )
        self.cores = settle_cores()
        if chosen.threads:
            ask_threads(chosen.threads)
        device = chosen.device
        if group is not None and device.startswith("cuda"):
            device = f"cuda:{group.rank}"
        find = several_backends if chosen.fit or chosen.split == "layer" else backends_for
        self.backends = (
            list(backends) if backends else find(device, chosen.refuse, not chosen.no_graphs)
        )
        self.programs = None if backends else saved_programs(chosen.kernels, self.backends[0])
        ask_for(chosen.vision_attention, self.backends)
        if not self.backends[0].blocks:
            self.checkpoint = checkpoint = checkpoint.without_blocks()
        self.dtype = choose_dtype(chosen.dtype, self.backends[0], checkpoint.weight_bytes)
        context = chosen.context or default_context(checkpoint.text)
        check_length(context, checkpoint, self.name)
        text = for_context(checkpoint.text, context)
        self.checkpoint = checkpoint = replace(checkpoint, text=text)
        self.limits = Budget(chosen.image_min_tokens, chosen.image_max_tokens)
        self.fit: FitFacts | None = None
        """What was looked at before the layout was chosen; None where it was asked for."""
        _check_ranks(checkpoint, chosen)
        _import_native(self.backends)
        if chosen.activations == "int8":
            from mtmd.kernels.plan import int8_products  # loads LLVM

            int8_products.check_device(self.backends, self.dtype)
            self.checkpoint = checkpoint = with_int8_towers(checkpoint)
        self.layout, made = self._lay_out(context)
        chosen, self.backends = self.options, list(self.layout.backends)
        self.ranks = self._start_ranks(context) if chosen.tp > 1 and group is None else None
        group = self.ranks.group if self.ranks else group
        self.encoder, self.runner, self.audio_encoder = made or make_graphs(
            checkpoint, chosen, context, self.dtype, self.layout, group
        )
        self.rounded: tuple[str, ...] = ()
        """Graphs with products of many rows that round activations to 8 bits."""
        if chosen.activations == "int8":
            graphs = self.product_graphs()
            int8_products.check_weights([node for graph in graphs.values() for node in graph])
            self.rounded = tuple(n for n, graph in graphs.items() if int8_products.count(graph))
        for encoder in self.encoders:
            _check_fit(encoder, checkpoint)
        if self.encoder:
            know_shapes(self.encoder)
        assert not isinstance(chosen.memory_limit, str)  # the options made it a number
        self.admission = Admission(
            self.encoder, self.runner, chosen.memory_limit, CACHE_BYTES, self.audio_encoder
        )
        self.grammars = (IsolatedGrammars if chosen.isolate else Grammars)(checkpoint.tokenizer)
        self.own_threads = partial(own_threads, torch.get_num_threads())
        """What a thread that plans or computes begins with."""
        side = self.encoder.side if self.encoder else None
        self.device_thread = DeviceThread(partial(_begin, self.own_threads, side))
        on_cpu = all(backend.device.type == "cpu" for backend in self.backends)
        self.device_thread.can_fork = on_cpu and group is None
        if self.ranks:
            self._lead(self.ranks)
            self.ranks.on_loss.append(self.device_thread.fail)
            weakref.finalize(self, self.ranks.close)
        self._placements: dict[Any, tuple[Placement, ...]] = {}
        self._check_overrides(self.layout.overrides(chosen.override_tensor))
        self.admission.check(
            lambda: what_fits(self._way), lambda space: min_bytes(self._way, space)
        )

    def product_graphs(self) -> dict[str, list[Node]]:
        """Return the graphs of one tile and of one token, by name."""
        graphs = {
            one.name: [one.graph(1, one.family.resolution.tile_type().shape)]
            for one in self.encoders
        }
        return {**graphs, "decoder": self.runner.graph(BatchShape(1))}

    @property
    def activations(self) -> str:
        """Return what products of many rows round activations to: "int8", with the graphs that do
        where others do not, or "auto", where none does.
        """
        if not self.rounded:
            return "auto"
        every = len(self.rounded) == len(self.encoders) + 1
        return "int8" if every else f"int8 ({', '.join(self.rounded)})"

    def _lay_out(self, context: int) -> tuple[Layout, Graphs | None]:
        """Lay the model out as requested; by `fit`, which is then as if its choice had been asked
        for. With encoder and decoder where they were made to find that out.
        """
        chosen = self.options
        backends, limit = self.backends, chosen.memory_limit
        if not chosen.fit and chosen.split == "none":
            layout = Layout(
                tuple(backends),
                cache_on_host=chosen.no_kv_offload,
                ranks=chosen.tp,
                shares=chosen.tensor_split,
            )
            return layout, None
        assert not isinstance(limit, str)  # the options made it a number
        ways = Ways(
            self.checkpoint,
            chosen,
            context,
            self.dtype,
            backends,
            memory_limits(backends, backends, limit),
            may_share=are_ranks(backends),
            lazy=lazy_memories(limit),
        )
        if chosen.split == "layer":
            devices = devices_of(backends, chosen.device)
            return ways.over_layers(devices, chosen.no_kv_offload, chosen.tensor_split), None
        way, self.fit = choose(ways)
        self.options = chosen_by(way, chosen)
        (first, *others) = way.members
        return way.layout, None if others else Graphs(first.encoder, first.runner, first.audio)

    def check_room(self) -> None:
        """Before a weight is read: raises OptionError for a context that was asked for and has no
        room in what is free, of which nothing is taken yet.
        """
        if self.options.context is not None and self.fit is None and self.admission.lacks_room:
            check_room(self.runner.context, self._way)

    @property
    def _way(self) -> Way:
        admission = self.admission
        pictures = Pictures(self.encoder, self.limits, self.runner.context, None)
        return Way("", self.layout, [admission.needed], admission.limits, pictures)

    def _start_ranks(self, context: int) -> Ranks:
        """The other ranks, which load their parts from the same files."""
        from mtmd.ranks.leader import Ranks, threads_of_a_rank

        chosen = replace(
            self.options,
            device=self.backends[0].name if self.backends[0].device.type == "cuda" else "cpu",
            dtype=name_of(self.dtype),
            context=context,
            threads=threads_of_a_rank(self.options),
            isolate=False,
            memory_limit=None,
        )
        ask_threads(chosen.threads)
        return Ranks(chosen, self.checkpoint.opened_from, launcher(chosen.tp))

    @contextmanager
    def checked_together(self) -> Iterator[None]:
        """Run checks together: the other ranks run their own meanwhile."""
        if self.ranks is None:
            yield
            return
        ranks = self.ranks
        with ranks.checks():
            self.runner.lead = None
            if self.encoder:
                self.encoder.lead = None
            try:
                yield
            finally:
                self._lead(ranks)

    def _lead(self, ranks: Ranks) -> None:
        from mtmd.ranks.leader import RunnerLead

        self.runner.lead = RunnerLead(ranks)
        if self.encoder:
            self.encoder.lead = ranks.encode

    def exclusively(self, work: Callable[[], T]) -> T:
        """Use the device while nobody else does; what comes of it is there when this returns.
        Raises what `work` raises.
        """
        side = self.encoder.side if self.encoder else None
        if side is None:
            return self.device_thread.exclusively(work)

        def all_of_it() -> T:  # the thread has a queue of its own there
            value = work()
            side.wait_for_caller()
            return value

        return self.device_thread.exclusively(all_of_it)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a loaded model cannot be pickled or copied, nor can an object "
            "that contains it; load it in each process, or run one `mtmd "
            "serve` for all"
        )

    def answer_options(self, values: Mapping[str, Any]) -> AnswerOptions:
        """Make options from the fields of `AnswerOptions` by name, and, where `sampling` says so,
        from this model's own settings; a schema is checked where this model's grammars are made.
        Raises OptionError.
        """
        if values.get("json_schema") is not None:
            values = {**values, "json_schema": self.grammars.checked(values["json_schema"])}
        if values.get("grammar") is not None:
            source = grammar_source(values["grammar"], self.grammars.check)
            values = {**values, "grammar": CheckedSchema(source)}
        made = options(AnswerOptions, self._with_own_sampling(given(values)))
        if made.task is not None:
            check_task(made.task, tasks_of(self.checkpoint.vision))
        return made

    def _with_own_sampling(self, values: dict[str, Any]) -> dict[str, Any]:
        way: Any = values.get("sampling", AnswerOptions.sampling)
        settings = self.checkpoint.sampling
        preset: tuple[str, ...] = ()
        if isinstance(way, PresetSampling):
            way, preset = way.way, way.names
        if way not in WAYS:
            return values | {"sampling": way}  # which is refused by name
        own = {n: v for n, v in settings.defaults(way).items() if n not in values}
        return own | values | {"sampling": AppliedSampling(way, settings, tuple(own), preset)}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what there is to say of the model's files, and of weights that are quantized when
        they are read.
        """
        note = weights_note(self.checkpoint)
        return (*self.checkpoint.notes, note) if note else self.checkpoint.notes

    def adapter_scales(
        self, chosen: AdapterChoice, *, has_pictures: bool = False, has_audio: bool = False
    ) -> tuple[float, ...]:
        """The scale of each adapter that answers may choose, by `AnswerOptions.adapter`; empty
        where none is chosen. Those that are there for pictures or audio need not be, in an answer
        that has them. Raises OptionError for one that was not loaded by this name.
        """
        adapters = self.checkpoint.chosen_adapters
        scales = dict(chosen)
        if unknown := [name for name in scales if name not in {one.name for one in adapters}]:
            there = ", ".join(one.name for one in adapters) or "none: load some with lora= (--lora)"
            raise OptionError(f"adapter: found {unknown[0]!r:.80}, expected one of {there}")
        default = {one.name: one.scale for one in adapters}
        each = [
            scales.get(one.name, None if one.applies(has_pictures, has_audio) else 0.0)
            for one in adapters
        ]
        result = tuple(
            default[one.name] if scale is None else float(scale)
            for one, scale in zip(adapters, each, strict=True)
        )
        return result if any(result) else ()

    def adapters_of_pictures(self, scales: tuple[float, ...]) -> tuple[float, ...]:
        """The same for the encoder: the scales of those that change it, empty where none does."""
        adapters = self.checkpoint.chosen_adapters
        result = tuple(
            scale if one.changes_pictures else 0.0
            for one, scale in zip(adapters, scales or (0.0,) * len(adapters), strict=True)
        )
        return result if any(result) else ()

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return sum(dict(self.runner.residency.bytes).values()), self.admission.weight_bytes

    def start_workers(self) -> None:
        """Begin to start what the first picture or schema would wait for."""
        if self.options.isolate:
            self.grammars.start()
            start_picture_workers()

    def close(self) -> None:
        """Close one that is not used any more: its thread and its workers end."""
        self.device_thread.close()
        self.grammars.close()
        if self.ranks is not None:
            self.ranks.close()

    @property
    def encoders(self) -> tuple[Encoder | AudioEncoder, ...]:
        """Return those of pictures and of audio, which there are."""
        both = self.encoder, self.audio_encoder
        return tuple(encoder for encoder in both if encoder is not None)

    @property
    def takes(self) -> str:
        """Return which media it takes beside text, in words."""
        media = {
            (True, True): "pictures, videos and audio",
            (True, False): "pictures and videos",
            (False, True): "audio",
        }
        both = self.encoder is not None, self.audio_encoder is not None
        return media.get(both, "text alone")

    def deaf(self, what: str) -> PromptError:
        """Return the error for `what` audio was given to a model that takes none."""
        return PromptError(
            f"{self.name} has no audio encoder and was given {what}; it takes {self.takes}"
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return where the nodes of each graph run. Made anew when a shape has come up that the
        device does not take as a whole. Nothing is run.
        """
        key = (
            len(self.runner.fallbacks),
            tuple(self.runner.fallbacks)[-1:],
            *(len(encoder.fallbacks) for encoder in self.encoders),
        )
        cached = self._placements.get(key)
        if cached is None:
            parts = (encoder_placement(encoder) for encoder in self.encoders)
            cached = (*parts, decoder_placement(self.runner))
            self._placements = {key: cached}  # replaced whole: other threads may be reading
        return cached

    @cached_property
    def kv(self) -> KVFacts:
        """Return how keys and values are stored, and what they take."""
        return kv_facts(self.runner)

    @property
    def layers(self) -> tuple[LayersFacts, ...]:
        """Return which layers each of several devices has; empty where one has all."""
        return layers_facts(self.layout, self.encoder is not None)

    def _check_overrides(self, overrides: Sequence[Override]) -> None:
        """An override that names nothing is a mistake, not a wish."""
        plans = [self.runner.plan(BatchShape(1, images=1 if self.encoders else 0))]
        for encoder in self.encoders:
            plans += encoder.weight_plans()
        for override in overrides:
            if not any(
                override.matches(s.node) for p in plans for s in p.steps if s.node.op != "copy"
            ):
                raise OptionError(
                    f"override {override.pattern.pattern!r} matches no node or weight; `mtmd dump` "
                    "lists the names"
                )


def _check_ranks(checkpoint: Checkpoint, chosen: LoadOptions) -> None:
    """Raises OptionError for adapters that ranks do not choose together."""
    on_pictures = [one.name for one in checkpoint.chosen_adapters if one.changes_pictures]
    if chosen.tp > 1 and on_pictures:
        raise OptionError(
            f"lora: {on_pictures[0]} changes the image encoder, which tp's ranks run for all "
            "answers alike; leave its name out, and it is applied to all"
        )


def _import_native(backends: Sequence[Backend]) -> None:
    """Import what writes machine code here, and not counted as the first answer's."""
    if any(backend.native for backend in backends):
        import mtmd.kernels.plan.native_run  # noqa: F401


def _begin(threads: Callable[[], None], side: SideStream | None) -> None:
    """Begin on the thread that owns the device, each time it begins."""
    threads()
    if side is not None:
        side.let_first()


def _check_fit(encoder: Encoder | AudioEncoder, checkpoint: Checkpoint) -> None:
    """Raises ModelError where a projector gives embeddings of another width than the decoder reads:
    they are of different models.
    """
    width, text = encoder.width, checkpoint.text
    read = text.width if isinstance(encoder, AudioEncoder) else text.image_width
    if width != read:
        raise ModelError(
            f"the projector gives {width} numbers per {encoder.noun} token, the decoder reads "
            f"{read}; "
            "they belong to different models, fetch the projector of this one"
        )
