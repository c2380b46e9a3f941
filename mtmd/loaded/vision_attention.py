"""The kernel of the encoder's attention on a GPU: as asked for, measured by the warm-up, told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mtmd.base.errors import OptionError
from mtmd.clip.batch_shapes import foreseen_tiles
from mtmd.clip.encoder import TowerEncoder
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Backend
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.vision_attention.measure import CudaProbe, Probe
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.graph import Node
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.facts import VisionAttentionFacts
from mtmd.kernels.report.programs import device_of


def ask_for(setting: str, backends: Sequence[Backend]) -> None:
    """Have every GPU go by a setting. Raises OptionError for one that there is no choice for."""
    gpus = [device for device in map(device_of, backends) if isinstance(device, Gpu)]
    if not gpus and setting != "auto":
        raise OptionError(
            f"vision_attention {setting}: found the device {backends[0].name}, which computes "
            "attention in one way, expected a GPU with Triton; leave the option out"
        )
    for gpu in gpus:
        gpu.attention.setting = setting


def ours_only(backends: Sequence[Backend]) -> None:
    """Have every GPU run Triton's kernel, for those who measure nothing."""
    for device in map(device_of, backends):
        if isinstance(device, Gpu):
            device.attention.setting = "triton"


def know_shapes(encoder: TowerEncoder) -> None:
    """Tell the GPU of an encoder whether all its tiles have one shape: some kernels plan each."""
    gpu = device_of(encoder.backends[0])
    if isinstance(gpu, Gpu):
        gpu.attention.one_shape = len({t.shape for _, t in encoder.sizes().values()}) == 1


def vision_attention(
    encoder: TowerEncoder | None, budget: Budget, measure: bool, probe: Probe | None = None
) -> VisionAttentionFacts | None:
    """Return what is known of every shape that is foreseen; with `measure`, which needs the device,
    what was not is measured (by `probe`, the card's own clock), while nothing is resized there.
    None where there is no choice.
    """
    gpu = None if encoder is None else device_of(encoder.backends[0])
    if encoder is None or not isinstance(gpu, Gpu) or not (probe or gpu.compiles):
        return None
    choice = gpu.attention
    if measure:
        kernel = KERNELS["attention"][0].load()
        with encoder.preprocessing.paused():
            choice.learn(
                _attention_nodes(encoder, budget),
                probe or CudaProbe(gpu.device),
                kernel,
                lambda result, inputs, options: kernel.error("attention", result, inputs, options),
                kernel.limits,
            )
        encoder.forget_runs()  # in which nodes have the kernels of before
    saved = choice.saved
    return VisionAttentionFacts(
        choice.setting,
        saved.machine if saved and saved.file else {},
        str(saved.file) if saved and saved.file else None,
        choice.learned,
        tuple(choice.left_out().items()),
    )


def reported(encoder: TowerEncoder | None) -> str:
    """Return the told by which kernels the pictures of this process were attended to, for a
    receipt; "" where there was no choice.
    """
    gpu = None if encoder is None else device_of(encoder.backends[0])
    used = Counter(gpu.attention.used.values()) if isinstance(gpu, Gpu) else Counter[str]()
    if len(used) == 1:
        return next(iter(used))
    total = used.total()
    return ", ".join(f"{n} ({count} of {total} kinds of shapes)" for n, count in used.most_common())


def _attention_nodes(encoder: TowerEncoder, budget: Budget) -> Iterator[Node]:
    for batch, shape in foreseen_tiles(encoder, budget):
        if batch & (batch - 1) == 0:  # others are measured with the next power of two
            yield from _on_gpu(encoder.new_plan(batch, shape))


def _on_gpu(plan: Plan) -> Iterator[Node]:
    for step in plan.steps:
        if step.node.op == "attention" and isinstance(device_of(step.backend), Gpu):
            yield step.node
