"""`mtmd transcribe FILES`: what is said in audio files, as text, subtitles or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mtmd.base.errors import AudioError, ImageError, OptionError
from mtmd.base.text import for_terminal, plural
from mtmd.commands.argument_parser import terminal_line
from mtmd.commands.shared import (
    STDIN,
    add_answer_arguments,
    add_model_arguments,
    add_quiet_argument,
    add_remote_argument,
    answer_options,
    from_pipe,
    is_piped,
    load_from,
)

if TYPE_CHECKING:  # torch takes its time to load
    from mtmd.model import Model
    from mtmd.transcription import Transcription

HELP = "Write down what is said in audio files."
EXAMPLES = """\
mtmd transcribe talk.mp3 -m org/name
mtmd transcribe talk.mp3 -m org/name --language de --format srt > talk.srt
mtmd transcribe *.m4a -m org/name --out notes/       # notes/NAME.txt for each
mtmd transcribe rede.wav -m org/name --translate     # into English
ffmpeg -i film.mkv -f wav - | mtmd transcribe - -m org/name"""
SHORT = (
    *("--model", "--format", "--language", "--translate", "--out", "--hint"),
    *("--max-tokens", "--quiet", "--device", "--context"),
)
FORMATS = ("text", "srt", "vtt", "json")
SUFFIXES = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="audio files, WAV, MP3, FLAC, Ogg, Opus, M4A or WebM, and videos for their sound; - "
        "reads one from standard input",
    )
    sub.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="what is written; srt and vtt have the times of the pieces in which the model heard "
        "it, json these and the receipts (default: text)",
    )
    sub.add_argument(
        "--language",
        metavar="NAME",
        help="language that is spoken, as de or German; with --translate, that is written "
        "(default: the model finds it; English)",
    )
    sub.add_argument("--translate", action="store_true", help="translate what is said")
    sub.add_argument(
        "--hint", default="", metavar="TEXT", help="names and words that may occur, for spelling"
    )
    sub.add_argument(
        "--out", metavar="DIR", help="write a file for each into this folder, which is made"
    )
    add_remote_argument(sub)
    add_quiet_argument(sub)
    add_answer_arguments(sub)
    add_model_arguments(sub, isolate=True)


def run(args: argparse.Namespace) -> int:
    """0, or 1 where one of several files cannot be read to its end."""
    chosen = answer_options(args)  # a wrong one is told before a model is loaded for it
    from mtmd.terminal.status_line import Status
    from mtmd.transcription import TranscriptionRequest, language_name

    if args.language is not None:
        language_name(args.language)
    paths = _outputs(args)
    sources = _sources(args.files, args.allow_remote_media)
    model = load_from(args)
    request, failed = TranscriptionRequest(args.language, args.translate, args.hint), 0
    status, count = Status(), len(sources)
    status.say("reading the audio")
    try:
        for index, result, is_last in model.transcribing(sources, request, **chosen):
            if not is_last:
                end = result.segments[-1].end
                file = f", file {index + 1} of {count}" if count > 1 else ""
                status.say(f"{end:.0f} of {result.seconds:.0f} s written down{file}")
                continue
            status.clear()
            name, path = args.files[index], paths[index]
            if isinstance(result, AudioError):
                if count == 1:
                    raise result
                failed += 1
                print(f"mtmd transcribe: {terminal_line(str(result))}", file=sys.stderr)
                continue
            text = _text(result, name, args.format)
            if path is None:
                if count > 1 and args.format == "text":
                    text = f"==> {name} <==\n{text}"
                sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()
            else:
                _write(path, text)
            if not args.quiet:
                print(_receipt(result, name, model, path), file=sys.stderr)
    finally:
        status.clear()
    if failed:
        print(f"mtmd transcribe: {plural(failed, 'file')} of {count} failed", file=sys.stderr)
    return 1 if failed else 0


def _sources(words: Sequence[str], remote: bool) -> list[Any]:
    """Each file, or what comes from a pipe in its place. Raises AudioError for the first that is
    not there, or is no audio.
    """
    from mtmd.clip.audio.recording import AudioFile
    from mtmd.prompt.audio_input import load_audio
    from mtmd.prompt.url_kinds import is_url

    if words.count(STDIN) > 1:
        raise AudioError(f"{STDIN}: found twice, expected once: standard input is read once")
    result: list[Any] = []
    for word in words:
        source: Any = word
        if is_piped(word):
            try:
                source = from_pipe(word, "audio", "transcribe - < talk.mp3")
            except ImageError as error:
                raise AudioError(str(error)) from None
            source = load_audio(source)
        result.append(source)
        recording = None if remote and is_url(word) else load_audio(source)
        if isinstance(recording, AudioFile):
            recording.check_kind()
    return result


def _outputs(args: argparse.Namespace) -> list[Path | None]:
    """Return where each is written, None for standard output. Raises OptionError for two files of
    one name, and a folder that cannot be made.
    """
    if args.out is None:
        if len(args.files) > 1 and args.format in ("srt", "vtt"):
            raise OptionError(
                f"--format: found {args.format} and {len(args.files)} files, expected one, or "
                "--out DIR, which has a file of subtitles for each"
            )
        return [None] * len(args.files)
    folder = Path(args.out).expanduser()
    names = [f"{_stem(file)}{SUFFIXES[args.format]}" for file in args.files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(
            f"--out: found two files that would be written as {twice}, expected other names"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out: {folder} cannot be made ({error.strerror})") from error
    return [folder / name for name in names]


def _stem(word: str) -> str:
    """Return how the transcript of a file is called, without its ending."""
    from mtmd.prompt.url_kinds import is_address, is_data_url

    if word == STDIN or is_data_url(word):
        return "audio"
    try:
        path = urlsplit(word).path if is_address(word) else word
    except ValueError:  # whoever fetches it says what is wrong
        return "audio"
    return Path(path).stem or "audio"


def _text(result: Transcription, source: str, form: str) -> str:
    if form == "json":
        return json.dumps({"file": source, **result.asdict()}, ensure_ascii=False) + "\n"
    return result.written(form)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--out: {path} cannot be written ({error.strerror})") from error


def _receipt(result: Transcription, source: str, model: Model, path: Path | None) -> str:
    from mtmd.terminal.wrap import DIM, styled, wrapped

    tokens = sum(segment.receipt.audio_tokens for segment in result.segments)
    count = plural(len(result.segments), "piece")
    notes = list(result.notes)
    if cut := sum(segment.receipt.finish == "length" for segment in result.segments):
        notes.append(f"the text of {plural(cut, 'piece')} is cut at --max-tokens")
    text = (
        f"{source}: {result.seconds:.1f} s in {count}, {tokens} audio tokens, {model.name} on "
        f"{model.backends[0].name}{f', written to {path}' if path else ''}"
        f"{''.join(f'; {note}' for note in notes)}"
    )
    return styled(wrapped(text, sys.stderr), DIM, sys.stderr)
