"""`mtmd history`: the conversations that `mtmd serve` keeps, copied, checked, brought back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtmd.base.text import plural
from mtmd.commands.arguments import add_options
from mtmd.options.serve import ServeOptions

HELP = "Back up, check, restore or recover the conversations that the server keeps."
EXAMPLES = """\
mtmd history backup ~/backups/today
mtmd history check
mtmd history restore ~/backups/today"""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    tasks = sub.add_subparsers(
        dest="task", metavar="TASK", required=True, parser_class=type(sub), help="one of:"
    )
    backup = _task(
        tasks, "backup", "Copy conversations and pictures to a folder; servers may go on meanwhile."
    )
    backup.add_argument("target", metavar="DEST", help="the new folder, or an empty one")
    check = _task(
        tasks,
        "check",
        "Look for damage, and for pictures that are missing or unused. The "
        "exit code is 1 if something needs repair.",
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument(
        "--remove-unknown",
        action="store_true",
        help="if nothing is wrong, delete pictures that belong to no conversation",
    )
    restore = _task(
        tasks,
        "restore",
        "Restore a backup; the previous data is moved to another folder. No server may run.",
    )
    restore.add_argument("source", metavar="BACKUP", help="a folder made by `mtmd history backup`")
    _task(
        tasks,
        "recover",
        "Build the database again from everything that can be read, and move "
        "the old one to another folder. No server may run.",
    )


def _task(
    tasks: argparse._SubParsersAction[argparse.ArgumentParser], name: str, words: str
) -> argparse.ArgumentParser:
    task = tasks.add_parser(name, help=words, description=words, allow_abbrev=False)
    add_options(task, ServeOptions, ["data"])
    return task


def run(args: argparse.Namespace) -> int:
    from mtmd.environment import data_folder

    folder = Path(args.data).expanduser() if args.data else data_folder()
    if args.task == "check":
        return _check(folder, as_json=args.json, remove=args.remove_unknown)
    from mtmd.web.store.backup import backup, recover_folder, restore

    if args.task == "recover":
        print(recover_folder(folder))
        return 0
    if args.task == "backup":
        target = Path(args.target).expanduser()
        copied = backup(folder, target)
        print(f"saved to {target}: ", end="")
    else:
        copied = restore(Path(args.source).expanduser(), folder)
        print(f"restored to {folder}: ", end="")
    print(_counts(copied.conversations, copied.messages, copied.pictures))
    if copied.missing:
        print(f"{plural(copied.missing, 'picture')} could not be found; `mtmd history check` tells")
    if copied.set_aside:
        print(f"what was there before is in {folder / copied.set_aside}")
    return 0


def _check(folder: Path, *, as_json: bool, remove: bool) -> int:
    from mtmd.web.store.check import check, remove_unknown

    result = check(folder)
    if as_json:
        print(json.dumps(result.asdict()))
    else:
        counts = _counts(result.conversations, result.messages, result.pictures)
        print(f"{folder}: {counts} ({result.picture_bytes / 1e6:.1f} MB)")
        for problem in result.problems:
            print(f"PROBLEM: {problem}")
        for note in result.notes:
            print(f"note: {note}")
        if not result.problems:
            print("nothing is wrong")
    if result.problems:
        return 1
    if remove:
        count = remove_unknown(folder)
        if not as_json:
            print(f"removed {plural(count, 'picture')} of no conversation")
    return 0


def _counts(conversations: int, messages: int, pictures: int) -> str:
    parts = {"conversation": conversations, "message": messages, "picture": pictures}
    return ", ".join(plural(number, word) for word, number in parts.items())
