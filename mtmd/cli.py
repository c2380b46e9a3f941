"""The `mtmd` command: parses, calls one verb, turns errors of ours into one line and exit code
2.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from mtmd import __version__
from mtmd.base.errors import MtmdError
from mtmd.base.interrupts import end_at_once, is_import, raise_after_import, raise_in_main
from mtmd.base.spelling import did_you_mean
from mtmd.commands import (
    ask,
    batch,
    chat,
    completion,
    describe,
    embed,
    history,
    rerank,
    serve,
    transcribe,
    warmup,
)
from mtmd.commands.argument_parser import Parser, by_option, terminal_line
from mtmd.commands.inspect import bench, compare, dump, fit, info
from mtmd.commands.models import convert, listing, pull, remove
from mtmd.commands.shared import read_texts, settle_model
from mtmd.terminal.wrap import wrapped

GROUPS: dict[str, dict[str, ModuleType]] = {
    "ask": {
        "ask": ask,
        "describe": describe,
        "transcribe": transcribe,
        "batch": batch,
        "chat": chat,
        "embed": embed,
        "rerank": rerank,
    },
    "serve": {"serve": serve, "history": history},
    "models": {"pull": pull, "list": listing, "rm": remove, "info": info, "convert": convert},
    "examine": {"warmup": warmup, "fit": fit, "bench": bench, "compare": compare, "dump": dump},
    "shell": {"completion": completion},
}
VERBS = {name: module for group in GROUPS.values() for name, module in group.items()}
HELP = "help"
MEANT = {  # commands of other programs, and ours
    "delete": "rm",
    "download": "pull",
    "generate": "ask",
    "ls": "list",
    "remove": "rm",
    "run": "chat",
    "show": "info",
    "version": "--version",
}
ABOUT = "Run vision-language models: ask about images, chat, serve, and see where every model runs."
EXAMPLES = """\
mtmd describe photo.jpg                     # with the demo model, which knows shapes and words
mtmd describe photo.jpg -m org/name         # with a model from the Hugging Face hub
mtmd ask "What is this?" -i photo.jpg       # a question, with pictures or without
mtmd serve                                  # a chat page and an OpenAI-compatible API
mtmd warmup                                 # what this machine can and cannot do"""


def parser(chosen: Collection[str] = VERBS) -> Parser:
    """`chosen`: the commands whose options are read; help and mistakes of others need none."""
    top = Parser(
        prog="mtmd",
        usage="mtmd [--version] COMMAND ...",
        allow_abbrev=False,
        description=ABOUT,
        examples=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"mtmd {__version__}")
    verbs = top.add_subparsers(
        prog="mtmd", dest="verb", metavar="COMMAND", parser_class=Parser, help=argparse.SUPPRESS
    )
    top.groups = {
        group: {name: module.HELP for name, module in modules.items()}
        for group, modules in GROUPS.items()
    } | {"help": {HELP: "Show help for a command: mtmd help COMMAND."}}
    for name, module in VERBS.items():
        sub = verbs.add_parser(
            name,
            description=module.HELP,
            allow_abbrev=False,
            examples=module.EXAMPLES,
            short=getattr(module, "SHORT", ()),
        )
        if name in chosen:
            module.add_arguments(sub)
    about = verbs.add_parser(
        HELP,
        description="Show help for a command.",
        examples="mtmd help\nmtmd help describe\nmtmd help describe --all",
    )
    about.add_argument("--all", action="store_true", help="show every option")
    about.add_argument(
        "words", nargs="*", metavar="COMMAND", help="the command (default: the overview)"
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 `compare` or `history check` found something, or a picture or recording
    of several failed, 2 a mistake in the call or its files, 3 `warmup --strict` found something or
    `fit` no way, 4 `batch --ray` is done and some rows have an error, 70 the device of `serve` has
    failed, 130 interrupted.
    """
    _open_closed_files()
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # an answer may hold characters that a terminal's encoding does not have
        sys.stdout.reconfigure(errors="backslashreplace")
    _take_sigterm()
    if completion.is_requested():
        completion.complete(parser())
    words = list(sys.argv[1:] if arguments is None else arguments)
    top = parser(words[:1])
    _check_verb(top, words)
    args = top.parse_args(words)
    if args.verb is None:
        top.print_help()
        return 0
    if args.verb == HELP:
        return main([*args.words, "--help-all" if args.all else "--help"])
    try:
        with _interrupts_of_imports():
            code = _run(args)
        sys.stdout.flush()
        return code
    except MtmdError as error:
        return _refuse(args.verb, by_option(top, args, str(error)))
    except KeyboardInterrupt:
        print(f"mtmd {args.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _leave_stdout()
        return 0
    except RuntimeError as error:
        if "home directory" not in str(error):  # of `Path.expanduser`
            raise
        return _refuse(
            args.verb, ('a path begins with "~", but there is no such user; write it in full')
        )
    except OSError as error:  # a full disk under the output, for one
        with suppress(OSError):
            _leave_stdout()
        is_output = error.errno == errno.ENOSPC  # whoever writes another file gives its name
        name = error.filename or ("standard output" if is_output else "")
        where = f": {name}" if name else ""
        return _refuse(args.verb, f"{error.strerror or type(error).__name__}{where}")


def _open_closed_files() -> None:
    """Open those of the three standard files that are closed: what is opened next would take the
    number of one that was closed before we began, and get what native code writes to it. In
    processes that we start, too.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = Path(os.devnull).open(mode)  # noqa: SIM115  # until the end
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def _take_sigterm() -> None:
    """The first process of a container passes over what would end any other: as loading takes
    minutes, `docker stop` would have to kill it. `serve` takes the signal over once it answers.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


@contextmanager
def _interrupts_of_imports() -> Iterator[None]:
    """Libraries in machine code turn a Ctrl-C that comes while they are imported into errors of
    their own, as numpy and pydantic do, or swallow it. In the process of a command it is raised
    once the import is over, and a second one ends the process; elsewhere, an error that leaves an
    import after it is that Ctrl-C.
    """
    came = waits = False
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: Any) -> None:
        nonlocal came, waits
        came = True
        if raise_in_main():
            return
        if before is end_at_once and is_import(frame):
            if waits:
                end_at_once(number, frame)
            waits = True
            raise_after_import(frame)
            return
        signal.default_int_handler(number, frame)

    usual = before in (signal.default_int_handler, end_at_once)
    taken = usual and threading.current_thread() is threading.main_thread()
    if taken:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        names = (f.f_code.co_name for f, _ in traceback.walk_tb(error.__traceback__))
        if came and "<module>" in names:  # of what is being imported, whose frames alone are kept
            raise KeyboardInterrupt from error
        raise
    finally:
        if taken and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _run(args: argparse.Namespace) -> int:
    """The command; or, in a process that a launcher has started as one of several ranks and not as
    the first, whatever the first one says.
    """
    if getattr(args, "tp", 1) > 1:
        from mtmd.environment import launcher

        launched = launcher(args.tp)
        if launched is not None and launched.rank:
            from mtmd.follower import join

            join(launched)
    settle_model(args)
    read_texts(args)
    code: int = VERBS[args.verb].run(args)
    return code


def _check_verb(top: Parser, words: Sequence[str]) -> None:
    """Check the verb and report it in our own words where argparse would list every command there
    is.
    """
    if words and not words[0].startswith("-") and words[0] not in (*VERBS, HELP):
        near = did_you_mean(words[0], (*VERBS, HELP, "--version"), MEANT)
        top.error(f"command {words[0]!r} is not known{near}")


def _refuse(verb: str, message: str) -> int:
    print(wrapped(f"mtmd {verb}: {terminal_line(message)}", sys.stderr), file=sys.stderr)
    return 2


def _leave_stdout() -> None:
    """Keep the interpreter's own flush at exit from failing on the closed pipe."""
    null: Any = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
