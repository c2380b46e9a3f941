"""`mtmd compare A B --image I -p PROMPT`: the same request through two models, and where their
values part.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from mtmd.base.options import options_of
from mtmd.base.text import for_terminal
from mtmd.commands.arguments import options_in
from mtmd.commands.completion import offers_models
from mtmd.commands.shared import (
    MODEL_HELP,
    add_model_arguments,
    add_prompt_argument,
    loading,
    pictures_named,
    settle_threads,
)
from mtmd.options.load import LoadOptions

HELP = (
    "Run one request through two models or settings, and name the first operation whose results"
    " differ."
)
EXAMPLES = """\
mtmd compare --dtype-b bf16                 # the demo model in fp32 and in bf16
mtmd compare path/to/checkpoint model-Q8_0.gguf --image photo.jpg
mtmd compare org/name org/name --flash-attn-b off"""
PER_SIDE = ("mmproj", "dtype", "device", "flash_attn", "kv_type", "chat_template")

SHORT = (
    *("--model", "--image", "--prompt", "--tokens", "--tolerance", "--json"),
    *("--dtype-a", "--dtype-b", "--device-a", "--device-b", "--flash-attn-a", "--flash-attn-b"),
    *("--threads", "--context"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    a = sub.add_argument(
        "a", nargs="?", metavar="A", help=f"the reference: {MODEL_HELP} (default: demo)"
    )
    b = sub.add_argument(
        "b",
        nargs="?",
        metavar="B",
        help=(
            "the model to compare with it (default: A, with an option that applies to one side "
            "only)"
        ),
    )
    by_option = sub.add_argument(
        "-m",
        "--model",
        dest="models_by_option",
        action="append",
        metavar="MODEL",
        help="A, and if repeated, B",
    )
    for named in (a, b, by_option):
        offers_models(named)
    sub.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="IMAGE",
        help="a picture file, - for standard input; may be repeated (default: text only)",
    )
    add_prompt_argument(sub)
    sub.add_argument(
        "--tokens",
        type=int,
        default=16,
        metavar="N",
        help="greedy tokens to compare (default: %(default)s)",
    )
    sub.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="NMSE that counts as a difference (default: depends on the types of both)",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sides = sub.add_argument_group("one side alone", "Options for both sides, for A or for B.")
    for name in PER_SIDE:
        declared = options_of(LoadOptions)[name]
        metavar = declared.kind.metavar
        for side in "ab":
            sides.add_argument(f"--{name.replace('_', '-')}-{side}", metavar=metavar)
    add_model_arguments(sub, model=False)


def run(args: argparse.Namespace) -> int:
    """0 where nothing differs beyond the tolerance, else 1."""
    from mtmd.base.errors import OptionError
    from mtmd.base.options import integer
    from mtmd.checkpoint.hub import DEMO, check_name, is_demo

    tokens = integer("tokens", args.tokens, 1, 1 << 20)
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise OptionError(f"tolerance: found {args.tolerance!r}, expected a number from 0")
    chosen = [_options(args, side) for side in "ab"]
    names = [args.a or DEMO, args.b or args.a or DEMO]
    if args.b is None and chosen[0] == chosen[1]:
        raise OptionError(
            "found one model, expected a second one, or an option of one side, like --dtype-b bf16"
        )
    for name in names:
        if not is_demo(name):
            check_name(name)
    images = pictures_named(args.image)
    with loading("both models"):
        from mtmd.inspect.compare import Source, compare_models, open_both
        from mtmd.inspect.comparison_text import render
        from mtmd.prompt.conversation import user_message

        message = (
            user_message(images, args.prompt)
            if images
            else {"role": "user", "content": args.prompt}
        )
        models = open_both(Source(names[0], chosen[0]), Source(names[1], chosen[1]))
    settle_threads(args.threads, models)
    comparison = compare_models(models, [message], tokens=tokens, tolerance=args.tolerance)
    print(json.dumps(comparison.asdict()) if args.json else for_terminal(render(comparison)))
    return 1 if comparison.differences else 0


def _options(args: argparse.Namespace, side: str) -> Any:
    from mtmd.options.by_name import options

    chosen = options_in(args, LoadOptions)
    own = {
        name: value for name in PER_SIDE if (value := getattr(args, f"{name}_{side}")) is not None
    }
    return options(LoadOptions, chosen | own)
