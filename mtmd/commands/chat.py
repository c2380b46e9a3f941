"""`mtmd chat [IMAGE...]`: a conversation at the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from mtmd.commands.shared import (
    STDIN,
    add_answer_arguments,
    add_model_arguments,
    add_remote_argument,
    add_system_argument,
    answer_options,
    check_loading,
    load_from,
)
from mtmd.terminal.wrap import wrapped

HELP = "Chat with the model about images."
EXAMPLES = """\
mtmd chat photo.jpg                         # pictures for the first question, if there are any
mtmd chat --allow-remote-media https://example.com/photo.jpg
mtmd chat --system "Answer in one word."
mtmd chat -m org/name --temperature 0.7"""
SHORT = (
    *("--model", "--system", "--max-tokens", "--temperature", "--top-p"),
    *("--sampling", "--repetition-penalty", "--stop-repeating", "--no-history", "--think"),
    *("--device", "--context", "--dtype", "--threads"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="picture and video files, or data URLs, for the first question",
    )
    add_remote_argument(sub)
    add_system_argument(sub)
    sub.add_argument("--no-history", action="store_true", help="do not save the input history")
    add_answer_arguments(sub, conversation=True)
    add_model_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """0, or 1 where lines come from a pipe and something went wrong with one."""
    from mtmd.base.errors import OptionError
    from mtmd.environment import data_folder
    from mtmd.prompt.picture_paths import check_sources
    from mtmd.terminal.line_input import history, is_interactive, texts

    chosen = answer_options(args)
    if STDIN in args.images:
        raise OptionError(
            "found - in place of a picture, expected files; standard input is what is said, and "
            "'mtmd describe -' reads a picture from it"
        )
    check_sources(args.images, args.allow_remote_media)
    check_loading(args)
    from mtmd.terminal.transcript import attach

    attached = [attach(image, args.allow_remote_media) for image in args.images]
    model, interactive = load_from(args, parallel=1), is_interactive()
    from mtmd.terminal.chat import HELP as COMMANDS
    from mtmd.terminal.chat import Chat

    chat = Chat(model, chosen, args.system, interactive)
    chat.attached = attached
    if interactive:
        reported = (
            f"{model.name} on {model.backends[0].name}; /help lists the commands, Ctrl-D quits"
        )
        print(wrapped(reported, sys.stderr), file=sys.stderr)
    saved = interactive and not args.no_history
    file = data_folder() / "chat_history" if saved else None
    with history(file, [f"/{name}" for name in COMMANDS]) if interactive else nullcontext():
        for text in texts("> ", interactive):
            if text.strip() and not chat.enter(text):
                break
    model.close()
    return 1 if chat.failed and not interactive else 0
