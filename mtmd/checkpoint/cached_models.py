"""Models in huggingface_hub's cache: which there are, and how one is removed. Loads without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.base.spelling import did_you_mean
from mtmd.checkpoint.file_names import PART, WEIGHTS, is_projector, type_of
from mtmd.checkpoint.hub import cached_repos, parse_name
from mtmd.checkpoint.stores import StoredModel, is_store_name, stored_models

CONFIG_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class CachedModel:
    """`name` is what loads it. `kind` is its architecture as config.json names it, "GGUF", or ""
    where it is not told; `bytes` what its files take; `last_used` seconds since 1970. `whole`: no
    file is missing that its index names.
    """

    name: str
    kind: str
    bytes: int
    last_used: float
    whole: bool


@dataclass(frozen=True)
class Cache:
    """`others` are repositories that hold nothing that is read here."""

    models: tuple[CachedModel, ...]
    others: tuple[str, ...]


def read_cache(cache_dir: Path | None = None) -> Cache:
    """Return what is in the cache, by name."""
    models: list[CachedModel] = []
    others: list[str] = []
    for repo in cached_repos(cache_dir):
        result = list(_models_in(repo))
        models += result
        others += [] if result else [repo.repo_id]
    return Cache(tuple(sorted(models, key=lambda m: m.name.lower())), tuple(sorted(others)))


def in_other_stores() -> tuple[CachedModel, ...]:
    """Return what other programs keep on this machine, by name."""
    return tuple(map(of_store, stored_models()))


def of_store(model: StoredModel) -> CachedModel:
    kind = "GGUF"
    if model.path.is_dir():
        kind = str(_read(model.path / "config.json").get("model_type", ""))
    return CachedModel(model.name, kind, model.bytes, model.last_used, model.whole)


def names_here(cache_dir: Path | None = None) -> list[str]:
    """Return what `-m` could be."""
    return [model.name for model in (*read_cache(cache_dir).models, *in_other_stores())]


@dataclass(frozen=True)
class Removal:
    """Describes what removing `name` would delete: `bytes` are freed."""

    name: str
    bytes: int
    _strategy: Any
    _paths: tuple[Path, ...] = ()

    def execute(self) -> None:
        """Raises OSError."""
        if self._strategy is not None:
            self._strategy.execute()
        for path in self._paths:
            path.unlink(missing_ok=True)


def plan_removal(name: str, cache_dir: Path | None = None) -> Removal:
    """Return what is to be deleted for `org/name`, with all its commits, `org/name@revision` or, of
    one GGUF of several, `org/name:TYPE`. Nothing is deleted yet. Raises ModelError for what is not
    in the cache.
    """
    if is_store_name(name):
        raise ModelError(
            f"model {name!r} belongs to another program, and stays; remove it there "
            "(`ollama rm`, or in LM Studio)"
        )
    repos = {repo.repo_id: repo for repo in cached_repos(cache_dir)}
    if "/" not in name:  # a word of it, or of another program
        raise _missing(name, repos)
    requested = parse_name(name)
    repo = repos.get(requested.repo)
    if repo is None:
        raise _missing(name, repos)
    revisions = [
        r
        for r in repo.revisions
        if requested.revision in (None, r.commit_hash) or requested.revision in r.refs
    ]
    if not revisions:
        known = [ref for r in repo.revisions for ref in (*r.refs, r.commit_hash)]
        raise ModelError(
            f"model {name!r} is in the cache at other revisions; found {', '.join(sorted(known))}"
        )
    if requested.type is None:
        return _whole(name, repo, revisions, cache_dir)
    files = {f.file_path: f for r in revisions for f in r.files if f.file_name.endswith(".gguf")}
    kinds = {path: type_of(_in_snapshot(path)) for path in files if not is_projector(path.name)}
    chosen = [path for path, kind in kinds.items() if kind.lower() == requested.type.lower()]
    if not chosen:
        raise _missing(name, [f"{requested.repo}:{kind}" for kind in kinds.values()])
    if len(chosen) == len(kinds):  # nothing would be left but projectors
        return _whole(name, repo, revisions, cache_dir)
    blobs = {files[path].blob_path for path in chosen}
    saved = {f.blob_path for r in repo.revisions for f in r.files if f.file_path not in chosen}
    freed = sum({files[p].blob_path: files[p].size_on_disk for p in chosen}.values())
    return Removal(name, freed, None, (*chosen, *(blobs - saved)))


def _whole(name: str, repo: Any, revisions: Iterable[Any], cache_dir: Path | None) -> Removal:
    from huggingface_hub import scan_cache_dir

    hashes = [r.commit_hash for r in revisions]
    # Of this repository alone: another one may hold the same commit.
    alone = replace(scan_cache_dir(cache_dir), repos=frozenset({repo}))
    strategy = alone.delete_revisions(*hashes)
    every = len(hashes) == len(repo.revisions)
    return Removal(name, repo.size_on_disk if every else strategy.expected_freed_size, strategy)


def _missing(name: str, known: Iterable[str]) -> ModelError:
    near = did_you_mean(name, known)
    return ModelError(f"model {name!r} is not in the cache{near or '; `mtmd list` lists them'}")


def _models_in(repo: Any) -> Iterator[CachedModel]:
    """Yield the models of the commit used last: the safetensors, and each type of GGUF."""
    if not repo.revisions:
        return
    revision = max(repo.revisions, key=lambda r: r.last_modified)
    files = {_in_snapshot(f.file_path): f for f in revision.files}
    if any(name in files for name in WEIGHTS) and "config.json" in files:
        config = _read(files["config.json"].file_path)
        read = [
            n for n in files if "/" not in n and n.endswith((".safetensors", ".json", ".jinja"))
        ]
        yield _model(
            repo.repo_id, str(config.get("model_type", "")), files, read, _whole_index(files)
        )
    decoders: dict[str, list[str]] = {}
    for name in files:
        if name.lower().endswith(".gguf") and not is_projector(name):
            decoders.setdefault(type_of(name), []).append(name)
    for kind, names in decoders.items():
        if kind:
            whole = all(_has_all_parts(name, names) for name in names)
            yield _model(f"{repo.repo_id}:{kind}", "GGUF", files, names, whole)


def _model(
    name: str, kind: str, files: dict[str, Any], names: list[str], whole: bool
) -> CachedModel:
    chosen = [files[n] for n in names]
    return CachedModel(
        name,
        kind,
        sum(f.size_on_disk for f in chosen),
        max(f.blob_last_accessed for f in chosen),
        whole,
    )


def _whole_index(files: dict[str, Any]) -> bool:
    if WEIGHTS[0] in files:
        return True
    shards = _read(files[WEIGHTS[1]].file_path).get("weight_map", {})
    return isinstance(shards, dict) and set(map(str, shards.values())) <= set(files)


def _has_all_parts(name: str, names: list[str]) -> bool:
    part = PART.search(name)
    if part is None:
        return True
    count = int(part[0].removesuffix(".gguf").rpartition("-")[2])
    return sum(PART.sub("", other) == PART.sub("", name) for other in names) == count


def _read(path: Path) -> dict[str, Any]:
    """A JSON file of a repository, {} for what is none."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _in_snapshot(path: Path) -> str:
    """A file's path in its repository."""
    parts = path.parts
    return "/".join(parts[len(parts) - parts[::-1].index("snapshots") + 1 :])
