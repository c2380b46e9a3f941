"""`mtmd describe IMAGE...`: one answer, streamed to stdout; everything else goes to stderr.

What a terminal would obey is left out of the answer; `--json` gives it unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from mtmd.base.errors import ImageError, OptionError
from mtmd.commands.shared import (
    add_ahead_argument,
    add_answer_arguments,
    add_model_arguments,
    add_prompt_argument,
    add_quiet_argument,
    add_remote_argument,
    add_system_argument,
    add_video_arguments,
    answer_options,
    chosen_ahead,
    frame_request,
    load_from,
    pictures_named,
    piped_picture,
    prompt_of,
    with_frames_chosen,
)
from mtmd.terminal.status_line import Status
from mtmd.terminal.wrap import wrapped

HELP = "Answer a prompt about one or several images, videos or audio files."
EXAMPLES = """\
mtmd describe photo.jpg                     # with the demo model, which knows shapes and words
mtmd describe photo.jpg -p "What does the sign say?" -m org/name
mtmd describe page.jpg -p @question.txt
mtmd describe page.png --task markdown -m org/name
mtmd describe before.jpg after.jpg -p "What has changed?"
mtmd describe --each photos/ -p "How many people are there?"
mtmd describe talk.wav -p "What is being said?" -m org/name
mtmd describe clip.mp4 -p "What happens?" --from 0:10 --to 0:25 --fps 2
mtmd describe --allow-remote-media https://example.com/photo.jpg
curl -s https://example.com/photo.jpg | mtmd describe -"""
SHORT = (
    *("--prompt", "--model", "--system", "--max-tokens", "--temperature"),
    *("--json-schema", "--detail", "--each", "--from", "--to"),
    *("--json", "--quiet", "--think", "--device", "--context"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="picture, video and audio files, or data URLs, in the order in which the model has "
        "them; - reads one from standard input",
    )
    add_remote_argument(sub)
    add_prompt_argument(sub)
    add_system_argument(sub)
    sub.add_argument(
        "--each",
        action="store_true",
        help=(
            "ask about each picture separately, and print a table with a row for each; also "
            "takes folders and patterns (for many pictures, resumable: mtmd batch)"
        ),
    )
    add_ahead_argument(sub)
    sub.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object: text, token ids and the receipt; with --each, one per line",
    )
    add_quiet_argument(sub)
    add_video_arguments(sub)
    add_answer_arguments(sub)
    add_model_arguments(sub, isolate=True)


def run(args: argparse.Namespace) -> int:
    """0, or 1 where `--each` has a picture without an answer."""
    chosen = answer_options(args)  # a wrong one is told before a model is loaded for it
    if args.each:
        return _each(args, chosen)
    if args.prepare_ahead is not None:
        raise OptionError("--prepare-ahead: found without --each; add it")
    for word in args.images:
        if os.path.isdir(word):  # noqa: PTH112  # a data URL is too long a path
            raise ImageError(
                f"{word}: found a folder, expected a picture file; with --each, each picture in it "
                "is asked about"
            )
    args.prompt = prompt_of(args, chosen)
    images = with_frames_chosen(pictures_named(args.images, args.allow_remote_media), args)
    model = load_from(args, parallel=1)
    from mtmd.terminal.one_answer import print_answer

    print_answer(model, images, args, chosen)
    return 0


def _each(args: argparse.Namespace, chosen: dict[str, Any]) -> int:
    """A row for each picture, in order, as soon as it is there."""
    from mtmd.batch.inputs import find_inputs, only_first_pages
    from mtmd.prompt.picture_paths import check_sources

    ahead = chosen_ahead(args)
    result = find_inputs(args.images, piped=piped_picture(args.images), audio=True)
    paths = (one.path for one in result.inputs if one.data is None)
    # what is there and no picture is told in its row, as a link in a folder that leads nowhere
    missing = (path for path in paths if not os.path.lexists(path))
    check_sources(missing, args.allow_remote_media)
    frames = frame_request(args)
    model = load_from(args)
    from mtmd.batch.answering import Batch
    from mtmd.service.prepare_ahead import PrepareAhead
    from mtmd.terminal.table import Table

    settings, parallel = model.loaded.answer_options(chosen), model.options.parallel
    batch = Batch(
        model.service,
        prompt_of(args, chosen),
        settings,
        parallel,
        args.system,
        frames,
        PrepareAhead(parallel, ahead),
    )
    rows = batch.rows(result.inputs)
    table, failed, status = Table(("image", "answer"), [i.name for i in result.inputs]), 0, Status()
    try:
        for number, row in enumerate(rows, 1):
            status.clear()
            failed += row.error is not None
            if args.json:
                print(json.dumps(row.asdict()), flush=True)
            else:
                table.add(
                    row.image, row.text or "" if row.error is None else f"failed: {row.error}"
                )
            if number < len(result.inputs):
                status.say(f"{number} of {len(result.inputs)} answered")
    finally:
        status.clear()
        rows.close()
    for note in (result.reported, only_first_pages(result.inputs)):
        if note and not args.quiet:
            print(wrapped(note, sys.stderr), file=sys.stderr)
    return 1 if failed else 0
