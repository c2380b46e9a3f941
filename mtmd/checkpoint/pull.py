"""Models fetched from the Hugging Face hub ahead of their use: room looked for, checksums compared.
Loads without torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.checkpoint.hub import (
    HubName,
    Result,
    ask_hub,
    check_files,
    is_demo,
    parse_name,
    resolve_model,
)

CHUNK = 1 << 22  # bytes of a file that are hashed at a time
SPARE = 64 << 20  # bytes of the disk that are left free


@dataclass(frozen=True)
class Pulled:
    """Describes where a model lies: `files` of `bytes` in all, `fetched` of those bytes now.
    `unchecked` are files of which the hub tells no checksum.
    """

    result: Result
    files: int
    bytes: int
    fetched: int
    unchecked: tuple[str, ...]


@dataclass(frozen=True)
class Arriving:
    """Describes how far a fetch is, as far as can be seen from outside: `missing` bytes come into
    the folder `blobs`, where `there` lay before.
    """

    blobs: Path
    there: int
    missing: int

    def read(self) -> tuple[int, int]:
        """Bytes that have come, and all. From any thread."""
        return max(0, min(_bytes_in(self.blobs) - self.there, self.missing)), self.missing


@dataclass(frozen=True)
class HubFile:
    """A file as the hub has it: `sha256` of its content, or `blob`, git's SHA-1 of it."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


def pull(
    model: str,
    progress: bool = False,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    report: Callable[[Arriving], None] = lambda _: None,
) -> Pulled:
    """Fetch `org/name[:TYPE][@revision]` into huggingface_hub's cache, what is there already left
    out, and compare every file with the hub's checksum. `progress`: bars on stderr; `report` is
    called once it is known what is missing.

    Raises ModelError for what is no such model, for a disk without room, and for a file that is not
    what the hub has: that one is taken out of the cache.
    """
    if is_demo(model):
        raise ModelError("the demo model is part of the package; there is nothing to download")
    name = parse_name(model)
    files = _files(model, name, name.revision, endpoint)
    missing = sum(f.size for f in files if not _is_cached(name, f.name, cache_dir))
    _check_room(model, missing, cache_dir)
    blobs = _blobs(name, cache_dir)
    report(Arriving(blobs, _bytes_in(blobs), missing))
    result = resolve_model(model, progress, endpoint=endpoint, cache_dir=cache_dir)
    folder = _snapshot(result)
    if any(not (folder / f.name).exists() for f in files):  # the branch has moved meanwhile
        files = _files(model, name, folder.name, endpoint)
    unchecked = _verify(model, folder, files, progress)
    return Pulled(result, len(files), sum(f.size for f in files), missing, unchecked)


def _files(model: str, name: HubName, revision: str | None, endpoint: str | None) -> list[HubFile]:
    info = ask_hub(model, name.repo, revision, endpoint, metadata=True)
    there = {file.rfilename: file for file in info.siblings or []}
    if outside := [file for file in there if ".." in Path(file).parts or Path(file).is_absolute()]:
        raise ModelError(
            f"model {model!r} names a file outside of its folder ({outside[0]!r:.80}); choose "
            "another repository"
        )
    return [_hub_file(there[file]) for file in check_files(model, name.type, list(there))]


def _hub_file(file: Any) -> HubFile:
    sha256 = file.lfs.sha256 if file.lfs else None
    return HubFile(file.rfilename, file.size or 0, sha256, None if sha256 else file.blob_id)


def _is_cached(name: HubName, file: str, cache_dir: Path | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    result = try_to_load_from_cache(name.repo, file, cache_dir=cache_dir, revision=name.revision)
    return isinstance(result, str)


def _blobs(name: HubName, cache_dir: Path | None) -> Path:
    """Return where huggingface_hub puts what it fetches of a repository, also before it is
    whole.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(cache_dir or HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}" / "blobs"


def _bytes_in(folder: Path) -> int:
    count = 0
    with suppress(OSError), os.scandir(folder) as files:  # it is made when the first file comes
        for file in files:
            with suppress(OSError):  # renamed, as it is whole
                count += file.stat().st_size
    return count


def _check_room(model: str, needed: int, cache_dir: Path | None) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    location = Path(cache_dir or HF_HUB_CACHE)
    while not location.exists():
        location = location.parent
    free = shutil.disk_usage(location).free - SPARE
    if needed > free:
        raise ModelError(
            f"model {model!r} takes {size_text(needed)}, and {size_text(max(free, 0))} are free at "
            f"{location}; make room (`mtmd rm` removes a model), or set HF_HOME to another disk"
        )


def _snapshot(result: Result) -> Path:
    """The folder of the commit: a GGUF may lie in one of its folders."""
    path = result.path
    while path.parent.name != "snapshots":
        path = path.parent
    return path


def _verify(model: str, folder: Path, files: Iterable[HubFile], progress: bool) -> tuple[str, ...]:
    from tqdm import tqdm

    files = list(files)
    total = sum(f.size for f in files)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="checking",
        disable=not progress,
        leave=False,
        dynamic_ncols=True,
    ) as bar:
        for file in files:
            path = folder / file.name
            if not _is_right(path, file, bar.update):
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise ModelError(
                    f"model {model!r}: {file.name} is not what the hub has (its checksum differs) "
                    "and was removed; pull the model again"
                )
    return tuple(f.name for f in files if not (f.sha256 or f.blob))


def _is_right(path: Path, file: HubFile, report: Any) -> bool:
    size = path.stat().st_size
    if file.sha256:
        digest, expected = hashlib.sha256(), file.sha256
    elif file.blob:  # as git names a file of this content
        digest, expected = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), file.blob
    else:
        return True
    with path.open("rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
            report(len(chunk))
    return digest.hexdigest() == expected


def size_text(count: int) -> str:
    """Bytes as people read sizes of files: 9.9 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
