"""Errors reach other processes as what they are."""

from __future__ import annotations

import pickle

import pytest

from mtmd.base.errors import BusyError, ContextError, ImageError, MtmdError


@pytest.mark.parametrize(
    "error",
    [ImageError("x.png: found\n nothing"), ContextError("too long", 12, 8), BusyError("full", 3.0)],
)
def test_an_error_can_be_pickled(error: MtmdError) -> None:
    """A pool of processes that could not read what a worker raised would wait for ever."""
    made = pickle.loads(pickle.dumps(error))
    assert type(made) is type(error) and str(made) == str(error) and vars(made) == vars(error)
