"""What is made of declared options and kept in files: keyword arguments with their types, and the
reference of all options.

python tools/option_tables.py      writes mtmd/options/keywords.py and docs/options.md
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mtmd.base.options import Option, defaults_of, options_of
from mtmd.cli import parser
from mtmd.clip.video.frame_request import FrameRequest
from mtmd.commands.arguments import help_with_default, in_units
from mtmd.options.answer import AnswerOptions
from mtmd.options.load import LoadOptions
from mtmd.options.serve import ServeOptions
from mtmd.web.settings import ConnectionLimits, MediaBudget, ServerSettings

ROOT = Path(__file__).parents[1]
KEYWORDS_FILE = ROOT / "mtmd" / "options" / "keywords.py"
REFERENCE_FILE = ROOT / "docs" / "options.md"
WRITTEN = "Written by `python tools/option_tables.py`; do not edit by hand."

KEYWORDS_HEAD = f'''"""Options as keyword arguments, for type checkers and editors.
{WRITTEN}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from mtmd.tools.tool import Tool, Toolbox

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = str | torch.device
    Dtype: TypeAlias = Literal["auto", "bf16", "fp32", "bfloat16", "float32"] | torch.dtype
else:  # torch is not loaded for types
    Device, Dtype = str, str

Detail: TypeAlias = Literal["auto", "low", "high"]
Task: TypeAlias = Literal[
    "markdown",
    "text",
    "table",
    "formula",
    "layout",
    "caption",
    "short-caption",
    "long-caption",
    "objects",
]
Path: TypeAlias = str | PathLike[str]
'''
KEYWORDS = {
    "LoadKeywords": (LoadOptions, "Describes how a model is loaded."),
    "AnswerKeywords": (AnswerOptions, "Describes how an answer is generated."),
}
KEYWORDS_TAIL = '''

class DescribeKeywords(LoadKeywords, AnswerKeywords, total=False):
    """Both, as `describe` takes them."""
'''
REFERENCE_HEAD = f"""# Options

{WRITTEN}

Each option once, with its default, followed by the commands that have another one. (`describe`
without `--each`, `ask` and `chat` compute one answer at a time.) Keyword arguments of Python have
the name in the first column, and so has a preset where the last column says so; `mtmd COMMAND
--help-all` shows which options a command has. Fields of requests have the same names and ranges
([the API](api.md)).
"""
REFERENCE = {
    "Loading a model": (
        (LoadOptions,),
        "Keyword arguments of `load` and `describe`, and of most commands.",
    ),
    "Answers": (
        (AnswerOptions,),
        "Keyword arguments of `describe`, `answer`, `stream`, and of commands that answer.",
    ),
    "Frames of videos": ((FrameRequest,), "Of `VideoInput`, and of commands that answer."),
    "The server": (
        (ServerSettings, MediaBudget, ConnectionLimits, ServeOptions),
        "Of `mtmd serve`, beside those of loading. The names are those of its settings, not "
        "keyword arguments.",
    ),
}


def keywords() -> str:
    """Return mtmd/options/keywords.py."""
    parts = [KEYWORDS_HEAD]
    for name, (record, text) in KEYWORDS.items():
        parts.append(f'\n\nclass {name}(TypedDict, total=False):\n    """{text}"""\n')
        types = {field.name: str(field.type) for field in dataclasses.fields(record)}
        for option, declared in options_of(record).items():
            type_ = declared.kind.takes or types[option]
            type_ = type_ if type_.endswith("| None") else f"{type_} | None"
            lines = textwrap.wrap(f"{declared.help}.", 90)
            body = "\n    ".join(lines) + ("\n    " if len(lines) > 1 else "")
            parts.append(f'\n    {option}: {type_}\n    """{body}"""\n')
    return "".join((*parts, KEYWORDS_TAIL))


def spelling(name: str, declared: Option) -> str:
    if declared.flag is None:
        return ""
    return f"`{declared.flag or '--' + name.replace('_', '-')}`"


def default_in(text: str) -> str:
    """Return the default that the help of an option ends with."""
    shown = re.search(r"\(default: (.*)\)$", text)
    return shown[1].replace("%%", "%") if shown else ""


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    top = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(top.choices)


def other_defaults(name: str, declared: Option, value: object) -> str:
    """Return the defaults of commands that differ from `value`, the option's own."""
    if declared.flag is None:
        return ""
    flag = declared.flag.split()[-1] if declared.flag else f"--{name.replace('_', '-')}"
    own = default_in(help_with_default(declared, in_units(declared, value), False))
    others: dict[str, list[str]] = defaultdict(list)
    for command, sub in commands().items():
        for action in sub._actions:
            shown = default_in(action.help or "")
            if flag in action.option_strings and shown and shown != own:
                others[shown].append(f"`{command}`")
    return "".join(f"; {', '.join(names)}: {shown}" for shown, names in others.items())


def rows(record: type) -> Iterator[str]:
    for name, declared in options_of(record).items():
        value = defaults_of(record)[name]
        shown = "" if value in (None, (), "") else str(value)
        if declared.scale != 1:
            shown = f"{value // declared.scale} {declared.kind.metavar.replace('IB', 'iB')}"
        shown = declared.default.format(shown) if declared.default else shown
        shown += other_defaults(name, declared, value)
        preset = "yes" if declared.preset else ""
        cells = (
            f"`{name}`",
            spelling(name, declared),
            declared.help,
            str(declared.kind),
            shown,
            preset,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def reference() -> str:
    """Return docs/options.md."""
    parts = [REFERENCE_HEAD]
    for title, (records, text) in REFERENCE.items():
        parts.append(f"\n## {title}\n\n{text}\n\n")
        parts.append(
            "| name | in commands | | values | default | preset |\n|---|---|---|---|---|---|\n"
        )
        parts += (f"{row}\n" for record in records for row in rows(record))
    return "".join(parts)


if __name__ == "__main__":
    KEYWORDS_FILE.write_text(keywords())
    REFERENCE_FILE.write_text(reference())
