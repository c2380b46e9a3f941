"""Several models to choose from: those in a folder, in the cache, or named one by one. Only files'
names, first bytes and sizes are looked at. Loads without torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError, OptionError
from mtmd.base.spelling import did_you_mean
from mtmd.checkpoint.cached_models import CONFIG_BYTES_MAX, of_store, read_cache
from mtmd.checkpoint.file_names import PART, WEIGHTS, is_projector
from mtmd.checkpoint.hub import (
    DEMO,
    ask_hub,
    check_files,
    check_name,
    is_demo,
    parse_name,
    resolve_model,
)
from mtmd.checkpoint.stores import NAMES as STORES
from mtmd.checkpoint.stores import StoredModel, find, is_store_name, models_of
from mtmd.kernels.checkpoint.magic import is_gguf

CACHE = "cache"  # stands for all models in the hub's cache, where no file is called so
DEEPEST = 3  # folders below the one that is given: org/name/file
DEEPEST_LINKED = 1  # below one that a link leads to, perhaps to the root of a disk
MAXIMUM = 256
MAX_ENTRIES = 20_000  # files and folders that are looked at, of one that is given
SHOWN = 3  # of what was left out


@dataclass(frozen=True)
class Source:
    """A model to choose. `name`: what it is called by; `model`: what loads it; `bytes` of its
    files, None where they are not here yet; `kind`: its architecture as config.json names it,
    "GGUF", or "".
    """

    name: str
    model: str
    bytes: int | None
    kind: str

    @property
    def is_here(self) -> bool:
        """Return whether loading fetches nothing."""
        return self.bytes is not None


class _EmptyError(ModelError):
    """There is no model in it."""


def read_sources(
    given: Sequence[str], report: Callable[[str], None] = lambda _: None
) -> list[Source]:
    """Each of `given` is a folder of models, a checkpoint folder, a GGUF, `org/name[:TYPE]`,
    "demo", "cache", "ollama", "lmstudio", a name in one of the last two, or several of these with
    commas between them. `report` gets a line for what was left out of a folder, and why, and for
    one of several that holds no model. Raises ModelError, OptionError.
    """
    words = [text for item in given for text in _items(item)]
    sources, empty = list[Source](), list[_EmptyError]()
    for text in words:
        try:
            sources += _read(text, report)
        except _EmptyError as error:
            empty.append(error)
    if not sources and empty:
        raise empty[0]
    for nothing in empty:
        report(str(nothing))
    sources = list({source.model: source for source in sources}.values())
    if len(sources) > MAXIMUM:
        raise _too_many("")
    return _distinguished(sources)


def _distinguished(sources: list[Source]) -> list[Source]:
    """Return those of the same name by as much of their paths as it takes: names are told to
    clients.
    """
    counts = Counter(source.name for source in sources)
    same = [s for s in sources if counts[s.name] > 1]
    others = {s.name for s in sources} - {s.name for s in same}
    parts = {s.model: Path(_bare(s.model)).parts for s in same}
    for length in range(2, max(map(len, parts.values()), default=0) + 1):
        names = {model: "/".join(result[-length:]) for model, result in parts.items()}
        if len({*names.values(), *others}) == len(names) + len(others):
            break
    else:
        names = {s.model: s.model for s in same}
    return [replace(s, name=names.get(s.model, s.name)) for s in sources]


def _bare(file: str) -> str:
    """Return it without the end of a GGUF's name."""
    name = PART.sub("", file)
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def _too_many(where: str) -> OptionError:
    return OptionError(
        f"models: found more than {MAXIMUM}{where}, expected at most that; name fewer"
    )


def source_on_hub(model: str) -> Source:
    """Return the model of the Hugging Face hub with this name, `org/name[:TYPE]`. Nothing is
    fetched: where it is not in the cache, the hub is asked whether it is one that is read. Raises
    ModelError, also for what is a file or folder here.
    """
    name = parse_name(model)
    if check_name(model):
        raise ModelError(f"model {model!r:.200} is no name on the Hugging Face hub")
    size = _cached_bytes(model)
    if size is None:
        info = ask_hub(model, name.repo, name.revision, None)
        check_files(model, name.type, [file.rfilename for file in info.siblings or []])
    return Source(model, model, size, "")


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: what may have been meant, or nothing."""
    return did_you_mean(name, known)


def _items(item: str) -> list[str]:
    """A path with a comma in it is one."""
    if Path(item).expanduser().exists():
        return [item]
    return [part for part in (p.strip() for p in item.split(",")) if part]


def _read(text: str, report: Callable[[str], None]) -> list[Source]:
    path = Path(text).expanduser()
    if is_demo(text):
        return [Source(DEMO, DEMO, _demo_bytes(), "")]
    if text == CACHE and not path.exists():
        result = [m for m in read_cache().models if m.whole]
        if not result:
            raise _EmptyError("models: the cache is empty; `mtmd pull org/name` fetches one")
        return [Source(m.name, m.name, m.bytes, m.kind) for m in result]
    if text in STORES and not path.exists():
        stored = models_of(text)
        if not stored:
            raise _EmptyError(f"models: found none of {text} on this machine; name another source")
        return [_of_store(one) for one in stored]
    if is_store_name(text):
        return [_of_store(find(text))]
    if not check_name(text):
        return [Source(text, text, _cached_bytes(text), "")]
    if path.is_file():
        alongside = [p for p in islice(path.parent.iterdir(), MAX_ENTRIES) if _is_gguf_file(p)]
        return [_Ggufs(alongside).source(path, path.name)]
    path = path.resolve()
    scan = _Scan(path, text)
    result_here = list(islice(scan.models(path, DEEPEST), MAXIMUM + 1))
    if len(result_here) > MAXIMUM:
        raise _too_many(f" in {text}")
    left_out = scan.left_out()
    if not result_here:
        raise _EmptyError(
            f"models: {text} holds no checkpoint and no GGUF; expected a folder with folders of "
            f"checkpoints, or GGUF files, in it{''.join(f' ({line})' for line in left_out)}"
        )
    for line in left_out:
        report(f"models: {text}: {line}")
    return result_here


def _of_store(stored: StoredModel) -> Source:
    model = of_store(stored)
    return Source(model.name, model.name, model.bytes, model.kind)


def _cached_bytes(text: str) -> int | None:
    """None for what is not in the cache, or not whole."""
    name = parse_name(text)
    if name.revision is None:
        known = f"{name.repo}:{name.type.upper()}" if name.type else name.repo
        return next((m.bytes for m in read_cache().models if m.name == known and m.whole), None)
    try:
        result = resolve_model(text, fetch=False)
    except ModelError:
        return None
    if result.path.is_file():
        return _size(result.path) + (_size(result.projector) if result.projector else 0)
    there = any((result.path / weights).is_file() for weights in WEIGHTS)
    return sum(map(_size, result.path.glob("*.safetensors"))) if there else None


class _Scan:
    """Models in the folder `root`, which is called `shown`, and in those below, each once. Links
    are followed. What cannot be read is left out, and counted.
    """

    def __init__(self, root: Path, shown: str) -> None:
        self._root, self._shown = root, shown
        self._looked_at = 0
        self._seen = set[str]()
        self._left_out: defaultdict[str, list[str]] = defaultdict(list)

    def left_out(self) -> list[str]:
        """Return the left out by reason."""
        lines = []
        for reason, names in self._left_out.items():
            more = ", ..." if len(names) > SHOWN else ""
            lines.append(f"skipped {len(names)}: {reason} ({', '.join(names[:SHOWN])}{more})")
        return lines

    def models(self, folder: Path, deep: int) -> Iterator[Source]:
        """A checkpoint in `folder`, or those in it and in the folders below. Raises OptionError
        where there is too much.
        """
        real = os.path.realpath(folder)
        if real in self._seen:
            return
        self._seen.add(real)
        files, folders = self._entries(folder)
        names = {path.name for path in files}
        if "config.json" in names and names.intersection(WEIGHTS):
            yield self._checkpoint(folder, files)
            return
        ggufs = [path for path in files if path.suffix.lower() == ".gguf"]
        alongside = _Ggufs(ggufs)
        for path in ggufs:
            if _is_first(path) and not is_projector(path.name) and self._is_gguf(path):
                yield alongside.source(path, path.relative_to(self._root).as_posix())
        for path, linked in folders:
            if deep:
                below = min(deep - 1, DEEPEST_LINKED) if linked else deep - 1
                yield from self.models(path, below)

    def _checkpoint(self, folder: Path, files: Iterable[Path]) -> Source:
        root = self._root
        name = folder.relative_to(root).as_posix() if folder != root else folder.name
        weights = sum(_size(p) for p in files if p.suffix == ".safetensors")
        return Source(name, str(folder), weights, _kind(folder / "config.json"))

    def _entries(self, folder: Path) -> tuple[list[Path], list[tuple[Path, bool]]]:
        """Files, and folders with whether they are links, by name. Hidden ones are left out."""
        try:
            with os.scandir(folder) as scanned:
                result = list(islice(scanned, MAX_ENTRIES - self._looked_at + 1))
        except OSError as error:
            self._skip(folder, f"cannot be read, {_words(error)}")
            return [], []
        self._looked_at += len(result)
        if self._looked_at > MAX_ENTRIES:
            raise OptionError(
                f"models: {self._shown} holds more than {MAX_ENTRIES:,} files and folders, "
                "expected one of models; name those to be served"
            )
        files: list[Path] = []
        folders: list[tuple[Path, bool]] = []
        for entry in sorted(result, key=lambda e: e.name.lower()):
            path = Path(entry.path)
            if entry.name.startswith("."):
                continue
            if not entry.name.isprintable():
                self._skip(path, "a name that cannot be shown")
                continue
            try:
                if entry.is_file():
                    files.append(path)
                elif entry.is_dir():
                    folders.append((path, entry.is_symlink()))
                elif entry.is_symlink():
                    self._skip(path, "a link that leads nowhere")
            except OSError as error:
                self._skip(path, f"cannot be read, {_words(error)}")
        return files, folders

    def _is_gguf(self, path: Path) -> bool:
        try:
            result = is_gguf(path)
        except ModelError as error:
            cause = error.__cause__
            words = _words(cause) if isinstance(cause, OSError) else type(cause).__name__
            self._skip(path, f"cannot be read, {words}")
            return False
        if not result:
            self._skip(path, "named so, and no GGUF")
        return result

    def _skip(self, path: Path, reason: str) -> None:
        name = path.relative_to(self._root).as_posix() if path != self._root else path.name
        self._left_out[reason].append(ascii(name)[1:-1])


def _words(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _size(path: Path) -> int:
    """0 for what was there a moment ago."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_gguf_file(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def _is_first(path: Path) -> bool:
    """Return whether it is the first part of a file."""
    part = PART.search(path.name)
    return part is None or int(part["part"]) == 1


class _Ggufs:
    """GGUF files of one folder."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._projectors: list[Path] = []
        self._parts: defaultdict[str, list[Path]] = defaultdict(list)
        for path in paths:
            if is_projector(path.name):
                self._projectors.append(path)
            self._parts[PART.sub("", path.name)].append(path)

    def source(self, path: Path, shown: str) -> Source:
        """Return it with its other parts, and the projector beside it, as loading finds it."""
        stem = PART.sub("", path.name)
        files = [path] if stem == path.name else list(self._parts[stem])
        files += self._projectors if len(self._projectors) == 1 else []
        return Source(_bare(shown), str(path), sum(map(_size, files)), "GGUF")


def _kind(config: Path) -> str:
    try:
        with config.open("rb") as file:
            value: Any = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return ""
    kind = value.get("model_type", "") if isinstance(value, dict) else ""
    return kind if isinstance(kind, str) else ""


def _demo_bytes() -> int:
    import mtmd.demo_model

    return (Path(mtmd.demo_model.__path__[0]) / WEIGHTS[0]).stat().st_size
