"""The words of identifiers and docstrings: `tools/words.py` has the lists."""

from __future__ import annotations

import ast
from pathlib import Path

import house
import pytest
from words import NO_BEGINNING, PRIVATE, first_word, private_words

ROOT = Path(__file__).parents[1]
FOLDERS = (*house.ROOMS, "tools", "benchmarks")
TREES = {
    file.relative_to(ROOT).as_posix(): ast.parse(file.read_bytes())
    for file in house.python_files(ROOT, *FOLDERS)
}
ROOMS = [file for file in TREES if file.partition("/")[0] in house.ROOMS]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_the_lists_fit_together() -> None:
    for word, others in PRIVATE.items():
        assert others and not any(private_words(other) for other in others), word


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("told_apart", ["told", "apart"]),
        ("mostTokens", ["most"]),
        ("HELD_BYTES", ["held"]),
        ("gelu_in_place", []),
        ("NotFoundError", []),
        ("foundation", []),
    ],
)
def test_words_of_names(name: str, expected: list[str]) -> None:
    assert private_words(name) == expected


def test_no_identifier_has_a_private_word() -> None:
    wrong = {
        f"{file}: {name}": ", ".join(
            f"{word}: rather {' or '.join(PRIVATE[word])}" for word in words
        )
        for file, tree in TREES.items()
        for name in {*house.defined_names(tree), Path(file).stem}
        if (words := private_words(name, file))
    }
    assert not wrong, wrong


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    wrong = [
        f"{file}: {getattr(node, 'name', 'module')}: {text[:60]}"
        for file in ROOMS
        for node in ast.walk(TREES[file])
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))
        if first_word(text) in NO_BEGINNING
    ]
    assert not wrong, wrong
