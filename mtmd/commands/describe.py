"""`mtmd describe IMAGE...`: one answer, streamed to stdout; everything else goes to stderr.

What a terminal would obey is left out of the answer; `--json` gives it unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys

from mtmd.commands.shared import (
    add_answer_arguments,
    add_model_arguments,
    answer_options,
    load_from,
)
from mtmd.kernels.text import for_terminal
from mtmd.terminal.status_line import Status

HELP = "Answer a prompt about one or several images."


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="picture files, in the order in which the model sees them",
    )
    sub.add_argument(
        "-p", "--prompt", default="Describe the image.", help="what to ask (default: %(default)s)"
    )
    sub.add_argument(
        "--json", action="store_true", help="print one JSON object: text, token ids and the receipt"
    )
    sub.add_argument("--quiet", action="store_true", help="no receipt on stderr")
    add_answer_arguments(sub)
    add_model_arguments(sub, isolate=True)


def run(args: argparse.Namespace) -> int:
    chosen = answer_options(args)  # a wrong one is told before a model is loaded for it
    model, status, in_line = load_from(args), Status(), False
    from mtmd.events import Finished, Progress, TextPiece
    from mtmd.prompt.conversation import user_message

    try:
        for event in model.stream([user_message(args.images, args.prompt)], **chosen):
            if isinstance(event, Progress):
                status.show(event)
            elif isinstance(event, TextPiece) and not args.json:
                status.clear()
                in_line = True
                print(for_terminal(event.text), end="", flush=True)
            elif isinstance(event, Finished):
                status.clear()
                in_line = False
                print(json.dumps(event.answer.asdict()) if args.json else "", flush=True)
                if not (args.json or args.quiet):
                    print(for_terminal(str(event.answer.receipt)), file=sys.stderr)
    finally:
        status.clear()
        if in_line:  # broken off: what is told next begins a line of its own
            print(flush=True)
    return 0
