"""The models of a server, from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmd import OptionError
from mtmd.checkpoint.collection import Source, read_sources
from mtmd.web.models.entry import Entry
from mtmd.web.models.loader import ProcessLoader
from mtmd.web.models.presets import FILE, NONE, Preset, read_presets
from mtmd.web.models.registry import Registry
from mtmd.web.settings import ServerSettings


def make_registry(
    given: Sequence[str],
    first: str | None,
    settings: ServerSettings,
    chosen: Mapping[str, Any],
    *,
    presets: str | None,
    maximum: int | None,
    unload_after_s: float,
    warm_up: bool,
    ends_on_fault: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Registry:
    """`given`: as `read_sources` takes it; `first`: one of them, or one more, which is the default.
    `chosen`: fields of LoadOptions. `unload_after_s`: 0 for never. `report`: as of `read_sources`.
    `ends_on_fault`: as of `Registry`; without, a model's
    process that fails is started again. Nothing is loaded. Raises OptionError, ModelError.
    """
    if maximum is not None and maximum < 1:
        raise OptionError(f"models-max: found {maximum}, expected at least 1")
    if unload_after_s and not 1 <= unload_after_s <= 1e9:
        raise OptionError(
            f"unload-after: found {unload_after_s:g}, expected seconds, at least 1, or 0 for never"
        )
    sources = read_sources(given, report)
    default = None if first is None else _named(first, sources)
    names = [source.name for source in sources]
    path = _presets_file(given, presets)

    def presets_of(names: list[str]) -> dict[str, Preset]:
        return {} if path is None else read_presets(path, names)

    known = presets_of(names)
    loader = ProcessLoader(
        chosen,
        queue=settings.queue,
        share_cache=settings.share_cache,
        hang_s=settings.hang_s or None,
        warm_up=warm_up,
        restarts=not ends_on_fault,
    )

    def new_entry(source: Source) -> Entry:
        own = presets_of([*names, source.name]).get(source.name, NONE)
        return Entry(source, _preset(own, settings))

    return Registry(
        [Entry(source, _preset(known.get(source.name, NONE), settings)) for source in sources],
        loader,
        slots=int(chosen["parallel"]),
        maximum=maximum,
        limits=loader.limits,
        unload_after_s=unload_after_s or None,
        default=default,
        any_name=settings.any_model,
        ends_on_fault=ends_on_fault,
        new_entry=new_entry,
    )


def _named(first: str, sources: list[Source]) -> str:
    """The name of the model that is meant by what `-m` takes; one that is not there is added."""
    path = Path(first).expanduser()
    meant = {first, str(path.resolve()) if path.exists() else first}
    result = next((s for s in sources if s.name == first or s.model in meant), None)
    if result is None:
        result, *others = read_sources([first])
        if others:
            raise OptionError(
                f"model: {first} holds {1 + len(others)} models, expected one; name one of them, "
                f"such as {result.model}"
            )
        sources.append(result)
    return result.name


def _preset(own: Preset, settings: ServerSettings) -> Preset:
    """Return it with what holds for all models where it says nothing."""
    return replace(own, answer={**settings.answers, **own.answer})


def _presets_file(given: Sequence[str], presets: str | None) -> Path | None:
    """The one that is named, or the one in the only folder that has one."""
    if presets is not None:
        return Path(presets).expanduser()
    alongside = [p for text in given if (p := Path(text).expanduser() / FILE).is_file()]
    if len(alongside) > 1:
        raise OptionError(f"presets: found {FILE} in several folders; name one with --presets")
    return alongside[0] if alongside else None
