"""The `mtmd` command: parses, calls one verb, turns errors of ours into one line and exit code 2."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mtmd import __version__
from mtmd.commands import describe, dump, warmup
from mtmd.kernels.errors import MtmdError

VERBS = {"describe": describe, "warmup": warmup, "dump": dump}


class Parser(argparse.ArgumentParser):
    """One line on stderr for a wrong call, in place of argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="mtmd", description="Answers questions about images, and says what the model saw and where it ran.")
    top.add_argument("--version", action="version", version=f"mtmd {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=Parser)
    for name, module in VERBS.items():
        sub = verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 a mistake in the call or its files, 3 `warmup --strict` found something, 130 interrupted."""
    args = parser().parse_args(arguments)
    try:
        code: int = VERBS[args.verb].run(args)
        sys.stdout.flush()
        return code
    except MtmdError as error:
        print(f"mtmd {args.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mtmd {args.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _leave_stdout()
        return 0


def _leave_stdout() -> None:
    """Keep the interpreter's own flush at exit from failing on the closed pipe."""
    null: Any = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
