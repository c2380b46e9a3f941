"""Options that several commands have."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from mtmd.commands.completion import offers, offers_models
from mtmd.terminal.status_line import Status

# Below this, products are too small to share between threads: on a busy machine waiting for each
# other takes most of the time.
SMALL_BYTES = 64 << 20

_OF_A_SERVER = ("parallel", "isolate")  # options that `mtmd serve` sets for any model

MODEL_HELP = (
    "a checkpoint folder, a GGUF file, org/name or org/name:Q4_K_M on the Hugging Face hub, or demo"
)
WHOLE = "-1 for the end of the context"
STDIN = "-"  # in place of a picture's path
STDIN_BYTES_MAX = 64 << 20  # as of a picture's file
IN_FILE = "@"  # before the path of a file in which a text stands
TEXT_BYTES_MAX = 1 << 20
TEXT_HELP = "@FILE reads it from a file, - from standard input, and @@ begins a text with @"


def add_device_arguments(group: argparse._ArgumentGroup) -> None:
    """Where a model runs and how: what every kind of model has."""
    device = group.add_argument(
        "--device",
        metavar="DEVICE",
        default="auto",
        help="auto, cpu, cuda:N, mps or xpu:N; several of cuda:N and cpu between commas with "
        "--split or --fit (default: auto)",
    )
    offers(device, ("auto", "cpu", "cuda", "mps", "xpu"))
    dtype = group.add_argument(
        "--dtype",
        metavar="TYPE",
        default="auto",
        help="the type that is computed in: fp32 (the tokens of transformers in fp32), bf16 (half "
        "the memory, prompts read two to three times faster, rounded to three digits) or auto: "
        "bf16 where the device multiplies it, fp32 elsewhere and for models below 16 MiB (default: "
        "auto)",
    )
    offers(dtype, ("auto", "bf16", "fp32"))
    flash = group.add_argument(
        "--flash-attn", metavar="WHEN", default="auto", help="auto, on or off (default: auto)"
    )
    offers(flash, ("auto", "on", "off"))
    group.add_argument(
        "--override-tensor",
        action="append",
        default=[],
        metavar="RE=DEVICE",
        help="run nodes whose name, or weight's name, matches RE on DEVICE; may be repeated",
    )
    group.add_argument(
        "--refuse",
        action="append",
        default=[],
        metavar="RULE",
        help="plan as if the device did not support OP, OP:head=72, OP:batch>1, OP:bf16 or "
        "OP:/NAME REGEX/; may be repeated",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (default: torch's choice, 1 for a very small model; decoding measures "
        "how many are best)",
    )


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

    places = ("model",) if hasattr(args, "model") else ("a", "b")
    found = [*(m for m in (getattr(args, place) for place in places) if m is not None), *given]
    if len(found) > len(places):
        most = "one model" if len(places) == 1 else "two models"
        raise OptionError(f"--model: found {', '.join(found)[:200]}, expected {most}")
    for place, name in zip(places, found, strict=False):
        setattr(args, place, name)


def add_preprocess_argument(group: argparse._ArgumentGroup) -> None:
    """Of what sees pictures."""
    where = group.add_argument(
        "--preprocess",
        metavar="WHERE",
        default="auto",
        help="resize and normalise pictures on the host, or auto: on a GPU where that gives the "
        "same to the bit (default: auto)",
    )
    offers(where, ("auto", "host"))


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
    group.add_argument(
        "--mmproj", metavar="FILE", help="the projector of a GGUF (default: the one beside it)"
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE|NAME",
        help="a Jinja chat template to use in place of the model's own, or the name of a built-in "
        "one (`chatml`, ...; docs/templates.md)",
    )
    add_device_arguments(group)
    group.add_argument(
        "--image-min-tokens",
        type=int,
        metavar="N",
        help="least tokens of one picture (default: the model's)",
    )
    group.add_argument(
        "--image-max-tokens",
        type=int,
        metavar="N",
        help="most tokens of one picture (default: the model's)",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="longest sequence in tokens, answer included (default: the model's, at most 8192)",
    )
    group.add_argument(
        "--tp",
        type=int,
        metavar="N",
        default=1,
        help="share every layer out among N processes, each with a GPU of its own where there are "
        "several (default: 1)",
    )
    split = group.add_argument(
        "--split",
        metavar="HOW",
        default="none",
        help="layer: each device of --device, or each GPU, has a run of layers; one GPU and the "
        "host where there is one (default: none)",
    )
    offers(split, ("none", "layer"))
    group.add_argument(
        "--tensor-split",
        metavar="SHARES",
        default="",
        help="the shares of --tp's processes or --split's devices, such as 3,1 (default: equal "
        "ones; of devices, by free memory)",
    )
    group.add_argument(
        "--fit",
        action="store_true",
        help="choose how the model lies in memory (one device, layers over several, --tp, keys and "
        "values on the host, part of the layers there), the first way that is predicted to fit",
    )
    group.add_argument(
        "--no-kv-offload",
        action="store_true",
        help="keep keys and values in the host's memory, and run the decoder's attention there",
    )
    group.add_argument(
        "--kernels",
        metavar="DIR",
        help="GPU programs compiled elsewhere, by 'mtmd warmup --target GPU --save DIR' (default: "
        "what MTMD_KERNELS names)",
    )
    vision = group.add_argument(
        "--vision-attention",
        metavar="KERNEL",
        default="auto",
        help="attention of the encoder on a GPU: triton (ours), torch (its own, where they take a "
        "node) or auto, what the warm-up has measured to be faster (default: auto)",
    )
    offers(vision, ("auto", "triton", "torch"))
    add_preprocess_argument(group)
    group.add_argument(
        "--speculate",
        metavar="HOW",
        default="auto",
        help="tokens of an answer to propose at once out of prompt and answer: auto (as many as "
        "pay), off or a number; answers are the same (default: auto)",
    )
    group.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="most memory of the device, or of each GPU, to take, like 8GiB; pictures are made "
        "smaller to fit (default: what is free)",
    )
    if isolate:
        group.add_argument(
            "--isolate",
            action="store_true",
            help="decode pictures, and follow JSON schemas, in worker processes with limits of "
            "memory and time; for files that others sent",
        )


def add_prompt_argument(sub: argparse.ArgumentParser, about: str = "") -> None:
    sub.add_argument(
        "-p",
        "--prompt",
        default="Describe the image.",
        metavar="TEXT",
        help=f"what to ask{about}; {TEXT_HELP} (default: %(default)s)",
    )


def add_system_argument(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--system",
        default="",
        metavar="TEXT",
        help="what the model is told before all else; @FILE reads it from a file",
    )


def read_texts(args: argparse.Namespace, names: Sequence[str] = ("prompt", "system")) -> None:
    """What stands in files, or comes from standard input, in the place of `--prompt` and
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
    """Without the line breaks at its end."""
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
    """Of what asks about many pictures."""
    ahead = sub.add_argument(
        "--prepare-ahead",
        metavar="N",
        help="pictures read and prepared beside those being answered, 1 to 64; auto: as many as "
        "keep the device from waiting, within cores and memory (default: auto)",
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
    length, way = ("-1", "model") if conversation else ("256", "greedy")
    own = "the model's own, or 0" if conversation else "0"
    answer = sub.add_argument_group("answer", argument_default=argparse.SUPPRESS)
    answer.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"longest answer, {WHOLE} (default: {length})"
    )
    detail = answer.add_argument(
        "--detail", metavar="HOW", help="auto, low (few tokens, no tiles) or high (default: auto)"
    )
    offers(detail, ("auto", "low", "high"))
    answer.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before TEXT; may be repeated",
    )
    answer.add_argument(
        "--ignore-eos", action="store_true", help="go on past the end-of-answer token"
    )
    answer.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 takes the most probable token, 1 draws (default: {own})",
    )
    sampling = answer.add_argument(
        "--sampling",
        metavar="WHICH",
        help="which of the model's own settings hold where no option is given: model (all), greedy "
        f"(its penalties), off (none); 'mtmd info' shows them (default: {way})",
    )
    offers(sampling, ("model", "greedy", "off"))
    answer.add_argument(
        "--stop-repeating",
        action="store_true",
        help="end an answer that says the same again and again",
    )
    answer.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="draw from the K most probable tokens (default: 0, off)",
    )
    answer.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the fewest tokens of probability P together (default: 1, off)",
    )
    answer.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="draw from tokens at least P times as probable as the best (default: 0)",
    )
    answer.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="above 1: make tokens already there less probable (default: 1, off)",
    )
    answer.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of the random draws (default: a new one, told in the receipt)",
    )
    think = answer.add_argument(
        "--think",
        metavar="HOW",
        help="on or off, or how much where the model knows that: minimal, low, medium, high, "
        "xhigh, max (default: what the model's template does)",
    )
    offers(think, ("on", "off", "low", "medium", "high"))
    answer.add_argument(
        "--think-budget",
        type=int,
        metavar="N",
        help="end the thought after N tokens, and begin the answer (default: no limit)",
    )
    answer.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables for the chat template, as a JSON object",
    )
    answer.add_argument(
        "--json-schema",
        metavar="FILE",
        help="a JSON schema that the answer follows, in a file or as it is; {} is any JSON",
    )


def add_video_arguments(sub: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which frames of videos are seen."""
    video = sub.add_argument_group("videos")
    video.add_argument(
        "--fps",
        type=float,
        metavar="N",
        help="frames a second that the model sees (default: the model's own)",
    )
    video.add_argument(
        "--max-frames",
        type=int,
        metavar="N",
        help="most frames of one video (default: the model's own, and what fits its context)",
    )
    video.add_argument(
        "--from",
        dest="start",
        type=seconds,
        metavar="TIME",
        help="leave out what is before: seconds, or as 1:30 or 1:02:30",
    )
    video.add_argument(
        "--to", dest="end", type=seconds, metavar="TIME", help="leave out what is after"
    )
    return video


def frame_request(args: argparse.Namespace) -> Any:
    """What was asked for, a `FrameRequest`. Raises OptionError."""
    from mtmd.prompt.video_input import REQUEST_NAMES, request_of

    return request_of({name: getattr(args, name) for name in REQUEST_NAMES})


def seconds(text: str) -> float:
    """Of "90", "90s", "1:30" or "1:02:30". Raises ValueError, as argparse has it."""
    total = 0.0
    for part in text.removesuffix("s").split(":"):
        if not part or not set(part) <= set("0123456789."):
            raise ValueError
        total = total * 60 + float(part)
    return total


def with_frames_chosen(images: Sequence[Any], args: argparse.Namespace) -> list[Any]:
    """The videos among `images` with what was asked for. Raises OptionError, also where something
    was asked for and there is none.
    """
    chosen = {name: getattr(args, name) for name in ("fps", "max_frames", "start", "end")}
    if all(value is None for value in chosen.values()):
        return list(images)
    from mtmd.base.errors import OptionError
    from mtmd.prompt.video_input import VideoInput, is_video

    made = [VideoInput(one, **chosen) if is_video(one) else one for one in images]
    if not any(isinstance(one, VideoInput) for one in made):
        names = {"max_frames": "max-frames", "start": "from", "end": "to"}
        given = next(name for name, value in chosen.items() if value is not None)
        raise OptionError(f"--{names.get(given, given)}: found no video, expected one to ask about")
    return made


def answer_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was chosen of `AnswerOptions`, checked. Raises OptionError."""
    from mtmd.config import AnswerOptions, options

    chosen = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(AnswerOptions)
        if hasattr(args, f.name)
    }
    if "json_schema" in chosen:
        chosen["json_schema"] = _read_schema(chosen["json_schema"])
    options(AnswerOptions, chosen)
    return chosen


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
    files = [word for word in words if word != STDIN and not _is_pipe(word)]
    check_sources(files, remote)
    return [
        _from_stdin() if word == STDIN else _from_pipe(word) if _is_pipe(word) else word
        for word in words
    ]


def _is_pipe(word: str) -> bool:
    """As a shell makes one of <(a command)."""
    try:
        return Path(word).is_fifo()
    except (OSError, ValueError):  # a data URL, which is too long for a path
        return False


def _from_pipe(word: str) -> Any:
    """As `_from_stdin`, of a pipe with a name, which can be read once."""
    from io import BytesIO

    from mtmd.base.errors import ImageError

    with Path(word).open("rb") as pipe:
        file = BytesIO(pipe.read(STDIN_BYTES_MAX + 1))
    file.name = word
    if not file.getbuffer().nbytes:
        raise ImageError(f"{word}: found nothing, expected a picture; check the command in <(...)")
    return file


def _from_stdin() -> Any:
    """The bytes of standard input, one more at most than a picture may have, as a file with its
    name.
    """
    from io import BytesIO

    from mtmd.base.errors import ImageError

    if sys.stdin.isatty():
        raise ImageError(
            "standard input: found a terminal, expected a picture; give one, as in "
            "'mtmd describe - < photo.jpg'"
        )
    file = BytesIO(sys.stdin.buffer.read(STDIN_BYTES_MAX + 1))
    file.name = "standard input"
    if not file.getbuffer().nbytes:
        raise ImageError(
            "standard input: found nothing, expected a picture; check the command before the |"
        )
    return file


def add_remote_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-remote-media",
        action="store_true",
        help="IMAGE may be an http(s) address, too: what lies at public ones is fetched",
    )


def piped_picture(words: Sequence[str], lists: Sequence[str] = ()) -> bytes | None:
    """What standard input holds where one of `words` stands for it, None where none does. Raises
    ImageError, also where it is to be a list as well.
    """
    from mtmd.base.errors import ImageError

    if STDIN not in words:
        return None
    if words.count(STDIN) + lists.count(STDIN) > 1:
        raise ImageError(f"{STDIN}: found twice, expected once: standard input is read once")
    return bytes(_from_stdin().getvalue())


def chosen_load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `LoadOptions` that are among the options."""
    from mtmd.config import LoadOptions

    names = [f.name for f in dataclasses.fields(LoadOptions)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def check_loading(args: argparse.Namespace) -> bool:
    """Whether the model the options name is on this disk. Raises MtmdError for an option out of its
    range, and for files that are not there. Without torch.
    """
    from mtmd.chat_template.built_in_templates import template_file
    from mtmd.checkpoint.hub import check_name, is_demo
    from mtmd.config import LoadOptions, options
    from mtmd.kernels.checkpoint.magic import first_bytes

    settings = options(LoadOptions, chosen_load_options(args))
    is_here = is_demo(args.model) or check_name(args.model)
    template = settings.chat_template and template_file(settings.chat_template)
    for file in (settings.mmproj, template):
        if file is not None:
            first_bytes(Path(file).expanduser())
    return is_here


def load_from(args: argparse.Namespace) -> Any:
    """The model the options name. Raises MtmdError; for what `check_loading` sees at once, before
    torch is imported.
    """
    from mtmd.checkpoint.hub import is_demo

    is_here = check_loading(args)
    with loading("the demo model" if is_demo(args.model) else args.model) as status:
        from mtmd.loading import load

        if not is_here:
            status.clear()  # the hub's own bars come in its place
        model = load(args.model, progress=sys.stderr.isatty(), **chosen_load_options(args))
    settle_threads(args.threads, [model])
    return model


def load_dual_from(args: argparse.Namespace) -> Any:
    """The dual encoder the options name. Raises MtmdError, for an option that it has no use for
    too.
    """
    from mtmd.base.errors import OptionError
    from mtmd.config import LoadOptions
    from mtmd.embedding.embedder import EMBEDDER_OPTIONS, load_embedder

    useless = {
        field.name: field.default
        for field in dataclasses.fields(LoadOptions)
        if field.name not in (*EMBEDDER_OPTIONS, *_OF_A_SERVER)
    }
    for name, usual in useless.items():
        if getattr(args, name, None) not in (usual, None, "", [], ()):
            raise OptionError(
                f"--{name.replace('_', '-')}: {args.model} is a dual encoder, which has no use "
                "for it; leave it out"
            )
    chosen = {name: getattr(args, name) for name in EMBEDDER_OPTIONS}
    model = load_embedder(args.model, progress=sys.stderr.isatty(), **chosen)
    settle_threads(args.threads, [model])
    return model


@contextmanager
def loading(what: str) -> Iterator[Status]:
    """On a terminal, a line that says what takes its time, and goes away."""
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


def settle_threads(asked: int | None, models: Sequence[Any]) -> None:
    """One thread for very small models, unless a number was asked for."""
    from mtmd.kernels.resources.threads import ask_threads

    if asked is None and all(model.checkpoint.weight_bytes < SMALL_BYTES for model in models):
        ask_threads(1, "as the model is very small")
