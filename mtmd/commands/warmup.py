"""`mtmd warmup`: what this machine can and cannot do for a model, and what that costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.text import for_terminal
from mtmd.commands.arguments import add_options, defaults_in, options_in
from mtmd.commands.shared import (
    add_model_arguments,
    add_random_weights,
    list_cards,
    load_from,
    loading,
    settle_threads,
    warmed_up,
)
from mtmd.options.load import LoadOptions

HELP = "Check which operations the device supports, run one encode and one decode step, and report."
EXAMPLES = """\
mtmd warmup                                 # the demo model on this machine
mtmd warmup -m org/name --strict            # exits with 3 unless everything is as intended
mtmd warmup -m org/name --target rtx4090    # a GPU that you do not have
mtmd warmup -m org/name --target cuda:90 --save kernels     # its programs, compiled here
mtmd serve -m org/name --kernels kernels    # and used there"""

MAX_TARGETS = 32

SHORT = (
    *("--model", "--device", "--dtype", "--context", "--parallel", "--threads", "--json"),
    *("--strict", "--no-run", "--target", "--memory", "--save", "--random-weights", "--tp"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_model_arguments(sub)
    sub.add_argument("--json", action="store_true", help="print the report as one JSON object")
    sub.add_argument(
        "--strict",
        action="store_true",
        help="exit with code 3 unless everything runs on the accelerated path",
    )
    sub.add_argument("--no-run", action="store_true", help="check and predict only, run nothing")
    add_random_weights(sub)
    group = sub.add_argument_group("a GPU that you do not have (nothing is run)")
    group.add_argument(
        "--target",
        metavar="GPU",
        help=(
            "predict memory, times and kernels for a card (rtx4090, h100, mi300x) or an "
            "architecture (cuda:90, hip:gfx942); several, separated by commas, for one table; "
            "list shows all cards; with --tp N, for N cards, over each link that may connect "
            "them"
        ),
    )
    group.add_argument(
        "--memory", metavar="SIZE", help="the GPU's memory, such as 24GiB (default: the card's)"
    )
    add_options(group, LoadOptions, ["parallel"], absent=True)
    group.add_argument(
        "--save",
        metavar="DIR",
        help=(
            "compile the model's GPU programs into DIR, for --kernels on that machine, and "
            "predict nothing"
        ),
    )
    group.add_argument(
        "--no-compile", action="store_true", help="do not compile the kernels, which takes seconds"
    )


def run(args: argparse.Namespace) -> int:
    if args.target == "list":
        return list_cards()
    if args.random_weights == "list":
        from mtmd.bench.shapes import shape_names

        print("\n".join(shape_names()))
        return 0
    if args.target is not None:
        return _predict(args)
    for name in ("memory", "parallel", "save", "no_compile"):
        if getattr(args, name, None) not in (None, False):
            option = "--" + name.replace("_", "-")
            raise OptionError(f"{option} is for a GPU that you do not have; give it with --target")
    model = _random(args) or _loaded(args)
    report = model.warmup_report if args.no_run else warmed_up(model)
    if args.json:
        print(json.dumps(report.asdict()))
    else:
        wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(for_terminal(report.text(wide) if wide else str(report)))
    return 3 if args.strict and not report.fully_accelerated else 0


def _predict(args: argparse.Namespace) -> int:
    """3 with `--strict` where not everything would run as intended, or does not fit."""
    from mtmd.inspect.predict_target import predict

    names = list(dict.fromkeys(name for name in args.target.split(",") if name.strip()))
    if not names:
        raise OptionError(f"target {args.target!r:.60}: expected a card, or several between commas")
    if len(names) > MAX_TARGETS:
        raise OptionError(f"target: found {len(names)}, expected at most {MAX_TARGETS}")
    if args.split != "none" or args.fit:
        raise OptionError(
            "target: found with split or fit, but it is one device; `mtmd fit` predicts several"
        )
    shared = args.tp != 1 or args.tensor_split
    if shared and len(names) > 1:
        raise OptionError(f"tp: found {len(names)} targets, expected one, of which there are N")
    saves = args.save is not None
    predicted = args.no_compile or args.memory is not None or args.strict or shared
    if saves and (len(names) > 1 or predicted):
        raise OptionError(
            "--save: expected one --target, and none of --memory, --strict, --no-compile and --tp, "
            "which are for predictions"
        )
    usual = defaults_in(LoadOptions)  # options of a device that is here are refused by `predict`
    given = options_in(args, LoadOptions)
    chosen = {name: value for name, value in given.items() if value != usual[name]}
    if saves:
        return _save(args, names[0], chosen)
    reports = [
        predict(
            name,
            args.model,
            memory=args.memory,
            random_weights=args.random_weights,
            # A table of several cards has no place for registers.
            compile=not args.no_compile and (len(names) == 1 or args.json),
            **chosen,
        )
        for name in names
    ]
    if args.json:
        result = [report.asdict() for report in reports]
        print(json.dumps(result[0] if len(result) == 1 else result))
    elif len(reports) == 1:
        print(for_terminal(str(reports[0])))
    else:
        from mtmd.inspect.prediction_text import render_comparison

        print(for_terminal(render_comparison(reports)))
    sound = all(r.fully_accelerated and r.fits(r.needed_bytes) is not False for r in reports)
    return 3 if args.strict and not sound else 0


def _save(args: argparse.Namespace, target: str, chosen: dict[str, Any]) -> int:
    from mtmd.commands.shared import compiling
    from mtmd.inspect.save_kernels import save_kernels

    with compiling() as progress:
        saved = save_kernels(
            target,
            args.save,
            args.model,
            random_weights=args.random_weights,
            progress=progress,
            **chosen,
        )
    if args.json:
        print(json.dumps(dataclasses.asdict(saved)))
    else:
        print(for_terminal(str(saved)))
    return 0


def _random(args: argparse.Namespace) -> Any:
    """The model of random weights that was asked for, if one was."""
    if args.random_weights is None:
        return None
    if args.model is not None:
        raise OptionError(
            f"found both the model {args.model!r:.60} and --random-weights; expected one of them"
        )
    from mtmd.options.by_name import options

    chosen = options(LoadOptions, options_in(args, LoadOptions))
    with loading(args.random_weights):
        from mtmd.bench.shapes import random_checkpoint, type_of_random_weights
        from mtmd.model import Model

        weights = type_of_random_weights(chosen)
        checkpoint = random_checkpoint(args.random_weights, weights)
        model = Model(checkpoint, chosen, name=f"{checkpoint.folder.name}, random {weights}")
    settle_threads(args.threads, [model])
    return model


def _loaded(args: argparse.Namespace) -> Any:
    """The model, of whatever kind."""
    from mtmd.base.errors import DualEncoderError

    try:
        return load_from(args)
    except DualEncoderError as kind:
        from mtmd.embedding.load_any import load_retriever

        model = load_retriever(args.model, kind, options_in(args, LoadOptions))
        settle_threads(args.threads, [model])
        return model
