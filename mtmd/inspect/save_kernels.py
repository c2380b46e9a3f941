"""Describes what a model launches on a GPU that is not here, compiled and saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mtmd import __version__
from mtmd.base.errors import OptionError
from mtmd.base.text import mib
from mtmd.inspect.predict_target import subject_of
from mtmd.kernels.gpu.jit import INSTALL, has_triton
from mtmd.kernels.report.programs import device_of
from mtmd.loaded.programs import foreseen_programs


@dataclass(frozen=True)
class SavedKernels:
    """Describes how many programs, and the bytes of their files."""

    target: str
    model: str
    folder: str
    programs: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.programs} programs of {self.model} for {self.target}, {mib(self.bytes)}, in "
            f"{self.folder}\ncompiled, not run; on a machine with such a GPU: mtmd serve -m MODEL "
            f"--kernels {self.folder}"
        )


def save_kernels(
    target: str,
    folder: str | PathLike[str],
    model: str | PathLike[str] | None = None,
    *,
    random_weights: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **chosen: Any,
) -> SavedKernels:
    """Compile what `model` launches on `target` with batches and pictures of the foreseen sizes,
    into a folder that `load(..., kernels=folder)` takes on a machine with such a GPU and the same
    Triton. Arguments as of `predict`; `progress(done, all)` is called after each program.

    Nothing is run. Raises MtmdError, OptionError for a folder with anything else in it.
    """
    if not has_triton():
        raise OptionError(
            f"save: kernels are compiled by Triton, which is not installed; {INSTALL}"
        )
    from mtmd.kernels.gpu.ahead.compiling import compile_all
    from mtmd.kernels.gpu.ahead.saved import check_folder, make_folder, save

    if not os.fspath(folder):
        raise OptionError("save: found '', expected a folder")
    where = Path(folder).expanduser()
    check_folder(where)
    subject = subject_of(target, model, random_weights, **chosen)
    device = device_of(subject.backends[0])
    assert device is not None
    programs = foreseen_programs(subject.encoder, subject.runner, subject.loaded.limits)
    if not programs:
        raise OptionError(f"save: no kernel of {subject.name} runs on {device.name}; see --target")
    make_folder(where)
    compiled = compile_all(device.name, programs, progress)
    written = save(where, device.name, subject.name, __version__, compiled)
    return SavedKernels(device.name, subject.name, str(where), **written)
