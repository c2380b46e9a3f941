"""Kernels compiled ahead of time (tests/support/compiler_process.py), and run as PTX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from compiler_process import Compiler, started
from ptx.kernels import Emulator


@pytest.fixture(scope="session")
def compiler(pytestconfig: pytest.Config) -> Iterator[Compiler]:
    with started(pytestconfig.getoption("record_compiled")) as result:
        yield result


TRIED_TILES = """
from dataclasses import asdict
import torch
from mtmd.kernels.backends.vision_attention.candidates import tiled
from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_program
from mtmd.kernels.graph import Type
x = Type.contiguous((1, 4096, 16, 72), torch.bfloat16)
out = [
    (name, asdict(compile_program(target, program)))
    for target in SHARED_LIMIT
    for name, kernel in tiled(target).items()
    for program in kernel.programs(x, x, x, scale=0.1)
]
"""


@pytest.fixture(scope="session")
def tried_tiles(compiler: Compiler) -> list[tuple[str, dict[str, Any]]]:
    """The tiles of attention at head 72 that a warm-up measures, and what each takes on the cards of
    docs/kernels.md.
    """
    result: list[tuple[str, dict[str, Any]]] = compiler(TRIED_TILES)
    return result


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest) -> Emulator:
    """Of the card that `--ptx` names; without it, of the one that kernels take the least for."""
    target = request.config.getoption("ptx") or "cuda:80"
    return Emulator(request.getfixturevalue("compiler"), target)


@pytest.fixture(scope="session")
def hopper(compiler: Compiler) -> Emulator:
    """Of an H100, whose products are by four warps, from shared memory."""
    return Emulator(compiler, "cuda:90")


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--ptx` every kernel runs in the emulator."""
    if request.config.getoption("ptx"):
        request.getfixturevalue("emulator").install(monkeypatch)
