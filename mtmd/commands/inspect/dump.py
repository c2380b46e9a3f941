"""`mtmd dump IMAGE -p PROMPT`: every node of a run, so that a divergence can be found node by
node.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtmd.base.errors import OptionError
from mtmd.base.text import for_terminal
from mtmd.commands.shared import (
    add_model_arguments,
    add_prompt_argument,
    load_from,
    loading,
    pictures_named,
)

HELP = (
    "Print every node of an encode and prefill: name, op, shape, device, sum, first and last "
    "values."
)
EXAMPLES = """\
mtmd dump photo.jpg --filter attn_out       # the demo model
mtmd dump photo.jpg -m org/name --json > here.json
mtmd dump photo.jpg -m org/name --compare there.json"""

SHORT = (
    *("--model", "--prompt", "--filter", "--json", "--compare"),
    *("--device", "--dtype", "--threads", "--context"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="picture files, - for standard input; without one, only the decoder is run",
    )
    add_prompt_argument(sub)
    sub.add_argument("--filter", metavar="RE", help="print only operations whose name matches")
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list, for --compare")
    form.add_argument(
        "--compare",
        type=Path,
        metavar="OTHER.json",
        help=(
            "name the first operation that differs from a dump made with --json, and exit with "
            "1; 0 if none differs"
        ),
    )
    sub.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="relative difference that counts (default: %(default)g)",
    )
    add_model_arguments(sub)


def run(args: argparse.Namespace) -> int:
    images = pictures_named(args.images)
    if args.compare and not args.compare.exists():
        raise OptionError(
            f"compare {args.compare}: found no such file, expected one made by 'mtmd dump --json'"
        )
    with loading("torch"):
        from mtmd.inspect.dump import check_tolerance, compare, pattern, read_rows, record

    check_tolerance(args.tolerance)
    requested = pattern(args.filter)
    other = read_rows(args.compare) if args.compare else None
    model = load_from(args)
    from mtmd.prompt.conversation import user_message

    message = (
        user_message(images, args.prompt) if images else {"role": "user", "content": args.prompt}
    )
    rows = record(model, [message], requested)
    if not rows:
        raise OptionError(f"filter {args.filter!r} matches no node")
    if other is not None:
        result = compare(rows, other, args.tolerance)
        print(for_terminal(result.text))
        return 0 if result.same else 1
    if args.json:
        print(json.dumps([r.asdict() for r in rows]))
    else:
        for row in rows:
            print(for_terminal(str(row)))
    return 0
