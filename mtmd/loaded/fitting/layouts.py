"""Describes where a model lies: on one device, its layers over several, shared out among ranks, its
cache on the host; and its encoder and decoder made so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mtmd.base.errors import OptionError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.encoder import AudioEncoder, Encoder
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Backend
from mtmd.kernels.graph import toposort
from mtmd.kernels.ops.collective import Group
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.plan.executor import Residency
from mtmd.kernels.plan.layer_split import LayerSplit, layer_weights, spread
from mtmd.kernels.plan.scheduler import Override
from mtmd.llm.engine.runner import Runner
from mtmd.loaded.device_and_dtype import choose_kv_type, keeps_halves
from mtmd.loaded.fitting.needed_memory import HOST, Bytes, NeededMemory, with_margin, with_pictures
from mtmd.options.load import LoadOptions

ANY = 1 << 60  # bytes: of a host of which nothing is known
KV_NODES = r"^blk\.\d+\.(kv_store|keys|values|attn|attn\.(scores|softmax))$"


@dataclass(frozen=True)
class Layout:
    """`backends` in order of preference: with a `split` its devices first. `tower` is the device of
    the encoder, None for the first. `cache_on_host`: attention of the decoder runs there, too.
    `ranks` processes share every layer, in `shares`.
    """

    backends: tuple[Backend, ...]
    split: LayerSplit | None = None
    tower: Backend | None = None
    cache_on_host: bool = False
    ranks: int = 1
    shares: tuple[float, ...] = ()

    @property
    def encoder_backends(self) -> list[Backend]:
        first = self.tower or self.backends[0]
        return [first, *(b for b in self.backends if b is not first)]

    def overrides(self, requested: Sequence[str]) -> list[Override]:
        overrides = [Override.parse(text) for text in requested]
        return overrides + [Override.parse(f"{KV_NODES}={HOST}")] * self.cache_on_host


class Graphs(NamedTuple):
    """Encoders, where there are such, and the decoder."""

    encoder: Encoder | None
    runner: Runner
    audio: AudioEncoder | None


def make_graphs(
    checkpoint: Checkpoint,
    chosen: LoadOptions,
    context: int,
    dtype: torch.dtype,
    layout: Layout,
    group: Group | None = None,
) -> Graphs:
    """The encoders, where there are some, and the decoder. Nothing is allocated and no weight read.
    `group`: this is one of the layout's ranks.
    """
    shares = layout.shares or None
    overrides, residency = layout.overrides(chosen.override_tensor), Residency()
    budget, vision = Budget(chosen.image_min_tokens, chosen.image_max_tokens), checkpoint.vision
    picture_tokens = vision.resolution.max_tokens(budget) if vision else 0
    runner = Runner(
        checkpoint.text,
        checkpoint.text_weights,
        layout.backends,
        dtype=dtype,
        context=context,
        sequences=chosen.parallel,
        # audio may be as long as the context
        image_tokens=context if checkpoint.audio and not picture_tokens else picture_tokens,
        cuts_images=vision is None or not vision.bidirectional,
        flash_attn=chosen.flash_attn,
        kv_type=choose_kv_type(
            chosen.kv_type, chosen.dtype, dtype, layout.backends[0], checkpoint.weight_bytes
        ),
        int8=chosen.activations == "int8",
        overrides=overrides,
        residency=residency,
        sharding=Sharding(group, shares) if group else None,
        split=layout.split,
        adapters=[one.text for one in checkpoint.chosen_adapters],
        always=[(one.text, one.scale) for one in checkpoint.applied_adapters],
    )
    if keeps_halves(dtype, layout.backends[0], checkpoint.weight_bytes):
        runner.keep_halves()
    audio = None
    leads = group is None or group.rank == 0  # the others have no part in it
    if leads and checkpoint.audio is not None and checkpoint.audio_weights is not None:
        audio = AudioEncoder(
            checkpoint.audio,
            checkpoint.audio_weights,
            layout.encoder_backends,
            dtype=dtype,
            flash_attn=chosen.flash_attn,
            int8=chosen.activations == "int8",
            overrides=overrides,
            residency=residency,
            preprocess="host",
        )
        if keeps_halves(dtype, layout.encoder_backends[0], checkpoint.weight_bytes):
            audio.keep_halves()
    if checkpoint.vision is None or checkpoint.vision_weights is None:
        return Graphs(None, runner, audio)
    encoder = Encoder(
        checkpoint.vision,
        checkpoint.vision_weights,
        layout.encoder_backends,
        dtype=dtype,
        flash_attn=chosen.flash_attn,
        int8=chosen.activations == "int8",
        overrides=overrides,
        residency=residency,
        sharding=Sharding(group, shares) if group else None,
        preprocess=chosen.preprocess,
        adapters=[one.vision for one in checkpoint.chosen_adapters if one.vision],
        always=[(one.vision, one.scale) for one in checkpoint.applied_adapters if one.vision],
    )
    if keeps_halves(dtype, layout.encoder_backends[0], checkpoint.weight_bytes):
        encoder.keep_halves()
    return Graphs(encoder, runner, audio)


def devices_of(backends: Sequence[Backend], requested: str = "auto") -> list[Backend]:
    """Return what layers may be spread over: the accelerators, and the host where it is asked for
    or only one accelerator is there.
    """
    every = list({b.space: b for b in reversed(backends)}.values())[::-1]
    accelerators = [b for b in every if b.space != HOST]
    host = [b for b in every if b.space == HOST][:1]
    with_host = len(accelerators) == 1 or HOST in requested.split(",")
    return accelerators + (host if with_host and accelerators else [])


def are_ranks(backends: Sequence[Backend]) -> bool:
    """Return whether processes that share a model would find just these devices."""
    names = [b.name for b in backends if b.space != HOST]
    return names == [f"cuda:{number}" for number in range(len(names))]


def over_layers(
    whole: NeededMemory,
    layout: Layout,
    devices: Sequence[Backend],
    available: Bytes,
    encode: Bytes,
    shares: Sequence[float] = (),
) -> Layout:
    """`layout` with its decoder's layers over the devices, so that the fullest is as empty as can
    be: by `shares` of the layers' bytes where given, else by what is `available` of each, as far as
    that is known; the encoder where most room is left. The host, the last of the devices where it
    is one, gets as few layers as can be. `whole` is the model on one device, and `encode` what its
    largest picture takes there.

    Raises OptionError where there are too few devices or layers, or another number of shares.
    """
    names = ", ".join(d.name for d in devices)
    if len(devices) < 2:
        raise OptionError(
            f"split layer: found {names or 'the CPU alone'}, expected several devices; leave it out"
        )
    if shares and len(shares) != len(devices):
        raise OptionError(
            f"tensor_split: found {len(shares)} shares, expected {len(devices)}, one for each of "
            f"{names}"
        )
    runner = whole.runner
    sizes, count = layer_bytes(runner, layout.cache_on_host), len(devices)
    if len(sizes) < count:
        raise OptionError(
            f"split layer: found {len(sizes)} layers for {count} devices ({names}), expected a "
            "layer for each; name fewer as the device (--device)"
        )
    room = [float(available.get(d.space, ANY)) for d in devices]
    if any(d.space not in available for d in devices if d.space != HOST):
        room = [float(sum(sizes))] * count
    tower, pictures = sum(whole.tower.values()), with_margin(max(encode.values(), default=0))
    resizing = max(whole.resizing.values(), default=0)
    step, prefill = (max(p.compute_bytes.values()) for p in whole.plans(runner.context))

    def alongside(location: int) -> list[int]:
        """Return what each device holds beside layers, the encoder at `location`."""
        with_tower = with_pictures(max(with_margin(prefill), with_margin(step) + pictures)) + tower
        with_tower += resizing if devices[location].side_streams else 0
        computed = [with_tower if i == location else with_margin(prefill) for i in range(count)]
        return [size + device.queue_bytes for size, device in zip(computed, devices, strict=True)]

    def fullest(device_of: Sequence[int], location: int) -> float:
        """The part that is taken of the fullest device but the host."""
        taken = alongside(location)
        for layer, device in enumerate(device_of):
            taken[device] += sizes[layer]
        return max(t / max(r, 1.0) for t, r in list(zip(taken, room, strict=True))[:cards])

    cards = count - (devices[-1].space == HOST)
    locations = range(count) if whole.encoder else range(1)
    if shares:
        device_of = spread(sizes, shares)
        position = min(locations, key=lambda p: fullest(device_of, p))
    elif cards == count:
        ways = [(spread(sizes, room, alongside(position)), position) for position in locations]
        device_of, position = min(ways, key=lambda way: fullest(*way))
    else:
        ways = [
            ((*spread(sizes[:-n], room[:-1], alongside(position)[:-1]), *[cards] * n), position)
            for position in locations  # of which the last is the host
            for n in range(1, len(sizes) - cards + 1)
        ]
        fitting = (way for way in ways if fullest(*way) <= 1)
        device_of, position = next(fitting, None) or min(ways, key=lambda way: fullest(*way))
    others = [b for b in layout.backends if all(b is not d for d in devices)]
    return Layout(
        (*devices, *others),
        LayerSplit(tuple(devices), device_of),
        devices[position],
        layout.cache_on_host,
    )


def layer_bytes(runner: Runner, cache_on_host: bool = False) -> list[int]:
    """Return the layer bytes of weights, and of what a full cache keeps, of each layer."""
    nodes = toposort(*runner.whole_graph(runner.sizes()["decode"]))
    layers = runner.family.layers
    sizes = layer_weights(nodes, len(layers))
    if cache_on_host:
        return sizes
    for name, size in runner.state_bytes().items():
        sizes[int(name.rpartition(".")[2])] += size
    return sizes
