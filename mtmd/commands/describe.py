"""`mtmd describe IMAGE...`: one answer, streamed to stdout; everything else goes to stderr."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mtmd.commands.shared import add_model_arguments, load_from

HELP = "Answer a prompt about one or several images."
ANSWER_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos", "stop",
                  "detail")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("images", nargs="+", metavar="IMAGE", help="picture files, in the order in which the model sees them")
    sub.add_argument("-p", "--prompt", default="Describe the image.", help="what to ask (default: %(default)s)")
    sub.add_argument("--json", action="store_true", help="print one JSON object: text, token ids and the receipt")
    sub.add_argument("--quiet", action="store_true", help="no receipt on stderr")
    answer = sub.add_argument_group("answer", argument_default=argparse.SUPPRESS)
    answer.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: 256)")
    answer.add_argument("--detail", metavar="HOW", help="auto, low (few tokens, no tiles) or high (default: auto)")
    answer.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    answer.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-answer token")
    answer.add_argument("--temperature", type=float, metavar="T", help="0 takes the most probable token, 1 draws (default: 0)")
    answer.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens (default: 0, off)")
    answer.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest tokens of probability P together (default: 1, off)")
    answer.add_argument("--min-p", type=float, metavar="P", help="draw from tokens at least P times as probable as the best (default: 0)")
    answer.add_argument("--repetition-penalty", type=float, metavar="R",
                        help="above 1: make tokens already there less probable (default: 1, off)")
    answer.add_argument("--seed", type=int, metavar="S", help="of the random draws (default: a new one, told in the receipt)")
    add_model_arguments(sub)


def run(args: argparse.Namespace) -> int:
    from mtmd.config import AnswerOptions, options
    chosen: dict[str, Any] = {name: getattr(args, name) for name in ANSWER_OPTIONS if hasattr(args, name)}
    options(AnswerOptions, chosen)  # a wrong option is told before a model is loaded for it
    model, status, in_line = load_from(args), _Status(), False
    from mtmd.conversation import user_message
    from mtmd.events import Finished, Progress, TextPiece
    try:
        for event in model.stream([user_message(args.images, args.prompt)], **chosen):
            if isinstance(event, Progress):
                status.show(event)
            elif isinstance(event, TextPiece) and not args.json:
                status.clear()
                in_line = True
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                status.clear()
                in_line = False
                print(json.dumps(event.answer.asdict()) if args.json else "", flush=True)
                if not (args.json or args.quiet):
                    print(event.answer.receipt, file=sys.stderr)
    finally:
        status.clear()
        if in_line:  # broken off: what is told next begins a line of its own
            print(flush=True)
    return 0


class _Status:
    """What the model is busy with: a line on stderr that is overwritten and goes before anything else is written. On a terminal only."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, event: Any) -> None:
        if sys.stderr.isatty():
            told = f"encoded {event.done} of {event.total} tiles" if event.stage == "encode" else f"reading {event.total} tokens"
            print(f"\r\x1b[K{told}", end="", file=sys.stderr, flush=True)
            self.shown = True

    def clear(self) -> None:
        """Only if it is there: the answer may stand on the same line of the same terminal."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.shown = False
