"""Describes how `mtmd` reads its words and tells its help: one line for a wrong call, examples in
every help, lines no wider than the terminal.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mtmd.base.spelling import did_you_mean
from mtmd.base.text import one_line, printable
from mtmd.terminal.wrap import wrapped

LONGEST = 600  # characters of an error line
SHORT = {  # options of llama.cpp's programs by their short names, and ours
    "-c": "--context",
    "-ctk": "--kv-type",
    "-ctv": "--kv-type",
    "-fa": "--flash-attn",
    "-hf": "--model",
    "-n": "--max-tokens",
    "-np": "--parallel",
    "-q": "--quiet",
    "-sys": "--system",
    "-t": "--threads",
    "-tp": "--tp",
    "-V": "--version",
    "-v": "--version",
}
OUT = ("-o", "--out", "--output")
REQUESTED = ("-p", "--prompt", "--question")
IN_FILE = ("-f", "--file", "--prompt-file")
GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")


_NO_NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: ('.*')", re.DOTALL)


def _expected_number(match: re.Match[str]) -> str:
    """Return what argparse says of a value that is no number, in the words of other errors."""
    option, kind, value = match.groups()
    return f"{option}: found {value}, expected a {'whole ' if kind == 'int' else ''}number"


class Parser(argparse.ArgumentParser):
    """argparse's, whose help has `examples` before the options: commands, each on a line. `groups`
    of commands with a line on each, by name, stand in place of argparse's list. `short`: the
    options, by their long names, that `--help` shows of many; `--help-all` shows all.
    """

    groups: dict[str, dict[str, str]]

    def __init__(
        self, *args: Any, examples: str = "", short: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.examples, self.short, self.groups = examples, frozenset(short), {}
        self.add_argument(
            "--help-all", action=_HelpAll, help="show all options" if short else argparse.SUPPRESS
        )

    def error(self, message: str) -> NoReturn:
        """One line on stderr for a wrong call, in place of argparse's usage text."""
        reported = terminal_line(_NO_NUMBER.sub(_expected_number, message))
        link = " " if reported.endswith("?") else "; "
        line = f"{self.prog}: {reported}{link}see '{self.prog} --help'"
        self.exit(2, f"{wrapped(line, sys.stderr)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, but what is left over is an error of the command it was
        given to, not of `mtmd`. llama.cpp's -hf would be taken for -h.
        """
        if any(word.partition("=")[0] == "-hf" for word in args or ()):
            for action in self._actions:
                if action.dest in ("model", "models"):
                    way = "as -m org/name" if action.option_strings else "as org/name alone"
                    self.error(f"option '-hf' is not known; a model of the hub is given {way}")
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            first = unknown[0]
            self.error(
                f"option {first!r} is not known{self._meant(first.split('=')[0])}"
                if first.startswith("-")
                else f"found {first!r}, expected no more arguments"
            )
        return known, unknown

    def _meant(self, option: str) -> str:
        """Return what to do about an option that is not known here."""
        from mtmd.options.by_name import MEANT  # here: only mistakes need it

        if option in ("--image", "--video") and any(a.dest == "images" for a in self._actions):
            return "; pictures and videos are given without an option: photo.jpg"
        options = [name for action in self._actions for name in action.option_strings]
        if option in OUT and not {"-o", "--out"} & {*options}:
            return "; results go to standard output; save them with > FILE"
        if option in GPU_LAYERS and "--split" in options:
            return "; a GPU is used if there is one, and --split layer shares it with the host"
        if option in REQUESTED and "--image" in options:
            return '; the question needs no option: mtmd ask "What is this?"'
        if option in REQUESTED and "--system" in options and "--prompt" not in options:
            return (
                "; questions are typed, or read line by line from a pipe; for one "
                "question, use mtmd ask"
            )
        if option == "--memory-limit" and "--host-memory" in options:
            return (
                "; --memory is the memory of each GPU that the model is to fit into, and "
                "--host-memory that of a machine without one"
            )
        if option == "--stream" and "--max-tokens" in options:
            return "; answers are always streamed"
        if option in IN_FILE and "--prompt" in options:
            return "; a prompt in a file is given as --prompt @FILE"
        long = {_as_option(other): _as_option(name) for other, name in MEANT.items()}
        return did_you_mean(option, options, long | SHORT)

    def format_help(self, every: bool = False) -> str:
        """`every`: with the options that are not among `short`."""
        left_out = [] if every or not self.short else [*self._left_out()]
        before = [(action, action.help) for action in left_out]
        for action in left_out:
            action.help = argparse.SUPPRESS
        try:
            head, options = self._head(bool(left_out)), self._options()
        finally:
            for action, text in before:
                action.help = text
        width = self._get_formatter()._width
        parts = [head]
        if self.examples:
            parts.append("examples:\n" + textwrap.indent(self.examples.rstrip(), "  "))
        parts += [part for part in (options, *_reported(self.groups, width)) if part]
        if left_out:
            parts.append(f"'{self.prog} --help-all' shows {len(left_out)} more options.")
        if self.groups:
            parts.append(f"'{self.prog} help COMMAND' shows its options and examples.")
        return "\n\n".join(parts) + "\n"

    def _left_out(self) -> Iterator[argparse.Action]:
        """The options that the short help leaves out."""
        for action in self._actions:
            named = self.short & {*action.option_strings}
            is_help = isinstance(action, (argparse._HelpAction, _HelpAll))
            if action.option_strings and not (named or is_help or action.required):
                yield action

    def _head(self, is_short: bool) -> str:
        """Usage, which is a line where options are left out, and description."""
        formatter = self._get_formatter()
        if is_short:
            words = [_usage_of(a) for a in self._actions if a.required or not a.option_strings]
            usage = " ".join([self.prog, "[OPTIONS]", *words])
            formatter.add_usage(usage, [], [])
        else:
            formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        return formatter.format_help().rstrip()

    def _options(self) -> str:
        formatter = self._get_formatter()
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help().rstrip()


class _HelpAll(argparse.Action):
    """Action as argparse's own for --help."""

    def __init__(self, option_strings: Sequence[str], **options: Any) -> None:
        super().__init__(option_strings, **options | {"dest": argparse.SUPPRESS, "nargs": 0})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(every=True), end="")
        parser.exit()


def _usage_of(action: argparse.Action) -> str:
    """Return how an argument stands in a line of usage."""
    name = str(action.metavar or action.dest)
    if action.option_strings:
        return f"{action.option_strings[-1]} {name}"
    ways = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}
    return ways.get(str(action.nargs), name)


def _as_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def by_option(top: Parser, args: argparse.Namespace, message: str) -> str:
    """A message about an option, which begins by its name in Python, by the name that was given.
    Behind the name may stand its value, and other options; what begins by "model" names one,
    however it was given.
    """
    begin, colon, rest = message.partition(": ")
    verbs = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    given = {
        action.dest: action.option_strings[-1]
        for action in verbs.choices[args.verb]._actions
        if action.option_strings and getattr(args, action.dest, action.default) != action.default
    }
    parts = [part.partition(" ") for part in begin.split(", ")]
    first, space, _ = parts[0]
    if not colon or first.replace("-", "_") not in given or (space and first == "model"):
        return message
    named = (given.get(name.replace("-", "_"), name) + sp + value for name, sp, value in parts)
    return f"{', '.join(named)}: {rest}"


def _reported(groups: dict[str, dict[str, str]], width: int) -> Iterator[str]:
    """A paragraph for each group of commands."""
    longest = max((len(name) for names in groups.values() for name in names), default=0)
    for group, names in groups.items():
        lines = [f"{group}:"]
        for name, text in names.items():
            head = f"  {name:<{longest}}  "
            lines += textwrap.wrap(
                text, max(width, 40), initial_indent=head, subsequent_indent=" " * len(head)
            )
        yield "\n".join(lines)


def terminal_line(text: str) -> str:
    """`text` fit for one line of a terminal: what users and files bring may hold line breaks and
    escape sequences, and be long.
    """
    plain = printable(one_line(text))
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}..."
