"""What a model would do on a GPU that is not here."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

from mtmd.config import LoadOptions, options
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.errors import OptionError
from mtmd.kernels.report.compiled import compiled_kernels
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loading import find_checkpoint
from mtmd.model import Model


def predict(target: str, model: str | PathLike[str] | None = None, **chosen: Any) -> WarmupReport:
    """The warm-up report for `target`, cuda:90 or hip:gfx942: ops taken and refused, memory,
    attention kernels compiled ahead of time.

    Nothing is run and no weight is read. `chosen` are the fields of `LoadOptions` less those of a
    device that is here. Raises MtmdError.
    """
    if useless := [name for name in ("device", "refuse", "threads") if name in chosen]:
        raise OptionError(
            f"{useless[0]}: has no meaning for the target {target!r:.60}, a GPU that is not here; "
            "leave it out"
        )
    device = Target(target)
    settings = options(LoadOptions, chosen)
    checkpoint, name = find_checkpoint(model, settings)
    subject = Model(checkpoint, settings, [device, Cpu(), Reference()], name=name)
    encoder, runner = subject.encoder, subject.runner
    sizes = encoder.sizes().items() if encoder else ()
    plans = [
        (f"encoder, {label}", encoder.plan(batch, tile.shape))
        for label, (batch, tile) in sizes
        if encoder
    ]
    plans += [(f"decoder, {label}", runner.plan(batch)) for label, batch in runner.sizes().items()]
    kernels = tuple(k for graph, plan in plans for k in compiled_kernels(graph, plan, device))
    return replace(subject.warmup_report, device_name="not here: predicted", compiled=kernels)
