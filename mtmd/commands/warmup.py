"""`mtmd warmup`: what this machine can and cannot do for a model, and what that costs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mtmd.commands.shared import add_model_arguments, load_from, settle_threads
from mtmd.kernels.text import for_terminal

HELP = "Ask the device about every op, run one encode and one step of decode, and report."


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_model_arguments(sub)
    sub.add_argument("--json", action="store_true", help="print the report as one JSON object")
    sub.add_argument(
        "--strict",
        action="store_true",
        help="exit with 3 if anything is not fully on the accelerated path",
    )
    sub.add_argument(
        "--target",
        metavar="GPU",
        help="predict for a GPU that is not here: cuda:90, cuda:80 or hip:gfx942; runs nothing",
    )
    sub.add_argument("--no-run", action="store_true", help="ask and predict only, run nothing")


def run(args: argparse.Namespace) -> int:
    if args.target:
        from mtmd.inspect.predict_target import predict

        here = {
            "device": args.device,
            "refuse": args.refuse,
            "threads": args.threads,
        }  # refused there, if given
        report = predict(
            args.target,
            args.model,
            dtype=args.dtype,
            flash_attn=args.flash_attn,
            override_tensor=args.override_tensor,
            context=args.context,
            **{k: v for k, v in here.items() if v and v != "auto"},
        )
    else:
        model = _dual_encoder(args) or load_from(args)
        report = model.warmup_report if args.no_run else model.warm_up()
    print(json.dumps(report.asdict()) if args.json else for_terminal(str(report)))
    return 3 if args.strict and not report.fully_accelerated else 0


def _dual_encoder(args: argparse.Namespace) -> Any:
    """The model, where it is one that gives vectors."""
    from pathlib import Path

    if args.model is None or not Path(args.model).is_dir():
        return None
    from mtmd.embedding.dual_checkpoint import is_dual_folder
    from mtmd.embedding.embedder import EMBEDDER_OPTIONS, load_embedder

    if not is_dual_folder(Path(args.model)):
        return None
    model = load_embedder(args.model, **{name: getattr(args, name) for name in EMBEDDER_OPTIONS})
    settle_threads(args.threads, [model])
    return model
