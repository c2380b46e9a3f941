"""Where a model is: a local folder, or a repository on the Hugging Face hub that is fetched into its usual cache."""
from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mtmd.kernels.errors import ModelError

TIMEOUT_S = 10.0
# What is read, and nothing else: no pickles, no copies in other formats. `consolidated*` repeats the weights in Mistral's naming.
ALLOWED = ["*.safetensors", "*.json", "*.jinja"]
IGNORED = ["*/*", "consolidated*.safetensors"]
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

_REPO = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def resolve_model(model: str | os.PathLike[str], progress: bool = False, *, endpoint: str | None = None,
                  cache_dir: Path | None = None) -> Path:
    """The folder of a model given as a local folder or as `org/name[@revision]` on the hub. A folder that exists wins.

    `progress`: show download bars on stderr. `endpoint`, `cache_dir`: another hub, another cache than huggingface_hub's own.
    Raises ModelError, in one line, if there is no such folder or repository, or it cannot be fetched.
    """
    text = os.fspath(model)
    if not text:  # Path("") would be the current folder
        _refuse_name(text)
    try:
        path = Path(text).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError):  # a name too long for the system, a home of nobody
        _refuse_name(text)
    if is_folder:
        return path
    if is_there:
        if path.suffix == ".gguf":
            raise ModelError(f"model {text!r:.200} is a GGUF file, which this version does not read yet; "
                             "use the safetensors folder of the model")
        raise ModelError(f"model {text!r} is a file; expected the folder it is in, or org/name on the Hugging Face hub")
    found = _REPO.fullmatch(text)
    if not found:
        _refuse_name(text)
    with _progress_bars(progress):
        return _fetch(text, found["repo"], found["revision"], endpoint, cache_dir)


def _fetch(model: str, repo: str, revision: str | None, endpoint: str | None, cache_dir: Path | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def snapshot(local: bool) -> Path:
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, endpoint=endpoint, allow_patterns=ALLOWED,
                                      ignore_patterns=IGNORED, local_files_only=local))

    try:
        info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, timeout=TIMEOUT_S)
    except HFValidationError:
        _refuse_name(model)
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 500
        if status < 500 and status != 429:
            raise ModelError(_explain(model, error, status)) from error
        try:
            return snapshot(local=True)
        except Exception:
            raise ModelError(f"model {model!r} is not in the local cache and the Hugging Face hub cannot be reached ({_cause(error)}); "
                             "check the network, or give a local folder") from error
    _check_weights(model, [file.rfilename for file in info.siblings or []])
    try:
        return snapshot(local=False)
    except Exception as error:
        raise ModelError(f"model {model!r} could not be fetched from the Hugging Face hub ({_cause(error)}); "
                         "check network and disk space and run again: finished files are kept") from error


def _check_weights(model: str, files: list[str]) -> None:
    if not any(name in files for name in WEIGHTS):
        others = sorted({Path(name).suffix for name in files} & {".bin", ".gguf", ".pt", ".pth", ".safetensors"})
        note = f"; it has {', '.join(others)} files, which this version does not read" if others else ""
        raise ModelError(f"model {model!r} has no {WEIGHTS[0]} on the Hugging Face hub{note}; "
                         "choose a repository in the transformers layout")


def _explain(model: str, error: Exception, status: int) -> str:
    """Why the hub refused, and what to do. The hub's own texts carry addresses and are long."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return f"model {model!r} is gated on the Hugging Face hub; accept its terms on its page there, then log in with 'hf auth login'"
    if isinstance(error, RevisionNotFoundError):
        return f"model {model!r} has no such revision on the Hugging Face hub; expected a branch, tag or commit after the @"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):  # the hub says 401 of private and missing ones alike
        return (f"model {model!r} is neither a local folder nor found on the Hugging Face hub; check the spelling, or log in with "
                "'hf auth login' if it is private")
    return f"model {model!r} was refused by the Hugging Face hub (HTTP status {status}); check your login with 'hf auth whoami'"


def _cause(error: Exception) -> str:
    """A few words without addresses: the status, the system's words, or the error's kind."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"HTTP status {status}"
    words = error.strerror if isinstance(error, OSError) else None
    return words or type(error).__name__


def _refuse_name(model: str) -> NoReturn:
    raise ModelError(f"model {model!r:.200} is no folder here and no name on the Hugging Face hub; "
                     "expected a checkpoint folder, or org/name")


@contextmanager
def _progress_bars(show: bool) -> Iterator[None]:
    """Silence huggingface_hub's bars meanwhile unless `show`."""
    if show:
        yield
        return
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    already = are_progress_bars_disabled()
    if not already:
        disable_progress_bars()
    try:
        yield
    finally:
        if not already:
            enable_progress_bars()
