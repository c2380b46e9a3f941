"""Options that several commands have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from mtmd.base.garbage import without_collections
from mtmd.base.options import defaults_of, options_of
from mtmd.clip.video.frame_request import FrameRequest, check_request
from mtmd.commands.arguments import add_options, options_in
from mtmd.commands.completion import offers, offers_models
from mtmd.options.answer import CONVERSATION, AnswerOptions
from mtmd.options.load import LoadOptions
from mtmd.terminal.status_line import Status

MODEL_HELP = (
    "a checkpoint folder, a GGUF file, org/name or org/name:Q4_K_M on the Hugging Face hub, or demo"
)
WHOLE = "-1 for the end of the context"
STDIN = "-"  # in place of a picture's path
STDIN_BYTES_MAX = 64 << 20  # as of a picture's file
IN_FILE = "@"  # before the path of a file in which a text stands
TEXT_BYTES_MAX = 1 << 20
TEXT_HELP = "@FILE reads it from a file, - from standard input, and @@ begins a text with @"


def add_model_named(sub: argparse.ArgumentParser) -> None:
    """The model of a command that takes nothing else: as its argument, or, as in all others, by
    -m.
    """
    named = sub.add_argument(
        "model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP} (default: demo)"
    )
    by_option = sub.add_argument(
        "-m", "--model", dest="models_by_option", action="append", metavar="MODEL", help="the same"
    )
    offers_models(named)
    offers_models(by_option)


def settle_model(args: argparse.Namespace) -> None:
    """The models given by -m where they stand without it, too. Raises OptionError for more than a
    command takes.
    """
    given = getattr(args, "models_by_option", None)
    if not given:
        return
    from mtmd.base.errors import OptionError

    locations = ("model",) if hasattr(args, "model") else ("a", "b")
    result = [
        *(m for m in (getattr(args, location) for location in locations) if m is not None),
        *given,
    ]
    if len(result) > len(locations):
        maximum = "one model" if len(locations) == 1 else "two models"
        raise OptionError(f"--model: found {', '.join(result)[:200]}, expected {maximum}")
    for location, name in zip(locations, result, strict=False):
        setattr(args, location, name)


def add_model_arguments(
    sub: argparse.ArgumentParser, model: bool = True, isolate: bool = False
) -> None:
    """All of `LoadOptions`, `isolate` where it can be chosen, and, with `model`, which model."""
    group = sub.add_argument_group("model and device")
    if model:
        named = group.add_argument(
            "-m", "--model", metavar="MODEL", help=f"{MODEL_HELP} (default: demo)"
        )
        offers_models(named)
    left_out = ("parallel", "allow_remote_media") + (() if isolate else ("isolate",))
    add_options(group, LoadOptions, leave_out=left_out)


DEFAULT_PROMPT = "Describe the image."


def add_prompt_argument(sub: argparse.ArgumentParser, about: str = "") -> None:
    sub.add_argument(
        "-p",
        "--prompt",
        default=DEFAULT_PROMPT,
        metavar="TEXT",
        help=f"what to ask{about}; {TEXT_HELP} (default: %(default)s)",
    )


def prompt_of(args: argparse.Namespace, chosen: Mapping[str, Any]) -> str | None:
    """The prompt, None where a task among the `chosen` options stands in the place of the
    default.
    """
    by_task = chosen.get("task") is not None and args.prompt is DEFAULT_PROMPT
    return None if by_task else str(args.prompt)


def add_system_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--system", default="", metavar="TEXT", help="a system prompt; @FILE reads it from a file"
    )


def read_texts(args: argparse.Namespace, names: Sequence[str] = ("prompt", "system")) -> None:
    """Read what stands in files, or comes from standard input, in the place of `--prompt` and
    `--system`. Raises OptionError.
    """
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    for name, word in given.items():
        if word == STDIN:
            _check_stdin(name, args)
            setattr(args, name, _text_of(name, sys.stdin.buffer, "standard input"))
        elif word.startswith(IN_FILE * 2):
            setattr(args, name, word[1:])
        elif word.startswith(IN_FILE):
            setattr(args, name, _text_in(name, word))


def _check_stdin(name: str, args: argparse.Namespace) -> None:
    """Raises OptionError where standard input is to be something else, or is a person."""
    from mtmd.base.errors import OptionError

    if not hasattr(args, "prompt"):
        raise OptionError(f"{name}: found -, expected a text: standard input is what is said")
    others = [getattr(args, other, ()) for other in ("images", "image", "list")]
    if [args.prompt, getattr(args, "system", ""), *chain(*others)].count(STDIN) > 1:
        raise OptionError(f"{name}: found - twice, expected once: standard input is read once")
    if sys.stdin.isatty():
        raise OptionError(f"{name}: found - and a terminal, expected a file: give @FILE, or < FILE")


def _text_in(name: str, word: str) -> str:
    from mtmd.base.errors import OptionError

    path = word.removeprefix(IN_FILE)
    try:
        with Path(path).expanduser().open("rb") as file:
            return _text_of(name, file, path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise OptionError(
            f"{name}: {path!r:.200} cannot be read ({reason}), expected a file with the text; for "
            f"a text that begins with @ give {IN_FILE}{word:.40}"
        ) from error


def _text_of(name: str, file: BinaryIO, where: str) -> str:
    """Return it without the line breaks at its end."""
    from mtmd.base.errors import OptionError

    data = file.read(TEXT_BYTES_MAX + 1)
    if len(data) > TEXT_BYTES_MAX:
        raise OptionError(
            f"{name}: found more than {TEXT_BYTES_MAX:,} bytes in {where}, expected at most that"
        )
    try:
        text = data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"{name}: found no UTF-8 text in {where}, expected one") from error
    if not text.strip():
        raise OptionError(f"{name}: found nothing in {where}, expected a text")
    return text


def add_ahead_argument(sub: argparse.ArgumentParser) -> None:
    """Add the argument to commands for many pictures."""
    ahead = sub.add_argument(
        "--prepare-ahead",
        metavar="N",
        help=(
            "pictures to read and resize in advance, 1 to 64; auto: as many as keep the device "
            "busy, within cores and memory (default: auto)"
        ),
    )
    offers(ahead, ("auto",))


def chosen_ahead(args: argparse.Namespace) -> int | None:
    """None for auto. Raises OptionError."""
    from mtmd.service.prepare_ahead import prepare_ahead

    word = args.prepare_ahead or "auto"
    return prepare_ahead(int(word) if word.isdecimal() and len(word) < 9 else word)


def add_answer_arguments(sub: argparse.ArgumentParser, conversation: bool = False) -> None:
    """All of `AnswerOptions` that concern one answer. `conversation`: the model's own sampling
    holds, and an answer ends where it ends.
    """
    own = CONVERSATION | {"temperature": "the model's own, or 0"} if conversation else {}
    names = dict.fromkeys(("max_tokens", "detail", *options_of(AnswerOptions)))
    group = sub.add_argument_group("answer")
    add_options(group, AnswerOptions, names, defaults=own, absent=True)


def add_random_weights(parser: argparse._ActionsContainer) -> None:
    """Add the argument to commands that need a model's shape only."""
    parser.add_argument(
        "--random-weights",
        metavar="CONFIG",
        help=(
            "use a model's shape with random weights: a config.json, or a published model's "
            "name; list shows all names"
        ),
    )


def list_cards() -> int:
    """Print the GPUs that `--target` knows by name."""
    from mtmd.kernels.estimate.cards import CARDS

    print(f"{'card':<11}{'target':<13}{'GiB':>5}{'GB/s':>7}{'bf16':>7}{'fp32':>6} TFLOP/s")
    for card in CARDS.values():
        assert card.memory_bytes and card.bandwidth and card.flops_16 and card.flops_32
        print(
            f"{card.name:<11}{card.target:<13}{card.memory_bytes / 2**30:>5.0f}"
            f"{card.bandwidth / 1e9:>7,.0f}{card.flops_16 / 1e12:>7,.0f}"
            f"{card.flops_32 / 1e12:>6.0f}  {card.title}"
        )
    return 0


def add_list_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--list",
        action="append",
        default=[],
        metavar="FILE",
        help="a file with one path or URL per line, - for stdin; may be repeated",
    )


def add_output_arguments(sub: argparse.ArgumentParser) -> None:
    """Add those of commands that compute vectors or scores."""
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--quiet", action="store_true", help="print no receipt on stderr")


def add_quiet_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--quiet", action="store_true", help="print no receipt and no thoughts on stderr"
    )


def add_video_arguments(sub: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Return which frames of videos are seen."""
    video = sub.add_argument_group("videos")
    add_options(video, FrameRequest)
    return video


def frame_request(args: argparse.Namespace) -> FrameRequest:
    """Return what was chosen of `FrameRequest`. Raises OptionError."""
    request = FrameRequest(**options_in(args, FrameRequest))
    check_request(request)
    return request


def with_frames_chosen(images: Sequence[Any], args: argparse.Namespace) -> list[Any]:
    """The videos among `images` with what was asked for. Raises OptionError, also where something
    was asked for and there is none.
    """
    chosen, usual = options_in(args, FrameRequest), defaults_of(FrameRequest)
    given = [name for name, value in chosen.items() if value not in (None, usual[name])]
    if not given:
        return list(images)
    from mtmd.base.errors import OptionError
    from mtmd.prompt.video_input import VideoInput, is_video

    made = [VideoInput(one, **chosen) if is_video(one) else one for one in images]
    if not any(isinstance(one, VideoInput) for one in made):
        raise OptionError(f"{given[0]}: found no video, expected one to ask about")
    return made


def answer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was chosen of `AnswerOptions`, checked. Raises OptionError."""
    from mtmd.options.by_name import options

    answering = options_in(args, AnswerOptions)
    if "json_schema" in answering:
        answering["json_schema"] = _read_schema(answering["json_schema"])
    options(AnswerOptions, answering)
    return answering


def _read_schema(path: str) -> str:
    """The text of a schema: of the file, or what stands in its place."""
    if path.lstrip().startswith("{"):
        return path
    from mtmd.base.errors import OptionError
    from mtmd.llm.sampling.json_schema import SCHEMA_BYTES_MAX

    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(SCHEMA_BYTES_MAX + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise OptionError(
            f"json-schema {path}: cannot be read ({reason}), expected a file with a JSON schema"
        ) from error


def pictures_named(words: Sequence[str], remote: bool = False) -> list[Any]:
    """Each of the paths, which are of files that are there, of the data URLs, and, with `remote`,
    of the addresses; what comes from a pipe, in place of STDIN or by its path, as bytes. Nothing
    heavy is imported for it, nothing fetched. Raises ImageError.
    """
    from mtmd.base.errors import ImageError
    from mtmd.prompt.picture_paths import check_sources

    if words.count(STDIN) > 1:
        raise ImageError(f"{STDIN}: found twice, expected once: standard input is read once")
    files = [word for word in words if not is_piped(word)]
    check_sources(files, remote)
    return [from_pipe(word) if is_piped(word) else word for word in words]


def is_piped(word: str) -> bool:
    """Return whether it is STDIN, or a pipe, as a shell makes one of <(a command)."""
    return word == STDIN or _is_pipe(word)


def _is_pipe(word: str) -> bool:
    try:
        return Path(word).is_fifo()
    except (OSError, ValueError):  # a data URL, which is too long for a path
        return False


def from_pipe(
    word: str, expected: str = "a picture", example: str = "describe - < photo.jpg"
) -> Any:
    """Read standard input where `word` is STDIN, else the pipe of that name, once: a file with its
    name. Raises ImageError where that is not `expected`.
    """
    from io import BytesIO

    from mtmd.base.errors import ImageError

    name, advice = word, "check the command in <(...)"
    if word != STDIN:
        with Path(word).open("rb") as pipe:
            file = BytesIO(_whole(pipe))
    else:
        name, advice = "standard input", "check the command before the |"
        if sys.stdin.isatty():
            raise ImageError(
                f"{name}: found a terminal, expected {expected}; give one, as in 'mtmd {example}'"
            )
        file = BytesIO(_whole(sys.stdin.buffer))
    file.name = name
    if not file.getbuffer().nbytes:
        raise ImageError(f"{name}: found nothing, expected {expected}; {advice}")
    return file


def _whole(pipe: BinaryIO) -> bytes:
    """All that comes from a pipe: one byte more at most than a picture may have, or, of what begins
    as a video or audio, than a file of that may.
    """
    data = pipe.read(STDIN_BYTES_MAX + 1)
    if len(data) > STDIN_BYTES_MAX:
        from mtmd.clip.audio import limits as audio
        from mtmd.clip.audio.signatures import HEAD_BYTES, audio_format
        from mtmd.clip.video import limits as video
        from mtmd.clip.video.signatures import is_container, video_format

        head = data[:HEAD_BYTES]
        if audio_format(head):
            data += pipe.read(audio.DEFAULT_LIMITS.max_bytes + 1 - len(data))
        elif is_container(video_format(head)):
            data += pipe.read(video.DEFAULT_LIMITS.max_bytes + 1 - len(data))
    return data


def add_remote_argument(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LoadOptions, ["allow_remote_media"])


def piped_picture(words: Sequence[str], lists: Sequence[str] = ()) -> bytes | None:
    """Return what standard input holds where one of `words` stands for it, None where none does.
    Raises ImageError, also where it is to be a list as well.
    """
    from mtmd.base.errors import ImageError

    if STDIN not in words:
        return None
    if words.count(STDIN) + lists.count(STDIN) > 1:
        raise ImageError(f"{STDIN}: found twice, expected once: standard input is read once")
    return bytes(from_pipe(STDIN).getvalue())


def check_loading(args: argparse.Namespace) -> bool:
    """Return whether the model the options name is on this disk. Raises MtmdError for an option out
    of its range, and for files that are not there. Without torch.
    """
    from mtmd.chat_template.built_in_templates import template_file
    from mtmd.checkpoint.hub import check_name, is_demo
    from mtmd.kernels.checkpoint.magic import first_bytes
    from mtmd.options.by_name import options

    settings = options(LoadOptions, options_in(args, LoadOptions))
    is_here = is_demo(args.model) or check_name(args.model)
    template = settings.chat_template and template_file(settings.chat_template)
    for file in (settings.mmproj, template):
        if file is not None:
            first_bytes(Path(file).expanduser())
    return is_here


def load_from(
    args: argparse.Namespace, parallel: int | None = None, *, answers: bool = True
) -> Any:
    """Load the model that the options name. `parallel` is the number of answers at once of a
    command without that option, None for the default: memory holds a full cache for each.
    `answers` as of `open_checkpoint`. Raises MtmdError; for what `check_loading` sees at once,
    before torch is imported.
    """
    if parallel is not None:
        args.parallel = parallel
    from mtmd.checkpoint.hub import is_demo

    is_here = check_loading(args)
    shown = "the demo model" if is_demo(args.model) else args.model
    with without_collections(), loading(shown) as status:
        from mtmd.loading import load, load_alongside

        if not is_here:
            status.clear()  # the hub's own bars come in its place
        chosen = options_in(args, LoadOptions)
        if answers:
            model = load(args.model, progress=sys.stderr.isatty(), **chosen)
        else:
            model = load_alongside(
                args.model, progress=sys.stderr.isatty(), answers=False, **chosen
            )
    settle_threads(args.threads, [model])
    return model


@contextmanager
def loading(what: str) -> Iterator[Status]:
    """Show on a terminal a line that says what takes its time, and goes away."""
    status = Status()
    status.say(f"loading {what} ...")
    try:
        yield status
    finally:
        status.clear()


def warmed_up(model: Any) -> Any:
    """The report of `model.warm_up()`. While programs are compiled for a GPU, a line on stderr says
    how far, and goes away.
    """
    from mtmd.model import Model

    if not isinstance(model, Model):
        return model.warm_up()
    with compiling() as progress:
        return model.warm_up(progress)


@contextmanager
def compiling() -> Iterator[Callable[[int, int], None]]:
    """Told of programs done, and of all, it shows them on a line that goes away."""
    status = Status()
    try:
        yield lambda done, total: status.say(f"GPU programs made ready: {done} of {total}")
    finally:
        status.clear()


def settle_threads(requested: int | None, models: Sequence[Any]) -> None:
    """One thread for very small models, unless a number was asked for."""
    from mtmd.kernels.resources.threads import ask_threads
    from mtmd.openmp import ONE_THREAD_BYTES

    if requested is None and all(
        model.checkpoint.weight_bytes < ONE_THREAD_BYTES for model in models
    ):
        ask_threads(1, "as the model is very small")
