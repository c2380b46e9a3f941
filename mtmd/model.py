"""A loaded model as people use it: prompts and pictures in, answers with receipts out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing
from dataclasses import replace
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import torch

from mtmd.base.errors import AudioError, DeviceError, ModelError, MtmdError, OptionError
from mtmd.base.options import integer, refuse
from mtmd.base.text import one_line, printable, shortened
from mtmd.chat import Chat
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.clip.image.decode import Picture
from mtmd.display.answer_view import view_of, with_pictures_loaded
from mtmd.events import Answer, Event, Finished, TextPiece
from mtmd.kernels.backends import Backend
from mtmd.kernels.dtype import name_of
from mtmd.kernels.plan.executor import Observer
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.llm.sampling.options import ModelSampling
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import attention_kernels, warmup_report
from mtmd.options.answer import AnswerOptions
from mtmd.options.keywords import AnswerKeywords
from mtmd.options.load import PARALLEL_MAX, LoadOptions
from mtmd.prompt.audio_input import Audio, AudioInput, AudioSource
from mtmd.prompt.conversation import (
    DEFAULT_PROMPT,
    AudioArgument,
    Images,
    Message,
    ParsedRequest,
    RawPrompt,
    requested,
)
from mtmd.prompt.load_image import ImageSource, decoded_bytes
from mtmd.prompt.prompts import EncodedPrompt, Prompts
from mtmd.prompt.url_kinds import is_url
from mtmd.service.asynchronous import AsyncTickets
from mtmd.service.many import Many
from mtmd.service.prepare_ahead import MINIMUM, PrepareAhead
from mtmd.service.prepare_ahead import prepare_ahead as checked_ahead
from mtmd.service.service import Service
from mtmd.service.ticket import Ticket
from mtmd.transcription import (
    PIECE_TOKENS,
    AudioPart,
    Segment,
    Transcription,
    TranscriptionRequest,
    audio_parts,
)

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Self, Unpack

__all__ = ["DEFAULT_PROMPT", "Model"]
T = TypeVar("T")


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
        self.loaded = LoadedModel(checkpoint, chosen, backends, name)
        self.prompts = Prompts(self.loaded)
        self._service: Service | None = None
        self._async: AsyncTickets | None = None
        self._lock = Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def options(self) -> LoadOptions:
        return self.loaded.options

    @property
    def checkpoint(self) -> Checkpoint:
        return self.loaded.checkpoint

    @property
    def encoder(self) -> Encoder | None:
        return self.loaded.encoder

    @property
    def runner(self) -> Runner:
        return self.loaded.runner

    @property
    def backends(self) -> list[Backend]:
        """Backends in order of preference."""
        return self.loaded.backends

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.dtype

    @property
    def sampling(self) -> ModelSampling:
        """Return how the model's files recommend to choose tokens. Conversations and `mtmd serve`
        do so; `describe` and `answer` do with `sampling="model"`.
        """
        return self.checkpoint.sampling

    @property
    def service(self) -> Service:
        """Return where answers are computed, of all threads together. Made when it is first asked
        for. Raises ModelError once the model was closed.
        """
        with self._lock:
            if self._closed:
                raise ModelError(f"{self.name} was closed; load it again to ask it")
            if self._service is None:
                self._service = Service(self)
            return self._service

    def close(self) -> None:
        """End all answers and let the memory of their caches go; the model answers nothing after
        that. Leaving `with load() as model:` does it.
        """
        with self._lock:
            self._closed = True
        self.release()

    def release(self) -> None:
        """Do what `close` does, for a model that may be asked again, which makes new caches
        then.
        """
        with self._lock:
            service, self._service = self._service, None
            waiting, self._async = self._async, None
        if waiting is not None:
            waiting.close()
        if service is not None:
            service.close()

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return self.loaded.weights_read()

    @property
    def warmup_report(self) -> WarmupReport:
        """Return where everything runs and what it will take. Nothing is run for it: `warm_up`
        does.
        """
        return warmup_report(self.loaded, check=False)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> WarmupReport:
        """The report with a real encode and a real step of decode: times, and every op against its
        reference. On a GPU the programs that answers will need are compiled first, those that are
        not in Triton's cache, several at once; `progress(done, all)` is called after each. Then the
        kernels that the encoder's attention could run by are measured, where they have not been.
        """
        return self.exclusively(lambda: warmup_report(self.loaded, check=True, progress=progress))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Name, device, number type, attention, context."""
        kernels = attention_kernels(self.loaded.placements)
        attention = "".join(f", {part}: {kernel} attention" for part, kernel in kernels.items())
        return (
            f"<mtmd.Model {self.name!r} on {', '.join(d.name for d in self.runner.devices)}, "
            f"{name_of(self.dtype)}"
            f"{attention}, context {self.runner.context}>"
        )

    def describe(
        self,
        image: Images | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> str:
        """The answer to a prompt about one or several images, videos or audio files, or, without
        one, to the prompt alone; without a prompt, a description.

        image: a path, the bytes of a file, an open file, a Pillow image, an array [H, W(, 1|3|4)]
        (uint8, or float from 0 to 1), a tensor [C, H, W] or [H, W] of the same, or a list of them.
        A path, bytes or file of a video are one; `VideoInput` says which of its frames are seen,
        and takes frames that are given.
        audio: a path, bytes or file of audio, `AudioInput(samples, rate)` or (samples, rate), or a
        list of them; audio files may stand among the images, too.
        messages: a conversation in place of both: {"role": "user", "content": "..."}, or content as
        a list of {"type": "text", "text": ...} and {"type": "image", "image": source}, also as
        OpenAI's interface ("image_url") and transformers ("url", "path") have it; the pictures of
        {"type": "image"} without a source are those of `image`.
        system: what the model is told before all else.
        chosen: the fields of `AnswerOptions` by name, most of all max_tokens (256; -1 for the end
        of the context), temperature (0, the most probable tokens; seed, top_k and top_p where some
        are drawn), sampling ("model": as the model's files recommend), stop (texts that end the
        answer), json_schema (a mapping or a Pydantic model that it follows), detail ("low", "auto",
        "high").
        Raises MtmdError.
        """
        answer = self.answer(image, prompt, audio=audio, messages=messages, system=system, **chosen)
        return answer.text

    def answer(
        self,
        image: Images | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Answer:
        """Do what `describe` does, by the same arguments, with token ids and receipt. `chosen` are
        options by name, most of all max_tokens, temperature, stop, json_schema and detail.
        """
        settings = self.loaded.answer_options(chosen)
        taken = self._taken(requested(image, prompt, messages, system, audio, settings.task))
        *_, last = self.service.submit_checked(taken, settings)
        assert isinstance(last, Finished)
        return _with_view(last.answer, taken)

    def complete(self, text: str | Sequence[int], **chosen: Unpack[AnswerKeywords]) -> Answer:
        """Continue a text, or the ids of its tokens, without a chat template, as base models do.
        Spellings of special tokens become those tokens: do not put text of others into it.
        `chosen` are options as for `answer`. Raises MtmdError.
        """
        settings = self.loaded.answer_options(chosen)
        prompt = RawPrompt(text if isinstance(text, str) else tuple(text))
        *_, last = self.service.submit_checked(prompt, settings)
        assert isinstance(last, Finished)
        return last.answer

    @overload
    def answers(
        self,
        images: Iterable[Images | None],
        prompt: str | Iterable[str] | None = None,
        *,
        system: str | None = None,
        parallel: int | None = None,
        prepare_ahead: int | Literal["auto"] | None = "auto",
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[Answer]: ...

    @overload
    def answers(
        self,
        images: Iterable[Images | None],
        prompt: str | Iterable[str] | None = None,
        *,
        system: str | None = None,
        parallel: int | None = None,
        prepare_ahead: int | Literal["auto"] | None = "auto",
        progress: bool = False,
        on_error: Literal["return"],
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[Answer | MtmdError]: ...

    def answers(
        self,
        images: Iterable[Images | None],
        prompt: str | Iterable[str] | None = None,
        *,
        system: str | None = None,
        parallel: int | None = None,
        prepare_ahead: int | Literal["auto"] | None = "auto",
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[Answer | MtmdError]:
        """An answer about each of many images, in their order, computed in the same batches.

        images: each as `describe` takes it, a list being several images of one question; taken from
        the iterable as they are needed. prompt: one for all, or a list, or any iterable, with one
        for each. parallel: questions answered at once, None for as many as the model was loaded
        for. prepare_ahead: questions whose pictures are prepared beside those, 1 to 64, or auto, as
        many as keep the device from waiting, within cores and memory. progress: a bar on stderr.
        on_error: "raise" ends it with the first error, which names its place, "images[3]", "return"
        gives the MtmdError in the answer's place. Options are checked at once. Leaving the loop
        gives up what is under way.
        """
        settings = self.loaded.answer_options(chosen)
        if on_error not in ("raise", "return"):
            refuse("on_error", on_error, "one of raise, return")
        parallel = self.options.parallel if parallel is None else parallel
        parallel = integer("parallel", parallel, 1, PARALLEL_MAX)
        ahead = PrepareAhead(parallel, checked_ahead(prepare_ahead))
        many = Many(parallel, ahead, self.service.bulk_slots)

        def one(item: tuple[int, tuple[Images | None, str | None]]) -> Answer | MtmdError:
            index, question = item
            try:
                many.make_room(decoded_bytes(question[0]))
                taken = self._taken(requested(*question, system=system))
                answer = many.finish(self.service.submit_bulk(taken, settings))
                return replace(answer, view=view_of(taken, one_of_many=True))
            except MtmdError as error:
                if on_error == "raise":
                    named = _of_item(error, index, question[0])
                    raise named.with_traceback(error.__traceback__) from error.__cause__
                return error

        questions = _questions(images, prompt)
        results = many.results(enumerate(questions), one)
        total = len(images) if isinstance(images, Sized) else None
        return _with_bar(results, total) if progress else results

    @overload
    def stream(
        self,
        image: Images | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[Event]: ...

    @overload
    def stream(
        self,
        messages: Sequence[Message],
        /,
        *,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[Event]: ...

    def stream(
        self,
        image: ParsedRequest | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[Event]:
        """Do what `answer` does, event by event, the last one `Finished`. Stop early by closing the
        iterator. `messages` may stand in the place of `image`. What is wrong with options and
        messages is raised at once, before the first event is asked for.
        """
        settings = self.loaded.answer_options(chosen)
        return self._stream(
            requested(image, prompt, messages, system, audio, settings.task), settings
        )

    def _stream(self, messages: Sequence[Message], settings: AnswerOptions) -> Iterator[Event]:
        taken = self._taken(messages)
        for event in self.service.submit_checked(taken, settings):
            yield _viewed(event, taken)

    def stream_text(
        self,
        image: ParsedRequest | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[str]:
        """Do what `stream` does, the pieces of the text alone, as they come: `"".join(...)` is the
        answer's text.
        """
        settings = self.loaded.answer_options(chosen)
        events = self._stream(
            requested(image, prompt, messages, system, audio, settings.task), settings
        )
        return (event.text for event in events if isinstance(event, TextPiece))

    async def aanswer(
        self,
        image: Images | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Answer:
        """Do what `answer` does, for asyncio: any number may be awaited together, and share
        batches. Cancelling it gives the request up.
        """
        settings = self.loaded.answer_options(chosen)
        events = self._astream(
            lambda: requested(image, prompt, messages, system, audio, settings.task), settings
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Finished):
                    return event.answer
        raise AssertionError("a ticket ends with Finished, or raises")

    @overload
    def astream(
        self,
        image: Images | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> AsyncGenerator[Event, None]: ...

    @overload
    def astream(
        self,
        messages: Sequence[Message],
        /,
        *,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> AsyncGenerator[Event, None]: ...

    def astream(
        self,
        image: ParsedRequest | None = None,
        prompt: str | None = None,
        *,
        audio: AudioArgument | None = None,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> AsyncGenerator[Event, None]:
        """Do what `stream` does, for `async for`. Options are checked at once. Who stops early
        closes it (`contextlib.aclosing`), or cancels the task.
        """
        settings = self.loaded.answer_options(chosen)
        return self._astream(
            lambda: requested(image, prompt, messages, system, audio, settings.task), settings
        )

    async def _astream(
        self, question: Callable[[], Sequence[Message]], settings: AnswerOptions
    ) -> AsyncGenerator[Event, None]:
        taken: list[Message] = []

        def submit() -> Ticket:
            """Submit on a thread of its own, as files are read."""
            taken.extend(self._taken(question()))
            return self.service.submit_checked(taken, settings)

        async with aclosing(self._async_tickets().events(submit)) as events:
            async for event in events:
                yield _viewed(event, taken)

    def _async_tickets(self) -> AsyncTickets:
        with self._lock:
            if self._async is None or not self._async.is_here:
                sequences = self.runner.sequences
                self._async = AsyncTickets(2 * sequences, sequences + MINIMUM)
            return self._async

    def _taken(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, from which an answer to them can be shown later."""
        return with_pictures_loaded(messages, self.prompts.load_image)

    def check(self, chosen: AnswerKeywords) -> None:
        """Raises OptionError for options that no answer of this model could have."""
        self.loaded.answer_options(chosen)

    def load_picture(self, source: ImageSource) -> Picture:
        """The pixels of one picture, upright. Raises ImageError."""
        return self.prompts.load_image(source)

    def chat(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        **chosen: Unpack[AnswerKeywords],
    ) -> Chat:
        """A conversation, in which what was said before goes with each question: `messages`, as
        `Chat.messages` has them, and what follows. `chosen` holds for every answer; where it does
        not say otherwise, tokens are chosen by the model's own settings (`sampling`), and an answer
        may go on to the end of the context. Raises MtmdError.
        """
        return Chat(self, system, chosen, () if messages is None else messages)

    def transcribe(
        self,
        audio: AudioSource | AudioInput,
        *,
        language: str | None = None,
        translate: bool = False,
        hint: str = "",
        **chosen: Unpack[AnswerKeywords],
    ) -> Transcription:
        """Return what is said in audio: a path, bytes, an open file, or `AudioInput(samples,
        rate)`. What is longer than the model takes at once is cut where it is quiet; the times of
        segments are those of these pieces.

        language: that is spoken, as "de" or "German"; None for the model to find. translate: into
        `language`, or English. hint: names and words that may occur. `chosen` are options as for
        `answer`. Raises MtmdError, AudioError for the file, PromptError for a model without audio.
        """
        request = TranscriptionRequest(language, translate, hint)
        *_, (_, last, _) = self.transcribing([audio], request, **chosen)
        if isinstance(last, AudioError):
            raise last
        return last

    def transcribing(
        self,
        sources: Sequence[AudioSource | AudioInput],
        request: TranscriptionRequest,
        **chosen: Unpack[AnswerKeywords],
    ) -> Iterator[tuple[int, Transcription | AudioError, bool]]:
        """Do what `transcribe` does for several recordings, whose pieces are answered in the same
        batches. Yields, in their order, which it is, all that is written of it so far, and whether
        that is all; or the error of one that cannot be read.
        """
        instructions = self.service.instructions
        if instructions is None:
            raise self.loaded.deaf("audio")
        settings = self.loaded.answer_options({"max_tokens": PIECE_TOKENS, **chosen})
        many = Many(self.options.parallel, slots=self.service.bulk_slots)

        def one(part: AudioPart) -> tuple[AudioPart, Answer | None]:
            if part.piece is None:
                return part, None
            options = replace(settings, **part.piece.options)
            return part, many.finish(self.service.submit_bulk(part.piece.messages, options))

        def read(source: AudioSource | AudioInput) -> Audio:
            return self.prompts.load_recording(source).audio(instructions.rate)

        made: list[Segment] = []
        parts = audio_parts(sources, read, instructions, request)
        for part, answer in many.results(parts, one):
            if isinstance(part.facts, AudioError):
                yield part.index, part.facts, True
                continue
            assert part.piece is not None and answer is not None
            made.append(part.piece.segment(answer.text, answer.receipt))
            seconds, notes = part.facts.seconds, part.facts.notes
            written = tuple(made), seconds, request.language, request.translate, notes
            yield part.index, Transcription(*written), part.is_last
            made = [] if part.is_last else made

    def spans(self, messages: Sequence[Message]) -> list[Span]:
        """Return what the decoder would read: the conversation tokenized, its images encoded."""
        return self.prompt(messages).spans

    @made_on_the_host()
    def prompt(self, messages: Sequence[Message], encoder: Observer | None = None) -> EncodedPrompt:
        """Do what `spans` does, with the images; every node of the encoding is shown to `encoder`,
        which sees it all even if it is known.
        """
        prepared = self.prompts.prepare(requested(None, None, messages), anew=encoder is not None)
        encoded = self.exclusively(lambda: self.prompts.encode(prepared, encoder))
        side = self.loaded.encoder.side if self.loaded.encoder else None
        if side is not None:
            for embeddings in encoded.embeddings:
                side.hand_over(embeddings)
        return encoded

    def observe(self, messages: Sequence[Message], encoder: Observer, decoder: Observer) -> None:
        """Encode and prefill a conversation, every node shown to an observer."""
        spans, runner = self.prompt(messages, encoder).spans, self.runner
        self.exclusively(lambda: runner.prefill(spans, runner.new_cache(), observe=decoder))

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do something with the device while no answer does. What it gives back has been computed;
        on a GPU tensors among it were made on another stream than the caller's
        (`Tensor.record_stream`). Raises what `work` raises.
        """
        return self.loaded.exclusively(work)


def _viewed(event: Event, messages: Sequence[Message]) -> Event:
    return Finished(_with_view(event.answer, messages)) if isinstance(event, Finished) else event


def _with_view(answer: Answer, messages: Sequence[Message]) -> Answer:
    return replace(answer, view=view_of(messages))


def _questions(
    images: Iterable[Images | None], prompt: str | Iterable[str] | None
) -> Iterator[tuple[Images | None, str | None]]:
    """Raises OptionError for another number of prompts than of images."""
    if isinstance(images, (str, bytes, PathLike)):
        raise OptionError(
            f"images: found {type(images).__name__}, expected a list of pictures; for one there "
            "is `answer`"
        )
    if isinstance(images, Mapping):  # else its keys would be taken for paths
        raise OptionError(
            f"images: found {type(images).__name__}, expected a list of pictures; give "
            "list(x.values())"
        )
    try:
        each = iter(images)  # also of a Dataset of torch's, which has items and no __iter__
    except TypeError:
        value = type(images).__name__
        raise OptionError(f"images: found {value}, expected a list of pictures") from None
    if prompt is None or isinstance(prompt, str):
        return ((image, prompt) for image in each)
    if not isinstance(prompt, Iterable):
        raise OptionError(
            f"prompt: found {type(prompt).__name__}, expected a text for all images, or a list "
            "with one for each"
        )
    if isinstance(images, Sized) and isinstance(prompt, Sized) and len(images) != len(prompt):
        raise OptionError(
            f"prompt: found {len(prompt)} for {len(images)} images, expected one for all, or one "
            "for each"
        )
    return _paired(each, iter(prompt))


def _paired(
    images: Iterator[Images | None], prompts: Iterator[str]
) -> Iterator[tuple[Images | None, str]]:
    """Raises OptionError where one of them, whose length nobody knew, ends before the other."""
    number, none = 0, object()
    for number, image in enumerate(images, 1):
        prompt = next(prompts, none)
        if not isinstance(prompt, str):
            value = "no more" if prompt is none else type(prompt).__name__
            raise OptionError(f"prompt: found {value} for image {number}, expected a text for each")
        yield image, prompt
    if next(prompts, none) is not none:
        raise OptionError(f"prompt: found more than images, {number}, expected one for each")


def _of_item(error: MtmdError, index: int, image: Images | None) -> MtmdError:
    """The error, which several may have in common, with the place among `images` before it, and the
    path where it does not tell that itself; as it is where the device has failed, for all.
    """
    if isinstance(error, DeviceError):
        return error
    reported = str(error).removeprefix("image: ")
    is_path = isinstance(image, (str, PathLike)) and not is_url(image)
    path = shortened(printable(one_line(image))) if is_path else ""
    where = f"images[{index}]{f' ({path})' if path and path not in reported else ''}"
    return error.reworded(f"{where}: {reported}")


def _with_bar(results: Iterator[T], total: int | None) -> Iterator[T]:
    from tqdm import tqdm

    with tqdm(total=total, unit="answer", dynamic_ncols=True) as bar:
        for result in results:
            bar.update()
            yield result
