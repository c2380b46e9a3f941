"""Models that other programs keep on this machine, read in place: Ollama's store of blobs and
manifests (`ollama:gemma3:4b`), and LM Studio's folder (`lmstudio:publisher/model`). Loads without
torch, and writes nothing.

Ollama: OLLAMA_MODELS or ~/.ollama/models has manifests/HOST/NAMESPACE/MODEL/TAG, JSON that names
the digest of each layer, and blobs/sha256-DIGEST (ollama/ollama, server/internal/manifest).
LM Studio: ~/.lmstudio/models has publisher/model/FILE.gguf, mmproj files beside them, and folders
of checkpoints.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.base.spelling import did_you_mean
from mtmd.checkpoint.file_names import PART, WEIGHTS, is_projector, type_of
from mtmd.environment import ollama_folder

OLLAMA, LM_STUDIO = "ollama", "lmstudio"
NAMES = (OLLAMA, LM_STUDIO)
MANIFEST_BYTES_MAX = 1 << 20
SETTINGS_BYTES_MAX = 1 << 20
MAX_MODELS = 2_000  # that are listed of one store
SHOWN = 8

_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
# Of a name, and of each folder below manifests/: no "..", nothing hidden.
_PART = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class StoredModel:
    """`name` is what loads it; `path` its decoder's GGUF or its checkpoint folder; `projector` the
    GGUF of its eyes where that is a file of its own. `bytes` of all files; `last_used` seconds
    since 1970; `whole`: every file that its manifest names is there. `system`, `parameters`:
    Ollama's files of defaults.
    """

    name: str
    path: Path
    projector: Path | None
    bytes: int
    last_used: float
    whole: bool
    system: Path | None = None
    parameters: Path | None = None


def is_store_name(model: str) -> bool:
    """Return whether a model is named as one of another program's store, and no file is called
    so.
    """
    store, colon, name = model.partition(":")
    return bool(colon and name) and store in NAMES and not Path(model).exists()


def find(model: str) -> StoredModel:
    """The model that `ollama:NAME[:TAG]` or `lmstudio:PUBLISHER/MODEL[:TYPE]` names. Raises
    ModelError where there is none, or it is nothing that is read here.
    """
    store, _, name = model.partition(":")
    return _find_ollama(model, name) if store == OLLAMA else _find_lm_studio(model, name)


def models_of(store: str) -> list[StoredModel]:
    """The models of one store that are read here, by name; none where the program was never
    used.
    """
    result = _ollama_models() if store == OLLAMA else _lm_studio_models()
    return sorted(islice(result, MAX_MODELS), key=lambda model: model.name.lower())


def stored_models() -> list[StoredModel]:
    """The models of all stores."""
    return [model for store in NAMES for model in models_of(store)]


# Ollama -------------------------------------------------------------------------------------------


def ollama_folders() -> list[Path]:
    """Return the folders of Ollama's models: what OLLAMA_MODELS names, or a user's and the
    service's.
    """
    given = ollama_folder()
    folders = (
        [given]
        if given
        else [
            Path("~/.ollama/models").expanduser(),
            Path("/usr/share/ollama/.ollama/models"),
            Path("/var/lib/ollama/models"),
        ]
    )
    return [folder for folder in folders if _is_folder(folder / "manifests")]


def _find_ollama(model: str, name: str) -> StoredModel:
    parts = _ollama_parts(name)
    if parts is None:
        raise ModelError(
            f"model {model!r:.200} is no name of Ollama's; expected ollama:MODEL, "
            "ollama:MODEL:TAG or ollama:HOST/NAMESPACE/MODEL:TAG, as `ollama list` prints it"
        )
    folders = ollama_folders()
    for folder in folders:
        manifest = folder.joinpath("manifests", *parts)
        if manifest.is_file():
            return _read_ollama(folder, manifest, model)
    if not folders:
        raise ModelError(
            f"model {model!r:.200}: found no store of Ollama's on this machine; expected it in "
            "~/.ollama/models, or where OLLAMA_MODELS says"
        )
    known = _known(model, models_of(OLLAMA))
    raise ModelError(
        f"model {model!r:.200} is not in Ollama's store{known}; `ollama pull {name}` fetches it"
    )


def _known(model: str, there: list[StoredModel]) -> str:
    """Return what may have been meant, or what there is."""
    names = [stored.name for stored in there]
    if near := did_you_mean(model, names):
        return near
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"; it has {shown}" if names else ", which has none that is read here"


def _ollama_parts(name: str) -> tuple[str, str, str, str] | None:
    """Host, namespace, model and tag, with Ollama's defaults for what a name leaves out."""
    path, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", _TAG)
    parts = path.split("/")
    if len(parts) > 3 or not all(map(_PART.fullmatch, (*parts, tag))):
        return None
    host, namespace, model = (*(_HOST, _NAMESPACE)[: 3 - len(parts)], *parts)
    return host, namespace, model, tag


def _ollama_models() -> Iterator[StoredModel]:
    for folder in ollama_folders():
        for manifest in sorted(folder.glob("manifests/*/*/*/*")):
            parts = manifest.parts[-4:]
            if not manifest.is_file() or not all(map(_PART.fullmatch, parts)):
                continue
            host, namespace, model, tag = parts
            named = model if (host, namespace) == (_HOST, _NAMESPACE) else f"{namespace}/{model}"
            named = named if host == _HOST else f"{host}/{named}"
            try:
                yield _read_ollama(folder, manifest, f"{OLLAMA}:{named}:{tag}")
            except ModelError:  # not a model that is read here; `find` says why
                continue


def _read_ollama(folder: Path, manifest: Path, model: str) -> StoredModel:
    """The files of a manifest. Raises ModelError."""
    layers: dict[str, list[Path]] = {}
    size, whole = 0, True
    for layer in _layers(manifest, model):
        kind, digest = layer.get("mediaType"), layer.get("digest")
        match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if not isinstance(kind, str) or match is None:
            raise ModelError(
                f"model {model!r}: {manifest} has a layer of type {kind!r:.80} with digest "
                f"{digest!r:.80}; expected sha256 and 64 digits; `ollama pull` it again"
            )
        blob = _blob(folder, match[1])
        layers.setdefault(kind.removeprefix(_LAYER), []).append(blob)
        size, whole = size + _size(blob), whole and blob.is_file()
    for kind, why in (
        ("tensor", "is stored as single tensors for Ollama's MLX engine"),
        ("adapter", "is a base model with an adapter, which would be left out"),
    ):
        if kind in layers:
            raise ModelError(
                f"model {model!r} {why}, which is not read; use the model's GGUF or safetensors "
                "from the Hugging Face hub"
            )
    decoders, projectors = layers.get("model", []), layers.get("projector", [])
    if len(decoders) != 1 or len(projectors) > 1:
        raise ModelError(
            f"model {model!r} has {len(decoders)} files of weights and {len(projectors)} "
            "projectors in Ollama's store; expected one, and at most one: it runs elsewhere (a "
            "cloud model), or is in parts; use its GGUF from the Hugging Face hub"
        )
    missing = [blob for blob in (*decoders, *projectors) if not blob.is_file()]
    if missing:
        raise ModelError(
            f"model {model!r}: {missing[0]} is missing, which {manifest} names; "
            f"`ollama pull {model.partition(':')[2]}` fetches it"
        )
    projector = projectors[0] if projectors else None
    used = _last_used(decoders[0])
    system, parameters = (next(iter(layers.get(kind, [])), None) for kind in ("system", "params"))
    return StoredModel(
        model, decoders[0], projector, size, used, whole, system=system, parameters=parameters
    )


def _layers(manifest: Path, model: str) -> list[dict[str, Any]]:
    try:
        with open_regular(manifest) as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        value = json.loads(data) if len(data) <= MANIFEST_BYTES_MAX else None
    except (OSError, ValueError, RecursionError):
        value = None
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ModelError(
            f"model {model!r}: {manifest} is no manifest of Ollama's; expected JSON of at most "
            f"{MANIFEST_BYTES_MAX >> 20} MiB with a list 'layers'; `ollama pull` it again"
        )
    return layers


def _blob(folder: Path, digest: str) -> Path:
    """A layer's file; older versions of Ollama wrote a colon in its name."""
    blobs = folder / "blobs"
    old = blobs / f"sha256:{digest}"
    return old if old.is_file() else blobs / f"sha256-{digest}"


# LM Studio ----------------------------------------------------------------------------------------


def lm_studio_folders() -> list[Path]:
    """Return the folders of LM Studio's models: what its settings say, or its usual ones."""
    home = Path("~/.lmstudio").expanduser()
    pointer = Path("~/.lmstudio-home-pointer").expanduser()
    moved = _text(pointer).strip() if pointer.is_file() else ""
    home = Path(moved) if moved and Path(moved).is_dir() else home
    settings = _json(home / "settings.json").get("downloadsFolder")
    folders = [
        *([Path(settings)] if isinstance(settings, str) and settings else []),
        home / "models",
        Path("~/.cache/lm-studio/models").expanduser(),
    ]
    return list(dict.fromkeys(folder for folder in folders if _is_folder(folder)))


def _find_lm_studio(model: str, name: str) -> StoredModel:
    known = models_of(LM_STUDIO)
    exact = [stored for stored in known if stored.name.lower() == model.lower()]
    of_model = [stored for stored in known if stored.name.lower().startswith(f"{model.lower()}:")]
    chosen = exact or of_model
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        types = ", ".join(stored.name for stored in chosen[:SHOWN])
        raise ModelError(f"model {model!r:.200} has several types in LM Studio's folder: {types}")
    if not lm_studio_folders():
        raise ModelError(
            f"model {model!r:.200}: found no folder of LM Studio's on this machine; expected "
            "~/.lmstudio/models"
        )
    raise ModelError(
        f"model {model!r:.200} is not in LM Studio's folder{_known(model, known)}; "
        f"`lms get {name}` fetches it"
    )


def _lm_studio_models() -> Iterator[StoredModel]:
    """Each GGUF of publisher/model, with the projector beside it, and each checkpoint folder."""
    for root in lm_studio_folders():
        for folder in sorted(root.glob("*/*")):
            if not _is_folder(folder) or not all(map(_PART.fullmatch, folder.parts[-2:])):
                continue
            name = f"{LM_STUDIO}:{'/'.join(folder.parts[-2:])}"
            files = [path for path in sorted(folder.iterdir()) if path.is_file()]
            if any(path.name in WEIGHTS for path in files) and (folder / "config.json").is_file():
                weights = [path for path in files if path.suffix == ".safetensors"]
                used = max(map(_last_used, weights), default=0.0)
                yield StoredModel(name, folder, None, sum(map(_size, weights)), used, True)
            ggufs = [path for path in files if path.suffix.lower() == ".gguf"]
            projectors = [path for path in ggufs if is_projector(path.name)]
            projector = projectors[0] if projectors else None
            decoders: dict[str, list[Path]] = {}
            for path in ggufs:
                if path not in projectors:
                    decoders.setdefault(PART.sub("", path.name), []).append(path)
            types = [type_of(stem) for stem in decoders]
            for (stem, parts), kind in zip(decoders.items(), types, strict=True):
                word = kind if kind and types.count(kind) == 1 else stem
                size = sum(map(_size, parts)) + (_size(projector) if projector else 0)
                used = _last_used(parts[0])
                yield StoredModel(f"{name}:{word}", parts[0], projector, size, used, True)


# Files --------------------------------------------------------------------------------------------


def _is_folder(path: Path) -> bool:
    """False for what may not be looked at, too."""
    try:
        return path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    except OSError:
        return False


def _size(path: Path) -> int:
    """0 for what is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_atime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(SETTINGS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    """{} for what is no JSON object."""
    try:
        value = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
