"""`mtmd bench`: how long each stage takes, against what the machine can do, in time and memory."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.options import options_of
from mtmd.base.spelling import did_you_mean
from mtmd.base.text import for_terminal
from mtmd.commands.arguments import add_options, options_in
from mtmd.commands.shared import add_model_named, add_random_weights, settle_threads
from mtmd.options.answer import AnswerOptions
from mtmd.options.load import LoadOptions

HELP = "Measure each stage of a model: time, memory, share of what the machine can do."
EXAMPLES = """\
mtmd bench                                  # the demo model
mtmd bench --random-weights list            # shapes of models that need not be fetched
mtmd bench --random-weights path/to/config.json --weights Q4_0
mtmd bench org/name --threads 1,2,4 --html bench.html
mtmd bench org/name --quality --variant dtype=bf16 --variant kv_type=q8_0"""
DESCRIPTION = (
    f"{HELP} Options that take a LIST, like 1,4,16, vary one thing at a time: the first value of "
    "each is the base from which the others are varied."
)
MAXIMUM = 1 << 20
LOADING = (
    *("mmproj", "chat_template", "device", "dtype", "weights", "flash_attn", "tensor_split"),
    *("memory_limit", "tp", "no_kv_offload", "kv_type", "activations"),
    *("image_min_tokens", "image_max_tokens"),
)
LISTS = ("context", "threads")  # options of loading that are axes here

SHORT = (
    *("--model", "--random-weights", "--weights", "--resolution", "--images", "--context"),
    *("--batch", "--threads", "--stages", "--decode", "--rounds", "--device", "--dtype"),
    *("--json", "--html"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.description = DESCRIPTION
    add_model_named(sub)
    add_random_weights(sub)
    what = sub.add_argument_group("what is measured")
    _list(what, "--resolution", "512", "pixels a side of a picture")
    _list(
        what,
        "--images",
        None,
        "pictures in the prompt, 0 for text alone (default: 1, or 0 for a model without encoder)",
    )
    _list(what, "--context", "256", "tokens of text in the prompt")
    _list(what, "--batch", "1", "sequences that decode at once")
    _list(what, "--threads", None, "CPU threads (default: torch's choice)")
    _list(what, "--load", "0", "busy processes beside it")
    what.add_argument(
        "--stages",
        metavar="LIST",
        help=(
            "stages to measure, such as encode,decode (default: "
            "preprocess,encode,prefill,decode,'first token')"
        ),
    )
    what.add_argument(
        "--decode", type=int, default=32, metavar="N", help="tokens to decode (default: 32)"
    )
    what.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measurements of each stage (default: 5)"
    )
    add_options(what, AnswerOptions, ["detail"])
    what.add_argument(
        "--copy",
        action="store_true",
        help="also time an answer that copies its prompt, with speculative decoding and without",
    )
    what.add_argument("--no-ops", action="store_true", help="do not time single operations")
    quality = sub.add_argument_group("what is lost")
    quality.add_argument(
        "--quality",
        nargs="?",
        const="",
        metavar="TEXT",
        help=(
            "measure quality instead of time: the divergence of the next token's probabilities "
            "from those of fp32, over a text file (default: one that is part of the package)"
        ),
    )
    quality.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="OPTIONS",
        help=(
            "a row of the table: load options separated by commas, such as dtype=bf16; may be "
            "repeated (default: as the model is loaded, and the usual types of weights, keys and "
            "values, and activations)"
        ),
    )
    quality.add_argument(
        "--reference",
        metavar="MODEL",
        help=(
            "compare with this model in fp32, such as the one that a GGUF was made from "
            "(default: the model itself)"
        ),
    )
    quality.add_argument(
        "--positions", type=int, metavar="N", help="tokens of the text (default: 512)"
    )
    device = sub.add_argument_group("model and device")
    add_options(device, LoadOptions, LOADING, absent=True)
    out = sub.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    out.add_argument("--html", metavar="FILE", help="write a self-contained page with charts")


def _list(group: argparse._ArgumentGroup, option: str, default: str | None, text: str) -> None:
    reported = f" (default: {default})" if default else ""
    group.add_argument(option, metavar="LIST", default=default, help=f"{text}{reported}")


def run(args: argparse.Namespace) -> int:
    if args.random_weights == "list":
        from mtmd.bench.shapes import shape_names

        print("\n".join(shape_names()))
        return 0
    if args.random_weights and args.model:
        raise OptionError(
            f"found both the model {args.model!r:.60} and --random-weights; expected one of them"
        )
    if args.quality is not None:
        return _quality(args)
    for name in ("variant", "reference", "positions"):
        if getattr(args, name):
            raise OptionError(f"--{name} says what --quality compares; give it with --quality")
    page = _writable(args.html) if args.html else None
    from mtmd.bench.stages import Plan
    from mtmd.bench.stages import run as measure
    from mtmd.options.by_name import options

    options(AnswerOptions, {"detail": args.detail})
    given = options_in(args, LoadOptions)
    chosen = options(LoadOptions, {n: value for n, value in given.items() if n not in LISTS})
    plan = Plan(
        args.model,
        args.random_weights,
        _numbers("resolution", args.resolution, 28, 8192),
        _numbers("images", args.images, 0, 64),
        _numbers("context", args.context, 1, MAXIMUM),
        _numbers("batch", args.batch, 1, 1024),
        _numbers("threads", args.threads, 1, 1024),
        _numbers("load", args.load, 0, 256),
        _number("decode", args.decode, 1, MAXIMUM),
        _number("rounds", args.rounds, 1, 1000),
        args.detail,
        not args.no_ops,
        f"mtmd {shlex.join(sys.argv[1:])}",
        args.copy,
        _stages(args.stages),
    )
    status = _Status()
    try:
        report = measure(
            plan, chosen, status.show, lambda model: settle_threads(plan.base().threads, [model])
        )
    finally:
        status.clear()
    if page:
        from mtmd.bench.html import render_page

        page.write_text(render_page(report), encoding="utf-8")
    if args.json:
        print(json.dumps(report.asdict()))
    else:
        from mtmd.bench.table import render_table

        print(for_terminal(render_table(report)))
    return 0


def _quality(args: argparse.Namespace) -> int:
    from mtmd.bench.quality import POSITIONS, POSITIONS_MAX, measure_quality, render_quality

    for name in ("random_weights", "html", "stages"):
        if getattr(args, name):
            flag = name.replace("_", "-")
            raise OptionError(f"found --quality and --{flag}; expected one of them")
    positions = POSITIONS if args.positions is None else args.positions
    _number("positions", positions, 2, POSITIONS_MAX)
    base = {n: v for n, v in options_in(args, LoadOptions).items() if n not in LISTS}
    if args.threads is not None:
        (base["threads"],) = _numbers("threads", args.threads, 1, 1024)[:1]
    variants = {text: _variant(text) for text in args.variant}
    status = _Status()
    try:
        report = measure_quality(
            args.model,
            variants,
            base,
            reference=args.reference,
            text=_text(args.quality) if args.quality else None,
            positions=positions,
            report=status.show,
        )
    finally:
        status.clear()
    print(json.dumps(report.asdict()) if args.json else for_terminal(render_quality(report)))
    return 0


def _text(name: str) -> str:
    """Raises OptionError for what is no text file."""
    from mtmd.base.files import open_regular
    from mtmd.bench.quality import TEXT_BYTES_MAX

    try:
        with open_regular(Path(name).expanduser()) as file:
            data = file.read(TEXT_BYTES_MAX + 1)
        if len(data) > TEXT_BYTES_MAX:
            raise OptionError(
                f"quality: {name!r:.200} has more than {TEXT_BYTES_MAX >> 20} MiB, expected less"
            )
        return data.decode("utf-8")
    except OSError as error:
        raise OptionError(
            f"quality: {name!r:.200} cannot be read ({error.strerror}), expected a text file"
        ) from None
    except UnicodeDecodeError:
        raise OptionError(f"quality: {name!r:.200} is no UTF-8, expected a text file") from None


def _variant(text: str) -> dict[str, Any]:
    """Options of loading, `name=value` between commas, as a command would read them. Raises
    OptionError.
    """
    declared, result = options_of(LoadOptions), dict[str, Any]()
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        field = name.replace("-", "_")
        if not equals or field not in declared or field == "context":
            near = did_you_mean(field, declared) if equals else "; expected NAME=VALUE"
            raise OptionError(
                f"variant: {part!r:.60} is no option of loading{near}; like dtype=bf16 or "
                "flash_attn=off"
            )
        kind = declared[field].kind
        try:
            read: Any = kind.parse(value) if kind.parse else value
        except ValueError:
            raise OptionError(
                f"variant: {part!r:.60}, expected {kind or 'another value'}"
            ) from None
        result[field] = value not in ("", "false", "off", "0") if kind.switch else read
    return result


def _stages(text: str | None) -> tuple[str, ...]:
    """Names between commas; none for no text, which is all. Raises OptionError."""
    from mtmd.bench.stages import STAGES_OF

    if text is None:
        return ()
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in STAGES_OF["load"]:
            expected = ", ".join(STAGES_OF["load"])
            raise OptionError(f"stages: found {name!r:.40}, expected some of {expected}")
    return names


def _numbers(name: str, text: str | None, minimum: int, maximum: int) -> tuple[int, ...]:
    """A list of different numbers between commas; none for no text. Raises OptionError."""
    if text is None:
        return ()
    try:
        result = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(
            f"{name}: found {text!r:.60}, expected whole numbers between commas, like 1,4,16"
        ) from None
    for value in result:
        _number(name, value, minimum, maximum)
    return tuple(dict.fromkeys(result))


def _number(name: str, value: int, minimum: int, maximum: int) -> int:
    if not minimum <= value <= maximum:
        raise OptionError(f"{name}: found {value}, expected {minimum} to {maximum}")
    return value


def _writable(text: str) -> Path:
    """Checked before minutes are spent on measuring. Raises OptionError."""
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise OptionError(f"html {text!r:.200}: expected a file in a folder that exists")
    return path


class _Status:
    """Describes what is being measured, on a line of the terminal that is overwritten."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self.shown = True

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
