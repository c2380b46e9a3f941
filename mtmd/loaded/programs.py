"""The programs that a model needs on a GPU, made before an answer waits for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtmd.clip.encoder import Encoder
from mtmd.clip.foreseen import foreseen_tiles
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Backend
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.errors import OptionError
from mtmd.kernels.gpu.ahead.compilations import compilations
from mtmd.kernels.gpu.triton_kernel import Program
from mtmd.kernels.report.facts import ProgramFacts
from mtmd.kernels.report.programs import Programs, device_of
from mtmd.llm.engine.runner import Runner
from mtmd.llm.foreseen import foreseen_batches

Progress = Callable[[int, int], None]


def foreseen_programs(encoder: Encoder | None, runner: Runner, budget: Budget) -> list[Program]:
    """What batches and pictures of the foreseen sizes launch, each once. Triton is imported."""
    found = Programs()
    if encoder is not None:
        tiles = foreseen_tiles(encoder, budget)
        found.add_all(encoder.new_plan(batch, shape) for batch, shape in tiles)
    found.add_all(runner.new_plan(batch) for batch in foreseen_batches(runner))
    return list(found.found.values())


def make_programs(
    encoder: Encoder | None, runner: Runner, budget: Budget, progress: Progress | None = None
) -> ProgramFacts | None:
    """Compile what is not in Triton's cache, for the device that the model is on; None where that
    is no GPU, or has no Triton. Raises PlacementError where the compiler refuses.
    """
    device = device_of(runner.backends[0])
    if not isinstance(device, Gpu) or not device.compiles:
        return None
    from mtmd.kernels.gpu.ahead.compiling import compile_all

    programs, before = foreseen_programs(encoder, runner, budget), compilations()
    compile_all(device.target, programs, progress)
    now = compilations()
    return ProgramFacts(
        device.target,
        len(programs),
        now.compiled - before.compiled,
        now.compile_ms - before.compile_ms,
    )


def use_saved(folder: str, backend: Backend) -> None:
    """Have the device find the programs of a folder that `mtmd warmup --save` wrote.

    Raises OptionError where the device is no GPU, or the folder is not for it.
    """
    device = device_of(backend)
    if not isinstance(device, Gpu) or not device.compiles:
        raise OptionError(
            f"kernels {folder}: found the device {backend.name}, expected a GPU with Triton, which "
            "compiled kernels are for; leave the option out"
        )
    from mtmd.kernels.gpu.ahead.saved import install, read_saved

    install(read_saved(Path(folder).expanduser(), device.target))
