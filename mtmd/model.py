"""A loaded model: prompts and pictures in, answers with receipts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.budget import Budget
from mtmd.clip.encoder import Encoder
from mtmd.clip.family import VisionFamily
from mtmd.clip.warmup import check_encoder, encoder_graphs, encoder_placement
from mtmd.config import AnswerOptions, LoadOptions, options
from mtmd.device import choose_dtype, device_name, set_threads
from mtmd.events import Answer, Event, Finished
from mtmd.kernels.backends import Backend, backends_for
from mtmd.kernels.dtype import name_of
from mtmd.kernels.errors import ModelError, OptionError, PromptError
from mtmd.kernels.plan.executor import Observer, Residency
from mtmd.kernels.plan.scheduler import Override
from mtmd.kernels.report.facts import DequantizedTensor, FlashFacts, Placement, WarmupReport
from mtmd.llm.engine.engine import Constraint, Generation
from mtmd.llm.engine.runner import PREFILL, Runner
from mtmd.llm.engine.sequence import BatchShape, Span
from mtmd.llm.sampling.constraint import Grammars
from mtmd.llm.warmup import check_decoder, decoder_graphs, decoder_placement
from mtmd.prompt.bridge import CACHE_BYTES, Bridge, Piece, Prepared
from mtmd.prompt.conversation import Conversation, Images, Message, read_conversation, user_message
from mtmd.receipt import ImageReceipt, Receipt
from mtmd.service.admission import Admission

if TYPE_CHECKING:
    from mtmd.service.service import Service

DEFAULT_PROMPT = "Describe the image."
DEFAULT_CONTEXT = 8192
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A conversation ready for the decoder: its images encoded, and all of it as spans."""

    spans: list[Span]
    prepared: list[Prepared]
    embeddings: list[Tensor]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for s in self.spans for t in s.tokens)


class Model:
    """Made by `load`. Safe to use from several threads: what they ask for at the same time is
    computed in the same batches.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        """`backends` in order of preference replaces what `chosen.device` and `chosen.refuse` ask
        for; `name` is for people.
        """
        self.checkpoint, self.options = checkpoint, chosen
        self.name = name or checkpoint.folder.resolve().name
        if chosen.threads:
            set_threads(chosen.threads)
        self.backends = list(backends) if backends else backends_for(chosen.device, chosen.refuse)
        self.dtype = choose_dtype(chosen.dtype, self.backends[0], checkpoint.weight_bytes)
        overrides = [Override.parse(o) for o in chosen.override_tensor]
        placement: dict[str, Any] = {
            "dtype": self.dtype,
            "flash_attn": chosen.flash_attn,
            "overrides": overrides,
            "residency": Residency(),
        }
        context = chosen.context or min(DEFAULT_CONTEXT, checkpoint.text.context)
        if context > checkpoint.text.context:
            raise OptionError(
                f"context: found {context}, expected at most {checkpoint.text.context}, which "
                f"{self.name} was made for"
            )
        self._placed: dict[Any, tuple[Placement, ...]] = {}
        self._limits = Budget(chosen.image_min_tokens, chosen.image_max_tokens)
        self.runner = Runner(
            checkpoint.text,
            checkpoint.text_weights,
            self.backends,
            context=context,
            sequences=chosen.parallel,
            image_tokens=_longest_image(checkpoint.vision, self._limits),
            **placement,
        )
        self.encoder = None
        if checkpoint.vision and checkpoint.vision_weights:
            self.encoder = Encoder(
                checkpoint.vision, checkpoint.vision_weights, self.backends, **placement
            )
            _check_fit(self.encoder, checkpoint)
        assert not isinstance(chosen.memory_limit, str)  # the options made it a number
        self.admission = Admission(self.encoder, self.runner, chosen.memory_limit, CACHE_BYTES)
        self.bridge = Bridge(self.encoder, checkpoint.tokenizer, self.admission)
        self._grammars = Grammars(checkpoint.tokenizer)
        self._service: Service | None = None
        self._lock = Lock()
        _check_overrides(overrides, self)
        self.admission.check()

    @property
    def service(self) -> Service:
        """Where answers are computed, of all threads together. Made when it is first asked for."""
        with self._lock:
            if self._service is None:
                from mtmd.service.service import Service

                self._service = Service(self)
            return self._service

    def close(self) -> None:
        """End all answers and let the memory of their caches go; the model may be used again."""
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    @property
    def warmup_report(self) -> WarmupReport:
        """Where everything runs and what it will take. Nothing is run for it: `warm_up` does."""
        return self._report(check=False)

    def warm_up(self) -> WarmupReport:
        """The report with a real encode and a real step of decode: times, and every op against its
        reference.
        """
        return self._exclusively(lambda: self._report(check=True))

    def describe(self, image: Images, prompt: str = DEFAULT_PROMPT, **chosen: Any) -> str:
        """The answer to a prompt about one or several images; `chosen` are the fields of
        `AnswerOptions`.

        image: path, bytes of a file, Pillow image, uint8 array [Y, X, 3], or a list of them. Raises
        MtmdError.
        """
        return self.answer(image, prompt, **chosen).text

    def answer(self, image: Images, prompt: str = DEFAULT_PROMPT, **chosen: Any) -> Answer:
        """As `describe`, with token ids and receipt."""
        *_, last = self.stream([user_message(image, prompt)], **chosen)
        assert isinstance(last, Finished)
        return last.answer

    def stream(self, messages: Sequence[Message], **chosen: Any) -> Iterator[Event]:
        """Events of the answer to a conversation, the last one `Finished`. Stop early by closing
        the iterator.

        messages: {"role": "user", "content": "..."} or content as a list of {"type": "text",
        "text": ...} and {"type": "image", "image": source}. Options are checked at once, before the
        first event is asked for.
        """
        settings = options(AnswerOptions, chosen)
        return self._stream(messages, settings)

    def _stream(self, messages: Sequence[Message], settings: AnswerOptions) -> Iterator[Event]:
        yield from self.service.submit_checked(messages, settings)

    def spans(self, messages: Sequence[Message]) -> list[Span]:
        """What the decoder would read: the conversation tokenized, its images encoded."""
        return self.prompt(messages).spans

    def prompt(self, messages: Sequence[Message], encoder: Observer | None = None) -> Prompt:
        """As `spans`, with the images; every node of the encoding is shown to `encoder`, which sees
        it all even if it is known.
        """
        pieces, prepared = self.prepare(messages, anew=encoder is not None)
        embeddings = self._exclusively(lambda: [self._encode(p, encoder) for p in prepared])
        return Prompt(self.bridge.spans(pieces, prepared, embeddings), prepared, embeddings)

    def _encode(self, prepared: Prepared, observe: Observer | None) -> Tensor:
        if prepared.embeddings is not None:
            return prepared.embeddings
        assert self.encoder is not None
        found = self.encoder.join(prepared.plan, self.encoder.encode(prepared.plan.tiles, observe))
        self.bridge.remember(prepared, found)
        return found

    def observe(self, messages: Sequence[Message], encoder: Observer, decoder: Observer) -> None:
        """Encode and prefill a conversation, every node shown to an observer."""
        spans = self.prompt(messages, encoder).spans
        self._exclusively(
            lambda: self.runner.prefill(spans, self.runner.new_cache(), observe=decoder)
        )

    def _exclusively(self, work: Callable[[], T]) -> T:
        """Use the device while no answer does."""
        service = self._service
        return service.exclusively(work) if service is not None else work()

    def prepare(
        self, messages: Sequence[Message], detail: str = "auto", anew: bool = False
    ) -> tuple[list[Piece], list[Prepared]]:
        """A conversation read, its pictures ready to be encoded. Nothing of it needs the device."""
        conversation = self.read(messages)
        rendered = self.checkpoint.template.render(conversation.messages)
        prepared = (
            self.bridge.prepare(conversation.pictures, replace(self._limits, detail=detail), anew)
            if self.encoder
            else []
        )
        return self.bridge.read(rendered, prepared), prepared

    def read(self, messages: Sequence[Message]) -> Conversation:
        """Pictures loaded, texts sealed. Raises PromptError, also for images that the model cannot
        see, and ImageError.
        """
        conversation = read_conversation(messages, self.checkpoint.tokenizer.seal)
        if conversation.pictures and self.encoder is None:
            raise PromptError(
                f"{self.name} has no image encoder and was given {len(conversation.pictures)} "
                "images; "
                f"{self.checkpoint.without_vision}"
            )
        return conversation

    def constraint(self, settings: AnswerOptions, stop: frozenset[int]) -> Constraint | None:
        """What an answer has to look like, None for anything. Raises OptionError. The first call
        reads the vocabulary, which takes time.
        """
        if settings.json_schema is None:
            return None
        assert isinstance(settings.json_schema, str)  # the options made it so
        return self._grammars.constraint(settings.json_schema, stop)

    def receipt(
        self,
        images: Sequence[ImageReceipt],
        prompt_tokens: int,
        output_tokens: int,
        finish: str,
        preprocess_ms: float,
        encode_ms: float,
        generation: Generation | None,
        seed: int | None,
    ) -> Receipt:
        """What an answer comes with, `generation` as far as it went."""
        placements = self._placements
        attention = {p.flash.graph: _attention(p.flash) for p in placements}
        warnings = tuple(
            f"{r.count} {r.op} node{'s' if r.count > 1 else ''} of the {r.graph} refused by "
            f"{r.backend}: {r.reason}; "
            f"runs on {r.runs_on}"
            for p in placements
            for r in p.refused
        )
        took = generation
        return Receipt(
            model=self.name,
            images=tuple(images),
            image_tokens=sum(i.tokens for i in images),
            prompt_tokens=prompt_tokens,
            reused_tokens=took.reused if took else 0,
            output_tokens=output_tokens,
            finish=finish,
            preprocess_ms=preprocess_ms,
            encode_ms=encode_ms,
            queued_ms=took.queued_ms if took else 0.0,
            prefill_ms=took.prefill_ms if took else 0.0,
            decode_ms=took.decode_ms if took else 0.0,
            device=self.backends[0].name,
            dtype=name_of(self.dtype),
            attention=attention,
            seed=seed,
            warnings=warnings,
        )

    @property
    def _placements(self) -> tuple[Placement, ...]:
        """Made anew when a shape has come up that the device does not take as a whole."""
        key = (
            len(self.runner.fallbacks),
            tuple(self.runner.fallbacks)[-1:],
            len(self.encoder.fallbacks) if self.encoder else 0,
        )
        found = self._placed.get(key)
        if found is None:
            parts = [encoder_placement(self.encoder)] if self.encoder else []
            found = (*parts, decoder_placement(self.runner))
            self._placed = {key: found}  # replaced whole: other threads may be reading
        return found

    def _report(self, check: bool) -> WarmupReport:
        graphs = [
            *(encoder_graphs(self.encoder) if self.encoder else []),
            *decoder_graphs(self.runner),
        ]
        checks = (
            [*([check_encoder(self.encoder)] if self.encoder else []), check_decoder(self.runner)]
            if check
            else []
        )
        placements = self._placements
        return WarmupReport(
            self.name,
            self.backends[0].name,
            device_name(self.backends[0]),
            name_of(self.dtype),
            tuple(p.flash for p in placements),
            tuple(r for p in placements for r in p.refused),
            tuple(graphs),
            checks=tuple(checks),
            dequantized=self._dequantized,
        )

    @property
    def _dequantized(self) -> tuple[DequantizedTensor, ...]:
        weights = self.checkpoint.text_weights, self.checkpoint.vision_weights
        return tuple(
            DequantizedTensor(d.name, d.kind, d.stored_bytes, d.values * self.dtype.itemsize)
            for part in weights
            if part
            for d in part.dequantized
        )


def _attention(flash: FlashFacts) -> str:
    """The kernel that attention runs by, and how much of it runs elsewhere than on the device."""
    kernel = (
        "explicit" if flash.state == "off" else "flash and explicit" if flash.rebuilt else "flash"
    )
    return (
        f"{kernel}, {len(flash.on_fallback)} of {flash.nodes} nodes on another backend"
        if flash.on_fallback
        else kernel
    )


def _longest_image(vision: VisionFamily | None, limits: Budget) -> int:
    """Tokens of a picture that one batch has to take: all of them where they see each other in both
    directions.
    """
    if vision is None:
        return 0
    most = vision.resolution.most_tokens(limits)
    return most if vision.bidirectional else min(most, PREFILL)


def _check_fit(encoder: Encoder, checkpoint: Checkpoint) -> None:
    """Raises ModelError where a projector gives embeddings of another width than the decoder reads:
    they are of different models.
    """
    found = encoder.graph(1, encoder.family.resolution.tile_type().shape).shape[2]
    if found != checkpoint.text.image_width:
        raise ModelError(
            f"the projector gives {found} numbers per image token, the decoder reads "
            f"{checkpoint.text.image_width}; "
            "they belong to different models, fetch the projector of this one"
        )


def _check_overrides(overrides: Sequence[Override], model: Model) -> None:
    """An override that names nothing is a mistake, not a wish."""
    encoder = model.encoder
    plans = [model.runner.plan(BatchShape(1, images=1 if encoder else 0))]
    if encoder:
        plans.append(encoder.plan(1, encoder.family.resolution.tile_type().shape))
    for override in overrides:
        if not any(override.matches(s.node) for p in plans for s in p.steps if s.node.op != "copy"):
            raise OptionError(
                f"override {override.pattern.pattern!r} matches no node or weight; `mtmd dump` "
                "lists the names"
            )
