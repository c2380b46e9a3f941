"""Pictures of the demo model's world, the demo model, and the command line run inside this
process.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Ran:
    """What a command did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """The one line on stderr of a call that was refused: exit code 2, nothing on stdout."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        line = self.err[:-1]
        assert (
            line.isprintable()
            and line.startswith("mtmd")
            and "Traceback" not in line
            and len(line) < 800
        ), line
        return line


Command = Callable[..., Ran]


@pytest.fixture
def mtmd(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """`mtmd("describe", path, ...)` as typed in a shell, without the cost of a new process."""
    import torch

    from mtmd.cli import main
    from mtmd.kernels.resources.threads import ask_threads

    threads = torch.get_num_threads()

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as left:
            assert isinstance(left.code, int)
            code = left.code
        return Ran(code, *capsys.readouterr())

    # A command has a process of its own else, and models that end with it.
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("freeze", "unfreeze"):
            monkeypatch.setattr(gc, name, lambda: None)
        yield run
    gc.collect()
    ask_threads(None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def demo():
    """The demo model, shared by tests that leave it as it is."""
    from mtmd import load

    return load()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A picture with one, two, three and four shapes each."""
    from world import draw

    folder, rng, result = tmp_path_factory.mktemp("world"), random.Random(11), {}
    while len(result) < 4:
        image, facts = draw(rng)
        if facts.things and len(facts.things) not in result:
            result[len(facts.things)] = folder / f"{len(facts.things)}.png"
            image.save(result[len(facts.things)])
    return result


@pytest.fixture(scope="session")
def one(world: dict[int, Path]) -> Path:
    """A picture with one shape."""
    return world[1]
