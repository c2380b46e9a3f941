"""Options are declared once: files that are made of them are current, and no command declares one
again.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import option_tables
import pytest

from mtmd.base.options import Option, defaults_of, options_of

ROOT = Path(__file__).parents[3]
RECORDS = [record for records, _ in option_tables.REFERENCE.values() for record in records]
OPTIONS = [
    pytest.param(record, name, one, id=f"{record.__name__}.{name}")
    for record in RECORDS
    for name, one in options_of(record).items()
]
OTHERS = {  # the same words for another option
    ("mtmd/commands/chat.py", "--no-history"): "of lines that are typed",
    ("mtmd/cluster/command.py", "--ray"): "by actors, not replicas",
    ("mtmd/commands/models/convert.py", "--to"): "a type, not a time",
}
EACH_ITS_OWN = ("--json",)  # every command prints another object


def arguments() -> Iterator[tuple[str, str, str]]:
    """(file, option, help) of each that a command declares itself."""
    for folder in ("mtmd", "web"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                    texts = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    for word in node.args:
                        if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                            file = path.relative_to(ROOT).as_posix()
                            yield file, word.value, texts.get("help", "")


def flag(name: str, one: Option) -> str:
    return (one.flag or "").split()[-1] if one.flag else f"--{name.replace('_', '-')}"


def test_files_made_of_options_are_current() -> None:
    assert option_tables.KEYWORDS_FILE.read_text() == option_tables.keywords(), "run the tool"
    assert option_tables.REFERENCE_FILE.read_text() == option_tables.reference(), "run the tool"


@pytest.mark.parametrize(("record", "name", "one"), OPTIONS)
def test_a_default_is_what_its_check_returns(record: type, name: str, one: Option) -> None:
    """So that records of options are made without checking what nobody has chosen."""
    value = defaults_of(record)[name]
    if value is not None:
        checked = one.kind.check(name, value)
        assert (type(checked), checked) == (type(value), value)


def test_no_option_is_declared_twice() -> None:
    declared = {flag(name, one) for r in RECORDS for name, one in options_of(r).items()}
    own = list(arguments())
    again = {(file, word) for file, word, _ in own if word in declared}
    assert again == set(OTHERS)
    texts = Counter((word, text) for _, word, text in own if word not in EACH_ITS_OWN)
    assert [pair for pair, count in texts.items() if count > 1] == []
    inherited = [r for r in RECORDS if any(issubclass(r, o) for o in RECORDS if o is not r)]
    assert inherited == []
    helps = Counter(one.help for r in RECORDS for one in options_of(r).values())
    assert [text for text, count in helps.items() if count > 1] == []


@pytest.mark.parametrize(("record", "name", "one"), OPTIONS)
def test_an_option_is_declared_whole(record: type, name: str, one: Option) -> None:
    """Its help is a part of a sentence, its default one of its values."""
    assert one.help and not one.help.endswith(".")
    if (value := defaults_of(record)[name]) is not None:
        assert one.kind.check(name, value) == value
