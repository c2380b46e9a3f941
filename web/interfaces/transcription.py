"""OpenAI's routes for speech: what is said in an audio file, in its language or translated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

from flask import Blueprint, Response, request
from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from werkzeug.datastructures import MultiDict

from mtmd import Event, Finished, PromptError, TextPiece, Ticket
from mtmd.transcription import (
    HINT_CHARS,
    PIECE_TOKENS,
    AudioPiece,
    Segment,
    Transcription,
    TranscriptionRequest,
    audio_pieces,
)
from mtmd.web import sse
from mtmd.web.access import owner
from mtmd.web.answering.answer import Answering, Form
from mtmd.web.answering.response_streams import Collected, Delivery, Writer
from mtmd.web.errors import ApiError
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.typed_body import Request
from mtmd.web.interfaces.fields import MaxTokens, ModelName, Seed, Temperature, given
from mtmd.web.served_model import ServedModel

LANGUAGE_CHARS = 40


def _no_words(requested: list[str]) -> list[str]:
    if "word" in requested:
        raise PydanticCustomError(
            "word",
            "found 'word', expected 'segment': no model that is supported gives times of words; "
            "those of a segment are when the piece of audio it is from begins and ends",
        )
    return requested


class TranscriptionBody(Request):
    """The fields of the form beside its `file`. `prompt`: names and words that may occur. Times are
    those of the pieces in which the model heard the file, so there are none of words. `to_language`
    is vLLM's, of a translation.
    """

    model_config = ConfigDict(extra="allow", strict=False, frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset(("chunking_strategy", "user"))
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "include": ([],),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
    }

    model: ModelName | None = None
    language: Annotated[str, Field(max_length=LANGUAGE_CHARS)] | None = None
    to_language: Annotated[str, Field(max_length=LANGUAGE_CHARS)] | None = None
    prompt: Annotated[str, Field(max_length=HINT_CHARS)] = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Temperature = 0.0
    seed: Seed | None = None
    max_completion_tokens: MaxTokens | None = None
    stream: bool = False
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]], Field(max_length=4), AfterValidator(_no_words)
    ] = Field(default_factory=list)

    @property
    def streams(self) -> bool:
        """Return whether text is sent as it comes: subtitles are whole."""
        return self.stream and self.response_format in ("json", "text")

    def requested(self, translate: bool) -> TranscriptionRequest:
        language = self.to_language if translate else self.language
        return TranscriptionRequest(language, translate, self.prompt)

    def options(self) -> dict[str, Any]:
        """Return the fields of AnswerOptions."""
        tokens = self.max_completion_tokens or PIECE_TOKENS
        return {"temperature": self.temperature, "max_tokens": tokens, **given(seed=self.seed)}


def blueprint(answering: Answering) -> Blueprint:
    routes = Blueprint("transcription", __name__)

    @routes.post("/v1/audio/transcriptions")
    @takes(Body.FORM, Work.ANSWER)
    def transcriptions() -> Response:
        return _answered(answering, translate=False)

    @routes.post("/v1/audio/translations")
    @takes(Body.FORM, Work.ANSWER)
    def translations() -> Response:
        return _answered(answering, translate=True)

    return routes


def _answered(answering: Answering, translate: bool) -> Response:
    if request.mimetype != "multipart/form-data":
        raise ApiError(415, "expected a form of type multipart/form-data")
    file = request.files.get("file")
    if file is None:
        raise ApiError(
            400, "file: missing; send the audio as the form's field 'file'", param="file"
        )
    body = TranscriptionBody.model_validate(_fields(request.form))
    answering.check_unknown(body)
    data = file.stream.read(answering.media.max_bytes + 1)
    form = TranscriptionForm(body, translate)

    def begin(model: ServedModel) -> Response:
        instructions, service = model.service.instructions, model.service
        if instructions is None:
            raise PromptError(
                f"{model.name} has no audio encoder and was given audio; it takes "
                f"{'pictures and videos' if model.sees else 'text alone'}"
            )
        with ExitStack() as resources:
            audio = resources.enter_context(answering.media.audio(data, "file", instructions.rate))
            form.seconds, form.notes = audio.facts.seconds, audio.facts.notes
            form.pieces = audio_pieces(audio, instructions, body.requested(translate))
            options = model.options(body.options(), called=body.model)

            def tickets() -> Iterator[Ticket]:
                """Yield them as they are asked for: each is submitted then."""
                for piece in form.pieces:
                    needed = {**options, **piece.options}
                    yield service.submit(piece.messages, tenant=owner(), **needed)

            later = tickets()
            first = [ticket for ticket, _ in zip(later, range(AT_ONCE), strict=False)]
            delivery = Delivery(first, resources.pop_all(), later=later)
        if body.streams:
            return delivery.streamed(form.writer(model), form.failure)
        return delivery.whole(lambda answers: form.whole(model, answers), form.error)

    return answering.when_loaded(body.model, body.streams, begin, form)


AT_ONCE = 4  # pieces of one file


def _fields(form: MultiDict[str, str]) -> dict[str, Any]:
    """Return the fields of a form: those called name[] are lists, empty ones were not given, and
    those without a name are nobody's.
    """
    return {
        name.removesuffix("[]"): form.getlist(name) if name.endswith("[]") else form[name]
        for name in filter(None, form)
        if name.endswith("[]") or form[name] != ""
    }


class TranscriptionForm(Form):
    """`pieces`, `seconds` and `notes` are set once the file was decoded."""

    def __init__(self, body: TranscriptionBody, translate: bool) -> None:
        self.body, self.translate = body, translate
        self.pieces: Sequence[AudioPiece] = ()
        self.seconds, self.notes = 0.0, tuple[str, ...]()

    def whole(self, model: ServedModel, answers: Sequence[Collected]) -> Any:  # noqa: ARG002
        result = self.transcription(
            [
                piece.segment(one.answer.text, one.answer.receipt)
                for piece, one in zip(self.pieces, answers, strict=True)
            ]
        )
        kind = self.body.response_format
        if kind == "json":
            return {"text": result.text, "usage": usage(result)}
        if kind == "verbose_json":
            return self.verbose(result)
        return Response(result.written(kind), mimetype=_TYPES[kind])

    def writer(self, model: ServedModel) -> Writer:  # noqa: ARG002
        return TranscriptWriter(self)

    def transcription(self, segments: Sequence[Segment]) -> Transcription:
        requested = self.body.requested(self.translate)
        return Transcription(
            tuple(segments), self.seconds, requested.language, self.translate, self.notes
        )

    def verbose(self, result: Transcription) -> dict[str, Any]:
        """Describe it as OpenAI's servers do, without what only their models know."""
        return {
            "task": "translate" if self.translate else "transcribe",
            "language": (result.language or "").lower(),
            "duration": result.seconds,
            "text": result.text,
            "segments": [
                {"id": number, "start": one.start, "end": one.end, "text": one.text}
                for number, one in enumerate(result.segments)
            ],
            "usage": {"type": "duration", "seconds": math.ceil(result.seconds)},
            "mtmd": {
                "receipts": [one.receipt.asdict() for one in result.segments],
                "notes": list(result.notes),
            },
        }


_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


def usage(result: Transcription) -> dict[str, Any]:
    receipts = [segment.receipt for segment in result.segments]
    prompt = sum(receipt.prompt_tokens for receipt in receipts)
    audio = sum(receipt.audio_tokens for receipt in receipts)
    output = sum(receipt.output_tokens for receipt in receipts)
    return {
        "type": "tokens",
        "input_tokens": prompt,
        "input_token_details": {"audio_tokens": audio, "text_tokens": prompt - audio},
        "output_tokens": output,
        "total_tokens": prompt + output,
    }


class TranscriptWriter(Writer):
    """Text in the order of the pieces, though several are written at once: of a later one it waits
    until those before it are whole.
    """

    def __init__(self, form: TranscriptionForm) -> None:
        self._form = form
        self._texts: dict[int, list[str]] = {}
        self._segments: dict[int, Segment] = {}
        self._at = 0
        self._is_past = self._is_begun = self._has_written = False
        """Of the piece at `_at`, whether its heading was passed and something written; whether
        something was written before it.
        """

    def write(self, index: int, event: Event) -> Iterator[str]:
        if isinstance(event, TextPiece):
            self._texts.setdefault(index, []).append(event.text)
        elif isinstance(event, Finished):
            piece = self._form.pieces[index]
            self._segments[index] = piece.segment(event.answer.text, event.answer.receipt)
        yield from self._ready()
        while self._at in self._segments:
            self._has_written |= self._is_begun
            self._at, self._is_past, self._is_begun = self._at + 1, False, False
            yield from self._ready()

    def _ready(self) -> Iterator[str]:
        """Yield what there is of the piece that is written."""
        text = "".join(self._texts.pop(self._at, ()))
        if not text:
            return
        if self._form.pieces[self._at].sentences:  # which are known once they are whole
            if self._at not in self._segments:
                self._texts[self._at] = [text]
                return
            text = self._segments[self._at].text
        heading = self._form.pieces[self._at].heading
        if heading and not self._is_past:
            if heading not in text and self._at not in self._segments:
                self._texts[self._at] = [text]
                return
            text, self._is_past = text.rpartition(heading)[2], True
        if not self._is_begun:
            text = text.lstrip()
            if not text:
                return
            text = f" {text}" if self._has_written else text
            self._is_begun = True
        yield sse.event({"type": "transcript.text.delta", "delta": text})

    def end(self) -> Iterator[str]:
        segments = [self._segments[index] for index in sorted(self._segments)]
        result = self._form.transcription(segments)
        done = {"type": "transcript.text.done", "text": result.text, "usage": usage(result)}
        yield sse.event(done)
