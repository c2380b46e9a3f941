"""`mtmd bench`: how long each stage takes, against what the machine can do, in time and memory."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from mtmd.base.errors import OptionError
from mtmd.base.text import for_terminal
from mtmd.commands.arguments import add_options, options_in
from mtmd.commands.shared import add_model_named, add_random_weights, settle_threads
from mtmd.options.answer import AnswerOptions
from mtmd.options.load import LoadOptions

HELP = "Measure the stages of a model apart: time, memory, share of what the machine can do."
EXAMPLES = """\
mtmd bench                                  # the demo model
mtmd bench --random-weights list            # shapes of models that need not be fetched
mtmd bench --random-weights path/to/config.json --weights Q4_0
mtmd bench org/name --threads 1,2,4 --html bench.html"""
DESCRIPTION = (
    f"{HELP} Options that take a LIST, like 1,4,16, vary one thing at a time: the first value of "
    "each is the base from which the others are varied."
)
MAXIMUM = 1 << 20
LOADING = (
    *("mmproj", "chat_template", "device", "dtype", "weights", "flash_attn", "tensor_split"),
    *("memory_limit", "tp", "no_kv_offload", "image_min_tokens", "image_max_tokens"),
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
        help="those that are measured, like encode,decode (default: preprocess,encode,prefill,"
        "decode,'first token')",
    )
    what.add_argument(
        "--decode", type=int, default=32, metavar="N", help="tokens decoded (default: 32)"
    )
    what.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measurements of each (default: 5)"
    )
    add_options(what, AnswerOptions, ["detail"])
    what.add_argument(
        "--copy",
        action="store_true",
        help="also time an answer that copies its prompt, with speculative decoding and without",
    )
    what.add_argument("--no-ops", action="store_true", help="leave out the times of single ops")
    device = sub.add_argument_group("model and device")
    add_options(device, LoadOptions, LOADING, absent=True)
    out = sub.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    out.add_argument("--html", metavar="FILE", help="write a page with charts, complete in itself")


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
