"""What `tools/house.py` counts, on a repository of two files."""

from __future__ import annotations

import subprocess

import house
import pytest

CONFIG = """
class LoadOptions:
    model: str
    device: str
    dtype: str
    threads: int
"""
COMMAND = """
def add_arguments(parser):
    parser.add_argument("-m", "--model")
    parser.add_argument("--no-device", action="store_false")
    parser.add_argument("--other")


def many(a, b, c, d, e, f, g, h, i, j, *, placeHeld):
    told_once = 1
    return told_once
"""


@pytest.fixture
def repository(tmp_path):
    for name, text in (("mtmd/config.py", CONFIG), ("mtmd/command.py", COMMAND)):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_lines_of_each_room(repository):
    counts = house.lines(repository)
    assert counts["product"] == counts["mtmd"] == 16 and counts["web"] == 0


def test_functions_with_many_arguments(repository):
    assert house.arguments(repository) == {"mtmd/command.py:8 many": 11}


def test_private_words_of_defined_names(repository):
    assert house.private_words(repository) == {"place": 1, "held": 1, "told": 1}


def test_where_options_are_declared(repository):
    declared = house.options(repository)
    assert {name: len(where) for name, where in declared.items()} == {
        "model": 2,
        "device": 2,
        "dtype": 1,
        "threads": 1,
    }
