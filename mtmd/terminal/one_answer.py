"""One answer, streamed to stdout, for `mtmd describe` and `mtmd ask`; all else goes to stderr."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtmd.events import Finished, Progress, TextPiece, ThinkingPiece
from mtmd.model import Model
from mtmd.prompt.audio_input import kind_of
from mtmd.prompt.conversation import messages_of
from mtmd.receipt import Receipt
from mtmd.terminal.line_input import without_echo_of_keys
from mtmd.terminal.status_line import Status
from mtmd.terminal.wrap import DIM, StreamedText, styled, wrapped

_FIRST_PAGE = re.compile(r"page 1 of [\d,]+")  # as decoding a PDF notes
EVERY_PAGE = "only the first page of the PDF was read; 'mtmd batch --pages' reads every page"


def print_answer(
    model: Model, images: Sequence[Any], args: argparse.Namespace, chosen: Mapping[str, Any]
) -> None:
    """The answer to `args.prompt` about `images`, none for the prompt alone; `chosen` are fields of
    `AnswerOptions`. With `args.json` it is one object, with `args.quiet` it comes without a
    receipt and without what the model thought before. Raises MtmdError.
    """
    status, text, thought = Status(), StreamedText(), StreamedText(is_thought=True)
    kinds = {kind_of(image) for image in images}
    if media := [kind for kind in ("video", "audio") if kind in kinds]:
        status.say(f"reading the {' and the '.join(media)}")
    messages = messages_of(images or None, args.prompt, args.system, task=chosen.get("task"))
    with without_echo_of_keys():
        try:
            for event in model.stream(messages, **chosen):
                if isinstance(event, Progress):
                    status.show(event)
                elif isinstance(event, ThinkingPiece) and not (args.json or args.quiet):
                    status.clear()
                    thought.write(event.text)
                elif isinstance(event, TextPiece) and not args.json:
                    status.clear()
                    if thought.begun:
                        thought.end()
                    text.write(event.text)
                elif isinstance(event, Finished):
                    status.clear()
                    if thought.begun:
                        thought.end()
                    if args.json:
                        print(json.dumps(event.answer.asdict()), flush=True)
                    else:
                        text.end()
                    if not (args.json or args.quiet):
                        receipt = wrapped(str(event.answer.receipt), sys.stderr)
                        print(styled(receipt, DIM, sys.stderr), file=sys.stderr)
                        if any(map(_FIRST_PAGE.fullmatch, _notes(event.answer.receipt))):
                            print(wrapped(EVERY_PAGE, sys.stderr), file=sys.stderr)
        finally:
            status.clear()
            if thought.begun:
                thought.end()
            if text.begun:  # broken off: what is said next begins a line of its own
                text.end()


def _notes(receipt: Receipt) -> Iterator[str]:
    """Yield what was noted on each picture."""
    for image in receipt.images:
        yield from image.notes
