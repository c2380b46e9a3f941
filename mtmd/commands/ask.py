"""`mtmd ask "question"`: one question, about pictures or about nothing that is shown, answered as
in a conversation.
"""

from __future__ import annotations

import argparse
import sys

from mtmd.base.errors import OptionError
from mtmd.commands.shared import (
    STDIN,
    TEXT_HELP,
    add_answer_arguments,
    add_model_arguments,
    add_quiet_argument,
    add_remote_argument,
    add_system_argument,
    add_video_arguments,
    answer_options,
    load_from,
    pictures_named,
    read_texts,
    with_frames_chosen,
)

HELP = "Ask one question, about pictures or without any."
EXAMPLES = """\
mtmd ask "Write a haiku about autumn." -m org/name
mtmd ask "What does the sign say?" -i photo.jpg -m org/name
mtmd ask "What has changed?" -i before.jpg -i after.jpg
mtmd ask @question.txt -i page.jpg           # - reads it from a pipe
mtmd ask "Name three colours." --temperature 0.7 --max-tokens 50"""
SHORT = (
    *("--image", "--model", "--system", "--max-tokens", "--temperature", "--sampling"),
    *("--stop-repeating", "--json-schema", "--seed", "--think", "--json", "--quiet"),
    *("--device", "--context"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "question",
        nargs="*",
        metavar="QUESTION",
        help=f"what to ask, in quotation marks or as words; {TEXT_HELP}",
    )
    sub.add_argument(
        "-i",
        "--image",
        dest="images",
        action="append",
        default=[],
        metavar="IMAGE",
        help="a picture or video file, or a data URL; - reads one from standard input; may be "
        "repeated",
    )
    add_remote_argument(sub)
    add_system_argument(sub)
    sub.add_argument(
        "--json", action="store_true", help="print a JSON object: text, token ids and the receipt"
    )
    add_quiet_argument(sub)
    add_video_arguments(sub)
    add_answer_arguments(sub, conversation=True)
    add_model_arguments(sub, isolate=True)


def run(args: argparse.Namespace) -> int:
    from mtmd.options.answer import CONVERSATION

    chosen = answer_options(args)  # a wrong one is reported before a model is loaded for it
    args.prompt = " ".join(args.question)
    if not args.question and not sys.stdin.isatty() and STDIN not in args.images:
        args.prompt = STDIN  # a question from a pipe
    if not args.prompt.strip():
        raise OptionError('question: found none, expected one: mtmd ask "What is a haiku?"')
    read_texts(args, ("prompt",))
    images = with_frames_chosen(pictures_named(args.images, args.allow_remote_media), args)
    model = load_from(args, parallel=1)
    from mtmd.terminal.one_answer import print_answer

    print_answer(model, images, args, CONVERSATION | chosen)
    return 0
