"""Conversion for programs: `convert` does what the command does."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from mtmd.base.errors import OptionError
from mtmd.base.options import one_of
from mtmd.convert.gguf import Written, convert_to_gguf
from mtmd.convert.imatrix import read_imatrix
from mtmd.finding import find_checkpoint
from mtmd.kernels.checkpoint.mixtures import ALIASES, MIXTURES
from mtmd.kernels.checkpoint.tensor_writer import Progress
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.options.load import LoadOptions

SAFETENSORS = "FP8"  # the mixture that no GGUF holds


def convert(
    model: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: str,
    mmproj_to: str | None = None,
    mmproj: str | None = None,
    imatrix: str | PathLike[str] | None = None,
    text_only: bool = False,
    progress: Progress | None = None,
) -> list[Written]:
    """Write `model`, anything that `load` takes, to `out`: as GGUF in a mixture such as Q4_K_M, or,
    with FP8, as a folder of safetensors. `progress(tensor, bytes, all)` is called for each tensor.

    A call that was cut off goes on where it was when it is made again. Raises MtmdError and
    OSError, before anything is written where that can be known.
    """
    to = _type("to", to)
    path = Path(out).expanduser()
    if to == SAFETENSORS:
        for name, value in (("mmproj_to", mmproj_to), ("imatrix", imatrix)):
            if value is not None:
                raise OptionError(f"{name}: has no meaning for FP8; leave it out")
        from mtmd.convert.fp8 import convert_to_fp8

        return convert_to_fp8(model, path, progress)
    if path.suffix.lower() != ".gguf":
        raise OptionError(f"out: found {str(path)!r:.80}, expected a file that ends in .gguf")
    if path.exists():
        raise OptionError(f"out: {path} is there already; remove it, or choose another name")
    if not path.parent.is_dir():
        raise OptionError(f"out: {path.parent} is no folder; make it first")
    kind = None if mmproj_to is None else _type("mmproj_to", mmproj_to)
    if kind == SAFETENSORS:
        raise OptionError("mmproj_to: found FP8, which no GGUF holds; expected another type")
    importance = None if imatrix is None else read_imatrix(Path(imatrix).expanduser())
    with made_on_the_host():
        checkpoint, _ = find_checkpoint(
            model, LoadOptions(mmproj=mmproj), progress is not None, answers=False
        )
        return convert_to_gguf(
            checkpoint,
            path,
            to,
            projector=kind,
            importance=importance,
            text_only=text_only,
            progress=progress,
        )


def _type(name: str, value: str) -> str:
    text = str(value).upper()
    return str(one_of(*MIXTURES).check(name, ALIASES.get(text, text)))
