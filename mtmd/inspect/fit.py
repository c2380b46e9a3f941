"""Layouts of a model in memories that need not be here, and what each of them lacks. Nothing is run
and no weight is read: configuration, the headers of weight files, and plans tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.options import refuse, size_or_none
from mtmd.bench.shapes import random_checkpoint, type_of_random_weights
from mtmd.checkpoint.cached_models import read_cache
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.headers import fetch_headers
from mtmd.checkpoint.hub import HubUnreachable, check_name, is_demo
from mtmd.checkpoint.open import open_checkpoint
from mtmd.checkpoint.requantize import with_int8_towers, with_weights
from mtmd.finding import find_checkpoint
from mtmd.inspect.fit_facts import SERVED, FitDevice, FitFacts
from mtmd.inspect.fit_text import render_fit
from mtmd.inspect.prediction import usable_bytes
from mtmd.kernels.backends import Backend, Cpu, Reference, several_backends
from mtmd.kernels.backends.target import MIN_CAPABILITY, Target
from mtmd.kernels.dtype import name_of
from mtmd.kernels.estimate.cards import find_card
from mtmd.llm.family import default_context
from mtmd.loaded.device_and_dtype import choose_dtype, choose_kv_type
from mtmd.loaded.fitting.alternatives import Ways, what_would_fit
from mtmd.loaded.fitting.context import check_length
from mtmd.loaded.fitting.needed_memory import HOST, SPARE, lazy_memories, limits
from mtmd.options.by_name import given, options
from mtmd.options.load import LoadOptions

USUAL = "cuda:80"  # the architecture of memories of which nothing else is said
MAX_DEVICES = 16
MAX_SIDE = 1 << 14  # pixels
NO_USE = (
    *(
        "device",
        "refuse",
        "threads",
        "memory_limit",
        "isolate",
        "allow_remote_media",
        "fit",
        "split",
        "tp",
    ),
    *("kernels", "vision_attention", "no_graphs"),
)


class FitReport(FitFacts):
    """Describes what `fit` finds out, and `str()` of it as text for a terminal."""

    def __str__(self) -> str:
        return render_fit(self)


def fit(
    model: str | PathLike[str] | None = None,
    *,
    memory: int | str | Sequence[int | str] | None = None,
    target: str | Sequence[str] | None = None,
    host_memory: int | str | None = None,
    image: tuple[int, int] | None = None,
    random_weights: str | None = None,
    **chosen: Any,
) -> FitReport:
    """Return how `model` would lie in these memories, of GPUs that need not be here: each of
    `memory`, in bytes or as "24GiB", or those of cards by name (`target`), or on architectures such
    as cuda:90 with a `memory` each; `host_memory` beside them. Without any of these, in what is
    free on this machine. Where `host_memory` is not given beside GPUs, ways that need it are told
    with what they need, and count as none that fits.

    `image` is the size (width, height) of the pictures, None for the largest that is taken. With
    `random_weights`, a config.json or a name such as gemma-3-4b, no files are needed, and `weights`
    of the options is their type. `chosen` are the fields of `LoadOptions` less those that say where
    a model lies. Of a name on the hub that is not in the cache, headers alone are fetched. Raises
    MtmdError.
    """
    for name in NO_USE:
        if name in given(chosen):
            raise OptionError(f"{name}: has no meaning where every way is tried; leave it out")
    settings = options(LoadOptions, chosen)
    if settings.override_tensor or settings.tensor_split or settings.no_kv_offload:
        raise OptionError("override_tensor, tensor_split, no_kv_offload: leave them out for `fit`")
    image = _image(image)
    devices, backends, lazy = _devices(
        [size_or_none("memory", size) for size in _several("memory", memory, Integral, str)],
        _several("target", target, str),
        size_or_none("host_memory", host_memory),
        settings.parallel,
    )
    checkpoint, name = _checkpoint(model, random_weights, settings)
    context = settings.context or default_context(checkpoint.text)
    check_length(context, checkpoint, name)
    dtype = choose_dtype(_dtype(settings, backends), backends[0], checkpoint.weight_bytes)
    if settings.activations == "int8":
        from mtmd.kernels.plan import int8_products  # loads LLVM

        int8_products.check_device(backends, dtype)
        checkpoint = with_int8_towers(checkpoint)
    available = {d.name: d.usable_bytes for d in devices if d.usable_bytes is not None}
    ways = Ways(checkpoint, settings, context, dtype, backends, available, image, lazy=lazy)
    if image is not None and checkpoint.vision is None:
        raise OptionError(f"image: {name} takes no pictures; leave it out")
    every = list(ways.each())
    facts = [way.facts(checkpoint.text.context) for way in every]
    chosen_name = next((f.name for f in facts if f.fits and not f.unknown), None)
    known = [way for way, f in zip(every, facts, strict=True) if not f.unknown]
    return FitReport(
        name,
        name_of(dtype),
        context,
        checkpoint.text.context,
        settings.parallel,
        image,
        ways.picture.tokens if ways.picture else 0,
        tuple(devices),
        (*facts, *ways.refused),
        chosen_name,
        () if chosen_name else tuple(what_would_fit(ways, known)),
        kv_type=choose_kv_type(
            settings.kv_type, settings.dtype, dtype, backends[0], checkpoint.weight_bytes
        ),
        served=settings.parallel if "parallel" in given(chosen) else SERVED,
    )


def _image(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if (
        not isinstance(value, (tuple, list))
        or len(value) != 2
        or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in value)
    ):
        refuse("image", value, f"width and height in pixels, up to {MAX_SIDE} each")
    return value[0], value[1]


def _several(name: str, value: object, *kinds: type) -> list[Any]:
    """One of these kinds, or a list of them."""
    if value is None:
        return []
    result = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(one, kinds) and not isinstance(one, bool) for one in result):
        what = "bytes, as numbers or texts" if Integral in kinds else "names"
        refuse(name, value, f"{what}: one, or a list of them")
    return result


def _devices(
    sizes: Sequence[int | None], target: Sequence[str], host: int | None, answers: int
) -> tuple[list[FitDevice], list[Backend], tuple[str, ...]]:
    """Return what was asked for, or what is here; and the memories in which one answer's cache
    counts.
    """
    if not sizes and not target:
        if host is None:
            return _here(answers)
        return [_host(host, answers)], [Cpu(), Reference()], ()
    count = max(len(sizes), len(target))
    if len({1, len(sizes), len(target)} - {0, 1}) > 1 or count > MAX_DEVICES:
        raise OptionError(
            f"fit: found {len(sizes)} memories and {len(target)} targets, expected as many of both "
            f"or one for all, and at most {MAX_DEVICES}"
        )
    devices, backends = [], list[Backend]()
    for number in range(count):
        size = sizes[number % len(sizes)] if sizes else None
        card = find_card(target[number % len(target)] if target else USUAL, size)
        if card.memory_bytes is None:
            raise OptionError(f"target {card.name}: many cards have it; give memory beside it")
        what = card.name if target else "any GPU"
        name = f"gpu{number}"
        usable = usable_bytes(card.memory_bytes)
        devices.append(FitDevice(name, what, card.memory_bytes, usable, answers))
        backends.append(Target(card.target, name))
    return [*devices, _host(host, answers)], [*backends, Cpu(), Reference()], ()


def _host(size: int | None, answers: int) -> FitDevice:
    usable = None if size is None else size - size // SPARE
    return FitDevice(HOST, "the host", size, usable, answers)


def _here(answers: int) -> tuple[list[FitDevice], list[Backend], tuple[str, ...]]:
    """Return what is free on this machine, as `LoadOptions.fit` looks at it."""
    backends, lazy = several_backends(), lazy_memories(None)
    free = limits(backends, backends, None)
    devices = [
        FitDevice(space, "free here", None, free.get(space), 1 if space in lazy else answers)
        for space in dict.fromkeys(b.space for b in backends)
    ]
    return devices, backends, lazy


def _checkpoint(
    model: str | PathLike[str] | None, shape: str | None, settings: LoadOptions
) -> tuple[Checkpoint, str]:
    if shape is not None and model is not None:
        raise OptionError(
            f"found both the model {str(model)!r:.60} and random_weights; expected one of them"
        )
    if shape is None:
        given = isinstance(model, (str, PathLike)) and not is_demo(model)
        if given and not check_name(str(model)):
            checkpoint = _from_hub(str(model), settings)
            return with_weights(checkpoint, settings.weights), str(model)
        checkpoint, name = find_checkpoint(model, settings, answers=False)
        checkpoint = with_weights(checkpoint, settings.weights)
        return checkpoint, name or checkpoint.folder.resolve().name
    kind = type_of_random_weights(settings)
    checkpoint = random_checkpoint(shape, kind)
    return checkpoint, f"{checkpoint.folder}, random weights ({kind})"


def _from_hub(model: str, settings: LoadOptions) -> Checkpoint:
    """Return what is in the cache whole, else from headers, which are some MB."""
    if any(one.name == model and one.whole for one in read_cache().models):
        return find_checkpoint(model, settings, answers=False)[0]
    projector = Path(settings.mmproj).expanduser() if settings.mmproj else None
    with TemporaryDirectory(prefix="mtmd-headers-", ignore_cleanup_errors=True) as folder:
        try:
            result = fetch_headers(model, Path(folder))
        except HubUnreachable:  # it may be here all the same, by another name
            return find_checkpoint(model, settings, answers=False)[0]
        return open_checkpoint(result.path, projector or result.projector, answers=False)


def _dtype(settings: LoadOptions, backends: Sequence[Backend]) -> str:
    """Return what a model would be loaded in where one of the GPUs has no bf16."""
    versions = [b.target.partition(":") for b in backends if isinstance(b, Target)]
    old = any(kind == "cuda" and int(v) < MIN_CAPABILITY for kind, _, v in versions)
    return "fp32" if old and settings.dtype == "auto" else settings.dtype
