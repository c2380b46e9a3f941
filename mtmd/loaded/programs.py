"""The programs that a model needs on a GPU, made before an answer waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtmd.base.errors import OptionError
from mtmd.clip.batch_shapes import foreseen_packs, foreseen_tiles
from mtmd.clip.encoder import Encoder
from mtmd.clip.token_budget import Budget
from mtmd.environment import kernels_from_environment
from mtmd.kernels.backends import Backend
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.gpu.ahead.compilations import compilations
from mtmd.kernels.gpu.triton_kernel import Program
from mtmd.kernels.graph import Shape, toposort
from mtmd.kernels.plan.layer_split import first_of_each_kind
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.facts import GivenPrograms, ProgramFacts
from mtmd.kernels.report.programs import Programs, device_of
from mtmd.llm.batch import BatchShape
from mtmd.llm.batch_shapes import foreseen_batches
from mtmd.llm.engine.runner import Runner

log = logging.getLogger("mtmd.kernels")
Progress = Callable[[int, int], None]


def foreseen_programs(encoder: Encoder | None, runner: Runner, budget: Budget) -> list[Program]:
    """Return what batches and pictures of the foreseen sizes launch, each once. Triton is
    imported.
    """
    result = Programs()
    if encoder is not None:
        tiles, packs = foreseen_tiles(encoder, budget), foreseen_packs(encoder)
        result.add_all(encoder_plans(encoder, tiles, packs))
    result.add_all(decoder_plans(runner, foreseen_batches(runner)))
    return list(result.result.values())


def encoder_plans(
    encoder: Encoder, tiles: Sequence[tuple[int, Shape]], packs: Sequence[int]
) -> Iterator[Plan]:
    """Yield the plans of so many tiles of a shape, and of packs of so many tokens, of one layer of
    each kind.
    """
    layers = set[int]()
    if tiles:
        layers |= first_of_each_kind(toposort(encoder.graph(*tiles[0])))
    if packs:
        layers |= first_of_each_kind(toposort(encoder.pack_graph(packs[0])))
    for batch, shape in tiles:
        yield encoder.plan_of_layers(encoder.graph(batch, shape, only=layers))
    for tokens in packs:
        yield encoder.plan_of_layers(encoder.pack_graph(tokens, layers))


def decoder_plans(runner: Runner, batches: Sequence[BatchShape]) -> Iterator[Plan]:
    """Yield the plans of batches, of one layer of each kind: what it launches, the others launch
    too. Of batches that differ by the rows whose logits are wanted the second and later ones have
    one layer: these rows are chosen behind the last.
    """
    of_pictures = {batch.images > 0: batch for batch in batches}
    layers = {
        pictures: first_of_each_kind(toposort(*runner.graph(batch)))
        for pictures, batch in of_pictures.items()
    }
    planned = set[BatchShape]()
    for batch in batches:
        own, layered = layers[batch.images > 0], replace(batch, requested=0)
        yield runner.plan_of_layers(batch, {min(own)} if layered in planned else own)
        planned.add(layered)


@dataclass(frozen=True)
class SavedPrograms:
    """Programs of a folder that was read: the model they were saved for, and Triton's keys."""

    folder: str
    model: str
    keys: frozenset[str]


def make_programs(
    encoder: Encoder | None,
    runner: Runner,
    budget: Budget,
    progress: Progress | None = None,
    given: SavedPrograms | None = None,
) -> ProgramFacts | None:
    """Compile what is not in Triton's cache, for the device that the model is on; None where that
    is no GPU, or has no Triton. Of those `given` it is told how many are of use. Raises
    PlacementError where the compiler refuses.
    """
    device = _compiling(runner.backends[0])
    if device is None:
        return None
    from mtmd.kernels.gpu.ahead.compiling import compile_all
    from mtmd.kernels.gpu.compile import disk_key

    programs, before = foreseen_programs(encoder, runner, budget), compilations()
    compile_all(device.target, programs, progress)
    now, of_use = compilations(), None
    if given is not None:
        used = sum(disk_key(device.target, program) in given.keys for program in programs)
        of_use = GivenPrograms(given.folder, given.model, len(given.keys), used)
        if not used:
            log.warning(
                "kernels %s: of %d programs, of %s, none is of use to this model",
                *(given.folder, len(given.keys), given.model),
            )
    return ProgramFacts(
        device.target,
        len(programs),
        now.compiled - before.compiled,
        now.compile_ms - before.compile_ms,
        of_use,
    )


def saved_programs(requested: str | None, backend: Backend) -> SavedPrograms | None:
    """Return what was asked for, or what MTMD_KERNELS names, put where the device finds it; None
    without either, and where the variable is set and the device has no use for it, which is noted.

    Raises OptionError as `use_saved`.
    """
    if requested:
        return use_saved(requested, backend)
    named = kernels_from_environment()
    if named is None:
        return None
    if _compiling(backend) is None:
        log.warning("MTMD_KERNELS is not used: %s has no compiled kernels", backend.name)
        return None
    try:
        return use_saved(named, backend)
    except OptionError as error:
        raise OptionError(f"MTMD_KERNELS: {error}") from error


def use_saved(folder: str, backend: Backend) -> SavedPrograms:
    """Have the device find the programs of a folder that `mtmd warmup --save` wrote.

    Raises OptionError where the device is no GPU, or the folder is not for it.
    """
    device = _compiling(backend)
    if device is None:
        raise OptionError(
            f"kernels {folder}: found the device {backend.name}, expected a GPU with Triton, which "
            "compiled kernels are for; leave the option out"
        )
    from mtmd.kernels.gpu.ahead.saved import install, read_saved

    saved = read_saved(Path(folder).expanduser(), device.target)
    install(saved)
    return SavedPrograms(folder, saved.model, frozenset(saved.programs))


def _compiling(backend: Backend) -> Gpu | None:
    device = device_of(backend)
    return device if isinstance(device, Gpu) and device.compiles else None
