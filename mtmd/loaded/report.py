"""Describes what is told about a loaded model: the warm-up report, and the lines about placement
that every receipt has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmd.base.cores import OthersWatch
from mtmd.base.text import mib, plural
from mtmd.base.throttling import ThrottleWatch
from mtmd.checkpoint.requantize import weights_note
from mtmd.checkpoint.requantized import Requantized
from mtmd.clip.encoder import TowerEncoder
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.warmup import check_encoder, encoder_graphs, preprocessing_facts
from mtmd.kernels.backends import Backend, Limited
from mtmd.kernels.backends.torch_device import TorchDevice
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.ahead.compilations import ahead
from mtmd.kernels.graph import toposort
from mtmd.kernels.report.facts import (
    ActivationFacts,
    AdapterFacts,
    Check,
    DequantizedTensor,
    FlashFacts,
    Placement,
    SpeculationFacts,
)
from mtmd.kernels.report.machine_facts import computing_threads, machine_facts
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.speculation import refusal
from mtmd.llm.warmup import check_decoder, decoder_graphs, measure_rows
from mtmd.loaded.device_and_dtype import device_name
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.programs import Progress, make_programs
from mtmd.loaded.ranks_report import ranks_facts
from mtmd.loaded.vision_attention import reported, vision_attention


@made_on_the_host()
def warmup_report(
    loaded: LoadedModel, check: bool, progress: Progress | None = None
) -> WarmupReport:
    """Return where everything runs and what it will take. With `check`, which needs the device, an
    encode and a step of decode are run: times, and every op against its reference; and on a GPU the
    programs that answers will need are compiled before, `progress(done, all)` told of each, and
    kernels of the encoder's attention are measured.
    """
    encoder, runner = loaded.encoder, loaded.runner
    of_encoders = [graph for one in loaded.encoders for graph in encoder_graphs(one)]
    graphs = [*of_encoders, *decoder_graphs(runner)]
    checks: list[Check] = []
    programs = None
    if check:
        programs = make_programs(encoder, runner, loaded.limits, progress, loaded.programs)
    preprocessing = preprocessing_facts(encoder, check) if encoder else None
    with ahead():
        attention = vision_attention(encoder, loaded.limits, check)
    watch, throttling = (OthersWatch(), ThrottleWatch()) if check else (None, None)
    if check:
        with loaded.checked_together(), ahead():
            checks = run_checks(loaded)
    by_torch = _by_torch(loaded)
    placements = loaded.placements  # after the checks, which may bring shapes of their own
    report = WarmupReport(
        loaded.name,
        loaded.backends[0].name,
        device_name(loaded.backends[0]),
        name_of(loaded.dtype),
        tuple(p.flash for p in placements),
        tuple(r for p in placements for r in p.refused),
        tuple(graphs),
        checks=tuple(checks),
        dequantized=_dequantized(loaded),
        speculation=_speculation(loaded),
        ranks=ranks_facts(loaded),
        layers=loaded.layers,
        fit=loaded.fit,
        programs=programs,
        vision_attention=attention,
        preprocessing=preprocessing,
        untried=tuple(by_torch.untried.items()) if by_torch else (),
        weights=weights_note(loaded.checkpoint),
        lacks=by_torch.lacks if by_torch else None,
        adapters=_adapters(loaded),
        kv=loaded.kv,
        activations=_activations(loaded),
        could_round=_could_round(loaded),
    )
    if report.ranks is not None:
        watch = None  # the other ranks, which are processes, would be taken for others
    device, threads = loaded.backends[0], computing_threads()
    facts = machine_facts(device, loaded.cores, threads, watch, report, throttling)
    return replace(report, machine=facts)


def run_checks(loaded: LoadedModel) -> list[Check]:
    """An encode and a step of decode; every rank of a model does the same."""
    runner = loaded.runner
    checks = [*(check_encoder(encoder) for encoder in loaded.encoders), check_decoder(runner)]
    if loaded.options.speculate == "auto":
        measure_rows(runner)
    return checks


def _by_torch(loaded: LoadedModel) -> TorchDevice | None:
    """The device, where it is one that has no kernels of ours."""
    device = loaded.backends[0]
    device = device.inner if isinstance(device, Limited) else device
    return device if isinstance(device, TorchDevice) else None


def _speculation(loaded: LoadedModel) -> SpeculationFacts:
    setting = str(loaded.options.speculate)
    refused = None if setting == "off" else refusal(loaded.runner.recurrent_bytes)
    costs = () if setting == "off" or refused else loaded.runner.pace.measured()
    return SpeculationFacts(setting, refused, costs)


def attention_kernels(placements: Sequence[Placement]) -> dict[str, str]:
    """Return the attention kernels by graph, the kernel that attention runs by, and how much of it
    runs elsewhere than on the device.
    """
    return {p.flash.graph: _attention(p.flash) for p in placements}


def attention_report(loaded: LoadedModel) -> dict[str, str]:
    """The same, with which of several kernels the encoder's is."""
    result, by = attention_kernels(loaded.placements), reported(loaded.encoder)
    return {**result, "encoder": f"{result['encoder']}, by {by}"} if by else result


def layout_text(loaded: LoadedModel) -> str:
    """Return which layers each of several devices has, and what was chosen by `fit`."""
    fit = loaded.fit
    if fit is None:
        return "; ".join(str(part) for part in loaded.layers)
    refused = [layout for layout in fit.layouts if layout.name != fit.chosen]
    reported = f"fit: {fit.chosen}"
    reported += "".join(f"; {part}" for part in loaded.layers)
    for layout in refused:
        short = layout.shortest
        reported += f"; refused: {layout.name}, " + (
            layout.reason
            or (
                f"{short.space} needs {mib(short.needed)} of {mib(short.available or 0)}"
                if short
                else "fits too"
            )
        )
    return reported


def refusal_warnings(placements: Sequence[Placement]) -> tuple[str, ...]:
    """One line for each kind of node that the preferred backend refused."""
    return tuple(
        f"{plural(r.count, f'{r.op} node')} of the {r.graph} refused by "
        f"{r.backend}: {r.reason}; "
        f"runs on {r.runs_on}"
        for p in placements
        for r in p.refused
    )


def recording_warnings(backends: Sequence[Backend]) -> tuple[str, ...]:
    """A line for each device that was to record runs and does not any more."""
    given_up = ((b.name, b.recorder.given_up) for b in backends if b.recorder is not None)
    return tuple(
        f"steps are launched kernel by kernel on {name}, which is slower: {why}"
        for name, why in dict(given_up).items()
        if why is not None
    )


def _attention(flash: FlashFacts) -> str:
    kernel = (
        "explicit" if flash.state == "off" else "flash and explicit" if flash.rebuilt else "flash"
    )
    return (
        f"{kernel}, {len(flash.on_fallback)} of {flash.nodes} nodes on another backend"
        if flash.on_fallback
        else kernel
    )


def preprocessed_where(encoder: TowerEncoder | None, plans: Sequence[ImagePlan]) -> str:
    """Return the preprocessed where of pictures and groups of frames that are prepared and encoded,
    "" for the host.
    """
    if encoder is None or encoder.side is None or not plans:
        return ""
    if (why := encoder.preprocessing.why_host) is not None:
        return f"on the host: {why}"
    name, every = encoder.backends[0].name, len(plans)
    resized = sum(plan.resized_there for plan in plans)
    normalised = sum(plan.normalize is not None for plan in plans)
    if not normalised:
        return ""
    if resized == every:
        return f"on {name}"
    reported = f"{resized} of {every} resized, " if resized else ""
    reported += "normalised" if normalised == every else f"{normalised} of {every} normalised"
    return f"{reported} on {name}"


def _adapters(loaded: LoadedModel) -> tuple[AdapterFacts, ...]:
    return tuple(
        AdapterFacts(
            one.name,
            one.scale,
            one.is_chosen,
            one.merged,
            sum(len(part.targets) for part in one.parts),
            max((t.rank for part in one.parts for t in part.targets.values()), default=0),
            sum(part.bytes(loaded.dtype) for part in one.parts),
        )
        for one in loaded.checkpoint.adapters
    )


def _activations(loaded: LoadedModel) -> tuple[ActivationFacts, ...]:
    """Return how many products of each graph round activations to 8 bits, where that was asked
    for.
    """
    if loaded.options.activations != "int8":
        return ()
    from mtmd.kernels.plan import int8_products  # loads LLVM

    weights = loaded.checkpoint.vision_weights, loaded.checkpoint.audio_weights
    quantized = {
        part: ", ".join(sorted(set(made.file.types.values())))
        for part, made in zip(("encoder", "audio encoder"), weights, strict=True)
        if made is not None and isinstance(made.file, Requantized)
    }
    return tuple(
        ActivationFacts(
            name,
            "int8",
            int8_products.count(graph),
            sum(1 for node in toposort(*graph) if node.op == "matmul"),
            int8_products.count_in_7_bits(graph),
            int8_products.count_in_16_bits(graph),
            quantized.get(name, ""),
        )
        for name, graph in loaded.product_graphs().items()
    )


def _could_round(loaded: LoadedModel) -> int:
    """Return how many of the decoder's products would round activations to 8 bits if asked to."""
    if loaded.options.activations == "int8" or loaded.backends[0].space != "cpu":
        return 0
    from mtmd.kernels.plan import int8_products  # loads LLVM

    graph = loaded.runner.graph(BatchShape(1))
    return int8_products.would_round(loaded.backends, loaded.dtype, graph)


def _dequantized(loaded: LoadedModel) -> tuple[DequantizedTensor, ...]:
    made = loaded.checkpoint
    weights = made.text_weights, made.vision_weights, made.audio_weights
    return tuple(
        DequantizedTensor(d.name, d.kind, d.stored_bytes, d.values * loaded.dtype.itemsize)
        for part in weights
        if part
        for d in part.dequantized
    )
