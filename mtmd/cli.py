"""The `mtmd` command: parses, calls one verb, turns errors of ours into one line and exit code
2.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from mtmd import __version__
from mtmd.commands import (
    batch,
    bench,
    chat,
    compare,
    describe,
    dump,
    embed,
    history,
    info,
    serve,
    warmup,
)
from mtmd.kernels.errors import MtmdError
from mtmd.kernels.text import one_line

VERBS = {
    "describe": describe,
    "batch": batch,
    "chat": chat,
    "embed": embed,
    "serve": serve,
    "history": history,
    "info": info,
    "warmup": warmup,
    "bench": bench,
    "compare": compare,
    "dump": dump,
}
LONGEST = 600  # characters of an error line


class Parser(argparse.ArgumentParser):
    """One line on stderr for a wrong call, in place of argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_terminal_line(message)}; see '{self.prog} --help'\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in the base class, but what is left over is an error of the command it was given to,
        not of `mtmd`.
        """
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            first = unknown[0]
            self.error(
                f"option {first!r} is not known"
                if first.startswith("-")
                else f"found {first!r}, expected no more arguments"
            )
        return known, unknown


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="mtmd",
        allow_abbrev=False,
        description="Answers questions about images, and says what the model saw and where it ran.",
    )
    top.add_argument("--version", action="version", version=f"mtmd {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="COMMAND", parser_class=Parser)
    for name, module in VERBS.items():
        sub = verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 `compare` or `history check` found something, 2 a mistake in the call
    or its files, 3 `warmup --strict` found something, 70 the device of `serve` has failed, 130
    interrupted.
    """
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # an answer may hold characters that a terminal's encoding does not have
        sys.stdout.reconfigure(errors="backslashreplace")
    top = parser()
    args = top.parse_args(arguments)
    if args.verb is None:
        top.error(f"found no command, expected one of {', '.join(VERBS)}")
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except MtmdError as error:
        return _refuse(args.verb, str(error))
    except KeyboardInterrupt:
        print(f"mtmd {args.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _leave_stdout()
        return 0
    except OSError as error:  # a full disk under the output, for one
        with suppress(OSError):
            _leave_stdout()
        where = f": {error.filename}" if error.filename else ""
        return _refuse(args.verb, f"{error.strerror or type(error).__name__}{where}")


def _run(args: argparse.Namespace) -> int:
    """The command; or, in a process that a launcher has started as one of several ranks and not as
    the first, whatever the first one says.
    """
    if getattr(args, "tp", 1) > 1:
        from mtmd.config import launcher

        launched = launcher(args.tp)
        if launched is not None and launched.rank:
            from mtmd.follower import join

            return join(launched)
    code: int = VERBS[args.verb].run(args)
    return code


def _refuse(verb: str, message: str) -> int:
    print(f"mtmd {verb}: {_terminal_line(message)}", file=sys.stderr)
    return 2


def _terminal_line(text: str) -> str:
    """`text` fit for one line of a terminal: what users and files bring may hold line breaks and
    escape sequences, and be long.
    """
    plain = "".join(c if c.isprintable() else "?" for c in one_line(text))
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}..."


def _leave_stdout() -> None:
    """Keep the interpreter's own flush at exit from failing on the closed pipe."""
    null: Any = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
