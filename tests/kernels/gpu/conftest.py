"""Kernels compiled ahead of time: see tests/support/compiler_process.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compiler_process import Compiler, started


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    with started() as result:
        yield result
