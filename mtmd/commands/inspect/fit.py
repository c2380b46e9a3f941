"""`mtmd fit MODEL`: whether a model fits into memories that need not be here, and how."""

from __future__ import annotations

import argparse
import json
import re

from mtmd.base.text import for_terminal
from mtmd.commands.arguments import add_options, options_in
from mtmd.commands.shared import add_model_named, add_random_weights, list_cards
from mtmd.options.load import LoadOptions

HELP = "Show how a model fits into memory, also of GPUs that you do not have; nothing is run."
EXAMPLES = """\
mtmd fit org/name --memory 24GiB,24GiB      # two GPUs
mtmd fit org/name --target rtx4090,rtx3090 --context 32768 --parallel 1
mtmd fit model.gguf --memory 8GiB --host-memory 32GiB --image 1920x1080
mtmd fit --random-weights config.json --weights Q4_K_M --memory 12GiB
mtmd fit                                    # the demo model in what is free here"""

NOWHERE = 3  # the exit code where no way fits
NAMES = (
    "context",
    "parallel",
    "dtype",
    "weights",
    "kv_type",
    "mmproj",
    "preprocess",
    "image_min_tokens",
    "image_max_tokens",
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_model_named(sub)
    where = sub.add_argument_group("memories (default: what is free on this machine)")
    where.add_argument(
        "--memory",
        metavar="SIZES",
        default="",
        help="memory of each GPU, such as 24GiB,24GiB (default: of the cards of --target)",
    )
    where.add_argument(
        "--target",
        metavar="GPUS",
        default="",
        help="cards (rtx4090,rtx4090), or architectures (cuda:90) with --memory; one for all, or "
        "one for each; list shows all cards (default: any GPU since cuda:80)",
    )
    where.add_argument(
        "--host-memory",
        metavar="SIZE",
        help=(
            "memory of the host; by itself, a machine without a GPU (default: unknown; ways "
            "that need it do not count as fitting)"
        ),
    )
    what = sub.add_argument_group("what is asked of it")
    add_options(what, LoadOptions, NAMES, absent=True)
    what.add_argument(
        "--image",
        metavar="WxH",
        help="size of pictures in pixels (default: the largest that the model takes)",
    )
    add_random_weights(what)
    sub.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.random_weights == "list":
        from mtmd.bench.shapes import shape_names

        print("\n".join(shape_names()))
        return 0
    if args.target == "list":
        return list_cards()
    image = _size(args.image)
    from mtmd.inspect.fit import fit

    report = fit(
        args.model,
        memory=_parts("memory", args.memory),
        target=_parts("target", args.target),
        host_memory=args.host_memory,
        image=image,
        random_weights=args.random_weights,
        **options_in(args, LoadOptions),
    )
    print(json.dumps(report.asdict()) if args.json else for_terminal(str(report)))
    return 0 if report.fits else NOWHERE


def _parts(name: str, text: str) -> list[str]:
    from mtmd.base.options import refuse

    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(parts):
        refuse(name, text, "one, or several between commas")
    return parts


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text.strip(), re.ASCII)
    if match is None:
        from mtmd.base.options import refuse

        refuse("image", text, "a size in pixels such as 1920x1080")
    return int(match[1]), int(match[2])
