"""Several models to choose from: those in a folder, in the cache, or named one by one. Only files'
names and sizes are looked at. Loads without torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmd.checkpoint.cached_models import CONFIG_BYTES_MAX, read_cache
from mtmd.checkpoint.hub import DEMO, PART, WEIGHTS, check_name, is_demo, is_projector
from mtmd.kernels.checkpoint.magic import is_gguf
from mtmd.kernels.errors import ModelError, OptionError
from mtmd.kernels.spelling import did_you_mean

CACHE = "cache"  # stands for all models in the hub's cache, where no file is called so
DEEPEST = 3  # folders below the one that is given: org/name/file
MOST = 256


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
        """Whether loading fetches nothing."""
        return self.bytes is not None


def read_sources(given: Sequence[str]) -> list[Source]:
    """Each of `given` is a folder of models, a checkpoint folder, a GGUF, `org/name[:TYPE]`,
    "demo", "cache", or several of these with commas between them. Raises ModelError, OptionError.
    """
    sources = [s for item in given for text in _items(item) for s in _read(text)]
    sources = list({source.model: source for source in sources}.values())
    if len(sources) > MOST:
        raise OptionError(f"models: found {len(sources)}, expected at most {MOST}; name fewer")
    counts = Counter(source.name for source in sources)
    return [replace(s, name=s.model) if counts[s.name] > 1 else s for s in sources]


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: what may have been meant, or nothing."""
    return did_you_mean(name, known)


def _items(item: str) -> list[str]:
    """A path with a comma in it is one."""
    if Path(item).expanduser().exists():
        return [item]
    return [part for part in (p.strip() for p in item.split(",")) if part]


def _read(text: str) -> list[Source]:
    path = Path(text).expanduser()
    if is_demo(text):
        return [Source(DEMO, DEMO, _demo_bytes(), "")]
    if text == CACHE and not path.exists():
        found = [m for m in read_cache().models if m.whole]
        if not found:
            raise ModelError("models: the cache is empty; `mtmd pull org/name` fetches one")
        return [Source(m.name, m.name, m.bytes, m.kind) for m in found]
    if not check_name(text):
        size = next((m.bytes for m in read_cache().models if m.name == text and m.whole), None)
        return [Source(text, text, size, "")]
    if path.is_file():
        return [_gguf(path, path.name)]
    path = path.resolve()
    found_here = list(_models_in(path, path, DEEPEST))
    if not found_here:
        raise ModelError(
            f"models: {text} holds no checkpoint and no GGUF; expected a folder with folders of "
            "checkpoints, or GGUF files, in it"
        )
    return found_here


def _models_in(root: Path, folder: Path, deep: int) -> Iterator[Source]:
    """A checkpoint in `folder`, or those in it and in the folders below."""
    if _is_checkpoint(folder):
        name = folder.relative_to(root).as_posix() if folder != root else folder.name
        weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        yield Source(name, str(folder), weights, _kind(folder / "config.json"))
        return
    inside = sorted(folder.iterdir(), key=lambda p: p.name.lower())
    for path in inside:
        if path.suffix.lower() == ".gguf" and path.is_file() and _is_decoder(path):
            yield _gguf(path, path.relative_to(root).as_posix())
    for path in inside:
        if deep and path.is_dir() and not path.name.startswith(".") and os.access(path, os.R_OK):
            yield from _models_in(root, path, deep - 1)


def _is_checkpoint(folder: Path) -> bool:
    names = [name for name in WEIGHTS if (folder / name).is_file()]
    return bool(names) and (folder / "config.json").is_file()


def _is_decoder(path: Path) -> bool:
    """Of a file in parts the first."""
    part = PART.search(path.name)
    is_first = part is None or int(part["part"]) == 1
    return is_first and not is_projector(path.name) and is_gguf(path)


def _gguf(path: Path, shown: str) -> Source:
    """With the projector beside it, as loading finds it."""
    parts, stem = [path], PART.sub("", path.name)
    if stem != path.name:
        parts = [p for p in path.parent.glob("*.gguf") if PART.sub("", p.name) == stem]
    projectors = [p for p in path.parent.glob("*.gguf") if is_projector(p.name)]
    files = [*parts, *(projectors if len(projectors) == 1 else [])]
    name = PART.sub("", shown)
    name = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    return Source(name, str(path), sum(p.stat().st_size for p in files), "GGUF")


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
