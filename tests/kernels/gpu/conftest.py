"""Kernels compiled ahead of time (tests/support/compiler_process.py), and run as PTX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compiler_process import Compiler, started
from ptx.kernels import Emulator


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    with started() as result:
        yield result


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """Of the card that `--ptx` names; without it, of the one that kernels take the least for."""
    target = request.config.getoption("ptx") or "cuda:80"
    return Emulator(request.getfixturevalue("compiler"), target)


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--ptx` every kernel runs in the emulator."""
    if request.config.getoption("ptx"):
        request.getfixturevalue("emulator").install(monkeypatch)
