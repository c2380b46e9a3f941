"""Audio written down: cut into pieces that the model takes, each asked about, and their texts put
together, with the times of the pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from mtmd.base.errors import AudioError, OptionError
from mtmd.base.spelling import did_you_mean
from mtmd.clip.audio.audio import Audio, AudioFacts
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.pieces import pieces
from mtmd.clip.audio.recording import GivenSamples
from mtmd.prompt.conversation import Message
from mtmd.receipt import Receipt

S = TypeVar("S")
LANGUAGES = {  # ISO 639-1, and of languages without one 639-3
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian",
    "bn": "Bengali", "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish",
    "de": "German", "el": "Greek", "en": "English", "es": "Spanish", "et": "Estonian",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "gl": "Galician",
    "gu": "Gujarati",
    "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian",
    "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ka": "Georgian",
    "kk": "Kazakh", "kn": "Kannada", "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian",
    "mi": "Maori", "mk": "Macedonian", "ml": "Malayalam", "mr": "Marathi", "ms": "Malay",
    "ne": "Nepali", "nl": "Dutch", "no": "Norwegian", "pa": "Punjabi", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian",
    "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai",
    "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese",
    "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
PIECE_TOKENS = 1024  # of the text of a piece, where nobody says
FORMATS = ("text", "json", "verbose_json", "srt", "vtt")
HINT_CHARS = 4096


@dataclass(frozen=True)
class TranscriptionRequest:
    """`language`: that is spoken, or, of a translation, that is written: an ISO 639-1 code, or its
    English name; None for what the model finds, English for a translation. `hint`: words that may
    occur.
    """

    language: str | None = None
    translate: bool = False
    hint: str = ""

    def prompt(self, instructions: Instructions) -> str:
        """Return what the model is told. Raises OptionError for a language that is not known."""
        name = None if self.language is None else language_name(self.language)
        if self.translate:
            text = instructions.translate.format(language=name or "English")
        elif name:
            text = instructions.transcribe_in.format(language=name)
        else:
            text = instructions.transcribe
        hint = "" if instructions.hint_is_system else self.hint
        context = f"Context: {hint}" if hint.strip() else ""
        return "\n\n".join(part for part in (text, context) if part)

    def begun(self, instructions: Instructions) -> str:
        """Return what the answer goes on from. Raises OptionError as `prompt` does."""
        if self.language is None or self.translate:
            return ""
        return instructions.begun.format(language=language_name(self.language))


@dataclass(frozen=True)
class Segment:
    """The text of a piece, from `start` to `end` seconds: the piece's own times, for the model
    gives none.
    """

    start: float
    end: float
    text: str
    receipt: Receipt


@dataclass(frozen=True)
class Transcription:
    """`language`: that was requested, None where the model was to find it. `notes`: what was found
    in the file, such as an end before its time.
    """

    segments: tuple[Segment, ...]
    seconds: float
    language: str | None = None
    translated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(segment.text for segment in self.segments if segment.text)

    def asdict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "seconds": self.seconds,
            "language": self.language,
            "translated": self.translated,
            "notes": list(self.notes),
            "segments": [
                {**asdict(segment), "receipt": segment.receipt.asdict()}
                for segment in self.segments
            ],
        }

    def written(self, form: str) -> str:
        """Return it in one of `FORMATS`."""
        if form == "srt":
            return self._subtitles("", ",", numbered=True)
        if form == "vtt":
            return self._subtitles("WEBVTT\n\n", ".", numbered=False)
        if form == "text":
            return f"{self.text}\n"
        body = self.asdict() if form == "verbose_json" else {"text": self.text}
        return json.dumps(body, ensure_ascii=False) + "\n"

    def _subtitles(self, head: str, point: str, numbered: bool) -> str:
        spoken = [segment for segment in self.segments if segment.text]
        cues = (
            f"{f'{number}' + chr(10) if numbered else ''}{_clock(segment.start, point)} --> "
            f"{_clock(segment.end, point)}\n{_cue(segment.text)}\n\n"
            for number, segment in enumerate(spoken, 1)
        )
        return head + "".join(cues)


@dataclass(frozen=True)
class AudioPiece:
    """A piece of audio to be asked about, from `start` to `end` seconds, with `options` that the
    answer needs; `heading` ends what the model says before the text, if it does, and `sentences`
    begin one in which it quotes the text.
    """

    start: float
    end: float
    messages: list[Message]
    heading: str = ""
    sentences: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        begins = self.messages[-1]["role"] == "assistant"
        return {"continue_final_message": True} if begins else {}

    def segment(self, text: str, receipt: Receipt) -> Segment:
        """Return what was written down of it."""
        if self.heading and self.heading in text:
            _, _, text = text.partition(self.heading)
        text = " ".join(text.split())
        return Segment(self.start, self.end, self._unquoted(text), receipt)

    def _unquoted(self, text: str) -> str:
        """The text that a sentence quotes, if it does."""
        begun = next((one for one in self.sentences if text.startswith(one)), "")
        quoted = text[len(begun) :].strip().removesuffix(".")
        if self.sentences and len(quoted) > 1 and quoted[0] == quoted[-1] and quoted[0] in "'\"":
            return quoted[1:-1].strip()
        return quoted if begun else text


def audio_pieces(
    audio: Audio, instructions: Instructions, request: TranscriptionRequest
) -> list[AudioPiece]:
    """Audio in pieces, each with the question about it. Raises OptionError."""
    prompt, begun = request.prompt(instructions), request.begun(instructions)
    rate, made, heading = audio.rate, [], "" if begun else instructions.heading
    system_text = "" if request.translate else instructions.system
    if instructions.hint_is_system and request.hint.strip():
        system_text = request.hint
    system: list[Message] = [{"role": "system", "content": system_text}] if system_text else []
    for start, stop in pieces(audio.samples, rate, instructions.seconds):
        part = {"type": "audio", "audio": GivenSamples(audio.samples[start:stop], rate)}
        content = [part, *([{"type": "text", "text": prompt}] if prompt else [])]
        if instructions.audio_last:
            content.reverse()
        messages: list[Message] = [*system, {"role": "user", "content": content}]
        if begun:
            messages.append({"role": "assistant", "content": begun})
        made.append(
            AudioPiece(start / rate, stop / rate, messages, heading, instructions.sentences)
        )
    return made


@dataclass(frozen=True)
class AudioPart:
    """A piece of one of several recordings, which is that of `index`, and what is known of its
    file; or, without a piece, why that cannot be read.
    """

    index: int
    facts: AudioFacts | AudioError
    piece: AudioPiece | None = None
    is_last: bool = True


def audio_parts(
    sources: Iterable[S],
    read: Callable[[S], Audio],
    instructions: Instructions,
    request: TranscriptionRequest,
) -> Iterator[AudioPart]:
    """The pieces of all recordings, each of which is read when its first piece is needed. Raises
    OptionError.
    """
    for index, source in enumerate(sources):
        try:
            audio = read(source)
        except AudioError as error:
            yield AudioPart(index, error)
            continue
        made = audio_pieces(audio, instructions, request)
        for number, piece in enumerate(made, 1):
            yield AudioPart(index, audio.facts, piece, number == len(made))


def language_name(language: str) -> str:
    """The English name of a language by its code, or by that name. Raises OptionError."""
    key = language.strip().lower()
    names = {name.lower(): name for name in LANGUAGES.values()}
    name = LANGUAGES.get(key.partition("-")[0]) or names.get(key)
    if name is None:
        near = did_you_mean(key, (*names, *LANGUAGES))
        raise OptionError(
            f"language: found {language!r:.40}, expected an ISO 639-1 code such as de, or the "
            f"English name of a language{near}"
        )
    return name


def _clock(seconds: float, point: str) -> str:
    ms = round(seconds * 1000)
    hours, ms = divmod(ms, 3_600_000)
    minutes, ms = divmod(ms, 60_000)
    whole, ms = divmod(ms, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{ms:03}"


def _cue(text: str) -> str:
    """A text without what ends a cue, or says when one is."""
    return " ".join(text.split()).replace("-->", "→")
