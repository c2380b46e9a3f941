"""`mtmd transcribe FILES`: what is said in audio files, as text, subtitles or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtmd.base.errors import OptionError
from mtmd.base.text import for_terminal, plural
from mtmd.commands.shared import (
    add_answer_arguments,
    add_model_arguments,
    add_quiet_argument,
    add_remote_argument,
    answer_options,
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
mtmd transcribe rede.wav -m org/name --translate     # into English"""
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
        help="audio files, WAV, MP3, FLAC, Ogg, Opus, M4A or WebM, and videos for their sound",
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
    chosen = answer_options(args)  # a wrong one is told before a model is loaded for it
    from mtmd.terminal.status_line import Status
    from mtmd.transcription import TranscriptionRequest, language_name

    if args.language is not None:
        language_name(args.language)
    paths = _outputs(args)
    _check_files(args.files, args.allow_remote_media)
    model = load_from(args)
    request, status = TranscriptionRequest(args.language, args.translate, args.hint), Status()
    for source, path in zip(args.files, paths, strict=True):
        status.say("reading the audio")
        result = None
        try:
            for result in model.transcribing(source, request, **chosen):
                end = result.segments[-1].end
                status.say(f"{end:.0f} of {result.seconds:.0f} s written down")
        finally:
            status.clear()
        assert result is not None, "audio has one piece at least"
        text = _text(result, source, args.format)
        if path is None:
            sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
        else:
            _write(path, text)
        if not args.quiet:
            print(_receipt(result, source, model, path), file=sys.stderr)
    return 0


def _check_files(files: Sequence[str], remote: bool) -> None:
    """Raises AudioError for the first that is not there, or is no audio."""
    from mtmd.clip.audio.recording import AudioFile
    from mtmd.prompt.audio_input import load_audio
    from mtmd.prompt.url_kinds import is_url

    for source in files:
        if not (remote and is_url(source)):
            recording = load_audio(source)
            if isinstance(recording, AudioFile):
                recording.check_kind()


def _outputs(args: argparse.Namespace) -> list[Path | None]:
    """Return where each is written, None for standard output. Raises OptionError for two files of
    one name, and a folder that cannot be made.
    """
    if args.out is None:
        return [None] * len(args.files)
    folder = Path(args.out).expanduser()
    names = [f"{Path(file).stem}{SUFFIXES[args.format]}" for file in args.files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(
            f"--out: found two files that would be written as {twice}, expected other names"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out: {folder} cannot be made ({error.strerror})") from error
    return [folder / name for name in names]


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
    count = len(result.segments)
    text = (
        f"{source}: {result.seconds:.1f} s in {plural(count, 'piece')}, {tokens} "
        f"audio tokens, {model.name} on {model.backends[0].name}"
        f"{f', written to {path}' if path else ''}"
    )
    return styled(wrapped(text, sys.stderr), DIM, sys.stderr)
