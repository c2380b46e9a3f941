"""`mtmd batch IMAGES... -p PROMPT --out FILE`: one prompt about many pictures, videos or
recordings, a row for each.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mtmd.base.text import for_terminal, one_line, plural
from mtmd.clip.video.frame_request import seconds
from mtmd.cluster import command as cluster
from mtmd.commands.arguments import add_options, options_in
from mtmd.commands.shared import (
    STDIN,
    add_ahead_argument,
    add_answer_arguments,
    add_list_argument,
    add_model_arguments,
    add_prompt_argument,
    add_remote_argument,
    add_system_argument,
    add_video_arguments,
    answer_options,
    chosen_ahead,
    frame_request,
    load_from,
    prompt_of,
)
from mtmd.options.load import LoadOptions

FAILURES_SHOWN = 3

HELP = (
    "Ask one prompt about each of many images, videos or recordings, and write the answers to a "
    "file; resumable."
)
EXAMPLES = """\
mtmd batch photos/ -p "Describe the image." --out answers.jsonl
mtmd batch 'photos/**/*.jpg' --out answers.csv --resume
mtmd batch papers/ --pages --task markdown --max-tokens -1 --markdown md/ --out md.jsonl -m org/name
mtmd batch calls/ -p "What does the caller want?" --out calls.csv -m org/name
mtmd batch films/ -p "What happens here?" --every 10s --out scenes.csv
find . -name '*.png' | mtmd batch --list - --out answers.jsonl
mtmd batch --list addresses.txt --allow-remote-media --out answers.jsonl
mtmd batch s3://bucket/photos --ray auto --out s3://bucket/answers.parquet --resume"""
SHORT = (
    *("--prompt", "--model", "--out", "--resume", "--retry-failed", "--list"),
    *("--parallel", "--max-tokens", "--temperature", "--json-schema", "--detail"),
    *("--pages", "--markdown", "--task", "--every", "--ray", "--device"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="picture, video and audio files, folders (all pictures and videos in them, at any "
        "depth, or, where there are none, audio), patterns and data URLs",
    )
    add_remote_argument(sub)
    add_list_argument(sub)
    add_prompt_argument(sub, " about each")
    add_system_argument(sub)
    sub.add_argument(
        "-o",
        "--out",
        type=lambda word: word if "://" in word else Path(word),
        required=True,
        metavar="FILE",
        help=(
            "output file: .jsonl, .csv or .parquet; in .csv, texts that a spreadsheet would run"
            " as formulas start with an apostrophe; with --ray, a .jsonl or .parquet folder"
        ),
    )
    sub.add_argument(
        "--resume",
        action="store_true",
        help=(
            "continue an existing file: images that have a row, failed or not, are skipped "
            "unless their file has changed"
        ),
    )
    sub.add_argument(
        "--retry-failed",
        action="store_true",
        help="as --resume, and ask again about images whose row is an error",
    )
    sub.add_argument(
        "--unordered",
        action="store_true",
        help="write rows in the order of completion (default: in the order of the images)",
    )
    add_options(sub, LoadOptions, ["parallel"], defaults={"parallel": 8})
    add_ahead_argument(sub)
    add_video_arguments(sub).add_argument(
        "--every",
        type=seconds,
        metavar="TIME",
        help=(
            "one row for each part of a video of this many seconds, named ...#t=FROM,TO "
            "(default: one row per video)"
        ),
    )
    sub.add_argument(
        "--pages",
        action="store_true",
        help="one row for each page of a PDF, named ...#page=N (default: its first page)",
    )
    sub.add_argument(
        "--markdown",
        type=Path,
        metavar="DIR",
        help="write each answer to a Markdown file of its own in this folder, too",
    )
    cluster.add_arguments(sub)
    add_answer_arguments(sub)
    add_model_arguments(sub, isolate=True)


def run(args: argparse.Namespace) -> int:
    """0 where every image has its answer, 1 where some failed."""
    from mtmd.base.errors import OptionError
    from mtmd.batch.inputs import check_urls, find_inputs
    from mtmd.batch.output import check_output
    from mtmd.batch.output_lock import output_lock

    cluster.check(args)
    if args.ray is not None:
        frames = vars(frame_request(args))
        return cluster.run(
            args, options_in(args, LoadOptions), answer_options(args), frames, chosen_ahead(args)
        )
    if args.markdown is not None:
        from mtmd.batch.markdown import check_folder

        check_folder(args.markdown)
    if isinstance(args.out, str):
        raise OptionError(f"out {args.out}: found an address, expected a file without --ray")
    answering, ahead = answer_options(args), chosen_ahead(args)
    if STDIN in args.images:
        raise OptionError(
            "found - in place of a picture, expected files; --list - reads paths from standard "
            "input, and 'mtmd describe -' one picture"
        )
    result = find_inputs(args.images, args.list, audio=True)
    check_urls(result.inputs, args.allow_remote_media)
    check_output(args.out)
    with output_lock(args.out) as note:
        if note:
            print(for_terminal(note), file=sys.stderr)
        return _run(args, result, answering, ahead)


def _run(
    args: argparse.Namespace, result: Any, answering: dict[str, Any], ahead: int | None
) -> int:
    from mtmd.base.errors import DeviceError
    from mtmd.batch.earlier_question import (
        SAMPLING,
        EarlierRun,
        chosen,
        name_of_model,
        own_sampling,
        requested,
    )
    from mtmd.batch.output import open_output
    from mtmd.batch.resuming import what_is_left
    from mtmd.options.answer import AnswerOptions
    from mtmd.options.by_name import options

    inputs = list(result.inputs)
    output = open_output(args.out, args.resume or args.retry_failed)
    if not output.known:
        _check_any(inputs)
    frames = frame_request(args)
    answers = chosen(options(AnswerOptions, answering))
    answers.pop(SAMPLING, None)  # what comes of it is compared, once the model is loaded
    before = EarlierRun(
        args.out,
        requested(
            name_of_model(args.model),
            args.prompt,
            args.system,
            chosen(options(LoadOptions, options_in(args, LoadOptions))),
            answers,
            chosen(frames),
        ),
        bool(output.known),
    )
    if args.every is not None:
        inputs = _in_parts(inputs, args)
    if args.pages:
        from mtmd.batch.inputs import in_pages

        inputs = in_pages(inputs, args.isolate)
    from mtmd.batch.inputs import only_first_pages

    resumed = what_is_left(inputs, output.known, before, args.retry_failed)
    left = resumed.inputs
    text = _Summary(resumed)
    first = "" if args.pages else only_first_pages(left)
    for note in (result.reported, first, before.note, resumed.reported):
        if note:
            print(for_terminal(note), file=sys.stderr)
    if not left:
        text.report(args.out)
        return text.code
    _check_any(left)
    model = load_from(args)
    resolved = model.loaded.answer_options(answering)
    before.check_sampling(own_sampling(resolved))
    output.forget(resumed.old)
    from tqdm import tqdm

    from mtmd.batch.answering import Batch
    from mtmd.batch.markdown import write_markdown
    from mtmd.service.prepare_ahead import PrepareAhead

    text.start = time.perf_counter()
    rows = Batch(
        model.service,
        prompt_of(args, answering),
        resolved,
        args.parallel,
        args.system,
        frames,
        PrepareAhead(args.parallel, ahead),
    ).rows(left, not args.unordered)
    # disable=None: only where stderr is a terminal
    bar = tqdm(
        total=len(left) + text.known,
        initial=text.known,
        unit="image",
        disable=None,
        dynamic_ncols=True,
        leave=False,
    )
    try:
        for row in rows:
            before.keep()
            with interrupts_wait():
                output.append(row)
                if args.markdown is not None:
                    write_markdown(args.markdown, row)
                text.count(row)
            bar.set_postfix(failed=text.failed, refresh=False)
            bar.update()
    except DeviceError as error:
        raise DeviceError(
            f"{error}; {args.out} keeps the rows written until then, and the same command with "
            "--resume goes on"
        ) from error
    except KeyboardInterrupt:
        text.is_broken_off = True
        raise
    finally:
        bar.close()
        rows.close()
        output.close()
        text.report(args.out)
    return text.code


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Have Ctrl-C wait for what is done here, so that a row that is written is counted, too."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *interrupt: came.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def _check_any(inputs: Sequence[Any]) -> None:
    """Raises ImageError where there is none of them."""
    from mtmd.prompt.picture_paths import check_paths

    if not any(one.is_url or Path(one.path).exists() for one in inputs):
        check_paths(one.path for one in inputs)


def _in_parts(inputs: list[Any], args: argparse.Namespace) -> list[Any]:
    """Raises OptionError."""
    from mtmd.base.errors import OptionError
    from mtmd.batch.inputs import in_parts

    if args.start is not None or args.end is not None:
        raise OptionError("--every: found with --from or --to, expected one of them")
    if any(one.is_url for one in inputs):
        raise OptionError(
            "--every: found a URL, expected files; download videos that are to be cut into parts"
        )
    if not args.every >= 0.1:
        raise OptionError(f"--every: found {args.every:g} s, expected at least 0.1")
    return in_parts(inputs, args.every, args.isolate)


class _Summary:
    """Summary of a run: rows of before that stay, and those that it has written."""

    def __init__(self, resumed: Any):
        self.known, self.rows, self.only_thoughts, self.cut = resumed.known, 0, 0, 0
        self.failed = len(resumed.failed)
        self.shown = list(resumed.failed[:FAILURES_SHOWN])
        self.start, self.is_broken_off = time.perf_counter(), False

    def count(self, row: Any) -> None:
        self.rows += 1
        only_thought = bool(row.thinking and not (row.text or "").strip())
        self.only_thoughts += only_thought
        self.cut += row.finish == "length" and not only_thought
        if row.error is not None:
            self.failed += 1
            self.shown += [(row.image, row.error)] if len(self.shown) < FAILURES_SHOWN else []

    @property
    def code(self) -> int:
        return 1 if self.failed else 0

    def report(self, path: Path) -> None:
        for line in self.lines(path):
            print(for_terminal(line), file=sys.stderr)

    def lines(self, path: Path) -> Iterator[str]:
        seconds = time.perf_counter() - self.start
        before = f" and {self.known} from before" if self.known else ""
        speed = f", {self.rows / seconds:.1f} images/s" if self.rows and seconds else ""
        rows = plural(self.rows, "row")
        yield f"{path}: {rows} in {seconds:.1f} s{speed}{before}; {self.failed} failed"
        if count := self.only_thoughts:
            have = "row has" if count == 1 else "rows have"
            yield f"  {count} {have} a thought and no answer; give --max-tokens or --think-budget"
        if self.cut:
            answers = "answer was" if self.cut == 1 else "answers were"
            yield f"  {self.cut} {answers} cut (finish is length); --max-tokens -1 is all that fits"
        if self.is_broken_off:
            yield "  the same command with --resume goes on"
        for name, error in self.shown:
            yield f"  {one_line(error if name in error else f'{name}: {error}', 200)}"
        if more := self.failed - len(self.shown):
            yield f"  and {more} more, whose rows have the reason"
        if self.failed:
            yield "  --retry-failed asks about them again"
