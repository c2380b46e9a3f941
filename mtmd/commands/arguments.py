"""Arguments of commands, made of declared options (`mtmd.base.options`)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtmd.base.options import Option, defaults_of, name_of, options_of
from mtmd.commands.completion import offers

SUPPRESS = argparse.SUPPRESS


def add_options(
    parser: argparse._ActionsContainer,
    record: type,
    names: Iterable[str] | None = None,
    *,
    leave_out: Sequence[str] = (),
    group: str = "",
    defaults: Mapping[str, Any] | None = None,
    absent: bool = False,
) -> None:
    """Add the options of a record that commands have: those in `names`, or all but `leave_out`.

    `group` is the heading of options that name none. `defaults` hold in place of the record's; a
    text among them is shown in the help. `absent`: an option that is not given is no attribute of
    the arguments.
    """
    declared = options_of(record)
    own = defaults or {}
    groups = {group.title or "": group for group in parser._action_groups} | {"": parser}
    for name in names if names is not None else declared:
        one = declared[name]
        if one.flag is None or name in leave_out:
            continue
        heading = one.group or group
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        value = own.get(name, defaults_of(record)[name])
        _add(groups[heading], name, one, value, name in own, absent)


def _add(
    group: argparse._ActionsContainer,
    name: str,
    declared: Option,
    value: Any,
    is_own: bool,
    absent: bool,
) -> None:
    kind = declared.kind
    flags = (declared.flag or "").split() or [f"--{name.replace('_', '-')}"]
    if not flags[-1].startswith("--"):
        flags.append(f"--{name.replace('_', '-')}")
    value = in_units(declared, value)
    keywords: dict[str, Any] = {
        "dest": name_of(name, declared),
        "help": help_with_default(declared, value, is_own),
        "default": SUPPRESS if absent else [] if kind.repeated else value,
    }
    if kind.switch and value is None:
        keywords["action"] = argparse.BooleanOptionalAction
    elif kind.switch:
        keywords["action"] = "store_true"
    else:
        keywords["metavar"] = kind.metavar
        if kind.repeated:
            keywords["action"] = "append"
        if kind.parse is not None:
            keywords["type"] = kind.parse
    action = group.add_argument(*flags, **keywords)
    if suggested := declared.suggested or kind.values:
        offers(action, suggested)


def defaults_in(*records: type) -> dict[str, Any]:
    """Return the defaults of the options of records as commands have them, by attribute."""
    return {
        name_of(name, one): [] if one.kind.repeated else in_units(one, defaults_of(record)[name])
        for record in records
        for name, one in options_of(record).items()
    }


def in_units(declared: Option, value: Any) -> Any:
    """Return the value in the units in which commands count."""
    return value if declared.scale == 1 else value // declared.scale


def help_with_default(declared: Option, value: Any, is_own: bool) -> str:
    """Return the help of an option with its default behind it, as `--help` shows it."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    if declared.default is not None and not (is_own and "{" not in declared.default):
        shown = declared.default.format(shown)
    elif value is None or value is False or value in ("", (), []):
        return declared.help
    return f"{declared.help} (default: {shown})".replace("%", "%%")


def options_in(args: argparse.Namespace, *records: type) -> dict[str, Any]:
    """The options of records that are among the arguments, by name."""
    result = {}
    for record in records:
        for name, one in options_of(record).items():
            if one.flag is not None and hasattr(args, dest := name_of(name, one)):
                value = getattr(args, dest)
                result[name] = value * one.scale if one.scale != 1 else value
    return result
