"""`mtmd batch --ray`: its options, and a run with them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mtmd.base.errors import DeviceError, OptionError
from mtmd.base.text import for_terminal, one_line

OWN = ("actors", "unit", "column", "name_column", "trust_tables")  # options that only it has
MAXIMUM = {"actors": 100_000, "unit": 1_000_000}
FILES = ("mmproj", "chat_template", "kernels")
SOME_FAILED = 4  # not 1, which is also the code of a program that breaks


def add_arguments(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("on many machines")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="by actors of a Ray cluster: local (started for this command), auto (the one this "
        "machine belongs to) or HOST:PORT of its head. --out is a folder then, of files of that "
        "form; pictures may lie in .tar and .parquet files, too, and behind addresses like "
        "s3://bucket/photos",
    )
    group.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help="how many, also more than there is room for now (default: as fit)",
    )
    group.add_argument(
        "--unit",
        type=int,
        metavar="N",
        help="rows of a file, which are answered again where a machine goes away (default: at most "
        "256)",
    )
    group.add_argument(
        "--column",
        metavar="NAME",
        help="of Parquet files, that of the pictures, their paths or addresses (default: image)",
    )
    group.add_argument(
        "--name-column", metavar="NAME", help="of Parquet files, that of the pictures' names"
    )
    group.add_argument(
        "--trust-tables",
        action="store_true",
        default=None,
        help="read any file and address that Parquet files name (default: below the folder of the "
        "Parquet file, and addresses of its own kind)",
    )


def check(args: argparse.Namespace) -> None:
    """Raises OptionError for options that do not go together."""
    if args.ray is None:
        for name in OWN:
            if getattr(args, name) is not None:
                raise OptionError(
                    f"--{name.replace('_', '-')}: found without --ray; add --ray, or leave it out"
                )
        return
    for name, default in (
        ("unordered", False),
        ("every", None),
        ("retry_failed", False),
        ("pages", False),
        ("markdown", None),
    ):
        if getattr(args, name) != default:
            raise OptionError(
                f"--{name.replace('_', '-')}: found with --ray, which does not "
                "use it; leave one of them out"
            )
    if args.allow_remote_media:
        raise OptionError(
            "--allow-remote-media: found with --ray, which reads addresses of any kind as its "
            "machines can; leave it out"
        )
    if args.split == "layer":
        raise OptionError(
            "--split layer: found with --ray, whose actors have a GPU each, expected none; "
            "--tp N gives each N GPUs"
        )
    for name, maximum in MAXIMUM.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= maximum:
            raise OptionError(f"{name}: found {value:,}, expected 1 to {maximum:,}")


def run(
    args: argparse.Namespace,
    loading: Mapping[str, Any],
    answering: Mapping[str, Any],
    frames: Mapping[str, Any],
    ahead: int | None = None,
) -> int:
    """`loading`, `answering`, `frames`: what was chosen of `LoadOptions`, `AnswerOptions` and
    `FrameRequest`; `ahead`: of `Job`. 0 where every picture has its answer, `SOME_FAILED` where
    not. Raises MtmdError.
    """
    from mtmd.cluster.connect import (
        check_address,
        cluster_lock,
        connected,
        import_ray,
        nodes,
        pool_size,
    )
    from mtmd.options.answer import AnswerOptions
    from mtmd.options.by_name import options
    from mtmd.options.load import LoadOptions

    check_address(args.ray)
    options(LoadOptions, loading)
    options(AnswerOptions, answering)
    ray_errors = import_ray(args.ray).exceptions
    from mtmd.batch.inputs import describe
    from mtmd.batch.output_lock import output_lock
    from mtmd.cluster.actors import Actors, list_on_cluster
    from mtmd.cluster.locations import absolute, full_name, is_address
    from mtmd.cluster.output import Output
    from mtmd.cluster.progress import Progress, Reporter
    from mtmd.cluster.run import Run
    from mtmd.cluster.sources.find import Columns, find
    from mtmd.cluster.worker import Job

    out = str(args.out)
    job = Job(
        full_name(out),
        Path(out).suffix.lower(),
        args.prompt,
        args.system,
        absolute(args.model),
        {**loading, **{name: absolute(loading[name]) for name in FILES if name in loading}},
        dict(answering),
        dict(frames),
        Columns(args.column or "image", args.name_column or "", bool(args.trust_tables)),
        ahead,
    )
    progress, start = Progress(), time.perf_counter()
    try:
        with ExitStack() as stack:
            is_local = not is_address(job.out)
            if is_local and (note := stack.enter_context(output_lock(_folder(job.out)))):
                _report(note)
            output = Output(job, args.resume)
            result = find(args.images, args.list, job.out)
            if skipped := describe(result.skipped):
                _report(skipped)
            ray = stack.enter_context(connected(args.ray))
            if not is_local:
                stack.enter_context(cluster_lock(ray, job.out))
                output.look(args.resume)
            device, cluster = loading.get("device", "auto"), nodes(ray)
            size = pool_size(cluster, device, args.tp, args.actors, args.threads)
            stack.callback(output.leave)
            output.prepare(result, partial(list_on_cluster, ray), args.unit, size.actors)
            output.count_before(progress)
            start = time.perf_counter()
            job = replace(job, loading={**job.loading, "device": size.device})
            reporter = stack.enter_context(Reporter())
            run = Run(output, Actors(ray, job, size), progress)
            run.until_done(size.actors, reporter.report)
    except ray_errors.RayError as error:
        raise DeviceError(
            f"ray: the cluster has failed ({one_line(error, 300)}); rows that are there stay, "
            "--resume goes on"
        ) from error
    finally:
        if progress.before + progress.written:
            _report(progress.summary(out, time.perf_counter() - start))
    return exit_code(progress)


def _folder(out: str) -> Path:
    """Return the path of a folder that has a parent."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _report(line: str) -> None:
    print(for_terminal(line), file=sys.stderr, flush=True)


def exit_code(progress: Any) -> int:
    """Return the exit code of a job that is done."""
    return SOME_FAILED if progress.failed + progress.failed_before else 0
