"""`mtmd describe IMAGE...`: one answer, streamed to stdout; everything else goes to stderr."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mtmd.commands.shared import add_model_arguments, load_from

HELP = "Answer a prompt about one or several images."
ANSWER_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos", "stop")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("images", nargs="+", metavar="IMAGE", help="picture files, in the order in which the model sees them")
    sub.add_argument("-p", "--prompt", default="Describe the image.", help="what to ask (default: %(default)s)")
    sub.add_argument("--json", action="store_true", help="print one JSON object: text, token ids and the receipt")
    sub.add_argument("--quiet", action="store_true", help="no receipt on stderr")
    answer = {"type": float, "default": argparse.SUPPRESS}
    sub.add_argument("--max-tokens", type=int, metavar="N", default=argparse.SUPPRESS, help="longest answer (default: 256)")
    sub.add_argument("--temperature", metavar="T", help="0 takes the most probable token (default: 0)", **answer)  # type: ignore[arg-type]
    sub.add_argument("--top-k", type=int, metavar="K", default=argparse.SUPPRESS, help="draw from the K most probable tokens (default: 0, off)")
    sub.add_argument("--top-p", metavar="P", help="draw from the fewest tokens of probability P together (default: 1, off)", **answer)  # type: ignore[arg-type]
    sub.add_argument("--min-p", metavar="P", help="draw from tokens at least P times as probable as the best (default: 0, off)", **answer)  # type: ignore[arg-type]
    sub.add_argument("--repetition-penalty", metavar="R", help="above 1: make tokens already there less probable (default: 1, off)", **answer)  # type: ignore[arg-type]
    sub.add_argument("--seed", type=int, metavar="S", default=argparse.SUPPRESS, help="of the random draws (default: a new one, told in the receipt)")
    sub.add_argument("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="end the answer before TEXT; may be repeated")
    sub.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on past the end-of-answer token")
    add_model_arguments(sub)


def run(args: argparse.Namespace) -> int:
    from mtmd.config import AnswerOptions, options
    chosen: dict[str, Any] = {name: getattr(args, name) for name in ANSWER_OPTIONS if hasattr(args, name)}
    options(AnswerOptions, chosen)  # a wrong option is told before a model is loaded for it
    from mtmd.model import Finished, Progress, TextPiece, user_message
    model = load_from(args)
    for event in model.stream([user_message(args.images, args.prompt)], **chosen):
        if isinstance(event, Progress):
            _show(event)
        elif isinstance(event, TextPiece) and not args.json:
            _clear()
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            _clear()
            if args.json:
                print(json.dumps(event.answer.asdict(), ensure_ascii=False))
            else:
                print()
                if not args.quiet:
                    print(event.answer.receipt, file=sys.stderr)
    return 0


def _show(event: Any) -> None:
    """What the model is busy with, on a terminal only: a line that is overwritten."""
    if sys.stderr.isatty():
        told = f"encoded {event.done} of {event.total} tiles" if event.stage == "encode" else f"reading {event.total} tokens"
        print(f"\r\x1b[K{told}", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
