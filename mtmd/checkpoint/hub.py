"""Describes where a model is: a local folder or GGUF file, the store of another program, or a
repository on the Hugging Face hub that is fetched into its usual cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mtmd.base.errors import ModelError
from mtmd.base.spelling import did_you_mean, nearest_path
from mtmd.checkpoint.file_names import PART, WEIGHTS, is_projector
from mtmd.checkpoint.stores import StoredModel, find, is_store_name
from mtmd.kernels.checkpoint.magic import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADD_ADAPTER,
    CONVERT,
    first_bytes,
    is_gguf,
    stand_in,
)

TIMEOUT_S = 10.0
# What is read, and nothing else: no pickles, no copies in other formats. `consolidated*` repeats
# the weights in Mistral's naming.
# Those that are not JSON
TOKENIZER_FILES = ("spiece.model", "sentencepiece.bpe.model", "merges.txt", "tiktoken.model")
ALLOWED = ["*.safetensors", "*.json", "*.jinja", *TOKENIZER_FILES]
TOKENIZER_ALLOWED = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
CONFIG_BYTES = 1 << 20  # of config.json in which it is looked for
# Of folders, those in which sentence-transformers says what the last layer's states are used for,
# the tokenizer of a Q-Former, and adapters for speech and vision (`*-lora`); `tokenizer-*` is a
# codec of audio that is spoken.
IGNORED = [
    "tokenizer-*.safetensors",
    "[!1qsv]*/*",
    "[sv]*[!a]/*",
    "1[!_]*/*",
    "q[!f]*/*",
    "*/*/*",
    "[!sv]*/*.safetensors",
    "consolidated*.safetensors",
]

DEMO = "demo"  # names the model that is part of the package, where no file is called so
DEMO_NAME = "demo model"
DEMO_NAMES = frozenset((DEMO, DEMO_NAME))
DEFAULT_REVISION = "main"  # as huggingface_hub has it
NOTHING = ["-"]  # names no file: the folder alone is asked for
PROJECTOR_TYPES = ("BF16", "F16", "F32", "Q8_0")  # of several projectors, the first there is

WEIGHT_FILES = (".gguf", ".safetensors")
_REPO = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<type>\w[\w.-]{0,30}))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_DRIVE = re.compile(r"[A-Za-z]:[/\\]")


@dataclass(frozen=True)
class Result:
    """A checkpoint folder, or a GGUF file and its projector where that is known; `stored`: what
    another program's store has of it.
    """

    path: Path
    projector: Path | None = None
    stored: StoredModel | None = field(default=None, compare=False)


def resolve_model(
    model: str | os.PathLike[str],
    progress: bool = False,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    fetch: bool = True,
) -> Result:
    """A model given as a local folder or GGUF file, or as `org/name[:TYPE][@revision]` on the hub,
    where TYPE chooses a GGUF ("Q4_K_M"), or by its name in another program's store
    (`ollama:gemma3:4b`). What exists here wins.

    `progress`: show download bars on stderr. `endpoint`, `cache_dir`: another hub, another cache
    than huggingface_hub's own. Without `fetch` the hub is not asked: what is in the cache is taken.
    Raises ModelError, in one line, if there is no such folder or repository, or it cannot be
    fetched; NotInCacheError where the hub could not be, or was not to be asked for what is missing.
    """
    text = os.fspath(model)
    if is_store_name(text):
        stored = find(text)
        return Result(stored.path, stored.projector, stored)
    if check_name(text):
        return Result(Path(text).expanduser())
    result = parse_name(text)
    if not fetch:
        return _in_cache(text, result, cache_dir, f"; `mtmd pull {text}` fetches it")
    with progress_bars(progress):
        fetched = _fetch(text, result, endpoint, cache_dir)
        fetch_tokenizer(fetched.path, endpoint=endpoint, cache_dir=cache_dir)
        return fetched


def fetch_tokenizer(
    folder: Path, *, endpoint: str | None = None, cache_dir: Path | None = None
) -> None:
    """Fetch the tokenizer of a checkpoint that was made with that of another repository; without
    the hub, what is in the cache will do. Raises ModelError where it cannot be fetched.
    """
    config = folder / "config.json"
    # Repositories with code of their own alone can say so, in that code.
    if not config.is_file() or b'"auto_map"' not in config.read_bytes()[:CONFIG_BYTES]:
        return
    from mtmd.clip.family import borrowed_tokenizer, in_usual_words
    from mtmd.kernels.checkpoint.settings import Settings, read_json

    borrowed = borrowed_tokenizer(in_usual_words(Settings(read_json(config), config.name)))
    if borrowed is None or cached_tokenizer(borrowed.repo, cache_dir) is not None:
        return
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            borrowed.repo, cache_dir=cache_dir, endpoint=endpoint, allow_patterns=TOKENIZER_ALLOWED
        )
    except Exception as error:
        raise ModelError(
            f"{borrowed.repo}, whose tokenizer the model has, could not be fetched from the "
            f"Hugging Face hub ({_cause(error)}); check the network"
        ) from error


def cached_tokenizer(repo: str, cache_dir: Path | None = None) -> Path | None:
    """Return the folder of a repository's tokenizer in the cache, None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    result = try_to_load_from_cache(repo, TOKENIZER_ALLOWED[0], cache_dir=cache_dir)
    return Path(result).parent if isinstance(result, str) else None


def resolve_adapter(
    adapter: str,
    progress: bool = False,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """A LoRA adapter given as a folder or file here, or as `org/name[@revision]` on the hub, from
    which its settings and weights are fetched. Without the hub, what is in the cache is taken.
    Raises ModelError.
    """
    path = Path(adapter).expanduser()
    if path.exists() or _is_path(adapter) or not _REPO.fullmatch(adapter):
        return path
    from huggingface_hub import snapshot_download

    name, revision, is_offline = parse_name(adapter), None, False
    try:
        info = ask_hub(adapter, name.repo, name.revision, endpoint)
        revision = info.sha
        if ADAPTER_CONFIG not in {file.rfilename for file in info.siblings or []}:
            raise ModelError(
                f"adapter {adapter!r} has no {ADAPTER_CONFIG} on the Hugging Face hub; expected a "
                "LoRA adapter that PEFT has saved"
            )
    except HubUnreachable:
        is_offline = True
    try:
        with progress_bars(progress):
            folder = Path(
                snapshot_download(
                    name.repo,
                    revision=revision or name.revision,
                    cache_dir=cache_dir,
                    endpoint=endpoint,
                    allow_patterns=sorted(ADAPTER),
                    local_files_only=is_offline,
                )
            )
    except Exception as error:
        raise ModelError(
            f"adapter {adapter!r} is neither here nor could it be fetched from the Hugging Face "
            f"hub ({_cause(error)}); check network and disk space, or give a local folder"
        ) from error
    if revision is not None and name.revision != revision:
        _remember(folder, name.revision or DEFAULT_REVISION, revision)
    return folder


def is_demo(model: str | os.PathLike[str] | None) -> bool:
    """Return whether the model that is part of the package is meant."""
    named = isinstance(model, str) and model in DEMO_NAMES
    return model is None or (named and not Path(str(model)).exists())


def check_name(model: str | os.PathLike[str]) -> bool:
    """Return whether a model is here, as a folder, a GGUF file or in another program's store; False
    for a name on the hub, which is not asked. Raises ModelError for what can be none of them.
    """
    text = os.fspath(model)
    if is_store_name(text):
        find(text)
        return True
    if not text:  # Path("") would be the current folder
        _refuse_name(text)
    try:
        path = Path(text).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long for the system, a home of nobody
        _refuse_name(text)
    if is_folder or (is_there and is_gguf(path)):
        return True
    if is_there:
        what, advice = _about(path)
        raise ModelError(
            f"model {text!r}: found {what}, expected a GGUF file, the folder of a checkpoint, or "
            f"org/name on the Hugging Face hub{advice}"
        )
    if not _REPO.fullmatch(text) or _is_weight_file(text):
        _refuse_name(text)
    return False


@dataclass(frozen=True)
class HubName:
    """`org/name[:TYPE][@revision]`."""

    repo: str
    type: str | None
    revision: str | None


def parse_name(text: str) -> HubName:
    """Raises ModelError for what is no such name."""
    result = _REPO.fullmatch(text)
    if not result:
        raise ModelError(
            f"model {text!r:.200} is no name on the Hugging Face hub; expected org/name, or "
            "org/name:TYPE for a GGUF (org/name:Q4_K_M)"
        )
    return HubName(result["repo"], result["type"], result["revision"])


class NotInCacheError(ModelError):
    """A model of the hub that is not on this machine, or not whole."""


def _in_cache(model: str, name: HubName, cache_dir: Path | None, otherwise: str) -> Result:
    """`otherwise`: why what is not there is not fetched, and what to do. Raises NotInCacheError;
    ModelError where the cache cannot be read, or another type is to be asked for.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    kind = name.type
    try:
        folder = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                cache_dir=cache_dir,
                allow_patterns=ALLOWED if kind is None else NOTHING,
                ignore_patterns=IGNORED if kind is None else [],
                local_files_only=True,
            )
        )
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    except HFValidationError:
        _refuse_name(model)
    except LocalEntryNotFoundError as error:
        raise NotInCacheError(f"model {model!r} is not in the local cache{otherwise}") from error
    except Exception as error:
        raise ModelError(
            f"model {model!r} cannot be read in the local cache ({_cause(error)}); check the disk "
            "and who may read it, or give a local folder"
        ) from error
    if kind is not None and not any(_has_type(f, kind) for f in _decoders(files)):
        there = ", ".join(_decoders(files)[:12]) or "none at all"
        raise NotInCacheError(
            f"model {model!r}: expected one GGUF file of type {kind} in the local cache, found "
            f"{there}{otherwise}"
        )
    return _in(folder, model, kind, files)


def _fetch(model: str, name: HubName, endpoint: str | None, cache_dir: Path | None) -> Result:
    from huggingface_hub import snapshot_download

    repo, kind, revision = name.repo, name.type, name.revision
    try:
        info = ask_hub(model, repo, revision, endpoint)
    except HubUnreachable as error:
        otherwise = (
            f" and the Hugging Face hub cannot be reached ({error.why}); "
            f"check the network, or give a local folder{_near_here(model, cache_dir)}"
        )
        return _in_cache(model, name, cache_dir, otherwise)
    files = [file.rfilename for file in info.siblings or []]
    check_files(model, kind, files)
    requested = ALLOWED if kind is None else _gguf_files(model, kind, files)
    try:
        # Of the commit whose files were looked at: the branch may have moved since.
        folder = Path(
            snapshot_download(
                repo,
                revision=info.sha or revision,
                cache_dir=cache_dir,
                endpoint=endpoint,
                allow_patterns=requested,
                ignore_patterns=IGNORED if kind is None else [],
            )
        )
        if info.sha and revision != info.sha:
            _remember(folder, revision or DEFAULT_REVISION, info.sha)
        return _in(folder, model, kind, files)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {model!r} could not be fetched from the Hugging Face hub ({_cause(error)}); "
            "check network and disk space and run again: finished files are kept"
        ) from error


class HubUnreachable(ModelError):
    """`why` in a few words."""

    def __init__(self, model: str, why: str):
        super().__init__(
            f"model {model!r}: the Hugging Face hub cannot be reached ({why}); check the network"
        )
        self.why = why


def ask_hub(
    model: str, repo: str, revision: str | None, endpoint: str | None, metadata: bool = False
) -> Any:
    """huggingface_hub's ModelInfo; with `metadata`, sizes and checksums of the files. Raises
    ModelError for what is not there or not allowed, HubUnreachable.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return HfApi(endpoint=endpoint).model_info(
            repo, revision=revision, timeout=TIMEOUT_S, files_metadata=metadata
        )
    except HFValidationError:
        _refuse_name(model)
    except (
        Exception
    ) as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        status = (
            error.response.status_code
            if isinstance(error, HfHubHTTPError) and error.response is not None
            else 500
        )
        if status < 500 and status != 429:
            raise ModelError(_explain(model, error, status)) from error
        raise HubUnreachable(model, _cause(error)) from error


def check_files(model: str, kind: str | None, files: list[str]) -> list[str]:
    """Return which of a repository's files are read. Raises ModelError where they are no model."""
    if kind is not None:
        return _gguf_files(model, kind, files)
    _check_weights(model, files)
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    return list(filter_repo_objects(files, allow_patterns=ALLOWED, ignore_patterns=IGNORED))


def _remember(folder: Path, revision: str, commit: str) -> None:
    """Remember which commit a branch or tag was, as huggingface_hub notes it in its cache when it
    is asked for a branch: by that the model is found without the hub.
    """
    notes = (folder.parents[1] / "refs").resolve()
    note = (notes / revision).resolve()
    if notes not in note.parents:  # "../x" is no name of a branch
        return
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(commit)


def _in(folder: Path, model: str, kind: str | None, files: list[str]) -> Result:
    """Return what was asked for, in the folder that holds it."""
    if kind is None:
        return Result(folder)
    chosen = _gguf_files(model, kind, files)
    projector = next((f for f in chosen if is_projector(f)), None)
    return Result(folder / chosen[0], folder / projector if projector else None)


def _gguf_files(model: str, kind: str, files: list[str]) -> list[str]:
    """The GGUF of a type, all its parts, and a projector if there is one. Raises ModelError naming
    the types there are.
    """
    decoders = _decoders(files)
    chosen = [f for f in decoders if _has_type(f, kind)]
    whole = {PART.sub("", f) for f in chosen}
    if len(whole) != 1:
        value = (
            f"{len(whole)} of that type ({', '.join(sorted(whole)[:4])})"
            if whole
            else f"{', '.join(decoders[:12]) or 'none at all'}"
        )
        raise ModelError(
            f"model {model!r}: expected one GGUF file of type {kind} in the repository, found "
            f"{value}; "
            "choose a type that one of its files is named by"
        )
    projectors = [f for f in sorted(files) if f.lower().endswith(".gguf") and is_projector(f)]
    best = next(
        (f for t in PROJECTOR_TYPES for f in projectors if _has_type(f, t)),
        projectors[0] if projectors else None,
    )
    return [*chosen, *([best] if best else [])]


def _decoders(files: list[str]) -> list[str]:
    return [f for f in sorted(files) if f.lower().endswith(".gguf") and not is_projector(f)]


def _has_type(file: str, kind: str) -> bool:
    """Return whether a file's name, or its folder's, has the type as a word of its own."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])", file, re.I) is not None


def _check_weights(model: str, files: list[str]) -> None:
    if any(name in files for name in WEIGHTS):
        return
    decoders = _decoders(files)
    if decoders:
        raise ModelError(
            f"model {model!r} has GGUF files on the Hugging Face hub; say which, as {model}:TYPE, "
            f"of {', '.join(decoders[:12])}"
        )
    if ADAPTER.intersection(files):
        raise ModelError(f"model {model!r} is a LoRA adapter and no model; {ADD_ADAPTER}")
    others = sorted({Path(name).suffix for name in files} & {".bin", ".pt", ".pth", ".safetensors"})
    note = f"; it has {', '.join(others)} files, which this version does not read" if others else ""
    raise ModelError(
        f"model {model!r} has no {WEIGHTS[0]} on the Hugging Face hub{note}; "
        f"{CONVERT if '.bin' in others else 'choose a repository in the transformers layout'}"
    )


def _explain(model: str, error: Exception, status: int) -> str:
    """Why the hub refused, and what to do. The hub's own texts carry addresses and are long."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            f"model {model!r} is gated on the Hugging Face hub; accept its terms on its page "
            "there, then log in with 'hf auth login'"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"model {model!r} has no such revision on the Hugging Face hub; expected a branch, tag "
            "or commit after the @"
        )
    if isinstance(error, RepositoryNotFoundError) or status in (
        401,
        404,
    ):  # the hub says 401 of private and missing ones alike
        return (
            f"model {model!r} is neither a local folder nor found on the Hugging Face hub; check "
            "the spelling, or log in with "
            f"'hf auth login' if it is private{_near_here(model)}"
        )
    return (
        f"model {model!r} was refused by the Hugging Face hub (HTTP status {status}); check your "
        "login with 'hf auth whoami'"
    )


def _cause(error: Exception) -> str:
    """A few words without addresses: the status, the system's words, or the error's kind."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"HTTP status {status}"
    words = error.strerror if isinstance(error, OSError) else None
    return words or type(error).__name__


def _refuse_name(model: str) -> NoReturn:
    expected = (
        "expected a checkpoint folder, a GGUF file, org/name[:TYPE], ollama:NAME, or "
        f"{DEMO}{_near(model)}"
    )
    if _is_path(model):
        raise ModelError(f"model {model!r:.200}: found no such file or folder, {expected}")
    raise ModelError(
        f"model {model!r:.200} is no folder here and no name on the Hugging Face hub; {expected}"
    )


def _is_path(model: str) -> bool:
    """Return whether somebody who writes this means a path, and not a name on the hub."""
    return (
        model.startswith((".", "/", "~"))
        or _DRIVE.match(model) is not None
        or model.count("/") > 1
        or "\\" in model
        or _is_weight_file(model)
    )


def _is_weight_file(model: str) -> bool:
    """Return whether this is a path to weights. A name on the hub may end as one does
    ("org/name.GGUF"): it is one where no such folder is here.
    """
    folder, slash, _ = model.rpartition("/")
    is_name = slash and not os.path.isdir(folder)  # noqa: PTH112  # False for names too long
    return model.lower().endswith(WEIGHT_FILES) and not is_name


def _about(path: Path) -> tuple[str, str]:
    """Return what a file is that is no model, and what to do, "" where nobody knows."""
    head = first_bytes(path)
    words = stand_in(head) if head else ("an empty file", "fetch it again")
    if words:
        return words[0], f"; {words[1]}"
    if (path.parent / "config.json").exists():
        return "another file", f"; did you mean its folder, {str(path.parent)!r}?"
    return "another file", ""


def _near(model: str) -> str:
    """The folder or GGUF file that a misspelt path may mean."""
    result = nearest_path(model) if model else None
    if result is None or not (Path(result).is_dir() or result.endswith(".gguf")):
        return ""
    return f"; did you mean {result!r}?"


def _near_here(model: str, cache_dir: Path | None = None) -> str:
    """The model on this machine that a misspelt name may mean."""
    return did_you_mean(model, [repo.repo_id for repo in cached_repos(cache_dir)])


def cached_repos(cache_dir: Path | None) -> list[Any]:
    """Return the models in huggingface_hub's cache, as it describes them."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    if not Path(cache_dir or HF_HUB_CACHE).is_dir():  # nothing was fetched yet
        return []
    info = scan_cache_dir(cache_dir)
    return [repo for repo in info.repos if repo.repo_type == "model"]


@contextmanager
def progress_bars(show: bool) -> Iterator[None]:
    """Silence huggingface_hub's bars meanwhile unless `show`."""
    if show:
        yield
        return
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    already = are_progress_bars_disabled()
    if not already:
        disable_progress_bars()
    try:
        yield
    finally:
        if not already:
            enable_progress_bars()
