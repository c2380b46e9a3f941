"""Nothing is collected while a model is loaded, and what was loaded is left out afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from mtmd.base.garbage import without_collections


def test_no_collections_meanwhile() -> None:
    generations = []

    def note(phase: str, facts: dict[str, int]) -> None:
        generations.append((phase, facts["generation"]))

    gc.callbacks.append(note)
    try:
        with without_collections():
            made = [[] for _ in range(30 * gc.get_threshold()[0])]
            assert generations == []
        assert gc.isenabled() and gc.get_freeze_count() >= len(made)
        assert generations == []
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()


def test_after_an_error_and_where_they_are_off() -> None:
    with pytest.raises(ValueError, match="defect"), without_collections():
        raise ValueError("defect")
    assert gc.isenabled()
    gc.unfreeze()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled() and gc.get_freeze_count() == 0, "the caller has other plans"
    finally:
        gc.enable()


def test_triton_says_nothing_at_the_end() -> None:
    """A process of its own: what is seen is its end."""
    code = """
from mtmd.base.garbage import without_collections
with without_collections():
    import triton.language
    from mtmd import OptionError, load
    try:
        load(split="layer")
    except OptionError as error:
        print(error)
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "expected several devices" in made.stdout and made.stderr == ""
