"""`mtmd completion SHELL`: what makes a shell complete commands, options and their values on TAB.

argcomplete does it: the shell calls `mtmd` with a variable set, and `mtmd` answers from the very
parser that reads its options.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

HELP = "Print the shell code that completes mtmd's commands, options and values."
EXAMPLES = """\
mtmd completion bash >> ~/.bashrc
mtmd completion zsh >> ~/.zshrc
mtmd completion fish > ~/.config/fish/completions/mtmd.fish"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["mtmd"], shell=args.shell))
    return 0


def is_requested() -> bool:
    """Return whether a shell wants to know how a line could go on."""
    return "_ARGCOMPLETE" in os.environ


def complete(parser: argparse.ArgumentParser) -> None:
    """Tell the shell, and leave."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)


def offers(action: argparse.Action, values: Iterable[str]) -> None:
    """Return what the shell offers as an option's value."""
    result = tuple(values)

    def completer(**_: Any) -> tuple[str, ...]:
        return result

    setattr(action, "completer", completer)  # noqa: B010  # argcomplete reads it there


def offers_models(action: argparse.Action) -> None:
    """Models that were fetched, and files."""

    def completer(prefix: str, **_: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        from mtmd.checkpoint.cached_models import names_here

        names = [name for name in names_here() if name.startswith(prefix)]
        return [*names, *FilesCompleter()(prefix)]

    setattr(action, "completer", completer)  # noqa: B010  # argcomplete reads it there
