"""A loaded model: prompts and pictures in, answers with receipts out."""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from mtmd.bridge import Bridge, Encoded
from mtmd.checkpoint import Checkpoint, open_checkpoint
from mtmd.clip.budget import Budget
from mtmd.clip.encoder import Encoder
from mtmd.clip.family import VisionFamily
from mtmd.clip.warmup import check_encoder, encoder_graphs, encoder_placement
from mtmd.config import AnswerOptions, LoadOptions, options, split_options
from mtmd.conversation import Conversation, Images, Message, read_conversation, user_message
from mtmd.device import choose_dtype, device_name, set_threads
from mtmd.kernels.backends import Backend, backends_for
from mtmd.kernels.dtype import name_of
from mtmd.kernels.errors import ModelError, OptionError, PromptError
from mtmd.kernels.executor import Observer, Residency
from mtmd.kernels.report import FlashFacts, Placement, WarmupReport
from mtmd.kernels.scheduler import Override
from mtmd.llm.engine import PREFILL, Engine, Generated
from mtmd.llm.sampler import Sampler
from mtmd.llm.sequence import BatchShape, Span
from mtmd.llm.text_stream import StopChecker
from mtmd.llm.warmup import check_decoder, decoder_graphs, decoder_placement
from mtmd.receipt import Receipt

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEFAULT_PROMPT = "Describe the image."
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Progress:
    """Work before the first token: `stage` is "encode" (in tiles) or "prefill" (in tokens)."""
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class TextPiece:
    """More of the answer; whole characters only."""
    text: str


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    receipt: Receipt

    def asdict(self) -> dict[str, Any]:
        return {"text": self.text, "prompt_token_ids": list(self.prompt_token_ids), "output_token_ids": list(self.output_token_ids),
                "receipt": self.receipt.asdict()}


@dataclass(frozen=True)
class Finished:
    """The last event of a stream."""
    answer: Answer


Event: TypeAlias = "Progress | TextPiece | Finished"


@dataclass(frozen=True)
class _Prompt:
    spans: list[Span]
    encoded: list[Encoded]
    preprocess_ms: float
    encode_ms: float

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for s in self.spans for t in s.tokens)


class Model:
    """Made by `load`. Safe to use from several threads; each answer is computed by itself."""

    def __init__(self, checkpoint: Checkpoint, chosen: LoadOptions, backends: Sequence[Backend] | None = None, name: str | None = None):
        """`backends` in order of preference replaces what `chosen.device` and `chosen.refuse` ask for; `name` is for people."""
        self.checkpoint, self.options = checkpoint, chosen
        self.name = name or checkpoint.folder.resolve().name
        if chosen.threads:
            set_threads(chosen.threads)
        self.backends = list(backends) if backends else backends_for(chosen.device, chosen.refuse)
        self.dtype = choose_dtype(chosen.dtype, self.backends[0], checkpoint.weight_bytes)
        overrides = [Override.parse(o) for o in chosen.override_tensor]
        placement: dict[str, Any] = {"dtype": self.dtype, "flash_attn": chosen.flash_attn, "overrides": overrides, "residency": Residency()}
        context = chosen.context or min(DEFAULT_CONTEXT, checkpoint.text.context)
        if context > checkpoint.text.context:
            raise OptionError(f"context: found {context}, expected at most {checkpoint.text.context}, which {self.name} was made for")
        self._placed: dict[Any, tuple[Placement, ...]] = {}
        self._limits = Budget(chosen.image_min_tokens, chosen.image_max_tokens)
        self.engine = Engine(checkpoint.text, checkpoint.text_weights, self.backends, context=context,
                             image_tokens=_longest_image(checkpoint.vision, self._limits), **placement)
        self.encoder = None
        if checkpoint.vision and checkpoint.vision_weights:
            self.encoder = Encoder(checkpoint.vision, checkpoint.vision_weights, self.backends, **placement)
            self._bridge = Bridge(self.encoder, checkpoint.tokenizer, self.backends[0].device)
            _check_fit(self.encoder, checkpoint)
        _check_overrides(overrides, self)

    @property
    def warmup_report(self) -> WarmupReport:
        """Where everything runs and what it will take. Nothing is run for it: `warm_up` does."""
        return self._report(check=False)

    def warm_up(self) -> WarmupReport:
        """The report with a real encode and a real step of decode: times, and every op against its reference."""
        return self._report(check=True)

    def describe(self, image: Images, prompt: str = DEFAULT_PROMPT, **chosen: Any) -> str:
        """The answer to a prompt about one or several images; `chosen` are the fields of `AnswerOptions`.

        image: path, bytes of a file, Pillow image, uint8 array [Y, X, 3], or a list of them. Raises MtmdError.
        """
        return self.answer(image, prompt, **chosen).text

    def answer(self, image: Images, prompt: str = DEFAULT_PROMPT, **chosen: Any) -> Answer:
        """As `describe`, with token ids and receipt."""
        *_, last = self.stream([user_message(image, prompt)], **chosen)
        assert isinstance(last, Finished)
        return last.answer

    def stream(self, messages: Sequence[Message], **chosen: Any) -> Iterator[Event]:
        """Events of the answer to a conversation, the last one `Finished`. Stop early by closing the iterator.

        messages: {"role": "user", "content": "..."} or content as a list of {"type": "text", "text": ...} and
        {"type": "image", "image": source}. Options are checked at once, before the first event is asked for.
        """
        settings = options(AnswerOptions, chosen)
        return self._stream(messages, settings, Sampler(settings))

    def spans(self, messages: Sequence[Message]) -> list[Span]:
        """What the decoder would read: the conversation tokenized, its images encoded."""
        *_, prompt = self._prepare(messages)
        assert isinstance(prompt, _Prompt)
        return prompt.spans

    def observe(self, messages: Sequence[Message], encoder: Observer, decoder: Observer) -> None:
        """Encode and prefill a conversation, every node shown to an observer."""
        *_, prompt = self._prepare(messages, observe=encoder)
        assert isinstance(prompt, _Prompt)
        self.engine.prefill(prompt.spans, self.engine.new_cache(), observe=decoder)

    def _stream(self, messages: Sequence[Message], settings: AnswerOptions, sampler: Sampler) -> Iterator[Event]:
        prompt = None
        for event in self._prepare(messages, settings.detail):
            if isinstance(event, _Prompt):
                prompt = event
            else:
                yield event
        assert prompt is not None
        done = Generated()
        stop = frozenset() if settings.ignore_eos else self.checkpoint.stop_tokens
        yield Progress("prefill", 0, len(prompt.tokens))
        pieces = []
        tokens = self.engine.generate(prompt.spans, sampler, stop=stop, max_tokens=settings.max_tokens, done=done)
        for piece in self._text(tokens, settings.stop, done):
            pieces.append(piece)
            yield TextPiece(piece)
        receipt = self._receipt(prompt, done, sampler.seed if settings.temperature else None)
        yield Finished(Answer("".join(pieces), prompt.tokens, tuple(done.tokens), receipt))

    def _text(self, tokens: Iterator[int], stop: Sequence[str], done: Generated) -> Iterator[str]:
        """Pieces of text from tokens, cut before the first stop string."""
        stream, checker = self.checkpoint.tokenizer.stream(), StopChecker(stop)
        for token in tokens:
            piece = checker.push(stream.push(token))
            if piece:
                yield piece
            if checker.found is not None:
                done.finish = "stop"
                return
        rest = checker.push(stream.finish())
        rest += checker.finish()
        if rest:
            yield rest

    def _prepare(self, messages: Sequence[Message], detail: str = "auto", observe: Observer | None = None) -> Iterator[Progress | _Prompt]:
        """Progress of the encoding, then the prompt."""
        clock = time.perf_counter()
        conversation = self._read(messages)
        rendered = self.checkpoint.template.render(conversation.messages)
        read_ms = (time.perf_counter() - clock) * 1e3
        if self.encoder is None:
            yield _Prompt([Span(tuple(self.checkpoint.tokenizer.encode_prompt(rendered)))], [], read_ms, 0.0)
            return
        encoding = self._bridge.encode(conversation.pictures, replace(self._limits, detail=detail), observe)
        for done, total in encoding:
            yield Progress("encode", done, total)
        yield _Prompt(self._bridge.spans(rendered, encoding.found), encoding.found, read_ms + encoding.prepare_ms, encoding.encode_ms)

    def _read(self, messages: Sequence[Message]) -> Conversation:
        conversation = read_conversation(messages, self.checkpoint.tokenizer.seal)
        if conversation.pictures and self.encoder is None:
            raise PromptError(f"{self.name} has no image encoder and was given {len(conversation.pictures)} images; "
                              f"{self.checkpoint.without_vision}")
        return conversation

    def _receipt(self, prompt: _Prompt, done: Generated, seed: int | None) -> Receipt:
        assert done.finish is not None, "a receipt is written at the end"
        images = tuple(e.receipt for e in prompt.encoded)
        placements = self._placements
        attention = {p.flash.graph: _attention(p.flash) for p in placements}
        warnings = tuple(f"{r.count} {r.op} node{'s' if r.count > 1 else ''} of the {r.graph} refused by {r.backend}: {r.reason}; "
                         f"runs on {r.runs_on}" for p in placements for r in p.refused)
        return Receipt(
            model=self.name, images=images, image_tokens=sum(i.tokens for i in images), prompt_tokens=len(prompt.tokens),
            output_tokens=len(done.tokens), finish=done.finish, preprocess_ms=prompt.preprocess_ms,
            encode_ms=prompt.encode_ms, prefill_ms=done.prefill_ms, decode_ms=done.decode_ms, device=self.backends[0].name,
            dtype=name_of(self.dtype), attention=attention, seed=seed, warnings=warnings)

    @property
    def _placements(self) -> tuple[Placement, ...]:
        """Made anew when a shape has come up that the device does not take as a whole."""
        key = len(self.engine.fallbacks), tuple(self.engine.fallbacks)[-1:], len(self.encoder.fallbacks) if self.encoder else 0
        found = self._placed.get(key)
        if found is None:
            parts = [encoder_placement(self.encoder)] if self.encoder else []
            found = (*parts, decoder_placement(self.engine))
            self._placed = {key: found}  # replaced whole: other threads may be reading
        return found

    def _report(self, check: bool) -> WarmupReport:
        graphs = [*(encoder_graphs(self.encoder) if self.encoder else []), *decoder_graphs(self.engine)]
        checks = [*([check_encoder(self.encoder)] if self.encoder else []), check_decoder(self.engine)] if check else []
        placements = self._placements
        return WarmupReport(
            self.name, self.backends[0].name, device_name(self.backends[0]), name_of(self.dtype), tuple(p.flash for p in placements),
            tuple(r for p in placements for r in p.refused), tuple(graphs), checks=tuple(checks))


def load(model: str | PathLike[str] | None = None, *, progress: bool = False, **chosen: Any) -> Model:
    """A model from a checkpoint folder, a GGUF file, or, as org/name, from the Hugging Face hub, org/name:Q4_K_M for a GGUF of that type;
    None is the demo model that comes with the package.

    `chosen` are the fields of `LoadOptions`. Raises MtmdError: ModelError for the checkpoint, OptionError for an option.
    """
    settings = options(LoadOptions, chosen)
    checkpoint, name = find_checkpoint(model, settings, progress)
    return Model(checkpoint, settings, name=name)


def find_checkpoint(model: str | PathLike[str] | None, settings: LoadOptions, progress: bool = False) -> tuple[Checkpoint, str | None]:
    """What `load` takes as `model`, opened, and the name to show where it is not the folder's or file's."""
    projector, template = (Path(p).expanduser() if p else None for p in (settings.mmproj, settings.chat_template))
    if model is None:
        return open_checkpoint(DEMO_MODEL, projector, template), "demo model"
    if not isinstance(model, (str, PathLike)):
        raise ModelError(f"model is an object of type {type(model).__name__}; expected a checkpoint folder, a GGUF file, "
                         "or org/name on the Hugging Face hub")
    from mtmd.hub import resolve_model
    found = resolve_model(model, progress)
    is_local = Path(model).expanduser().exists()  # else the folder is named by a hash
    return open_checkpoint(found.path, projector or found.projector, template), None if is_local else str(model)


_last: tuple[Any, Model] | None = None


def describe(image: Images, prompt: str = DEFAULT_PROMPT, *, model: str | PathLike[str] | Model | None = None, **chosen: Any) -> str:
    """The answer to a prompt about one or several images, in one call. The last model used is kept for the next.

    `chosen` are the fields of `LoadOptions` and `AnswerOptions`, of the latter alone where `model` is a loaded one. Raises MtmdError.
    """
    for_loading, for_answer = split_options(chosen)
    answer_options = {name: getattr(for_answer, name) for name in chosen if hasattr(for_answer, name)}
    if isinstance(model, Model):
        if late := [name for name in chosen if name not in answer_options]:
            raise OptionError(f"{late[0]}: the model given is already loaded; give the option to `load`")
        return model.describe(image, prompt, **answer_options)
    global _last
    key, last = (None if model is None else str(model), for_loading), _last
    if last is None or last[0] != key:
        _last = last = key, load(model, **{name: getattr(for_loading, name) for name in chosen if name not in answer_options})
    return last[1].describe(image, prompt, **answer_options)


def _attention(flash: FlashFacts) -> str:
    """The kernel that attention runs by, and how much of it runs elsewhere than on the device."""
    kernel = "explicit" if flash.state == "off" else "flash and explicit" if flash.rebuilt else "flash"
    return f"{kernel}, {len(flash.on_fallback)} of {flash.nodes} nodes on another backend" if flash.on_fallback else kernel


def _longest_image(vision: VisionFamily | None, limits: Budget) -> int:
    """Tokens of a picture that one batch has to take: all of them where they see each other in both directions."""
    if vision is None:
        return 0
    most = vision.most_tokens(limits)
    return most if vision.bidirectional else min(most, PREFILL)


def _check_fit(encoder: Encoder, checkpoint: Checkpoint) -> None:
    """Raises ModelError where a projector gives embeddings of another width than the decoder reads: they are of different models."""
    found = encoder.graph(1, encoder.family.tile_type().shape).shape[2]
    if found != checkpoint.text.image_width:
        raise ModelError(f"the projector gives {found} numbers per image token, the decoder reads {checkpoint.text.image_width}; "
                         "they belong to different models, fetch the projector of this one")


def _check_overrides(overrides: Sequence[Override], model: Model) -> None:
    """An override that names nothing is a mistake, not a wish."""
    encoder = model.encoder
    plans = [model.engine.plan(BatchShape(1, images=1 if encoder else 0))]
    if encoder:
        plans.append(encoder.plan(1, encoder.family.tile_type().shape))
    for override in overrides:
        if not any(override.matches(s.node) for p in plans for s in p.steps if s.node.op != "copy"):
            raise OptionError(f"override {override.pattern.pattern!r} matches no node or weight; `mtmd dump` lists the names")
