"""Describes what is told to those whose model cannot be had."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from mtmd import MtmdError
from mtmd.checkpoint.collection import near
from mtmd.web.errors import ApiError
from mtmd.web.models.entry import Entry
from mtmd.web.models.progress import SOON_S
from mtmd.web.models.schedule import Refuse

NAMED = 10  # models, in an error
_PATH = re.compile(r"(?<![\w./~-])(?!(?<=:)//)~?(?:/+[^\s/]+)+/*")  # an address of the web is none


def not_here(name: str, called: Iterable[str], names: list[str]) -> ApiError:
    """`called`: every name that means a model; `names`: the models' own."""
    there = ", ".join(map(repr, names[:NAMED]))
    more = f" and {len(names) - NAMED} more (GET /v1/models)" if len(names) > NAMED else ""
    return ApiError(
        404,
        f"the requested model is not available{near(name[:256], called) or ';'} this server has "
        f"{there}{more}; its option --any-model accepts other names",
        param="model",
        code="model_not_found",
    )


def busy(entry: Entry) -> ApiError:
    wait_s = entry.progress.retry_s if entry.progress else SOON_S
    return ApiError(
        503,
        f"the model {entry.name!r} is not in memory yet; try again in {wait_s} s",
        code="model_loading",
        headers={"Retry-After": str(wait_s)},
    )


def fetching(entry: Entry) -> ApiError:
    progress = entry.progress
    far, wait_s = (progress.progress, progress.retry_s) if progress else (0.0, SOON_S)
    how_far = (
        "waits until another one is fetched from the Hugging Face hub"
        if progress and progress.waits
        else f"is being downloaded from the Hugging Face hub, {far:.0%} so far"
    )
    return ApiError(
        503,
        f"the model {entry.name!r} {how_far}; try again in {wait_s} s",
        code="model_loading",
        headers={"Retry-After": str(wait_s)},
    )


def ending() -> ApiError:
    return ApiError(
        503,
        "the server is stopping and loads no more models; try again when it is back",
        code="server_ending",
        headers={"Retry-After": str(SOON_S)},
    )


def refuse_waiters(entry: Entry, error: Callable[[], Exception]) -> None:
    """Refuse those who wait for it. An exception that is raised belongs to one thread."""
    for waiter in entry.waiters:
        if not waiter.is_over:
            waiter.refuse(error())
    entry.waiters.clear()


def not_loaded(entry: Entry) -> ApiError:
    return ApiError(
        503,
        f"the model {entry.name!r} cannot be loaded: {entry.reason}",
        param="model",
        code="model_not_loaded",
    )


def reason_for(entry: Entry, error: BaseException) -> str:
    """Do what `reason_of` does, for those who ask: of files their names, without where they lie."""
    from huggingface_hub.constants import HF_HUB_CACHE

    reason = reason_of(error).replace(entry.source.model, entry.name)
    # Folders that are known may have blanks in their names, at which a path seems to end.
    files = map(Path, [entry.source.model, HF_HUB_CACHE, *map(str, entry.preset.load.values())])
    folders = {str(file.parent) for file in files if file.is_absolute()} - {"/"}
    for folder in sorted(folders, key=len, reverse=True):
        reason = reason.replace(f"{folder}/", "/")
    return _PATH.sub(_name_of, reason)


def _name_of(path: re.Match[str]) -> str:
    parts = path[0].split("/")
    last = max((n for n, part in enumerate(parts) if re.search(r"\w", part)), default=0)
    return "/".join(parts[last:])


def reason_of(error: BaseException) -> str:
    """Return it in one line. What is no mistake of the files or options is in the log."""
    if isinstance(error, MtmdError):
        return " ".join(str(error).split())
    full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    if full or "out of memory" in str(error):  # Metal's
        return "not enough memory"
    if isinstance(error, OSError):
        return f"its files cannot be read ({error.strerror or type(error).__name__})"
    return f"internal error: {type(error).__name__}"


def too_large(step: Refuse) -> str:
    gib = 1 << 30
    return (
        f"it needs {step.needs / gib:.1f} GiB of memory ({step.space}), predicted, and "
        f"{step.there / gib:.1f} GiB are there with all others unloaded; lower its context or "
        "parallel in the presets, or serve it elsewhere"
    )
